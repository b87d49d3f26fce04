"""What a consumer does wrong is told in words, and ends what it did: for nobody else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.test_session import EVERYWHERE, HIDDEN, PROMPT, BySlot, Engine, Positions
from tllm.ports import (
    Actions,
    ConsumerFlow,
    CpuExport,
    PerToken,
    RequestResult,
    ResidualStream,
    Sampler,
    Steer,
    Stop,
    TokenTarget,
)
from tllm.spec.request import RequestSpec, RowsRead
from tllm.spec.selection import Selection

READ = ResidualStream.read(layer=0)
WRITE = ResidualStream.write(layer=0)


@pytest.fixture
def engine():
    return Engine()


class WritesForNames(Positions):
    """Names requests by their ids, where `RequestInfo` is wanted."""

    def __init__(self, window, method):
        super().__init__(window)
        self.method = method

    def flows(self):
        return [ConsumerFlow(reads=(READ,), writes=(WRITE,), window=self.window)]

    def consume_bundle(self, bundle, ctx):
        writer, ids = ctx.writer(WRITE.role), bundle.meta.request_ids[:1]
        if self.method == "set":
            writer.set(ids, torch.ones(1, HIDDEN))
        else:
            writer.clear(ids)


@pytest.mark.parametrize("method", ["set", "clear"])
@pytest.mark.parametrize("window", ["same_step", "next_step", "background"])
def test_a_write_for_what_is_no_request_is_its_consumers_error_alone(engine, window, method):
    engine.session.consumers.register(WritesForNames(window, method))
    engine.start("a")
    engine.start("b", EVERYWHERE)
    owner = engine.session.consumers.get("positions")
    assert engine.step(a=PROMPT, b=PROMPT) == [False] * PROMPT + [True] * PROMPT
    for _ in range(2):
        owner.thread.drain()
        assert engine.step() == [False, True]
    assert "TypeError: requests[0]='a' is str; give RequestInfo" in owner.error


class NeedsTokens(BySlot):
    """Waits for the tokens of each sequence, and notes of whom it was told."""

    def __init__(self):
        super().__init__("one")
        self.told = []

    def on_request_finished(self, request, ctx):
        self.told.append(request.request_id)
        return super().on_request_finished(request, ctx)


def test_what_begins_after_it_was_given_up_is_told_at_its_end_and_frees_its_slot(engine):
    consumer = NeedsTokens()
    engine.session.consumers.register(consumer)
    names = [f"request-{number}" for number in range(9)]
    for name in names:
        engine.session.sequences.discard_results([name])
        engine.start(name)
        engine.step(**{name: PROMPT})
        engine.finish(name)
    assert consumer.told == names
    assert len(engine.session._slots.by_slot) == 4


class SteersOnce(Positions):
    """Adds ones to the rows of layer 0 from its first decision on; then raises, where it is told.

    Args:
        raises: in which of its methods.
    """

    def __init__(self, raises=None):
        super().__init__()
        self.raises, self.calls = raises, 0

    def flows(self):
        writes = (WRITE, Actions.write("steer"))
        return [ConsumerFlow(reads=(READ,), writes=writes, window="next_step")]

    def decide(self, rows, ctx):
        self.calls += 1
        if self.calls > 1:
            if self.raises == "decide":
                raise KeyError("missing")
            return []
        ctx.writer(WRITE.role).set(rows.meta.requests, torch.ones(HIDDEN))
        vectors = {"post_block": {0: np.ones(HIDDEN, np.float32)}}
        return [Steer(request, vectors) for request in rows.meta.requests]

    def on_step_end(self, ctx):
        if self.raises == "on_step_end" and self.calls > 1:
            raise KeyError("missing")


@pytest.mark.parametrize("leaves", ["decide", "on_step_end", "unregister"])
def test_what_a_controller_does_to_a_request_ends_with_it(engine, leaves):
    engine.session.consumers.register(SteersOnce(raises=leaves))
    asked = (RowsRead("positions", Selection()),)
    spec = RequestSpec("a", "a", isolated=True, acted=True, steering_rows=asked)
    engine.session.sequences.start("a", [1] * PROMPT, PROMPT, spec, 0)
    engine.computed["a"] = 0
    changed, counts = [], {"a": PROMPT}
    for number in range(7):
        if leaves == "unregister" and number == 4:
            engine.session.unregister("positions")
        ids, rows = engine.begin(counts)
        changed.append(float(rows[0, 0]))
        engine.session.steps.before_sampling(None)
        engine.session.steps.after_sampling(torch.zeros(1, dtype=torch.int64), ids)
        engine.session.steps.end()
        counts = {"a": 1}
    assert max(changed) == 2.0, "the write and the steering, together"
    assert changed[0] == changed[-1] == 0.0
    errors = engine.session._slots.get("a").errors
    assert bool(errors) == (leaves != "unregister")


class Stops(Positions):
    """Ends requests for a reason."""

    def __init__(self, reason):
        super().__init__()
        self.reason = reason

    def flows(self):
        return [ConsumerFlow(reads=(READ,), writes=(Actions.write("stop"),))]

    def decide(self, rows, ctx):
        return [Stop(request, self.reason) for request in rows.meta.requests]


@pytest.mark.parametrize("reason", [np.array(["sad", "gay"])[0], "sad\ud800"])
def test_the_reason_of_a_stop_can_be_sent_to_the_users_process(engine, reason):
    """vLLM's thread that sends outputs ended with the first that could not."""
    engine.session.consumers.register(Stops(reason))
    engine.session.sequences.start("a", [1] * PROMPT, PROMPT, RequestSpec("a", "a", acted=True), 0)
    engine.computed["a"] = 0
    engine.step(a=PROMPT)
    controlled = engine.session._slots.get("a").controlled
    (decided,) = controlled.decided["positions"]
    if isinstance(reason, np.str_):
        assert type(controlled.stop.data["reason"]) is str and decided.error is None
    else:
        assert controlled.stop is None
        assert decided.error == r"Stop(reason)='sad\ud800' has lone surrogates; leave them out"


def test_an_array_for_other_layers_than_the_models_is_refused_of_a_controller():
    groups = Engine(layers=4).session.consumers.controllers._groups
    rows = np.ones((3, HIDDEN), np.float32)
    with pytest.raises(ValueError, match=r"Steer\(vectors\).*one of 3 rows.*model has 4 layers"):
        groups.read({"post_block": rows}, "Steer(vectors)")
    assert len(list(groups.read({"post_block": np.ones((4, HIDDEN))}, "Steer(vectors)"))) == 4


@pytest.mark.parametrize("width", [1e3, True, np.float32(8), "8", None, 0])
def test_the_width_of_a_guide_is_a_whole_number(width):
    with pytest.raises(ValueError, match=r"Sampler.write\(width\)=.*(whole number|1 or more)"):
        Sampler.write(width=width)


@pytest.mark.parametrize("other", [ResidualStream.read, TokenTarget.read])
def test_rows_of_one_flow_are_of_one_phase(other):
    for reads in ([READ, other(phase="decode", role="b")], [other(phase="decode", role="b"), READ]):
        with pytest.raises(ValueError, match=r"share a phase, but \['any', 'decode'\] were given"):
            ConsumerFlow(reads=reads)


@pytest.mark.parametrize("places", [[0, 1], ["post_block"], ("post_block", 1)])
def test_places_are_pairs(places):
    with pytest.raises(ValueError, match=r"is no place; give \(site, layer\) of each"):
        ResidualStream.read_block(places)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ConsumerFlow(bundle_key=None), "bundle_key=None: give a list"),
        (lambda: ConsumerFlow(bundle_key="phase"), "bundle_key='phase': give a list"),
        (lambda: ConsumerFlow(reads=[ResidualStream.read(role=["a"])]), "reads: role=.* no text"),
        (lambda: CpuExport.write(channel=["x"]), "channel=.*give a text"),
        (lambda: RequestResult(None, "error", ValueError("no rows")), r"give text.*str\(error\)"),
    ],
)
def test_what_is_no_text_or_list_is_refused_where_it_is_given(make, told):
    with pytest.raises(TypeError, match=told):
        make()


def test_rows_of_tokens_may_be_listed_in_any_order():
    found = PerToken([3, 1, 2, 1], ["d", "b", "c", "b2"])
    assert found.positions.tolist() == [1, 2, 3]
    assert list(found.values) == ["b2", "c", "d"]


class Learns(Positions):
    """Fits a line to the rows.

    Args:
        left: whether inference mode is left for it.
        wrong: what else it does, and shall not.
    """

    def __init__(self, left, wrong):
        super().__init__()
        self.left, self.wrong = left, wrong

    def flows(self):
        return [ConsumerFlow(reads=(READ,))]

    def start(self, ctx):
        self.line = torch.nn.Linear(HIDDEN, 1)

    def consume_bundle(self, bundle, ctx):
        rows = bundle.entries[READ.role]
        if self.wrong == "parameters":
            self.line = torch.nn.Linear(HIDDEN, 1)
        with torch.inference_mode(not self.left), torch.enable_grad():
            self.line(rows if self.wrong == "rows" else rows.clone()).sum().backward()
            torch.optim.SGD(self.line.parameters(), 0.1).step()
        if self.wrong == "other":
            raise RuntimeError("inference is over")


@pytest.mark.parametrize(
    ("left", "wrong", "advised"),
    [
        (False, "mode", True),
        (True, "rows", True),
        (True, "parameters", True),
        (True, "other", False),
    ],
)
def test_who_would_learn_in_inference_mode_is_told_how(engine, left, wrong, advised):
    engine.session.consumers.register(Learns(left, wrong))
    engine.start("a")
    with torch.inference_mode():
        engine.step(a=PROMPT)
    told = engine.session.consumers.get("positions").error
    assert told.startswith("RuntimeError: ")
    assert ("torch.inference_mode(False), torch.enable_grad()" in told) == advised, told


class LearnsToDecide(Learns):
    """The same in `decide`."""

    def flows(self):
        return [ConsumerFlow(reads=(READ,), writes=(Actions.write("note"),), window="next_step")]

    def decide(self, rows, ctx):
        self.consume_bundle(rows, ctx)


def test_a_controller_that_would_learn_in_inference_mode_is_told_how(engine):
    engine.session.consumers.register(LearnsToDecide(False, "mode"))
    spec = RequestSpec("a", "a", acted=True)
    engine.session.sequences.start("a", [1] * PROMPT, PROMPT, spec, 0)
    engine.computed["a"] = 0
    with torch.inference_mode():
        engine.step(a=PROMPT)
        engine.step()
    (told,) = engine.session._slots.get("a").errors.values()
    assert "torch.inference_mode(False), torch.enable_grad()" in told

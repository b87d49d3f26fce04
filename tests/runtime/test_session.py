"""A session on taps of no model: what each step's row plan says, and who is given its rows."""

import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tllm.consumers.base import Consumer
from tllm.consumers.capture.memory import MemoryConsumer
from tllm.ports import ConsumerFlow, ModelView, RequestMeta, ResidualStream, Sampler
from tllm.runtime import dispatch, steps
from tllm.runtime.columns import Column
from tllm.runtime.descriptor import Descriptor
from tllm.runtime.kernels.backend import INTERPRETED
from tllm.runtime.session import Session
from tllm.runtime.taps import Taps
from tllm.runtime.verdicts import BROKEN
from tllm.spec.gates import MAX_GATES
from tllm.spec.groups import GroupUse
from tllm.spec.hooks import HookPoint
from tllm.spec.operations import Coefficients
from tllm.spec.patching import PatchUse
from tllm.spec.request import RequestSpec
from tllm.spec.selection import Selection

CPU, HIDDEN, PROMPT = torch.device("cpu"), 4, 3
EVERYWHERE = GroupUse("any", Selection(), "strong")
OFF_AT_8 = GroupUse("any", Selection.parse({"ranges": [[0, 8]]}), "strong")


class Positions(Consumer):
    """Keeps which positions it was given of each sequence, and the steps that it was told of."""

    consumer_id = "positions"

    def __init__(self, window="same_step"):
        self.window = window
        self.seen = {}
        self.steps = []

    def flows(self):
        reads = (ResidualStream.read(layer=0), RequestMeta.read())
        return [ConsumerFlow(reads=reads, window=self.window)]

    def consume_bundle(self, bundle, ctx):
        for name, position in zip(bundle.meta.request_ids, bundle.meta.positions, strict=True):
            self.seen.setdefault(name, []).append(int(position))

    def on_step_end(self, ctx):
        self.steps.append(ctx.step)


class Asked(Positions):
    on_request_only = True


class Engine:
    """Steps of running sequences, as an engine would have them.

    At the tap of layer l > 0, each number of the row at position p is 100 l + p.
    """

    def __init__(self, layers=1, stages=1, samples=True, most_rows=64):
        self.layers = range(layers)
        self.taps = Taps(
            {(HookPoint.POST_BLOCK, layer): None for layer in self.layers},
            second={},
            hidden_size=HIDDEN,
            dtype=torch.float32,
            device=CPU,
            max_tokens=64,
            max_programs=16,
            add_rows=8,
        )
        self.session = Session(
            self.taps,
            lambda site, layer: (HookPoint.parse(site), layer),
            ModelView(
                *(HIDDEN, layers, 10, torch.float32, CPU, None, None, None),
                max_requests=4,
                num_stages=stages,
            ),
            lm_head=None,
            samples=samples,
            drafts=False,
            max_sequences=4,
            max_positions=64,
            max_programs=16,
            steering_rows=4,
            steering_vectors=4,
            max_patch_bytes=2**20,
            max_patch_host_bytes=2**20,
            ring_rows=64 * layers,
            max_ring_rows=most_rows * layers,
            overflow="block",
        )
        operation = ("post_block", 0, "v", Coefficients(add=1.0))
        self.session.steering.put({"v": np.ones(HIDDEN, np.float32)}, {"strong": [operation]})
        self.computed = {}
        self.begun_undecided = 0

    def start(self, name, *steering, consumers=(), patch=()):
        options = {consumer: {"enabled": True} for consumer in consumers}
        spec = RequestSpec(
            name, name, steering=steering, consumers=options, patch=patch, isolated=True
        )
        self.session.sequences.start(name, [1] * PROMPT, PROMPT, spec, 0)
        self.computed[name] = 0

    def finish(self, name):
        self.session.sequences.finish(name)
        del self.computed[name]

    def preempt(self, name):
        self.computed[name] = 0

    def begin(self, counts, drafts=None):
        """Begin a step of these tokens of each sequence, the last of which are drafted.

        Returns:
            `[tokens or more]`, their ids, and what the tap makes of rows of zeros.
        """
        starts = np.array([self.computed[name] for name in counts], np.int32)
        ids = torch.zeros(sum(counts.values()), dtype=torch.int64)
        steps, names = self.session.steps, list(counts)
        tokens = np.array(list(counts.values()), np.int32)
        drafted = drafts and np.array([drafts.get(name, 0) for name in counts], np.int32)
        sampled_from = np.full(len(counts), PROMPT, np.int32)

        def where():
            # After two steps with three drafts each, of which it is not known which are accepted.
            low = np.where(starts > PROMPT, np.maximum(starts - 2, PROMPT), starts)
            return low.astype(np.int32), np.where(starts > PROMPT, 6, 0).astype(np.int32)

        undecided = (
            steps.undecided
            and drafts
            and steps.begin_undecided(names, tokens, sampled_from, drafted, where)
        )
        self.begun_undecided += bool(undecided)
        self.is_idle = not undecided and steps.begin_idle()
        if not (undecided or self.is_idle):
            steps.begin(names, starts, tokens, sampled_from, ids, drafted)
            # Descriptors on the device are those that the host means.
            assert torch.equal(self.taps.descriptors, torch.from_numpy(self.taps._fields))
        rows = torch.zeros(self.taps.plan.shape[1], HIDDEN)
        torch.ops.tllm.tap(rows, None, self.taps.descriptors[0], self.taps.plan)
        for layer in self.layers[1:]:
            of_layer = torch.zeros_like(rows)
            own = [np.arange(n) + s for s, n in zip(starts, counts.values(), strict=True)]
            of_layer[: len(ids)] = 100 * layer + torch.tensor(np.concatenate(own))[:, None]
            torch.ops.tllm.tap(of_layer, None, self.taps.descriptors[layer], self.taps.plan)
        for name, count in counts.items():
            self.computed[name] += count
        return ids, rows

    def step(self, **counts):
        """Compute these tokens of each sequence; one of all when none is named.

        Returns:
            `[tokens]`, whether each is steered.
        """
        counts = counts or dict.fromkeys(self.computed, 1)
        ids, rows = self.begin(counts)
        steered = (self.taps.plan[Column.STEER.plan_row] >= 0).tolist()
        assert rows.any(1).tolist() == steered, "the vector is of ones"
        assert not any(steered[len(ids) :])
        self.session.steps.before_sampling(None)
        self.session.steps.after_sampling(torch.zeros(len(counts), dtype=torch.int64), ids)
        self.session.steps.end()
        return steered[: len(ids)]

    def draft(self, drafts, accepted, *, later=False):
        """Decode one token of each sequence, with these drafts after it, of which so many are
        accepted; and the prompts of those that begin.

        Args:
            later: it is asked when it must be known.

        Returns:
            `[tokens]`, whether each is steered.
        """
        counts = {
            name: 1 + drafts.get(name, 0) if computed else PROMPT
            for name, computed in self.computed.items()
        }
        starts = np.array(list(self.computed.values()), np.int32)
        ids, rows = self.begin(counts, drafts)
        steered = (self.taps.plan[Column.STEER.plan_row] >= 0).tolist()
        assert rows.any(1).tolist() == steered and not any(steered[len(ids) :])
        steps, width = self.session.steps, 1 + max(drafts.values())
        steps.before_sampling(torch.zeros(len(ids), 2))
        steps.after_sampling(torch.zeros((len(counts), width), dtype=torch.int64), ids)
        kept = {
            name: 1 + accepted.get(name, 0) if self.computed[name] > PROMPT else PROMPT
            for name in counts
        }
        told = np.array(list(kept.values()), np.int32)
        if self.is_idle:
            pass
        elif later:
            steps.accept_later(lambda: (starts, told))
        else:
            steps.accept(told)
        steps.end(wait=not later)
        for name in counts:
            self.computed[name] += kept[name] - counts[name]
        return steered[: len(ids)]


@pytest.fixture
def engine():
    return Engine()


def decoding(engine, steps=10):
    """`a` is steered and `b` is not; both have come to the same position."""
    engine.start("a", EVERYWHERE)
    engine.start("b")
    assert engine.step(a=PROMPT, b=PROMPT) == [True] * PROMPT + [False] * PROMPT
    for _ in range(steps):
        assert engine.step() == [True, False]


def test_a_steered_decode_goes_on_after_a_pass_that_is_no_step(engine):
    decoding(engine)
    engine.session.steps.skip()
    assert (engine.taps.plan[Column.STEER.plan_row] == -1).all()
    assert engine.step() == [True, False]
    assert engine.step() == [True, False]


def test_a_steady_steered_decode_is_planned_once(engine, monkeypatch):
    planner = engine.session._planner
    plan, planned = planner.plan, []
    monkeypatch.setattr(planner, "plan", lambda *a: (planned.append(a), plan(*a))[1])
    decoding(engine)
    assert len(planned) == 2, "the prompts, and the first of ten decode steps"
    engine.start("c")
    engine.step(a=1, b=1, c=PROMPT)
    assert engine.step() == [True, False, False]
    assert engine.step() == [True, False, False]
    assert len(planned) == 4
    assert engine.session.steps.rows_steered == PROMPT + 13


@settings(max_examples=30 if INTERPRETED else 60, deadline=None)
@given(
    st.lists(st.sampled_from(["turn", "turn", "turn", "same", "preempt", "trade", "skip", "new"])),
    st.sampled_from(["same_step", "out_of_band"]),
)
def test_batches_of_pipeline_stages_take_turns(script, window):
    """Each is steered and read as if it were alone, whatever happens between its turns."""
    engine = Engine(layers=2, stages=2)
    consumer = Positions(window)
    engine.session.consumers.register(consumer)
    batches, number = [["a", "b"], ["c", "d"]], 0
    steered = {name: name in "ad" for name in "abcde"}
    for batch in batches:
        for name in batch:
            engine.start(name, *([EVERYWHERE] if steered[name] else []))
        engine.step(**dict.fromkeys(batch, PROMPT))
    for what in [*script, "turn", "turn"]:
        number += what != "same"
        batch = batches[number % 2]
        if what == "preempt":
            engine.preempt(batch[0])
        elif what == "trade":
            batches[0][0], batches[1][0] = batches[1][0], batches[0][0]
        elif what == "skip":
            engine.session.steps.skip()
        elif what == "new" and "e" not in engine.computed:
            engine.finish(batch[1])
            batch[1] = "e"
            engine.start("e")
        counts = {name: max(1, PROMPT - engine.computed[name]) for name in batch}
        found = engine.step(**counts)
        assert found == [steered[name] for name in batch for _ in range(counts[name])]
        engine.session.synchronize()
        for name in batch:
            seen = consumer.seen[name]
            assert seen == list(range(len(seen))), "each position once, in order"
            assert len(seen) >= engine.computed[name]


def test_batches_that_take_turns_are_laid_out_once_and_handed_out_by_what_is_known(monkeypatch):
    engine = Engine(layers=2, stages=2)
    consumer = Positions()
    engine.session.consumers.register(consumer)
    planner = engine.session._planner
    laid, lay_out = [], planner._lay_out
    monkeypatch.setattr(planner, "_lay_out", lambda batch: (laid.append(1), lay_out(batch))[1])
    made, flows = [], steps.StepFlows
    monkeypatch.setattr(steps, "StepFlows", lambda *of: (made.append(1), flows(*of))[1])
    for name in "abc":
        engine.start(name, EVERYWHERE)
    for batch in ("ab", "c"):
        engine.step(**dict.fromkeys(batch, PROMPT))
    for _ in range(10):
        assert engine.step(a=1, b=1) == [True, True]
        assert engine.step(c=1) == [True]
    assert (len(laid), len(made)) == (4, 4)
    assert consumer.seen == {name: list(range(PROMPT + 10)) for name in "abc"}


def test_batches_that_take_turns_find_their_rows_in_a_ring_that_has_grown():
    """The one that did not make it grow read them where its rows had lain before."""
    given, goes_on = [], threading.Event()

    class Reading(Positions):
        def flows(self):
            reads = (ResidualStream.read(layer=1, role="row"),)
            return [ConsumerFlow(reads=reads, window=self.window)]

        def consume_bundle(self, bundle, ctx):
            given.append((bundle.entries["row"], bundle.meta.positions))

    class Slow(Reading):
        consumer_id = "slow"

        def consume_bundle(self, bundle, ctx):
            goes_on.wait()

    engine = Engine(layers=2, stages=2, most_rows=128)
    engine.session.consumers.register(Reading())
    engine.session.consumers.register(Slow("background"))
    before = engine.session._ring.capacity
    for name in "abcd":
        engine.start(name)
    for count in [PROMPT, *([1] * 40)]:
        for batch in ("ab", "cd"):
            engine.step(**dict.fromkeys(batch, count))
    goes_on.set()
    assert engine.session._ring.capacity > before
    assert len(given) == 2 * 41
    for rows, positions in given:
        assert torch.equal(rows[:, 0], torch.tensor(100.0 + positions).float())


def test_what_reads_one_stage_and_draws_on_another_is_told_where_to_read():
    class Guide(Positions):
        def flows(self):
            reads = (ResidualStream.read(layer=0),)
            return [ConsumerFlow(reads=reads, writes=(Sampler.write(phase="any", width=4),))]

    engine = Engine(stages=2, samples=False)
    with pytest.raises(ValueError, match=r"of the last of 2; give .* \(ESamp: source_layer\)"):
        engine.session.consumers.register(Guide())


def test_a_result_that_was_promised_by_a_consumer_that_left_is_an_error():
    """It was pending for ever."""

    class Promising(Positions):
        def on_request_finished(self, request, ctx):
            self.promise = Future()
            if request.request_id == "a":
                self.promise.set_result("made")
            return self.promise

    engine = Engine()
    engine.session.consumers.register(Promising())
    for name in "ab":
        engine.start(name)
    engine.step(a=PROMPT, b=PROMPT)
    for name in "ab":
        engine.finish(name)
    engine.session.unregister("positions")
    found = engine.session.sequences.pop_results(["a", "b"], {})
    assert found["a"][0]["positions"] == {"status": "ok", "error": None, "payload": "made"}
    assert found["b"][0]["positions"]["status"] == "error"
    assert "was unregistered before it had made this" in found["b"][0]["positions"]["error"]


def test_what_was_steered_leaves_nothing_behind_in_an_idle_session(engine):
    engine.start("plain")
    engine.step(plain=PROMPT)
    for _ in range(2):
        engine.start("a", EVERYWHERE)
        assert engine.step(plain=1, a=PROMPT) == [False] + [True] * PROMPT
        assert engine.step(plain=1, a=1) == [False, True]
        assert engine.taps.descriptors[0, Descriptor.FLAGS]
        engine.finish("a")
        assert engine.step() == [False]
        assert (engine.taps.plan[Column.STEER.plan_row] == -1).all()
        assert not engine.taps.descriptors[0, Descriptor.FLAGS], "nobody looks at the plan"
    assert engine.session.steps.rows_steered == 2 * (PROMPT + 1)


def test_ways_of_steering_that_are_known_come_and_go_beside_others_without_a_write(
    engine, monkeypatch
):
    weakly = GroupUse("any", Selection(), "weak")
    operation = ("post_block", 0, "v", Coefficients(add=0.5))
    engine.session.steering.put({}, {"weak": [operation]})
    decoding(engine)
    set_used, written = engine.taps.set_used, []
    monkeypatch.setattr(
        engine.taps,
        "set_used",
        lambda column, points: (written.append(points), set_used(column, points)),
    )
    for _ in range(2):
        engine.start("c", weakly)
        assert engine.step(a=1, b=1, c=PROMPT) == [True, False] + [True] * PROMPT
        engine.finish("c")
        assert engine.step() == [True, False]
        assert len(written) == 1, "its entry, the first time"
    engine.finish("a")
    assert engine.step() == [False]
    assert not engine.taps.descriptors[0, Descriptor.FLAGS]


def test_vectors_that_come_during_a_steady_decode_may_move_the_others(engine):
    decoding(engine)
    more = {f"v{number}": np.ones(HIDDEN, np.float32) for number in range(100)}
    before = engine.taps.descriptors[0, Descriptor.VECTORS].item()
    engine.session.steering.put(more, {})
    assert engine.step() == [True, False]
    assert engine.taps.descriptors[0, Descriptor.VECTORS].item() != before


def test_a_consumer_hears_of_every_step_in_which_others_are_steered(engine):
    class OfPrompts(Positions):
        def flows(self):
            reads = (ResidualStream.read(layer=0, phase="prefill"), RequestMeta.read())
            return [ConsumerFlow(reads=reads, window=self.window)]

    consumer = OfPrompts()
    engine.session.consumers.register(consumer)
    decoding(engine)
    assert consumer.steps == list(range(1, 12)), "though it is given rows in the first only"


def test_a_consumer_that_raised_costs_no_more_than_none(engine, monkeypatch):
    class Raising(Positions):
        def consume_bundle(self, bundle, ctx):
            raise RuntimeError("on purpose")

    engine.session.consumers.register(Raising())
    engine.start("b")
    engine.step(b=PROMPT)
    assert engine.step() == [False]
    assert engine.session.steps.idle
    plan, planned = engine.session._planner.plan, []
    monkeypatch.setattr(
        engine.session._planner, "plan", lambda *a: (planned.append(a), plan(*a))[1]
    )
    engine.start("a", EVERYWHERE)
    engine.step(b=1, a=PROMPT)
    for _ in range(5):
        assert engine.step() == [False, True]
        assert not engine.session.steps.observed
    assert len(planned) == 2


KINDS = {"plain": (), "everywhere": (EVERYWHERE,), "off at 8": (OFF_AT_8,)}
STEERED_BELOW = {"plain": 0, "everywhere": 1000, "off at 8": 8}
ACTIONS = st.one_of(
    st.tuples(st.just("start"), st.sampled_from(sorted(KINDS))),
    st.tuples(st.sampled_from(["finish", "preempt"]), st.integers(0, 3)),
    st.tuples(st.sampled_from(["decode", "decode", "decode", "calm"]), st.integers(1, 4)),
    st.tuples(st.just("step"), st.permutations("abcd"), st.lists(st.integers(0, 2), min_size=4)),
    st.tuples(st.sampled_from(["skip", "put", "consumer comes", "consumer goes"])),
)


@settings(deadline=None, max_examples=50 if INTERPRETED else 150)
@given(st.lists(ACTIONS, min_size=8, max_size=40))
def test_rows_are_steered_as_asked_whatever_happens(actions):
    engine, kinds, steered = Engine(), {}, 0
    engine.start("a")
    kinds["a"] = "plain"

    def step(counts):
        nonlocal steered
        expected = []
        for name, count in counts.items():
            first = engine.computed[name]
            end = STEERED_BELOW[kinds[name]]
            expected += [position < end for position in range(first, first + count)]
        assert engine.step(**counts) == expected
        steered += sum(expected)

    def decode(times):
        for _ in range(times if kinds else 0):
            step(dict.fromkeys(engine.computed, 1))

    def finish(name):
        engine.finish(name)
        del kinds[name]

    for number, (action, *details) in enumerate(actions):
        free = [name for name in "abcd" if name not in kinds]
        if action == "start" and free:
            kinds[free[0]] = details[0]
            engine.start(free[0], *KINDS[details[0]])
        elif action in ("finish", "preempt") and kinds:
            name = sorted(kinds)[details[0] % len(kinds)]
            (finish if action == "finish" else engine.preempt)(name)
        elif action == "decode":
            decode(details[0])
        elif action == "calm":
            for name in [name for name, kind in kinds.items() if kind != "plain"]:
                finish(name)
            decode(details[0])
        elif action == "step":
            order, counts = details
            asked = {n: c for n, c in zip(order, counts, strict=False) if c and n in kinds}
            if asked:
                step(asked)
        elif action == "skip":
            engine.session.steps.skip()
            assert (engine.taps.plan[Column.STEER.plan_row] == -1).all()
        elif action == "put":
            engine.session.steering.put({f"v{number}": np.ones(HIDDEN, np.float32)}, {})
        elif action == "consumer comes" and not engine.session.consumers.by_id:
            engine.session.consumers.register(Positions())
        elif action == "consumer goes" and engine.session.consumers.by_id:
            engine.session.unregister()
    assert engine.session.steps.rows_steered == steered


def grow(engine, name, *consumers):
    """Another input of a streamed prompt; it asks these consumers, and no others."""
    length = engine.session._slots.get(name).info.prompt_len + 2
    options = {consumer: {"enabled": True} for consumer in consumers}
    engine.session.sequences.start(
        name,
        [1] * length,
        length,
        RequestSpec(name, name, consumers=options),
        0,
        engine.computed[name],
    )


def test_rows_of_an_input_are_given_though_the_next_one_asks_for_none(engine):
    consumer = Asked("next_step")
    engine.session.consumers.register(consumer)
    engine.start("a", consumers=["positions"])
    engine.step(a=PROMPT)
    grow(engine, "a")
    engine.step(a=1)
    assert consumer.seen == {"a": [0, 1, 2]}
    assert not any(span.held for span in engine.session._ring._spans)


def test_a_prompt_that_grows_is_laid_out_again_only_when_its_rows_go_to_others(engine, monkeypatch):
    consumer, slots = Asked(), engine.session._slots
    engine.session.consumers.register(consumer)
    engine.start("a", consumers=["positions"])
    assign, laid_out = slots.assign_timeline, []
    monkeypatch.setattr(
        slots, "assign_timeline", lambda *args: (laid_out.append(args), assign(*args))
    )
    engine.step(a=PROMPT)
    for _ in range(3):
        grow(engine, "a", "positions")
        engine.step(a=2)
    assert consumer.seen == {"a": list(range(PROMPT + 6))}
    assert not laid_out
    grow(engine, "a")
    engine.step(a=2)
    grow(engine, "a", "positions")
    engine.step(a=2)
    assert consumer.seen["a"][PROMPT + 6 :] == [PROMPT + 8, PROMPT + 9]
    assert len(laid_out) == 2
    everybody = Positions()
    everybody.consumer_id = "everybody"
    engine.session.consumers.register(everybody)
    grow(engine, "a", "positions")
    engine.step(a=2)
    assert consumer.seen["a"][-2:] == everybody.seen["a"] == [PROMPT + 10, PROMPT + 11]


@pytest.mark.parametrize("beside", [(), (EVERYWHERE,)], ids=["alone", "beside a steered one"])
def test_what_was_written_for_an_input_is_not_for_one_that_does_not_ask(engine, beside):
    write = ResidualStream.write(layer=0, phase="any")

    class Writing(Asked):
        def flows(self):
            return [ConsumerFlow(reads=(RequestMeta.read(),), writes=(write,))]

        def consume_bundle(self, bundle, ctx):
            pass

        def on_request_started(self, request, ctx):
            ctx.writer(write.role).set([request], torch.ones(HIDDEN))

    def added():
        _, rows = engine.begin(dict.fromkeys(engine.computed, 1))
        return rows[list(engine.computed).index("a")].tolist()

    engine.session.consumers.register(Writing())
    if beside:
        engine.start("b", *beside)
    engine.start("a", consumers=["positions"])
    found = [added()]
    grow(engine, "a")
    found.append(added())
    grow(engine, "a", "positions")
    found.append(added())
    assert found == [[1.0] * HIDDEN, [0.0] * HIDDEN, [1.0] * HIDDEN]


@pytest.mark.parametrize("again", [False, True])
def test_who_used_a_consumer_in_an_earlier_input_is_told_to_it_at_the_end(engine, again):
    class BySlot(Asked):
        rows, options = {}, []

        def consume_bundle(self, bundle, ctx):
            for number, request in enumerate(bundle.meta.requests):
                own = bundle.meta.positions[bundle.meta.request_index == number]
                self.rows.setdefault(request.slot, []).extend(own.tolist())

        def on_request_finished(self, request, ctx):
            self.options.append((request.prompt_len, dict(request.options)))
            return self.rows.pop(request.slot, [])

    engine.session.consumers.register(consumer := BySlot())

    def result_of(name):
        engine.finish(name)
        return engine.session.sequences.pop_results([name], {})[name][0]["positions"]["payload"]

    engine.start("a", consumers=["positions"])
    engine.step(a=PROMPT)
    grow(engine, "a")
    engine.step(a=2)
    if again:
        grow(engine, "a", "positions")
        engine.step(a=1)
        grow(engine, "a")
        engine.step(a=1)
    expected = [*range(PROMPT), *([PROMPT + 2] if again else [])]
    assert result_of("a") == expected and not consumer.rows
    assert consumer.options == [(PROMPT + (6 if again else 2), {"enabled": True})]
    engine.start("b", consumers=["positions"])
    engine.step(b=PROMPT)
    assert result_of("b") == list(range(PROMPT)), "it has the slot that the other had"


def test_a_consumer_that_comes_is_not_told_of_who_used_another_of_its_name(engine):
    engine.session.consumers.register(Asked())
    engine.start("a", consumers=["positions"])
    engine.step(a=PROMPT)
    grow(engine, "a")
    engine.session.unregister()
    ended = []

    class Other(Asked):
        def on_request_finished(self, request, ctx):
            ended.append(request.request_id)

    engine.session.consumers.register(Other())
    engine.finish("a")
    assert not ended


def test_once_all_consumers_are_waited_for_no_rows_are_kept_for_slow_ones(engine):
    slowly = threading.Event()

    class Slow(Positions):
        def consume_bundle(self, bundle, ctx):
            slowly.wait()
            super().consume_bundle(bundle, ctx)

    engine.session.consumers.register(consumer := Slow("background"))
    engine.start("a")
    engine.step(a=PROMPT)
    engine.step()
    assert not consumer.seen
    slowly.set()
    engine.session.synchronize()
    assert consumer.seen == {"a": [0, 1, 2, 3]}
    assert not engine.session._ring._spans


@pytest.mark.parametrize("of_controllers", [63, 64])
def test_a_row_has_all_operations_of_its_request_and_of_controllers(engine, of_controllers):
    """As many as both may be."""
    place = ("post_block", 0)
    one = Coefficients(add=0.5, norm=1e-12)
    assert not one.only_adds, "each is an operation of its own"
    groups = {
        name: [(*place, name, one)] * count for name, count in (("a", 64), ("b", of_controllers))
    }
    engine.session.steering.put({name: np.ones(HIDDEN, np.float32) for name in groups}, groups)
    uses = [GroupUse("any", Selection(), name) for name in groups]
    engine.start("a", *uses)
    _, rows = engine.begin({"a": 1})
    assert rows[0].tolist() == pytest.approx([0.5 * (64 + of_controllers)] * HIDDEN)


def test_steering_follows_the_order_of_the_batch(engine):
    decoding(engine)
    assert engine.step(b=1, a=1) == [False, True]
    assert engine.step(b=1) == [False]
    assert engine.step(b=1, a=1) == [False, True]


def test_steering_of_a_range_ends_in_a_steady_decode(engine):
    engine.start("a", OFF_AT_8)
    engine.start("b", EVERYWHERE)
    engine.step(a=PROMPT, b=PROMPT)
    found = [engine.step() for _ in range(PROMPT, 12)]
    assert found == [[True, True]] * (8 - PROMPT) + [[False, True]] * 4
    assert engine.session.steps.rows_steered == 2 * PROMPT + sum(map(sum, found))


def test_a_consumer_that_needs_tokens_hears_of_an_end_that_nobody_waits_for(engine):
    ended = []

    class Needing(Positions):
        needs_tokens = True

        def on_request_finished(self, request, ctx):
            ended.append((request.request_id, request.token_ids))

    engine.session.consumers.register(Needing())
    engine.session.sequences.start("a", [1] * PROMPT, PROMPT, RequestSpec("a"), 0)
    engine.computed["a"] = 0
    engine.step(a=PROMPT)
    engine.finish("a")
    assert ended == [("a", None)]


class BySlot(Consumer):
    """Keeps rows by slot, as documents show it, and is asked when the tokens are known."""

    needs_tokens = True

    def __init__(self, name):
        self.consumer_id = name
        self.seen = {}

    def flows(self):
        return [ConsumerFlow(reads=[ResidualStream.read(layer=0)])]

    def on_request_started(self, request, ctx):
        self.seen[request.slot] = []

    def consume_bundle(self, bundle, ctx):
        for slot, position in zip(bundle.meta.slots, bundle.meta.positions, strict=True):
            self.seen[slot].append(int(position))

    def on_request_finished(self, request, ctx):
        return len(self.seen.pop(request.slot)), request.token_ids


def test_a_slot_is_nobody_elses_while_a_consumer_waits_for_the_tokens(engine):
    """The user's process knows where a stop string ended a text, and tells it later."""
    engine.session.consumers.register(BySlot("one"))
    engine.session.consumers.register(BySlot("other"))
    engine.start("a")
    engine.step(a=PROMPT)
    engine.step(a=1)
    engine.finish("a")
    for name in "bcdef":  # more than there are slots
        engine.start(name)
        engine.step(**{name: PROMPT})
        engine.finish(name)
    tokens = {"a": {0: [1] * 5}, "b": {0: [1] * 4}}
    found = engine.session.sequences.pop_results(["a"], tokens)["a"][0]
    assert {name: found[name]["payload"] for name in found} == dict.fromkeys(
        ("one", "other"), (PROMPT + 1, (1,) * 5)
    )
    slots = engine.session._slots
    free = len(slots._free)
    engine.session.unregister("one")  # it is asked for its part of the others; the other one waits
    assert len(slots._free) == free
    found = engine.session.sequences.pop_results(["b"], tokens)["b"][0]
    assert found["one"]["payload"] == (PROMPT, None)
    assert found["other"]["payload"] == (PROMPT, (1,) * 4)
    assert len(slots._free) == free + 1
    engine.session.sequences.discard_results(list("cdef"))
    assert len(slots._free) == len(slots.by_slot) and not slots._held


def test_what_was_computed_of_a_dropped_token_comes_again(engine):
    consumer = Positions()
    engine.session.consumers.register(consumer)
    engine.start("a")
    engine.step(a=PROMPT)
    engine.step(a=1)
    engine.step(a=1)  # of a token that is dropped: the prompt goes on at its position
    spec = RequestSpec("a", "a")
    engine.session.sequences.start("a", [1] * (PROMPT + 3), PROMPT + 3, spec, 0, PROMPT + 1)
    engine.computed["a"] = PROMPT + 1
    engine.step(a=2)
    assert consumer.seen["a"] == [0, 1, 2, 3, 4, 4, 5]


def test_nobody_is_given_rows_that_were_to_be_steered_and_are_not(engine):
    consumer = Positions()
    engine.session.consumers.register(consumer)
    engine.start("a", GroupUse("any", Selection(), "unknown"))
    engine.start("b", EVERYWHERE)
    assert engine.step(a=PROMPT, b=PROMPT) == [False] * PROMPT + [True] * PROMPT
    engine.finish("a")
    result = engine.session.sequences.pop_results(["a"], {})["a"][0]["positions"]
    assert result["status"] == "error" and "unknown is not in this worker" in result["error"]
    assert consumer.seen == {"b": [0, 1, 2]}


def test_what_stands_beside_rows_that_nobody_judges_ends_nothing(engine):
    """Strengths of the last step whose rows were judged, which may be anybody's."""
    spec = RequestSpec("a", steering=(GroupUse("any", Selection(), "unknown"),), stops=((0, "x"),))
    engine.session.sequences.start("a", [1] * PROMPT, PROMPT, spec, 0)
    engine.start("b", EVERYWHERE)
    engine.computed["a"] = PROMPT
    engine.begin({"a": 1, "b": PROMPT})
    engine.session.steering.gates.state = torch.ones(64, 2, MAX_GATES)
    [(place, why)] = engine.session.steps.take_verdicts().wait().pop("a")
    assert place == BROKEN and "unknown" in why
    engine.finish("a")
    assert engine.session.steps.take_verdicts() is None


def test_who_was_to_be_steered_and_is_not_is_told_once(engine):
    engine.start("a", GroupUse("any", Selection(), "unknown"))
    engine.start("b", EVERYWHERE)
    engine.start("c", GroupUse("any", Selection(), "unknown"))
    steps = engine.step(a=PROMPT, b=PROMPT, c=PROMPT)
    assert steps == [False] * PROMPT + [True] * PROMPT + [False] * PROMPT
    assert engine.session.not_steered(["a", "b"]) == ["a"]
    engine.session.consumers.register(Positions())  # looks at every sequence again
    assert engine.session.not_steered(["a", "b"]) == []
    engine.finish("c")
    assert engine.session.not_steered(["c"]) == ["c"]
    assert engine.session.stats()["sequences_not_steered"] == 2


@pytest.mark.parametrize("steering", [(), (EVERYWHERE,)])
def test_rows_are_not_delivered_again_after_steps_in_which_none_are(engine, steering):
    consumer = Asked()
    engine.session.consumers.register(consumer)
    engine.start("a", consumers=["positions"])
    engine.start("b", *steering)
    engine.step(a=PROMPT, b=PROMPT)
    for _ in range(10):
        engine.step()
    engine.preempt("a")
    engine.step(b=1)
    engine.step(b=1)
    engine.step(a=PROMPT + 10, b=1)
    engine.step()
    assert consumer.seen == {"a": [*range(PROMPT + 11)]}


def test_a_consumer_does_not_get_rows_from_before_it_came_when_they_are_computed_again(engine):
    decoding(engine, 10)
    engine.preempt("a")
    engine.step(b=1)
    consumer = Positions()
    engine.session.consumers.register(consumer)
    engine.step(a=PROMPT + 10, b=1)
    engine.step()
    assert consumer.seen["a"] == [PROMPT + 10]


def test_a_session_is_idle_while_nothing_is_done_to_any_row(engine):
    assert engine.session.steps.idle
    engine.start("a")
    assert engine.session.steps.idle
    engine.start("b", EVERYWHERE)
    assert not engine.session.steps.idle
    engine.finish("b")
    assert engine.session.steps.idle
    engine.session.consumers.register(Asked())
    assert engine.session.steps.idle, "nobody has asked for it"
    engine.start("c", consumers=["positions"])
    assert not engine.session.steps.idle


def test_a_slot_is_not_steered_for_its_next_sequence(engine):
    decoding(engine)
    engine.finish("a")
    engine.start("c")
    assert engine.step(c=PROMPT, b=1) == [False] * (PROMPT + 1)
    assert engine.step() == [False, False]


@pytest.mark.parametrize("window", ["same_step", "next_step"])
def test_a_consumer_that_comes_while_sequences_are_steered_has_every_row_from_then_on(
    engine, window
):
    decoding(engine)
    consumer = Positions(window)
    engine.session.consumers.register(consumer)
    for _ in range(5):
        assert engine.step() == [True, False]
    engine.session.unregister("positions")
    engine.step()
    came = PROMPT + 10
    assert consumer.seen == {name: [*range(came, came + 5)] for name in "ab"}
    assert len(consumer.steps) == 5


def test_rows_computed_again_after_a_long_decode_are_given_once(engine):
    consumer = Positions()
    engine.session.consumers.register(consumer)
    decoding(engine, 30)
    engine.preempt("a")
    engine.step(a=20, b=1)
    engine.step(a=PROMPT + 30 - 20, b=1)
    for _ in range(3):
        engine.step()
    length = PROMPT + 30
    assert consumer.seen == {"a": [*range(length + 3)], "b": [*range(length + 5)]}


def test_rows_that_a_consumer_came_too_late_for_are_not_its_when_computed_again(engine):
    decoding(engine, 30)
    consumer = Positions()
    engine.session.consumers.register(consumer)
    engine.preempt("a")
    engine.step(a=PROMPT + 30, b=1)
    engine.step()
    assert consumer.seen == {"a": [33], "b": [33, 34]}


def test_a_consumer_on_request_is_not_called_for_sequences_that_are_only_steered(engine):
    consumer = Asked()
    engine.session.consumers.register(consumer)
    decoding(engine)
    assert not consumer.steps
    engine.start("c", consumers=["positions"])
    engine.step(a=1, b=1, c=PROMPT)
    engine.step()
    assert consumer.seen == {"c": [*range(PROMPT + 1)]}
    assert len(consumer.steps) == 2
    engine.finish("c")
    engine.step()
    assert len(consumer.steps) == 2


@pytest.mark.parametrize("steering", [EVERYWHERE, OFF_AT_8])
def test_a_sequence_whose_results_were_taken_is_steered_and_no_longer_captured(engine, steering):
    consumer = Positions()
    engine.session.consumers.register(consumer)
    engine.start("a", steering)
    engine.start("b")
    engine.step(a=PROMPT, b=PROMPT)
    engine.step()
    engine.session.sequences.pop_results(["a"], {})
    assert engine.step() == [True, False]
    assert consumer.seen == {"a": [*range(PROMPT + 1)], "b": [*range(PROMPT + 2)]}


def test_patched_positions_are_patched_wherever_a_step_computes_them(engine):
    """Prompt in chunks, decode, after a preemption, in batches whose other rows are plain or
    steered; each position has the row that was given for it, then what steers it."""
    patched = (0, PROMPT - 1, PROMPT + 1, PROMPT + 2)
    given = np.arange(1, 1 + len(patched), dtype=np.float32)[:, None].repeat(HIDDEN, 1)
    use = PatchUse("post_block", 0, patched, 0.0, 1.0, None, given.tobytes())
    row = dict(zip(patched, given[:, 0].tolist(), strict=True))
    late = GroupUse("any", Selection.parse({"ranges": [[2, PROMPT + 2]]}), "strong")
    engine.start("plain")
    engine.start("a", late, patch=(use,))
    engine.start("b", EVERYWHERE)

    def expected(start, count):
        at = range(start, start + count)
        return [row.get(p, 0.0) + (2 <= p < PROMPT + 2) for p in at]

    for computed in ([PROMPT - 1, 1, 1, 1, 1], [PROMPT, 1, 1, 1]):
        for count in computed:
            start = engine.computed["a"]
            _, rows = engine.begin({"plain": 1, "a": count, "b": 1})
            engine.session.steps.end()
            values = rows[: count + 2, 0].tolist()
            assert values == [0.0, *expected(start, count), 1.0]
        engine.preempt("a")
    assert engine.session.steps.rows_patched == 2 * len(patched)
    for name in list(engine.computed):
        engine.finish(name)
    assert engine.session.steps.begin_idle()
    assert not engine.taps.descriptors[0, Descriptor.FLAGS]


def test_a_decode_goes_on_unplanned_once_its_patches_are_behind(engine, monkeypatch):
    planner = engine.session._planner
    plan, planned = planner.plan, []
    monkeypatch.setattr(planner, "plan", lambda *a: (planned.append(a), plan(*a))[1])
    engine.start("a", patch=(PatchUse("post_block", 0, (PROMPT + 1,), 0.0, 1.0),))
    engine.begin({"a": PROMPT})
    for _ in range(8):
        engine.begin({"a": 1})
    assert len(planned) == 4, "the prompt, the tokens before, at and after the patched one"


def test_a_patch_of_rows_that_are_gone_is_told_and_the_sequence_goes_on(engine):
    gone = PatchUse("post_block", 0, (1,), 0.0, 1.0, None, None, ("run", (0,)))
    engine.start("a", patch=(gone,))
    assert engine.step(a=PROMPT) == [False] * PROMPT
    engine.finish("a")
    assert engine.session.not_steered(["a"]) == ["a"]
    said = engine.session.sequences.pop_results(["a"], {})["a"][0]["patching"]
    assert said["status"] == "error" and "dropped before the request began" in said["error"]
    assert engine.session.stats()["sequences_not_patched"] == 1


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("window", ["same_step", "next_step", "background"])
def test_rows_of_rejected_drafts_reach_nobody_and_are_computed_again(engine, window, later):
    """Also where it is asked which drafts are accepted when the next step begins."""
    consumer = Positions(window)
    engine.session.consumers.register(consumer)
    engine.start("a", EVERYWHERE)
    engine.start("b")
    engine.step(a=PROMPT, b=PROMPT)
    engine.draft({"a": 3}, {"a": 1}, later=later)
    assert engine.session.steps.undecided is later
    engine.draft({"a": 2, "b": 3}, {"a": 2, "b": 0}, later=later)
    engine.step(a=1, b=1)
    engine.draft({"b": 1}, {"b": 1}, later=later)
    engine.session.flush()
    assert consumer.seen == {"a": list(range(10)), "b": list(range(8))}
    assert engine.session.steps.rows_captured == 18
    assert engine.session.steps.rows_steered == 10


class Undecided:
    """Drafted steps of an engine's sequences of which nobody knows where they begin.

    Attributes:
        asked: how many of them were asked which drafts were accepted.
    """

    def __init__(self, engine, drafts):
        self._steps, self._taps = engine.session.steps, engine.taps
        self._names = list(engine.computed)
        self._drafts = np.array([drafts.get(name, 0) for name in self._names], np.int32)
        self.asked = 0

    def step(self, kept, where=lambda: None):
        """Whether one was begun, of which so many tokens are their sequences' own."""
        sampled_from = np.full(len(self._names), PROMPT, np.int32)
        if not self._steps.begin_undecided(
            self._names, self._drafts + 1, sampled_from, self._drafts, where
        ):
            return False
        tokens = int(self._drafts.sum()) + len(self._names)
        self.steered = (self._taps.plan[Column.STEER.plan_row] >= 0).tolist()
        assert not any(self.steered[tokens:])
        self.steered = self.steered[:tokens]

        def decide():
            self.asked += 1
            return np.full(len(kept), PROMPT, np.int32), np.array(kept, np.int32)

        self._steps.accept_later(decide)
        self._steps.end(wait=False)
        return True


def test_steps_in_which_the_same_is_done_wherever_they_begin_wait_for_nothing(engine):
    engine.start("a", EVERYWHERE)
    engine.start("b")
    engine.step(a=PROMPT, b=PROMPT)
    engine.draft({"a": 3, "b": 1}, {"a": 1}, later=True)
    undecided = Undecided(engine, {"a": 3, "b": 1})
    asked = []
    for kept in ([4, 1], [1, 2], [3, 1], [2, 2]):
        assert undecided.step(kept)
        assert undecided.steered == [True] * 4 + [False] * 2
        asked.append(undecided.asked)
    assert asked == [0, 0, 1, 2], "the engine has taken the tokens of all but two steps"
    engine.session.steps.end()
    assert undecided.asked == 4
    assert engine.session.steps.rows_steered == PROMPT + 2 + 4 + 1 + 3 + 2


@pytest.mark.parametrize("window", ["same_step", "next_step", "out_of_band", "background"])
def test_rows_of_steps_that_are_decided_later_are_whose_they_are(window):
    pick, given = np.random.default_rng(3), []

    class Reading(Positions):
        def flows(self):
            reads = (ResidualStream.read(layer=1, role="row"), RequestMeta.read(role="whose"))
            return [ConsumerFlow(reads=reads, window=self.window)]

        def consume_bundle(self, bundle, ctx):
            super().consume_bundle(bundle, ctx)
            given.append(bundle)

    engine, reading, computed = Engine(layers=2), Reading(window), {}
    engine.session.consumers.register(reading)
    engine.start("a", EVERYWHERE)
    engine.start("b")
    engine.step(a=PROMPT, b=PROMPT)
    for step in range(20):
        if step == 10:
            computed["a"] = engine.computed["a"]
            engine.session.steps.end()
            engine.finish("a")
            engine.start("c", EVERYWHERE)
            engine.step(b=1, c=PROMPT)
        drafts = dict.fromkeys(engine.computed, 1 if step % 7 == 5 else 3)
        accepted = {name: int(pick.integers(most + 1)) for name, most in drafts.items()}
        engine.draft(drafts, accepted, later=True)
    engine.session.flush()
    computed |= engine.computed
    assert reading.seen == {name: list(range(count)) for name, count in computed.items()}
    assert engine.session.steps.rows_captured == sum(computed.values())
    assert engine.session.steps.rows_steered == computed["a"] + computed["c"]
    # Windows that a forward pass waits for must know where it begins.
    assert engine.begun_undecided == (18 if window in ("out_of_band", "background") else 0)
    for bundle in given:
        rows, expected = bundle.entries["row"], torch.tensor(100.0 + bundle.meta.positions)
        assert torch.equal(rows, expected[:, None].expand(-1, HIDDEN).float())


BATCHES = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from(sorted(KINDS))),
        st.tuples(st.just("finish"), st.integers(0, 3)),
        st.tuples(st.just("preempt"), st.integers(0, 3)),
        st.tuples(st.just("draft"), st.integers(1, 3), st.lists(st.integers(0, 3), min_size=4)),
        st.tuples(st.just("draft"), st.just(3), st.lists(st.integers(0, 3), min_size=4)),
    ),
    min_size=10,
    max_size=40,
)


@settings(deadline=None, max_examples=50 if INTERPRETED else 150)
@given(BATCHES, st.sampled_from([None, "same_step", "out_of_band", "background"]))
def test_sequences_come_and_go_while_steps_are_undecided(actions, window):
    """Each row is given once, as what it is, and steered as asked."""
    engine, kinds, given, steered = Engine(layers=2), {}, {}, 0
    end_of = {}

    class Reading(Consumer):
        consumer_id = "reading"

        def flows(self):
            reads = (ResidualStream.read(layer=1, role="row"), RequestMeta.read())
            return [ConsumerFlow(reads=reads, window=window)]

        def consume_bundle(self, bundle, ctx):
            meta, rows = bundle.meta, bundle.entries["row"]
            assert torch.equal(rows[:, 0], torch.tensor(100.0 + meta.positions).float())
            for name, position in zip(meta.request_ids, meta.positions.tolist(), strict=True):
                given.setdefault(name, []).append(position)

        def on_request_finished(self, request, ctx):
            assert request.request_id not in end_of
            end_of[request.request_id] = len(given.get(request.request_id, ()))

    if window is not None:
        engine.session.consumers.register(Reading())
    computed, number = {}, 0
    for action, *details in [("start", "everywhere"), *actions, ("draft", 3, [1] * 4)]:
        names = sorted(engine.computed)
        if action == "start" and len(names) < 4:
            name, number = f"r{number}", number + 1
            kinds[name] = details[0]
            engine.start(name, *KINDS[details[0]])
        elif action == "finish" and names:
            name = names[details[0] % len(names)]
            computed[name] = max(computed.get(name, 0), engine.computed.pop(name))
            finish = engine.session.sequences.finish
            engine.session.steps.when_decided(partial(finish, name))
        elif action == "preempt" and names:
            engine.session.steps.end()
            name = names[details[0] % len(names)]
            computed[name] = max(computed.get(name, 0), engine.computed[name])
            engine.preempt(name)
        elif action == "draft" and names:
            most, accepted = details
            decoding = [name for name in names if engine.computed[name]]
            drafts, kept = dict.fromkeys(decoding, most), {}
            for name, count in zip(decoding, accepted, strict=False):
                kept[name] = min(count, most)
            if not drafts:
                engine.session.steps.end()
                engine.step(**dict.fromkeys(names, PROMPT))
                steered += sum(STEERED_BELOW[kinds[name]] > 0 for name in names) * PROMPT
                continue
            before = dict(engine.computed)
            found, expected = engine.draft(drafts, kept, later=True), []
            for name, start in before.items():
                count = 1 + most if start else PROMPT
                end = STEERED_BELOW[kinds[name]]
                expected += [at < end for at in range(start, start + count)]
                own = range(start, engine.computed[name])
                steered += sum(at < end for at in own)
            assert found == expected
    engine.session.flush()
    for name, count in engine.computed.items():
        computed[name] = max(computed.get(name, 0), count)
    assert engine.session.steps.rows_steered == steered
    if window is not None:
        assert {name: sorted(rows) for name, rows in given.items()} == {
            name: list(range(count)) for name, count in computed.items() if count
        }
        assert engine.session.steps.rows_captured == sum(computed.values())
        gone = [name for name in computed if name not in engine.computed]
        assert end_of == {name: computed[name] for name in gone}, "rows before the end"


def test_a_batch_that_loses_and_gains_sequences_is_waited_for_by_nobody():
    engine, reading = Engine(), Positions("background")
    engine.session.consumers.register(reading)
    engine.start("a", EVERYWHERE)
    engine.start("b")
    engine.step(a=PROMPT, b=PROMPT)
    for step in range(12):
        if step == 4:
            engine.start("c", EVERYWHERE)
        if step == 8:
            engine.computed.pop("a")
            finish = engine.session.sequences.finish
            engine.session.steps.when_decided(partial(finish, "a"))
            assert engine.session._slots.get("a") is not None, "its last rows are not known yet"
        engine.draft(
            dict.fromkeys(engine.computed, 3), dict.fromkeys(engine.computed, 1), later=True
        )
    assert engine.begun_undecided == 11, "all but the first, before which there was none"
    assert engine.session._slots.get("a") is None
    engine.session.flush()
    assert reading.seen == {
        "a": list(range(PROMPT + 8 * 2)),
        "b": list(range(PROMPT + 12 * 2)),
        "c": list(range(PROMPT + 7 * 2)),
    }


def test_where_a_step_begins_must_be_known_where_what_is_done_depends_on_it(engine):
    def is_begun(*steering, drafts=3, between=None, then=lambda: None):
        """Whether a step is, of a sequence that is known to be between two positions."""
        engine.start("a", *steering)
        engine.step(a=PROMPT)
        engine.draft({"a": 3}, {"a": 1}, later=True)
        then()
        low, high = between or (0, 0)
        known = np.array([low], np.int32), np.array([high - low], np.int32)
        where = lambda: known if between else None  # noqa: E731
        begun = Undecided(engine, {"a": drafts}).step([1], where)
        engine.session.steps.end()
        for name in list(engine.computed):
            engine.finish(name)
        engine.session.unregister()
        return begun

    def within(start, stop):
        return GroupUse("any", Selection.parse({"ranges": [[start, stop]]}), "strong")

    assert is_begun(EVERYWHERE)
    assert is_begun(within(0, 60))
    assert not is_begun(within(0, PROMPT + 7)), "it ends where the step may have come to"
    assert not is_begun(within(PROMPT + 5, 60)), "it begins there"
    near = PROMPT + 1, PROMPT + 4
    assert not is_begun(within(0, PROMPT + 6), drafts=2, between=near), "it ends in the last token"
    assert is_begun(within(0, PROMPT + 7), drafts=2, between=near)
    assert not is_begun(within(PROMPT + 2, 60), drafts=2, between=near)
    assert is_begun(within(PROMPT + 1, 60), drafts=2, between=near)
    assert not is_begun(EVERYWHERE, drafts=2, between=(PROMPT - 1, PROMPT)), "of the prompt, or not"
    assert not is_begun(EVERYWHERE, drafts=2), "nothing is known of others than before"
    consumer = Positions("next_step")
    assert not is_begun(EVERYWHERE, then=lambda: engine.session.consumers.register(consumer))


def test_drafts_that_nobody_looks_at_are_not_taken_for_delivered(engine):
    engine.start("a", EVERYWHERE)
    engine.step(a=PROMPT)
    engine.draft({"a": 3}, {})
    consumer = Positions()
    engine.session.consumers.register(consumer)
    engine.step(a=1)
    assert consumer.seen == {"a": [PROMPT + 1]}
    assert engine.session.steps.rows_steered == PROMPT + 2


def test_a_step_of_which_it_never_becomes_known_what_was_accepted_gives_no_draft(engine):
    consumer = Positions()
    engine.session.consumers.register(consumer)
    engine.start("a")
    engine.step(a=PROMPT)
    engine.begin({"a": 4}, {"a": 3})
    engine.session.steps.end()
    assert consumer.seen == {"a": [0, 1, 2, PROMPT]}


def test_a_step_of_which_it_never_becomes_known_where_it_began_gives_nothing(engine):
    consumer = Positions("out_of_band")
    engine.session.consumers.register(consumer)
    engine.start("a", EVERYWHERE)
    engine.step(a=PROMPT)
    engine.draft({"a": 3}, {"a": 1}, later=True)
    engine.begin({"a": 4}, {"a": 3})
    assert engine.begun_undecided == 1
    engine.session.steps.end()
    assert consumer.seen == {"a": [0, 1, 2, PROMPT, PROMPT + 1]}
    assert engine.session.steps.rows_steered == PROMPT + 2


@pytest.mark.parametrize(("delivery", "every"), [("bundle", 1), ("bundle", 2), ("device_lease", 1)])
@pytest.mark.parametrize("names", ["a", "ab"])
def test_rows_of_several_layers_are_each_under_their_role(names, delivery, every):
    """Sequence `a` has another capture program than `b`: somebody else reads its rows, too."""
    layers, kept, rows = (3, 1, 2), [], 0

    class Reading(Consumer):
        consumer_id = "reading"

        def flows(self):
            reads = [ResidualStream.read(layer=layer, role=str(layer)) for layer in layers]
            several = {"delivery": delivery, "dispatch_every_n_steps": every}
            return [ConsumerFlow(reads=(*reads, RequestMeta.read(role="who")), **several)]

        def consume_bundle(self, bundle, ctx):
            nonlocal rows
            rows += len(bundle.meta)
            assert list(bundle.entries) == [*map(str, layers), "who"]
            assert len(bundle.entries) == 4 and "0" not in bundle.entries
            assert bundle.entries.get("1") is not None and bundle.entries.get("0") is None
            assert bundle.entries["who"] is bundle.meta
            self.check(bundle)
            if delivery == "bundle":
                assert all(bundle.entries[str(layer)].is_contiguous() for layer in layers)
                kept.append(bundle)

        def check(self, bundle):
            for layer in layers:
                expected = torch.tensor(100.0 * layer + bundle.meta.positions)
                torch.testing.assert_close(
                    bundle.entries[str(layer)], expected[:, None].expand(-1, HIDDEN).float()
                )

    engine, reading = Engine(layers=4), Reading()
    engine.session.consumers.register(reading)
    engine.session.consumers.register(Asked())
    for name in names:
        engine.start(name, consumers=("positions",) if name == "a" else ())
    engine.step(**dict.fromkeys(names, PROMPT))
    for _ in range(19):
        engine.step()
    assert rows == len(names) * (PROMPT + 19)
    for bundle in kept:  # the ring has been written over since
        reading.check(bundle)


def test_rows_of_several_layers_are_changed_in_place_by_what_learns():
    """On a thread of its own a consumer is not in inference mode."""
    grown = []

    class Learning(Consumer):
        consumer_id = "learning"

        def flows(self):
            reads = [ResidualStream.read(layer=layer, role=str(layer)) for layer in range(2)]
            return [ConsumerFlow(reads=reads, window="background")]

        def consume_bundle(self, bundle, ctx):
            learned = torch.ones(HIDDEN, requires_grad=True)
            first, second = (bundle.entries[str(layer)] for layer in range(2))
            before = second.clone()
            first.mul_(learned).sum().backward()
            assert torch.equal(second, before)
            grown.append(learned.grad)

    engine = Engine(layers=2)
    engine.session.consumers.register(Learning())
    engine.start("a")
    engine.step(a=PROMPT)
    engine.session.synchronize()
    assert len(grown) == 1


def test_only_rows_that_are_lost_count_as_dropped(engine):
    consumer = Positions("background")
    engine.session.consumers.register(consumer)
    engine.start("a")
    engine.step(a=PROMPT)
    engine.session._ring.reserve = lambda rows: None
    engine.draft({"a": 3}, {"a": 1})
    assert engine.session.steps.rows_dropped == 2
    assert engine.session.sequences.slots.get("a").dropped == {"positions": 2}


@pytest.mark.parametrize("window", ["same_step", "next_step", "out_of_band", "background"])
def test_rows_are_said_to_be_of_the_input_that_they_were_computed_for(engine, window):
    looked = threading.Event()

    class Phases(Asked):
        def consume_bundle(self, bundle, ctx):
            if window == "background":
                looked.wait()
            for position, of_prompt in zip(
                bundle.meta.positions, bundle.meta.is_prefill, strict=True
            ):
                self.seen[int(position)] = bool(of_prompt)

    consumer = Phases(window)
    engine.session.consumers.register(consumer)
    engine.start("a", consumers=["positions"])
    engine.step(a=PROMPT)
    for _ in range(3):
        engine.step(a=1)
    grow(engine, "a", "positions")
    looked.set()
    engine.session.flush()
    assert consumer.seen == {position: position < PROMPT for position in range(PROMPT + 3)}


def test_rows_that_wait_for_an_nth_step_are_flushed_on_the_stream_they_were_copied_on(
    engine, monkeypatch
):
    streams = []

    @contextmanager
    def on(stream):
        streams.append(stream)
        yield
        streams.pop()

    class Tenth(Positions):
        def flows(self):
            [flow] = super().flows()
            return [replace(flow, dispatch_every_n_steps=10)]

        def consume_bundle(self, bundle, ctx):
            self.seen[bundle.meta.positions.tobytes()] = list(streams)

    engine.session.consumers.register(consumer := Tenth("background"))
    engine.start("a")
    engine.step(a=PROMPT)
    engine.step(a=1)
    engine.session.flush()
    assert list(consumer.seen.values()) == [[], []]  # of the prompt, and generated
    engine.step(a=1)
    monkeypatch.setattr(dispatch, "CurrentStream", on)
    monkeypatch.setattr(engine.session.consumers.by_id["positions"], "side", "its own")
    engine.session.flush()
    assert list(consumer.seen.values())[-1] == ["its own"]


def test_rows_on_their_way_to_the_host_count_as_there(engine, monkeypatch):
    consumer, under_way = MemoryConsumer(), []
    arrive, send = consumer.on_export, consumer.consume_bundle
    monkeypatch.setattr(consumer, "on_export", lambda *args: (time.sleep(0.01), arrive(*args)))

    def consume_bundle(bundle, ctx):
        send(bundle, ctx)
        under_way.append(engine.session.consumers.by_id["memory"].export_thread.waiting)

    monkeypatch.setattr(consumer, "consume_bundle", consume_bundle)
    engine.session.consumers.register(consumer)
    steps = 4
    consumer._limit = consumer._rows._limit = steps * PROMPT * HIDDEN * 4
    capture = {"memory": {"hooks": {"post_block": [0]}, "positions": "all"}}
    for number in range(20):
        spec = RequestSpec(f"r{number}", f"r{number}", consumers=capture)
        engine.session.sequences.start(f"r{number}", [1] * PROMPT, PROMPT, spec, 0)
        engine.computed = {f"r{number}": 0}
        engine.step(**{f"r{number}": PROMPT})
        engine.finish(f"r{number}")
    results = engine.session.sequences.pop_results([f"r{number}" for number in range(20)], {}, 10.0)
    for of_sample in results.values():
        assert of_sample[0]["memory"]["status"] == "ok"
        assert len(of_sample[0]["memory"]["payload"]["post_block"][0]) == PROMPT
    assert len(results) == len(under_way) == 20
    assert max(under_way) <= 2 * steps + 1  # each with the end of a sequence


def test_a_thread_that_is_late_is_told_of_sequences_as_they_were(engine):
    """What a thread has still to be given may be of sequences that have grown meanwhile."""
    told, may_go_on = [], threading.Event()

    class Late(Positions):
        def consume_bundle(self, bundle, ctx):
            assert may_go_on.wait(30)
            (request,) = bundle.meta.requests
            told.append((bundle.meta.positions.tolist(), request.prompt_len))

    engine.session.consumers.register(Late("background"))
    engine.start("a")
    engine.step(a=PROMPT)
    for _ in range(3):
        engine.step()
    grow(engine, "a")
    engine.step()
    may_go_on.set()
    engine.session.synchronize()
    decoded = [([PROMPT + number], PROMPT) for number in range(3)]
    assert told == [([0, 1, 2], PROMPT), *decoded, ([PROMPT + 3], PROMPT + 2)]


def test_rows_of_several_steps_are_of_prompts_that_grow_between_them(engine):
    told = []

    class Every(Positions):
        def flows(self):
            reads = (ResidualStream.read(layer=0, phase="any"), RequestMeta.read())
            return [ConsumerFlow(reads=reads, window="same_step", dispatch_every_n_steps=4)]

        def consume_bundle(self, bundle, ctx):
            meta = bundle.meta
            told.append((bundle.key["phase"], meta.positions.tolist(), meta.is_prefill.tolist()))

    engine.session.consumers.register(Every())
    engine.start("a")
    engine.step(a=PROMPT)
    engine.step()
    grow(engine, "a")
    engine.step()
    engine.step()
    prompt = "prefill", [0, 1, 2, 4], [True] * 4
    assert told == [prompt, ("decode", [3, 5], [False] * 2)]

"""Consumers that decide what is done to requests, against what conditions and `transformers` do."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from engine.asking import generate, greedy, prompts_of, sampled, tokens_of
from engine.reference import HIDDEN, Addition, GatedChange
from engine.test_stopping import AT, PROMPT, TOKENS, WHEN, P, threshold_that_ends
from tllm import PoolingParams, SamplingParams
from tllm.client.composer import Composer
from tllm.client.request import RequestKind, Uses
from tllm.consumers.base import Consumer
from tllm.ports import (
    Action,
    Actions,
    ConsumerFlow,
    Note,
    ResidualStream,
    SetScale,
    Steer,
    Stop,
    TokenTarget,
)
from tllm.runtime.kernels.backend import INTERPRETED
from tllm.spec.request import Asked

PROMPTS = 4 if INTERPRETED else 12
DECODED = ResidualStream.read(layer=AT[1], phase="decode", role="h")


class Watch(Consumer):
    """Stops a sample where the row of a generated token scores above a threshold."""

    consumer_id = "watch"
    on_request_only = True

    def __init__(self, window="same_step", kinds=("stop", "note")):
        self.window = window
        self.kinds = kinds

    def flows(self):
        write = Actions.write(*self.kinds)
        return [ConsumerFlow(reads=[DECODED], writes=[write], window=self.window)]

    def validate_options(self, options):
        """Anything."""

    def decide(self, rows, ctx):
        scores = (rows.entries["h"].float().cpu() @ P).tolist()
        for request, score, position in zip(
            rows.owners, scores, rows.meta.positions.tolist(), strict=True
        ):
            if request.options.get("clumsy") and position % 4 == 3:
                raise RuntimeError("dropped it")
            if score > request.options["above"]:
                yield Note(request, {"score": score, "at": position})
                yield Stop(request, reason="turned")


def watched(above, **more):
    return {"consumers": {"watch": {"above": above, **more}}}


def edges_of(reference, prompts):
    """For each prompt a threshold that some of its rows are above."""
    found = []
    for number, prompt in enumerate(prompts):
        _, states = reference.run([*prompt, *reference.greedy(prompt, TOKENS)], [AT])
        ordered = (states[AT] @ P)[len(prompt) : -1].sort().values
        at = len(ordered) - 1 - number % 4
        found.append(float((ordered[at] + ordered[at - 1]) / 2))
    return found


def ends_of(outputs):
    return [(list(s.token_ids), s.finish_reason, s.stop_reason) for o in outputs for s in o.outputs]


def random_prompts(seed):
    """Some begin alike, and some are longer than a step."""
    long = prompts_of([64], seed)[0]
    return [
        [*long[: 8 * (number % 7)], *own]
        for number, own in enumerate(prompts_of([3 + i % 30 for i in range(PROMPTS)], seed + 1))
    ]


def check_stops(llm, reference, seed, monitor=WHEN):
    """A threshold in Python ends where the same threshold as a condition does."""
    prompts = random_prompts(seed)
    edges = edges_of(reference, prompts)
    beside = [greedy(TOKENS), greedy(3)]
    asked = [greedy(TOKENS, stop_when={**monitor, "above": edge}) for edge in edges]
    declared = ends_of(generate(llm, [*prompts, PROMPT, PROMPT], [*asked, *beside]))
    llm.register_consumer(Watch())
    llm.reset_prefix_cache()
    asked = [greedy(TOKENS, **watched(edge)) for edge in edges]
    outputs = generate(llm, [*prompts, PROMPT, PROMPT], [*asked, *beside])
    assert ends_of(outputs) == declared
    assert {reason for _, reason, _ in declared} == {"stop", "length"}
    for output, edge in zip(outputs, edges, strict=False):
        (sample,) = output.outputs
        result = sample.consumer_results.get("watch")
        if sample.finish_reason == "length":
            assert result is None
            continue
        last = len(output.prompt_token_ids) + len(sample.token_ids) - 1
        note, stop = result.payload.actions
        assert (result.status, note.position, stop.position) == ("ok", last, last)
        assert note.data["at"] == last and note.data["score"] > edge
        assert (stop.acts_from, stop.lag_steps) == (last, 0)
    generate(llm, [[1]], greedy(1))  # the engine says with its next step who has ended
    (stats,) = llm.intervention_stats()
    assert stats["running_sequences"] == 0
    actions = stats["by_consumer"]["watch"]["actions"]
    assert set(actions["lag_steps"]["same_step"]) == {0} and actions["refused"] == 0


def test_a_threshold_in_python_stops_where_a_condition_does(llm, reference):
    """Prompts in chunks and cached, beside plain requests."""
    check_stops(llm, reference, 0)


def test_a_threshold_in_python_stops_ahead_and_preempted(tight_llm, reference):
    """The next step is under way when it is decided."""
    check_stops(tight_llm, reference, 50)


def test_each_sample_is_stopped_by_itself(llm, reference):
    edge = threshold_that_ends(reference, 3)[2] - 2
    llm.register_consumer(Watch())
    seeded = {"n": 4, "seed": 5, "temperature": 1.0}
    declared = generate(llm, [PROMPT], sampled(TOKENS, **seeded, stop_when={**WHEN, "above": edge}))
    decided = generate(llm, [PROMPT], sampled(TOKENS, **seeded, **watched(edge)))
    assert ends_of(decided) == ends_of(declared)
    assert len({len(sample.token_ids) for sample in decided[0].outputs}) > 1


@pytest.mark.parametrize("engine", ["llm", "tight_llm"])
def test_the_next_step_and_a_thread_stop_later(engine, reference, request):
    llm = request.getfixturevalue(engine)
    tokens, end, edge = threshold_that_ends(reference, 3)
    llm.register_consumer(Watch(window="next_step"))
    (output,) = generate(llm, [PROMPT], greedy(TOKENS, **watched(edge)))
    assert ends_of([output]) == [(tokens[: end + 2], "stop", "turned")]
    _, stop, *_ = output.outputs[0].consumer_results["watch"].payload.actions
    last = len(PROMPT) + end
    assert (stop.position, stop.acts_from, stop.lag_steps) == (last, last + 1, 1)
    llm.clear_consumers()
    llm.register_consumer(Watch(window="background"))
    (output,) = generate(llm, [PROMPT], greedy(TOKENS, **watched(edge)))
    ((kept, reason, _),) = ends_of([output])
    assert kept == tokens[: len(kept)] and len(kept) > end
    assert (reason == "stop") == (len(kept) < TOKENS)


def test_a_stop_waits_for_the_least_tokens_and_ends_before_the_first(llm, reference):
    tokens, end, edge = threshold_that_ends(reference, 3)

    class AtOnce(Watch):
        def flows(self):
            read = ResidualStream.read(layer=0, phase="prefill", role="h")
            return [ConsumerFlow(reads=[read], writes=[Actions.write("stop")])]

        def decide(self, rows, ctx):
            return [Stop(request, reason="unwanted") for request in rows.meta.requests]

    llm.register_consumer(Watch())
    params = greedy(TOKENS, min_tokens=end + 2, **watched(edge))
    assert ends_of(generate(llm, [PROMPT], params)) == [(tokens[: end + 2], "stop", "turned")]
    llm.clear_consumers()
    llm.register_consumer(AtOnce())
    outputs = generate(llm, [PROMPT, PROMPT], [greedy(4, **watched(0)), greedy(4)])
    assert ends_of(outputs) == [([], "stop", "unwanted"), (tokens[:4], "length", None)]


def test_what_decide_raises_is_heard_by_its_requests_alone(llm, reference):
    """Bundles of one request each."""

    class Alone(Watch):
        def flows(self):
            (flow,) = super().flows()
            return [ConsumerFlow(flow.reads, flow.writes, bundle_key=["request_id"])]

    llm.register_consumer(Alone())
    tokens, end, edge = threshold_that_ends(reference, 3)
    asked = [watched(1e9, clumsy=True), watched(edge), {}]
    outputs = generate(llm, [PROMPT] * 3, [greedy(TOKENS, **each) for each in asked])
    assert tokens_of(outputs) == [tokens, tokens[: end + 1], tokens]
    clumsy, careful, plain = (output.outputs[0].consumer_results for output in outputs)
    assert (clumsy["watch"].status, clumsy["watch"].error) == ("error", "RuntimeError: dropped it")
    assert careful["watch"].status == "ok" and "watch" not in plain
    (stats,) = llm.intervention_stats()
    assert stats["by_consumer"]["watch"]["actions"]["raised"] == 1
    assert stats["consumers"] == {"watch": "ok"}


class Script(Watch):
    """Returns what it is told, by the rows of the last request that it is given."""

    def __init__(self, decide: Any, **more: Any) -> None:
        super().__init__(**more)
        self._decide = decide
        self.kept: list[Any] = []

    def decide(self, rows, ctx):
        self.kept += rows.meta.requests
        return self._decide(self.kept, rows)


def test_an_action_that_cannot_act_is_heard(llm):
    def decide(kept, rows):
        return [Stop(rows.meta.requests[0], reason="out")]

    llm.register_consumer(Script(decide, kinds=("note",)))
    (output,) = generate(llm, [PROMPT], greedy(2, **watched(0)))
    result = output.outputs[0].consumer_results["watch"]
    assert result.status == "partial_error" and "name 'stop' there" in result.error
    assert len(output.outputs[0].token_ids) == 2


def test_an_action_for_a_request_that_has_ended_is_counted(llm):
    llm.register_consumer(Script(lambda kept, rows: [Stop(kept[0], reason="out")]))
    outputs = [generate(llm, [PROMPT], greedy(3, **watched(0)))[0] for _ in range(2)]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3]
    (stats,) = llm.intervention_stats()
    assert stats["by_consumer"]["watch"]["actions"]["too_late"] == 2


@pytest.mark.parametrize("wrong", [lambda r: "stop", Action, lambda r: Stop(r.slot, "out")])
def test_what_is_no_action_is_refused(llm, wrong):
    """And nothing is done of what came before it."""

    def decide(kept, rows):
        (request,) = rows.meta.requests
        return [Stop(request, reason="out"), wrong(request)]

    llm.register_consumer(Script(decide))
    (output,) = generate(llm, [PROMPT], greedy(3, **watched(0)))
    assert "decide returned" in output.outputs[0].consumer_results["watch"].error
    assert len(output.outputs[0].token_ids) == 3


def test_an_action_that_is_in_no_list_is_refused(llm):
    llm.register_consumer(Script(lambda kept, rows: Stop(rows.owners[0], reason="out")))
    (output,) = generate(llm, [PROMPT], greedy(3, **watched(0)))
    result = output.outputs[0].consumer_results["watch"]
    assert "decide returned Stop(" in result.error and "returns a list of Steer" in result.error
    assert len(output.outputs[0].token_ids) == 3


def test_what_never_ends_is_refused(llm):
    def decide(kept, rows):
        (request,) = rows.meta.requests
        return (Note(request, {"number": number}) for number in count())

    llm.register_consumer(Script(decide))
    (output,) = generate(llm, [PROMPT], greedy(3, **watched(0)))
    result = output.outputs[0].consumer_results["watch"]
    assert "more than 4096 actions for 1 requests" in result.error and result.payload is None
    assert len(output.outputs[0].token_ids) == 3


def test_an_action_for_a_request_of_another_engine_takes_nothing_else_along(llm):
    def decide(kept, rows):
        (request,) = rows.meta.requests
        return [Stop(replace(request, slot=10**6), reason="gone"), Stop(request, reason="out")]

    llm.register_consumer(Script(decide))
    (output,) = generate(llm, [PROMPT], greedy(3, **watched(0)))
    assert output.outputs[0].stop_reason == "out"
    (stats,) = llm.intervention_stats()
    actions = stats["by_consumer"]["watch"]["actions"]
    assert actions["raised"] == 0
    ahead = llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    assert actions["too_late"] == 1 + ahead  # which then computed one more row


def test_what_a_thread_raises_by_the_last_row_is_heard(llm):
    def decide(kept, rows):
        (request,) = rows.meta.requests
        if rows.meta.positions[0] == request.prompt_len + 1:
            time.sleep(0.5)  # the request ends meanwhile
            raise RuntimeError("dropped it")
        return [Note(request, {})]

    llm.register_consumer(Script(decide, window="background"))
    (output,) = generate(llm, [PROMPT], greedy(3, **watched(0)))
    result = output.outputs[0].consumer_results["watch"]
    assert (result.status, result.error) == ("error", "RuntimeError: dropped it")


def test_what_is_decided_after_decide_raised_does_not_hide_that(llm):
    def decide(kept, rows):
        if rows.meta.positions[0] == kept[0].prompt_len and len(kept) == 1:
            raise RuntimeError("dropped it")
        return [Stop(kept[0], reason="out")]

    class Alone(Script):
        def flows(self):
            (flow,) = super().flows()
            return [ConsumerFlow(flow.reads, flow.writes, bundle_key=["request_id"])]

    llm.register_consumer(Alone(decide))
    outputs = generate(llm, [PROMPT] * 2, [greedy(6, **watched(0))] * 2)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 6]
    first = outputs[0].outputs[0].consumer_results["watch"]
    assert (first.status, first.error) == ("error", "RuntimeError: dropped it")


def test_a_request_that_came_before_its_controller_is_told(llm):
    engine = llm.llm_engine
    engine.add_request("early", {"prompt_token_ids": PROMPT}, greedy(6))
    engine.step()

    class Everybody(Script):
        on_request_only = False

    def decide(kept, rows):
        return [Stop(request, reason="out") for request in rows.meta.requests]

    llm.register_consumer(Everybody(decide))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    (sample,) = outputs[0].outputs
    assert len(sample.token_ids) == 6
    assert "was added before consumer 'watch'" in sample.consumer_results["watch"].error


def test_stops_and_notes_leave_the_prefix_cache_as_it_is(llm):
    [prompt] = prompts_of([100], seed=9)
    llm.register_consumer(Watch())
    cached = [
        output.num_cached_tokens
        for asked in (watched(1e9), {}, watched(1e9))
        for output in generate(llm, [prompt], greedy(2, **asked))
    ]
    assert cached == [0, 96, 96]


def test_requests_that_nobody_can_act_on_are_refused(llm):
    class Everybody(Watch):
        on_request_only = False

    llm.register_consumer(Everybody())
    sentence = "decides what is done to requests"
    with pytest.raises(ValueError, match=f"{sentence}.*pooling"):
        pooled = PoolingParams(task="embed")
        llm.llm_engine.add_request("pooled", {"prompt_token_ids": PROMPT}, pooled)
    off = SamplingParams(max_tokens=2, consumers={"watch": {"enabled": False}}, detokenize=False)
    assert tokens_of(generate(llm, [PROMPT], off))


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [({"streamed": True}, "streamed.*give the whole"), ({"generated": 3}, "a beam")],
)
def test_requests_of_which_tokens_are_dropped_are_refused(kind, sentence):
    uses, composer = Uses(acting="consumers['watch']"), Composer({})
    RequestKind().check(Asked(), (), uses, composer)
    with pytest.raises(ValueError, match=rf"consumers\['watch'\] decides.*{sentence}.*'enabled'"):
        RequestKind(**kind).check(Asked(), (), uses, composer)
    RequestKind(**kind).check(Asked(), (), Uses(), composer)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"window": "out_of_band"}, "acts when nobody knows"),
        ({"writes": [Actions.write("steer")]}, "use window='next_step', or steering with a cond"),
        ({"dispatch_every_n_steps": 2}, "rows of earlier steps could not act in time"),
        ({"reads": [DECODED, TokenTarget.read(phase="decode")]}, "use window='next_step'"),
    ],
)
def test_windows_that_cannot_act_are_refused(given, sentence):
    asked = {"reads": [DECODED], "writes": [Actions.write("stop")]} | given
    with pytest.raises(ValueError, match=sentence):
        ConsumerFlow(**asked)


def test_actions_must_be_named():
    with pytest.raises(ValueError, match="allows nothing"):
        Actions.write()
    with pytest.raises(ValueError, match="choose one of steer, stop, note"):
        Actions.write("halt")


# -- steering --------------------------------------------------------------------------------------

CHANGE = 4 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(12))
STEERED = {"post_block": {1: {"vector": CHANGE, "scale": 2}, 3: {"vector": P, "method": "ablate"}}}


class Gate(Watch):
    """Steers after the row of a generated token that scores above a threshold."""

    consumer_id = "watch"

    def __init__(self, window="next_step", kinds=("steer", "note")):
        super().__init__(window, kinds)

    def decide(self, rows, ctx):
        scores = (rows.entries["h"].float().cpu() @ P).tolist()
        for request, score in zip(rows.owners, scores, strict=True):
            if score > request.options["above"]:
                tokens = request.options.get("tokens")
                yield Steer(request, request.options.get("vectors", STEERED), tokens=tokens)


def gated(edge, scope):
    """The same declared, by a condition."""
    when = {**WHEN, "above": edge, "scope": scope}
    return {
        hook: {layer: {**entry, "when": when} for layer, entry in layers.items()}
        for hook, layers in STEERED.items()
    }


def check_steering(llm, reference, seed, scopes=("next", "rest")):
    """A rule in Python steers as the same rule as a condition does, one step later as it does."""
    prompts = random_prompts(seed)
    edges = edges_of(reference, prompts)
    own = {"steering_vectors": {"post_block": {0: CHANGE}}}
    asked, decided = [], []
    for number, edge in enumerate(edges):
        scope, base = scopes[number % 2], own if number % 3 == 2 else {}
        asked.append(greedy(TOKENS, **base, decode_steering_vectors=gated(edge, scope)))
        tokens = 1 if scope == "next" else None
        decided.append(greedy(TOKENS, **base, **watched(edge, tokens=tokens)))
    beside = [greedy(TOKENS), greedy(3)]
    declared = generate(llm, [*prompts, PROMPT, PROMPT], [*asked, *beside])
    llm.register_consumer(Gate())
    outputs = generate(llm, [*prompts, PROMPT, PROMPT], [*decided, *beside])
    assert tokens_of(outputs) == tokens_of(declared)
    assert tokens_of(outputs)[-2] == reference.greedy(PROMPT, TOKENS)
    fired = 0
    for output, signal in zip(outputs, declared, strict=True):
        result = output.outputs[0].consumer_results.get("watch")
        if result is not None:
            fired += 1
            held = signal.outputs[0].signals["turned"].fired.tolist()
            assert result.status == "ok"
            assert [each.position for each in result.payload.actions] == held
            acted = [(a.acts_from, a.lag_steps) for a in result.payload.actions[:-1]]
            assert acted == [(position + 1, 1) for position in held[:-1]]
    assert fired > len(prompts) / 2
    generate(llm, [[1]], greedy(1))
    (stats,) = llm.intervention_stats()
    assert stats["steering_configurations"] == 0 and stats["running_sequences"] == 0
    assert set(stats["by_consumer"]["watch"]["actions"]["lag_steps"]["next_step"]) == {1}


def test_a_rule_in_python_steers_as_a_condition_does(llm, reference):
    """Prompts in chunks and cached, some steered by their request too, beside plain ones."""
    check_steering(llm, reference, 3)


def test_a_rule_in_python_steers_ahead_and_preempted(tight_llm, reference):
    """What is computed again is steered as it was."""
    check_steering(tight_llm, reference, 60)


def test_each_sample_is_steered_by_itself(llm, reference):
    edge = threshold_that_ends(reference, 3)[2] - 2
    llm.register_consumer(Gate())
    seeded = {"n": 4, "seed": 5, "temperature": 1.0}
    when = {"decode_steering_vectors": gated(edge, "rest")}
    declared = generate(llm, [PROMPT], sampled(TOKENS, **seeded, **when))
    decided = generate(llm, [PROMPT], sampled(TOKENS, **seeded, **watched(edge)))
    assert ends_of(decided) == ends_of(declared)
    results = [sample.consumer_results.get("watch") for sample in decided[0].outputs]
    starts = {result and result.payload.actions[0].acts_from for result in results}
    assert len(starts) > 1


class Plan(Watch):
    """Does what it is told at positions, counted from the end of the prompt."""

    def __init__(self, plan):
        super().__init__("next_step", ("steer", "stop", "note"))
        self._plan = plan

    def decide(self, rows, ctx):
        for request, position in zip(rows.owners, rows.meta.positions.tolist(), strict=True):
            make = self._plan.get(position - request.prompt_len)
            if make is not None:
                yield make(request)


def added(first, stop, vector):
    return Addition(("post_block", 1), vector, len(PROMPT) + first, len(PROMPT) + stop)


def test_scales_and_names(llm, reference):
    """Two vectors at once, one of another scale from some token on, one that ends."""
    other = CHANGE.flip(0)
    llm.register_consumer(
        Plan(
            {
                1: lambda r: Steer(r, {"post_block": {1: CHANGE}}),
                3: lambda r: SetScale(r, -0.5),
                4: lambda r: Steer(r, {"post_block": {1: other}}, name="b", tokens=3),
                5: lambda r: SetScale(r, 0.0),
                6: lambda r: SetScale(r, 1.5),
                9: lambda r: Steer(r, None),
            }
        )
    )
    (output,) = generate(llm, [PROMPT], greedy(12, **watched(0)))
    expected = reference.greedy(
        PROMPT,
        12,
        additions=[
            *(added(2, 4, CHANGE), added(4, 6, -CHANGE / 2), added(7, 10, 1.5 * CHANGE)),
            added(5, 8, other),
        ],
    )
    assert tokens_of([output]) == [expected]
    log = output.outputs[0].consumer_results["watch"].payload
    verbs = ["steer", "set_scale", "steer", "set_scale", "set_scale", "steer"]
    assert [each.action for each in log.actions] == verbs
    assert log.problem is None


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (lambda r: Steer(r, {"post_block": {77: CHANGE}}), "has no layer 77"),
        (lambda r: Steer(r, {"post_block": {1: [1.0]}}), "has 1 numbers; the model's hidden size"),
        (lambda r: Steer(r, {"nowhere": {1: CHANGE}}), "nowhere"),
        (lambda r: Steer(r, 3), "Steer\\(vectors\\) is int"),
        (lambda r: Steer(r, STEERED, tokens=0), "must be 1 or more"),
        (lambda r: Steer(r, gated(1.0, "rest")), "has a condition"),
        (
            lambda r: Steer(r, {"post_block": {1: {"vector": CHANGE, "positions": [1]}}}),
            "has 'positions'",
        ),
        (lambda r: SetScale(r, 2.0, name="x"), "steers nothing of that name; there is nothing"),
        (lambda r: SetScale(r, "much"), "SetScale\\(scale\\)"),
        (lambda r: Stop(r, reason=""), "give a text that is not empty"),
        (lambda r: Note(r, 3), "give a mapping"),
    ],
)
def test_an_action_that_is_wrong_is_heard_by_its_request_alone(llm, action, sentence):
    llm.register_consumer(Plan({1: action, 2: lambda r: Note(r, {"still": "here"})}))
    params = [greedy(5, **watched(0)), greedy(5)]
    wrong, plain = generate(llm, [PROMPT, PROMPT], params)
    result = wrong.outputs[0].consumer_results["watch"]
    assert result.status == "partial_error"
    assert re.search(sentence, result.error)
    assert result.payload.notes == [{"still": "here"}]
    assert tokens_of([wrong]) == tokens_of([plain])
    assert "watch" not in plain.outputs[0].consumer_results


def test_a_prompt_in_chunks_is_steered_from_the_next_chunk_on(llm, reference):
    """Of 60 tokens, 24 at a time; the first row is looked at, and so no block is shared."""

    class First(Plan):
        def flows(self):
            read = ResidualStream.read(layer=0, role="h")
            write = Actions.write("steer")
            return [ConsumerFlow([read], [write], window="next_step", positions=[3, 30])]

    llm.reset_prefix_cache()
    [prompt] = prompts_of([60], seed=6)
    vectors = {"post_block": {1: CHANGE}}
    llm.register_consumer(
        First({3 - 60: lambda r: Steer(r, vectors), 30 - 60: lambda r: SetScale(r, 2.0)})
    )
    asked = [greedy(4, **watched(0), n=1), greedy(4), greedy(4, **watched(0))]
    outputs = [generate(llm, [prompt], each)[0] for each in asked]
    additions = [
        Addition(("post_block", 1), CHANGE, 24, 48),
        Addition(("post_block", 1), 2 * CHANGE, 48),
    ]
    steered, plain = reference.greedy(prompt, 4, additions), reference.greedy(prompt, 4)
    assert tokens_of(outputs) == [steered, plain, steered]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
    log = outputs[2].outputs[0].consumer_results["watch"].payload
    assert [(a.position, a.acts_from, a.lag_steps) for a in log.actions] == [
        (3, 24, 1),
        (30, 48, 1),
    ]


def test_blocks_are_private_from_where_a_controller_may_steer(llm, reference):
    """Prompts are shared; what follows the first row that is decided by is not, with anybody."""
    llm.reset_prefix_cache()
    llm.register_consumer(Gate())
    [prompt] = prompts_of([64], seed=9)
    outputs = generate(llm, [prompt], greedy(70, **watched(-1e9)))
    (steered,) = tokens_of(outputs)
    plain = reference.greedy(prompt, 1)
    assert steered[:1] == plain
    longer = [*prompt, *steered[:64], 5]
    asked = [watched(1e9), {}, watched(1e9), {}]
    found = [generate(llm, [longer], greedy(3, **each))[0] for each in asked]
    assert [output.num_cached_tokens for output in found] == [64, 128, 128, 128]
    assert tokens_of(found) == [reference.greedy(longer, 3)] * 4


# -- on a thread -----------------------------------------------------------------------------------

UNIT = P / P.norm()
GO = threading.Event()
"""What the slow controller of this process waits for."""


class Slow(Gate):
    """Comes to a decision at the third generated token, when it is let."""

    def __init__(self):
        super().__init__("background", ("steer", "stop", "note"))

    def decide(self, rows, ctx):
        for request, position in zip(rows.owners, rows.meta.positions.tolist(), strict=True):
            if position == request.prompt_len + 2:
                GO.wait(60)
                yield Steer(request, STEERED, tokens=4)


@pytest.mark.parametrize("engine_name", ["llm", "tight_llm"])
@pytest.mark.parametrize("later", [1, 3])
def test_what_a_thread_decides_acts_when_it_is_ready(engine_name, reference, later, request):
    """The engine goes on meanwhile, also where it schedules ahead."""
    llm = request.getfixturevalue(engine_name)
    GO.clear()
    llm.register_consumer(Slow())
    engine = llm.llm_engine
    engine.add_request("slow", {"prompt_token_ids": PROMPT}, greedy(10, **watched(0)))
    generated = 0
    while generated < 3 + later:  # those before are computed with the step
        for output in engine.step():
            generated = len(output.outputs[0].token_ids)
            assert not output.finished
    # An engine that schedules ahead has computed rows whose tokens are not here yet.
    (running,) = engine.engine_core.engine_core.scheduler.requests.values()
    first = running.num_computed_tokens
    assert first >= len(PROMPT) + generated - 1
    GO.set()
    while waiting(llm):
        time.sleep(0.01)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    (sample,) = outputs[0].outputs
    (action,) = sample.consumer_results["watch"].payload.actions
    lag = first - (len(PROMPT) + 2)
    assert (action.acts_from, action.lag_steps, action.error) == (first, lag, None)
    change = GatedChange(("post_block", 1), lambda h: h + 2 * CHANGE, [], None, first, first + 4)
    ablated = GatedChange(
        ("post_block", 3), lambda h: h - (h @ UNIT)[:, None] * UNIT, [], None, first, first + 4
    )
    assert list(sample.token_ids) == reference.greedy(PROMPT, 10, gated=[change, ablated])
    (stats,) = llm.intervention_stats()
    assert stats["by_consumer"]["watch"]["actions"]["lag_steps"] == {"background": {lag: 1}}


def waiting(llm):
    (stats,) = llm.intervention_stats()
    return stats["by_consumer"]["watch"]["waiting"]


TURNS = [threading.Event() for _ in range(2)]
"""What the controller that raises late waits for, at the first rows."""


class Late(Watch):
    """Raises for requests that ask for it, when it is let."""

    def __init__(self):
        super().__init__("background")

    def decide(self, rows, ctx):
        (request,) = rows.meta.requests
        if request.options["above"]:
            TURNS[min(rows.meta.positions[0] - request.prompt_len, 1)].wait(60)
            raise RuntimeError("dropped it")
        return [Note(request, {"slot": request.slot})]


def test_what_a_thread_raises_late_is_not_told_to_who_has_the_slot_now(llm):
    """The first request goes on without the consumer, and its end does not wait for the thread."""
    for turn in TURNS:
        turn.clear()
    llm.register_consumer(Late())
    engine = llm.llm_engine

    def step_to(tokens):
        last = None
        while last is None or len(last.outputs[0].token_ids) < tokens:
            outputs = engine.step()
            last = outputs[0] if outputs else last
        return last

    def let_raise(number):
        TURNS[number].set()
        while True:
            (stats,) = llm.intervention_stats()
            if stats["by_consumer"]["watch"].get("actions", {}).get("raised", 0) > number:
                return
            time.sleep(0.01)

    engine.add_request("first", {"prompt_token_ids": PROMPT}, greedy(8, **watched(1)))
    step_to(4)
    let_raise(0)
    step_to(8)
    generate(llm, [[1]], greedy(1))  # the engine says with its next step who has ended
    engine.add_request("second", {"prompt_token_ids": PROMPT}, greedy(8, **watched(0)))
    step_to(2)
    let_raise(1)
    result = step_to(8).outputs[0].consumer_results["watch"]
    assert (result.status, result.error) == ("ok", None)

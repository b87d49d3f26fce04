"""Consumers that decide what is done to requests, against what conditions and `transformers` do."""

from __future__ import annotations

import os
from typing import Any

import pytest

from engine.asking import generate, greedy, prompts_of, sampled, tokens_of
from engine.test_stopping import AT, PROMPT, TOKENS, WHEN, P, threshold_that_ends
from tllm import PoolingParams, SamplingParams
from tllm.consumers.base import Consumer
from tllm.ports import Actions, ConsumerFlow, Note, ResidualStream, Stop, TokenTarget

INTERPRETED = os.environ["TLLM_TEST_RUNNER"] == "v2"
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
        scores = (rows.entries["h"].float() @ P).tolist()
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


def test_the_next_step_and_a_thread_stop_later(llm, reference):
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
    params = greedy(TOKENS, min_tokens=end + 4, **watched(edge))
    assert ends_of(generate(llm, [PROMPT], params)) == [(tokens[: end + 4], "stop", "turned")]
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


def test_what_is_no_action_is_refused(llm):
    llm.register_consumer(Script(lambda kept, rows: ["stop"]))
    (output,) = generate(llm, [PROMPT], greedy(3, **watched(0)))
    assert "decide returned 'stop'" in output.outputs[0].consumer_results["watch"].error


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
    with pytest.raises(ValueError, match="give a text"):
        Stop(None, reason="")  # type: ignore[arg-type]

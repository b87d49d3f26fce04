"""`AsyncLLM`: streaming outputs, streaming input, abort, and what the last output carries."""

import pytest
import torch
from child_process import TESTS, python_path, run_script
from oldest_vllm import ON_0_30

import tllm.stores
from engine import modes, streaming
from engine.asking import RELATIVE, error_of
from engine.reference import HIDDEN, Addition
from tllm.runtime.kernels.backend import INTERPRETED

pytestmark = pytest.mark.skipif(
    INTERPRETED,
    reason="the interpreted V2 runner is set up in this process only",
)


stops_exactly = pytest.mark.skipif(
    ON_0_30,
    reason="vLLM 0.30 itself gives a token too many when it schedules ahead and the answer in a "
    "streamed session is stopped",
)


@pytest.fixture(scope="module")
def saved(tiny_model, tmp_path_factory):
    """What a process with an `AsyncLLM` saw."""
    folder = tmp_path_factory.mktemp("streaming")
    output = folder / "saved.pt"
    run_script(
        streaming,
        *(tiny_model, output),
        log=folder / "log",
        environment=python_path(),
        cwd=TESTS.parent,
        timeout=480,
        forks=True,
    )
    return torch.load(output, weights_only=False)


def test_the_last_of_the_streamed_outputs_carries_the_rows(saved, reference):
    prompts = [[10, 11, 12], list(range(40, 60))]
    for prompt, got in zip(prompts, saved["streamed"], strict=True):
        assert got["steps"] > 1
        assert not any(got["early"])
        assert got["tokens"] == reference.greedy(prompt, 6)
        passed = [*prompt, *got["tokens"]][:-1]
        assert got["positions"] == list(range(len(passed)))
        _, states = reference.run(passed, [("post_block", 1)])
        for row, expected in zip(got["rows"], states["post_block", 1], strict=True):
            assert error_of(row, expected) < RELATIVE


def test_consumers_stop_before_a_server_kills_their_engine(saved):
    assert saved["parted"]


@pytest.mark.parametrize("name", ["CUMULATIVE 1", "CUMULATIVE 2", "DELTA 1", "DELTA 2"])
def test_results_have_all_tokens_of_all_samples_however_they_are_streamed(saved, reference, name):
    """A delta has a part of the tokens, and a sample may end in an output before the last."""
    found, whole = saved["apart"]["found"][name], saved["apart"]["whole"]
    samples = [0, 1] if name.endswith("2") else [0]
    if len(samples) == 2:
        assert found["tokens"] == {0: whole[0][: saved["apart"]["stopped"] + 1], 1: whole[1]}
        assert any(ended == [0] for ended in found["ended"][:-1]), "they did not end apart"
    else:
        assert found["tokens"] == {0: reference.greedy(streaming.SAMPLED, 6)}
    assert found["ended"][-1] == samples == list(found["results"])
    assert found["of the first"] is found["results"][0]
    assert not any(found["early"]), "results come with the last output"
    for sample, results in found["results"].items():
        assert [(r.status, r.error) for r in results.values()] == [("ok", None)] * 3
        tokens = [*streaming.SAMPLED, *found["tokens"][sample]]
        stored = results["filesystem"].payload
        record = tllm.stores.open(stored.root).record(stored.request_id, sample_index=sample)
        assert list(record.token_ids) == tokens
        _, states = reference.run(tokens[:-1], [("post_block", 1)])
        activation, reader = results["memory"].payload["post_block"][1], results["reader"].payload
        of_record = record.positions("post_block", 1), record.tensor("post_block", 1)
        for positions, rows, first in (
            (activation.positions, activation.tensor, 0),
            (reader.positions, reader.values, 0),
            (*of_record, len(streaming.SAMPLED) if sample else 0),
        ):
            assert positions.tolist() == list(range(first, len(tokens) - 1))
            for row, expected in zip(rows, states["post_block", 1][first:], strict=True):
                assert error_of(row, expected) < RELATIVE


def test_deltas_that_the_caller_merges_are_counted_once(saved, reference):
    """vLLM's own merging appends to the tokens of an output that was given out before."""
    tokens, results = saved["merged"]["tokens"], saved["merged"]["results"]
    assert tokens == reference.greedy(streaming.SAMPLED, len(tokens))
    stored = results["filesystem"].payload
    record = tllm.stores.open(stored.root).record(stored.request_id)
    assert list(record.token_ids) == [*streaming.SAMPLED, *tokens]
    for positions in (
        record.positions("post_block", 1),
        results["memory"].payload["post_block"][1].positions,
        results["reader"].payload.positions,
    ):
        assert positions.tolist() == list(range(len(positions)))
        assert len(streaming.SAMPLED) < len(positions) <= len(streaming.SAMPLED) + len(tokens)


def test_an_aborted_request_leaves_no_sequence_behind(saved):
    assert saved["stats"][0]["running_sequences"] == 0


def test_rows_of_a_streaming_session_are_delivered_once(saved):
    """A turn's last token never passes the model: vLLM drops it when the next turn comes."""
    passed = sum(map(len, streaming.TURNS)) + len(streaming.TURNS) * (streaming.ANSWER - 1)
    result = saved["session"]["result"]
    assert result.payload.positions.tolist() == list(range(passed))


def test_what_one_input_of_a_session_used_is_told_at_its_end(saved):
    """It may be the first or the last; rows of the other are nobody's."""
    first, last = (len(turn) + streaming.ANSWER - 1 for turn in streaming.TURNS)
    assert saved["read by one input"] == [
        list(range(first)),
        list(range(first, first + last)),
    ]


def test_a_token_that_only_a_later_input_reaches_is_captured(saved):
    result = saved["later"]
    assert (result.status, result.error) == ("ok", None)
    activation = result.payload["post_block"][1]
    assert activation.positions.tolist() == [0, 6]
    rows = saved["session"]["result"].payload.values
    torch.testing.assert_close(activation.tensor, rows[[0, 6]], rtol=1e-4, atol=1e-5)


def test_an_input_that_asks_otherwise_than_its_request_is_refused(saved):
    """The results of both could not be told apart; the session after these is as ever."""
    refused = saved["refused"]
    for name in ("other capture", "none", "one more"):
        assert "capture: an input of a streamed prompt asks otherwise" in refused[name]
    for name in ("steering", "other steering"):
        assert "asks for steering of its own" in refused[name]
    assert "asks for DELTA, and the request for CUMULATIVE" in refused["deltas"]
    assert refused["the same"] is refused["the same steering"] is None
    assert "consumers['writing']: an input of a streamed prompt asks for it" in refused["a writer"]
    assert refused["no writer"] is None
    assert "stop_when was given for a prompt that is streamed" in refused["stop_when"]
    assert "conversation was given for a prompt that is streamed" in refused["conversation"]
    assert (
        "decides on later tokens ('scope', 'over'), and was given for a prompt that is streamed"
        in refused["scope"]
    )


def test_a_condition_ends_samples_of_an_async_engine_that_is_a_step_ahead(saved):
    """The first generated tokens are those before which `min_tokens` keeps it from ending."""
    prompt_len, first = len(streaming.SAMPLED), streaming.ENDED_AFTER
    for (name, _), found in saved["ended"].items():
        assert all(status == ("ok", None) for status in found["status"])
        if name == "abort_when":
            assert sum(found["tokens"].values()) == 0
            assert found["reasons"] == [("abort", "always")] * 2
            assert found["fired"] == [list(range(prompt_len))] * 2
            continue
        assert found["tokens"] == {0: first, 1: first}
        assert found["reasons"] == [("stop", "always")] * 2
        generated = range(prompt_len, prompt_len + first)
        assert found["fired"] == [list(generated)] * 2
        assert found["captured"] == [list(range(prompt_len + first - 1))] * 2


def test_samples_that_are_not_finite_any_more_say_why_however_they_are_streamed(saved):
    for kind, samples in saved["broken"].items():
        assert [reason for reason, _, _ in samples] == ["error"] * 2, kind
        assert all(told == why and "not finite" in why for _, told, why in samples), kind


def test_the_record_of_a_streaming_session_has_the_tokens_that_the_engine_kept(saved, reference):
    stored = saved["session"]["captures"]["filesystem"]
    assert (stored.status, stored.error) == ("ok", None)
    record = tllm.stores.open(stored.payload.root).record(stored.payload.request_id)
    first, second = streaming.TURNS
    answers = saved["session"]["tokens"][-1]
    kept = streaming.ANSWER - 1
    tokens = [*first, *answers[:kept], *second, *answers[streaming.ANSWER :]]
    assert list(record.token_ids) == tokens
    _, states = reference.run(tokens[:-1], [("post_block", 1)])
    rows = record.tensor("post_block", 1)
    for row, expected in zip(rows, states["post_block", 1], strict=True):
        assert error_of(row, expected) < RELATIVE


@stops_exactly
def test_a_streaming_session_ends_where_the_engine_says(saved, reference):
    """vLLM had scheduled a token more than the answer has, and its rows are nobody's."""
    answers, stopped = saved["stopped"]["unstopped"], saved["stopped"]["tokens"]
    assert stopped == answers[: streaming.LONGER + streaming.STOPPED_AFTER]
    first, second = streaming.TURNS
    tokens = [*first, *answers[: streaming.LONGER - 1], *second, *stopped[streaming.LONGER :]]
    results = saved["stopped"]["results"]
    assert {result.status for result in results.values()} == {"ok"}
    activation = results["memory"].payload["post_block"][1]
    assert activation.positions.tolist() == list(range(len(tokens) - 1))
    stored = results["filesystem"].payload
    record = tllm.stores.open(stored.root).record(stored.request_id)
    assert list(record.token_ids) == tokens
    _, states = reference.run(tokens[:-1], [("post_block", 1)])
    for rows in (activation.tensor, record.tensor("post_block", 1)):
        for row, expected in zip(rows, states["post_block", 1], strict=True):
            assert error_of(row, expected) < RELATIVE


@stops_exactly
def test_a_token_that_is_dropped_between_the_parts_leaves_no_row(saved, reference):
    """The next part begins where the dropped token was, and its row is the one that counts."""
    interrupted = saved["stopped"]["interrupted"]
    first, second = streaming.TURNS
    kept = saved["stopped"]["unstopped"][: streaming.STOPPED_AFTER - 1]
    context = [*first, *kept, *second]
    answer = interrupted["tokens"][streaming.STOPPED_AFTER :]
    assert answer == reference.greedy(context, len(answer))
    tokens = [*context, *answer]
    _, states = reference.run(tokens[:-1], [("post_block", 1)])
    results = interrupted["results"]
    assert {result.status for result in results.values()} == {"ok"}
    activation = results["memory"].payload["post_block"][1]
    stored = results["filesystem"].payload
    record = tllm.stores.open(stored.root).record(stored.request_id)
    assert list(record.token_ids) == tokens
    reader = interrupted["reader"].payload
    for positions, rows in (
        (activation.positions, activation.tensor),
        (record.positions("post_block", 1), record.tensor("post_block", 1)),
        (reader.positions, reader.values),
    ):
        assert positions.tolist() == list(range(len(tokens) - 1))
        for row, expected in zip(rows, states["post_block", 1], strict=True):
            assert error_of(row, expected) < RELATIVE
    assert interrupted["reduced"].status == "partial_error"
    assert "1 tokens that the engine dropped" in interrupted["reduced"].error


def test_a_streaming_session_cannot_say_which_of_its_tokens_were_generated(saved):
    capture = saved["session"]["captures"]["memory"]
    assert capture.status == "partial_error"
    assert "the prompt was streamed" in capture.error
    first, second = streaming.TURNS
    after = len(first) + streaming.ANSWER - 1
    positions = capture.payload["post_block"][1].positions
    assert positions.tolist() == [first.index(5), first.index(6), after + second.index(30)]


def test_steering_is_global_and_by_request(saved, reference):
    early, late, _ = modes.vectors(HIDDEN)
    everywhere = Addition(("post_block", 1), early)
    module = Addition(("post_block", 2), late)
    assert saved["steered"] == [
        reference.greedy(streaming.STEERED, 6, [everywhere]),
        reference.greedy(streaming.STEERED, 6, [everywhere, module]),
    ]
    assert saved["status"]["modules"] == ["late"]
    assert saved["status"]["requests"] == 0
    assert "['post_block'][99]: post_block has no layer 99" in saved["steering refusal"]


def test_requests_that_share_a_new_vector_all_wait_for_it(saved, reference):
    shared = Addition(("post_block", 1), modes.vectors(HIDDEN)[2])
    assert saved["at once"] == [reference.greedy(streaming.STEERED, 6, [shared])] * 3


def test_requests_that_come_together_are_known_and_brought_in_few_calls(saved, reference):
    """The first with conditions, too, which add the consumer `signals`."""
    tokens, asked = saved["burst"]
    vector = modes.vectors(HIDDEN)[0]
    assert tokens == [
        reference.greedy(streaming.STEERED, 6, [Addition(("post_block", 1), scale * vector)])
        for scale in streaming.BURST
    ]
    assert len({tuple(each) for each in tokens}) > 1
    del asked["take_results"]
    assert asked["update_steering"] <= 2
    assert asked.total() <= 5


def test_an_unknown_consumer_is_refused_and_the_engine_lives(saved):
    assert "consumers['nobody']" in saved["refusal"]
    assert "reader" in saved["refusal"]

"""Captures of an `AsyncLLM`, whose engine and ranks are in other processes."""

from __future__ import annotations

import pytest
import torch
from engine.asking import RELATIVE, error_of
from engine.reference import GatedChange

import tllm.stores
from capture import serving


def check(truth, output, sample):
    tokens = [*output["prompt"], *sample["tokens"]][:-1]
    assert sample["positions"] == list(range(len(tokens)))
    for mine, theirs in zip(sample["rows"], truth.states(tokens)["post_block", 1], strict=True):
        assert error_of(mine, theirs) < RELATIVE


def test_rows_come_with_the_last_output_and_to_disk(served, truth):
    saved, root = served
    store = tllm.stores.open(root)
    for number, output in enumerate(saved["outputs"]):
        for index, sample in enumerate(output["samples"]):
            assert sample["results"] == {"memory": ("ok", None), "filesystem": ("ok", None)}
            check(truth, output, sample)
            if number < 3:
                [record] = [r for r in store if r.request_id.startswith(f"r{number}-")]
                assert torch.equal(record.tensor("post_block", 1), sample["rows"])
                assert list(record.token_ids) == [*output["prompt"], *sample["tokens"]]
            assert index < 2


def test_a_request_is_steered_where_a_monitor_says_so(served, truth):
    """Its signals come with the last output, and those of the request beside it do not."""
    saved, reference = served[0], truth.reference
    (prompt, tokens, signals), (_, plain, none) = saved["gated"]
    probe = (("pre_attn", 1), lambda h: h @ serving.PROBE)
    v = serving.PROBE / serving.PROBE.norm()

    def clamped(h):
        return h - (h @ v).clamp(min=0)[:, None] * v

    changes = [
        GatedChange(place, change, [probe], lambda s: (s[0] > 0.5).float(), start)
        for place, change, start in (
            (("post_block", 2), lambda h: h + serving.VECTOR, 0),
            (("mlp_out", 3), clamped, len(prompt)),
        )
    ]
    assert tokens == reference.greedy(prompt, 6, gated=changes)
    assert plain == reference.greedy(prompt, 6) and none == {}
    reference.run([*prompt, *tokens][:-1], gated=changes)
    [scores] = changes[0].scores
    assert {*signals} == {"sad"}
    at = signals["sad"].positions.tolist()
    assert {*range(len(prompt), len(scores))} <= {*at} <= {*range(len(scores))}
    assert signals["sad"].scores == pytest.approx(scores[at].numpy(), rel=1e-4, abs=5e-3)
    assert signals["sad"].fired.tolist() == [p for p in at if scores[p] > 0.5]
    assert 0 < len(signals["sad"].fired) < len(at)


def test_a_plain_request_beside_captures_costs_the_workers_no_call(served):
    saved, _ = served
    assert saved["calls_for_plain"] == []


def test_an_aborted_request_has_what_was_captured_until_then(served, truth):
    saved, root = served
    store = tllm.stores.open(root)
    for way in ("aborted", "slept"):  # an engine that goes to sleep aborts what runs
        [sample] = saved[way]["samples"]
        for status, error in sample["results"].values():
            assert status == "partial_error"
            assert "aborted" in error
        check(truth, saved[way], sample)
    partial = store.filter(tag="t", status="partial_error")
    [left] = [record for record in partial if record.request_id.startswith("left")]
    assert "which tokens it generated is not known" in left.error
    assert {tuple(left.positions(*key).tolist()) for key in left.keys} == {(0,)}


def test_a_consumer_that_cannot_begin_on_one_rank_is_on_none(served):
    """What the other rank has of it must serve nobody: `consumers` are looked at below."""
    saved, _ = served
    assert saved["of the first rank"] == "consumer 'of the first' cannot begin: no room here"


def test_what_is_wrong_is_refused_and_nothing_is_left(served):
    saved, _ = served
    positions, layer, consumer, by_hand, no_consumer, no_params = saved["refused"]
    assert "capture['memory']['positions']: position 99" in positions
    assert "capture['memory']['hooks']: post_block has no layer 9" in layer
    assert "capture['disc']" in consumer
    assert "extra_args['capture'] was given, where nobody reads it" in by_hand
    assert "; 'hooks' is an option of one: give {'memory': {'hooks': ...}}" in no_consumer
    assert "in the place of parameters, and is dict; give tllm.SamplingParams(" in no_params
    for worker in saved["stats"]:
        assert worker["running_sequences"] == 0
        assert worker["results_kept"] == 0  # of the one that was left, too, whose were promised
        assert worker["consumers"] == {"filesystem": "ok", "memory": "ok", "signals": "ok"}

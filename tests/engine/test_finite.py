"""Rows that are changed so much that they stop being finite: their requests end with an error, and
nobody else notices."""

from __future__ import annotations

import pytest
import torch

from engine.asking import generate, greedy, prompts_of, tokens_of
from engine.reference import HIDDEN, LAYERS
from tllm import SamplingParams
from tllm.consumers.base import Consumer
from tllm.ports import ConsumerFlow, ResidualStream

HAS_GPU = torch.cuda.is_available()
ALONE = torch.ones(HIDDEN)
ALONE[::2] = 0.0
ENTRY = [{"vector": ALONE.tolist(), "scale": 1e18}]
"""As large as a vector may be."""
PLACES = [("mlp_out", 0), ("attn_in", LAYERS - 1), ("mlp_in", LAYERS - 1)]
TOO_LARGE = {point: {layer: ENTRY} for point, layer in PLACES}
"""What an MLP makes of it is one factor times the other."""
PATCHES = [
    {"hook": point, "layer": layer, "positions": [4], "source": {"tensor": 1e18 * ALONE[None]}}
    for point, layer in PLACES
]
FULL = torch.full((1, HIDDEN), 1.6e18)
WAYS = {
    "steering": {"steering_vectors": TOO_LARGE},
    "steering of the prompt alone": {"prefill_steering_vectors": TOO_LARGE},
    "steering of generated tokens": {"decode_steering_vectors": TOO_LARGE},
    "patches": {"patch": PATCHES},
    "patches of which no other row knows": {
        "patch": [
            {"hook": point, "layer": LAYERS - 1, "positions": [4], "source": {"tensor": row}}
            for point, row in (("attn_out", FULL), ("mlp_out", FULL))
        ]
    },
}
NAMES = {"steering": "steering", "patches": "patching"}


class Writer(Consumer):
    """Adds far too much to rows of the requests that name it."""

    consumer_id = "writer"
    on_request_only = True

    def flows(self):
        read = ResidualStream.read(layer=0, site="post_block", role="rows")
        write = ResidualStream.write(layer=1, site="post_block", role="out")
        return [ConsumerFlow(reads=[read], writes=[write])]

    def on_request_started(self, request, ctx):
        ctx.writer("out").set([request], torch.full((HIDDEN,), 1e30))


def prompts():
    return prompts_of([40, 9, 17, 33], seed=5)


def with_one_broken(tokens, **asked):
    return [greedy(tokens), greedy(tokens, **asked), greedy(tokens), greedy(tokens)]


def assert_only_the_second_broke(outputs, plain, name):
    others = [output for i, output in enumerate(outputs) if i != 1]
    assert tokens_of(others) == [tokens for i, tokens in enumerate(plain) if i != 1]
    assert [output.outputs[0].finish_reason for output in others] == ["length"] * 3
    [sample] = outputs[1].outputs
    assert sample.finish_reason == "error"
    assert "not finite" in sample.stop_reason and "smaller scale" in sample.stop_reason
    result = sample.consumer_results[name]
    assert result.status == "error" and "not finite" in result.error
    return sample


@pytest.mark.parametrize("way", WAYS)
def test_a_request_whose_rows_overflow_ends_with_an_error(llm, way):
    """Beside others, in chunks and with cached prefixes; what it left in the cache nobody reads,
    also who asks the same."""
    plain = tokens_of(generate(llm, prompts(), [greedy(6)] * 4))
    before = llm.intervention_stats()[0]["sequences_not_finite"]
    for prompt in (prompts()[1], prompts()[0], prompts()[0]):
        mixed = [prompts()[0], prompt, *prompts()[2:]]
        expected = tokens_of(generate(llm, mixed, [greedy(6)] * 4))
        outputs = generate(llm, mixed, with_one_broken(6, **WAYS[way]))
        sample = assert_only_the_second_broke(outputs, expected, NAMES[way.split()[0]])
        # None was drawn from such a row. Where the next pass runs already, it is known sooner.
        right = expected[1][:1] if way.endswith("tokens") else []
        assert list(sample.token_ids) in ([right, []] if HAS_GPU else [right])
    assert llm.intervention_stats()[0]["sequences_not_finite"] == before + 3
    assert tokens_of(generate(llm, prompts(), [greedy(6)] * 4)) == plain
    generate(llm, [[1]], greedy(1))
    assert llm.intervention_stats()[0]["running_sequences"] == 0


def test_each_sample_ends_by_itself(llm):
    """Of the first token nothing is steered; whoever has a certain one then is."""
    asked = {
        "steering_vectors": {
            point: {
                layer: [
                    e | {"positions": {"phase": "generation", "windows": [[1, 3]]}} for e in ENTRY
                ]
            }
            for point, layer in PLACES
        }
    }
    params = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True, detokenize=False, **asked)
    [output] = generate(llm, prompts()[:1], params)
    assert [s.finish_reason for s in output.outputs] == ["error"] * 3
    assert {len(s.token_ids) for s in output.outputs} <= ({1, 2} if HAS_GPU else {2})
    assert {s.consumer_results["steering"].status for s in output.outputs} == {"error"}


def test_what_a_consumer_writes_is_told_to_be_too_much(llm):
    llm.register_consumer(Writer())
    plain = tokens_of(generate(llm, prompts(), [greedy(6)] * 4))
    outputs = generate(llm, prompts(), with_one_broken(6, consumers={"writer": {}}))
    sample = assert_only_the_second_broke(outputs, plain, "writer")
    assert not sample.token_ids
    [again] = generate(llm, prompts()[:1], greedy(6, consumers={"writer": {}}))
    assert again.outputs[0].finish_reason == "error", "the consumer goes on"


def test_large_is_not_too_large(llm):
    """Just what float32 holds; nothing is told of plain requests beside it."""
    entry = [{"vector": ALONE.tolist(), "scale": 1e17}]
    asked = {"steering_vectors": {"post_block": {LAYERS - 1: entry}}}
    outputs = generate(llm, prompts(), with_one_broken(3, **asked))
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 4

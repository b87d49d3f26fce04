"""Three families: log-probabilities and greedy tokens are those of `transformers`."""

from __future__ import annotations

import asyncio

import pytest
from oracle import families

from logprobs.asking import (
    CORRELATION,
    ENGINE,
    OTHER_ENGINE,
    SAME_ENGINE,
    agrees,
    correlation,
    greedy,
    prompts,
    vllm_logprobs,
)
from tllm.logprobs import AsyncVirtualLM, TransformersLM


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(family, tmp_path):
    path = str(families.save(family, tmp_path))
    options = ENGINE | {"skip_tokenizer_init": True, "max_logprobs": -1}
    asked = [[token % families.VOCAB for token in prompt] for prompt in prompts(6)]
    reference = TransformersLM.from_name(path)
    expected = reference.batch_next_token_logprobs_sync(asked)
    with AsyncVirtualLM.from_name(path, engine_opts=options) as lm:
        assert lm.tokenizer is None
        found = asyncio.run(lm.batch_next_token_logprobs(asked))
        assert agrees(found, expected, OTHER_ENGINE)
        assert correlation(found, expected) > CORRELATION
        for prompt, row in zip(asked[:3], found, strict=False):
            assert agrees(row, vllm_logprobs(lm, prompt), SAME_ENGINE)
            assert asyncio.run(_lane(lm, prompt, 8)) == asyncio.run(greedy(reference, prompt, 8))


async def _lane(lm, prompt, count):
    async with lm.open(prompt) as lane:
        for _ in range(count):
            lane.feed(int((await lane.next()).argmax()))
        return list(lane.tokens[len(prompt) :])

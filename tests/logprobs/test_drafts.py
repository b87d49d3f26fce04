"""Lanes and queries of an engine that drafts tokens."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from logprobs.asking import ENGINE, MODEL, OTHER_ENGINE, VOCAB, agrees, gathered, left_in
from tests.forked_processes import forked
from tllm import SamplingParams
from tllm.logprobs import AsyncVirtualLM

REPEATED = [7, 8, 9, 10]
"""What is drafted."""
LANES = 10
"""More than the engine runs at once."""

pytestmark = pytest.mark.skipif(
    os.environ["TRITON_INTERPRET"] == "1",
    reason="vLLM's kernel for n-grams is beyond Triton's interpreter",
)


@pytest.fixture(scope="module")
def drafting():
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    drafts |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    more = {"num_gpu_blocks_override": 32, "speculative_config": drafts, "async_scheduling": False}
    with forked():
        lm = AsyncVirtualLM.from_name(MODEL, engine_opts=ENGINE | more, timeout=3600.0)
    with lm:
        yield lm


def test_lanes_and_queries_beside_drafted_tokens_say_what_transformers_says(drafting, reference):
    pick = random.Random(5)
    asked, answers = [], []

    async def generate():
        """Requests whose tokens are drafted, one after the other."""
        number = 0
        while True:
            params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
            prompt = {"prompt_token_ids": REPEATED * 5}
            async for _ in drafting.engine.generate(prompt, params, f"drafted {number}"):
                pass
            number += 1

    async def walk():
        root = drafting.open(REPEATED * 8)
        lanes = [root.fork() for _ in range(LANES)]
        await root.close()
        for step in range(4):
            for lane in lanes:
                fed = (pick.choice([*REPEATED, pick.randrange(2, VOCAB)]) for _ in range(step + 1))
                lane.feed(*fed)
            asked.extend(lane.tokens for lane in lanes)
            answers.extend(await gathered(lane.next() for lane in lanes))
            queries = [[*REPEATED, *REPEATED, pick.randrange(2, VOCAB)] for _ in range(4)]
            asked.extend(queries)
            answers.extend(await gathered(map(drafting.next_token_logprobs, queries)))
            forks = [pick.choice(lanes).fork() for _ in lanes]
            await gathered(lane.close() for lane in lanes)
            lanes = forks
        await gathered(lane.close() for lane in lanes)

    async def run():
        beside = asyncio.ensure_future(generate())
        await walk()
        assert not beside.done(), beside
        beside.cancel()
        await asyncio.wait([beside])
        return await drafting.engine.intervention_stats()

    [stats] = drafting.run(run())
    assert 0 < stats["tokens_accepted"] < stats["tokens_drafted"]
    for tokens, answer in zip(asked, answers, strict=True):
        expected = asyncio.run(reference.next_token_logprobs(tokens))
        assert agrees(answer[None], expected[None], OTHER_ENGINE), tokens
    assert not left_in(drafting)

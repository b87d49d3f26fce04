"""Lanes and queries of an engine that drafts tokens."""

from __future__ import annotations

import asyncio
import gc
import os
import random

import pytest
import torch
from engine.drafting import skip_without_drafts

from logprobs.asking import ENGINE, MODEL, OTHER_ENGINE, VOCAB, agrees, gathered, greedy, left_in
from logprobs.test_random_walks import Walk, is_right
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
    skip_without_drafts()
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


PLACE = ("post_block", 1)
LENGTH = 30
DIRECTION = torch.randn(128, generator=torch.Generator().manual_seed(2))
PROBE = {"hook": PLACE[0], "layer": PLACE[1], "vector": DIRECTION}


def drafted(count, **asked):
    capture = {"memory": {"hooks": {PLACE[0]: [PLACE[1]]}}}
    return SamplingParams(
        max_tokens=count, temperature=0, ignore_eos=True, capture=capture, **asked
    )


class Guests:
    """Requests whose tokens are drafted, one after the other: they have their length, are ended by
    a condition, are refused, are aborted, and are left.

    Args:
        alone: what came of the longest of them, alone, for each prompt.

    Attributes:
        ends: how each of them ended.
    """

    def __init__(self, lm, alone, seed):
        self.ends = []
        self._engine = lm.engine
        self._alone = alone
        self._draw = random.Random(seed)
        self._seed = seed

    async def run(self):
        while True:
            await self._ask(f"guest {self._seed}-{len(self.ends)}")

    async def _ask(self, name):
        prompt, tokens, rows = self._draw.choice(self._alone)
        kind = self._draw.choice(["length", "stop", "refused", "aborted", "left"])
        count, asked, leaves = self._draw.randint(1, LENGTH), {}, self._draw.randint(1, 8)
        if kind == "stop":
            scores = (rows[len(prompt) :] @ DIRECTION).tolist()
            highest = [i for i in range(1, len(scores)) if scores[i] > max(scores[:i]) + 1e-2]
            count = self._draw.choice(highest)
            edge = (scores[count] + max(scores[:count])) / 2
            asked["stop_when"] = {"probe": PROBE, "above": edge, "name": "highest"}
        elif kind == "refused":
            asked["abort_when"] = {"probe": PROBE, "above": -1e9, "name": "unwanted"}
        params = drafted(LENGTH if asked else count, **asked)
        stream = self._engine.generate({"prompt_token_ids": prompt}, params, name)
        async for output in stream:
            (sample,) = output.outputs
            leaves -= 1
            if not leaves and kind == "left":
                await stream.aclose()
                break
            if not leaves and kind == "aborted":
                await self._engine.abort(name)
        self.ends.append(kind)
        given = list(sample.token_ids)
        assert given == tokens[: len(given)], name
        if kind in ("left", "aborted"):
            return
        reason = {"stop": "highest", "refused": "unwanted"}.get(kind)
        expected = {"length": count, "stop": count + 1, "refused": 0}[kind]
        assert (len(given), sample.stop_reason) == (expected, reason), name
        captured = sample.activations[PLACE[0]][PLACE[1]]
        passed = len(prompt) + max(len(given) - 1, 0)
        assert captured.positions.tolist() == list(range(passed)), name
        torch.testing.assert_close(captured.tensor, rows[:passed], rtol=1e-4, atol=1e-4)


def test_lanes_and_requests_that_come_and_go_at_any_time_leave_each_other_alone(
    drafting, reference
):
    async def tokens_alone(prompt):
        params = drafted(LENGTH)
        async for output in drafting.engine.generate({"prompt_token_ids": prompt}, params, "alone"):
            (sample,) = output.outputs
        rows = sample.activations[PLACE[0]][PLACE[1]].tensor
        return prompt, list(sample.token_ids), rows

    alone = [drafting.run(tokens_alone(REPEATED * count)) for count in (2, 5, 9)]
    for prompt, tokens, _ in alone:
        assert tokens == asyncio.run(greedy(reference, prompt, LENGTH))
    walks = [Walk(drafting, number) for number in range(2)]
    guests = [Guests(drafting, alone, number) for number in range(3)]

    async def run():
        beside = [asyncio.ensure_future(each.run()) for each in guests]
        await gathered(walk.run(steps=40) for walk in walks)
        for each in beside:
            assert not each.done(), each
            each.cancel()
        await asyncio.wait(beside)

    drafting.run(run())
    ends = [end for each in guests for end in each.ends]
    assert {*ends} == {"length", "stop", "refused", "aborted", "left"}
    known = {}
    for tokens, found, form in (each for walk in walks for each in walk.answers):
        if tokens not in known:
            known[tokens] = reference.next_token_logprobs_sync(list(tokens))
        assert is_right(found, form, known[tokens]), (tokens, form)
    walks.clear()
    gc.collect()
    assert not left_in(drafting)

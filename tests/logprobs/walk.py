"""Everything that is asked of a backend, one after the other, and what `transformers` says."""

from __future__ import annotations

import asyncio

import torch

from logprobs.asking import (
    CORRELATION,
    OTHER_ENGINE,
    agrees,
    correlation,
    gathered,
    greedy,
    left_in,
    prompts,
)

COUNT = 12
"""More than the engine runs at once."""
FED = [100, 20, 30]


async def walk(lm, asked):
    """Queries in all forms, lanes that are forked and closed, a completion, cancelled queries."""
    found = {"full": torch.stack(await gathered(map(lm.next_token_logprobs, asked)))}
    found["top"] = await lm.batch_next_token_logprobs(asked, top_k=5)
    found["some"] = await lm.batch_next_token_logprobs(asked, only=[7, 70])
    lanes = [lm.open(prompt) for prompt in asked]
    await gathered(lane.next() for lane in lanes)
    for token in FED:
        forks = [lane.fork() for lane in lanes]
        await gathered(lane.close() for lane in lanes)
        lanes = forks
        for lane in lanes:
            lane.feed(token)
        steps = await gathered(lane.next() for lane in lanes)
    found["lanes"] = torch.stack(steps)
    found["greedy"] = [await lm.sample(prompt, 6, [], temperature=0) for prompt in asked[:3]]
    waiting = [asyncio.ensure_future(lm.next_token_logprobs([9, i])) for i in range(6)]
    await asyncio.sleep(0.005)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await gathered(lane.close() for lane in lanes)
    await lm.next_token_logprobs([1, 2, 3, 4])
    return found


def check(lm, reference, vocab):
    """Walk, compare with a `TransformersLM`, and see that nothing is left in the engine."""
    asked = [[token % vocab for token in prompt] for prompt in prompts(COUNT)]
    found = asyncio.run(walk(lm, asked))
    full = found["full"]
    expected = reference.batch_next_token_logprobs_sync(asked)
    assert agrees(full, expected, OTHER_ENGINE)
    assert correlation(full, expected) > CORRELATION
    assert torch.equal(found["top"].token_ids.long(), full.topk(5).indices)
    assert torch.allclose(found["top"].values, full.topk(5).values, atol=1e-4)
    assert torch.allclose(found["some"], full[:, [7, 70]], atol=1e-4)
    longer = reference.batch_next_token_logprobs_sync([prompt + FED for prompt in asked])
    assert agrees(found["lanes"], longer, OTHER_ENGINE)
    for prompt, tokens in zip(asked, found["greedy"], strict=False):
        assert tokens == asyncio.run(greedy(reference, prompt, 6))
        assert tokens == asyncio.run(stepped(lm, prompt, 6))
    assert not left_in(lm)
    consumer = lm.engine.consumers["next_token"]
    assert lm.run(lm.engine.read_stats(consumer))["kept"] == 0


async def stepped(lm, prompt, count):
    """The most likely tokens, from a lane."""
    async with lm.open(prompt) as lane:
        for _ in range(count):
            lane.feed(int((await lane.next()).argmax()))
        return list(lane.tokens[len(prompt) :])

"""`python served.py OUTPUT OPTIONS`: ask as a user would, and save what came back.

A process of its own, since the modes differ in environment variables. OPTIONS is JSON: arguments of
`AsyncVirtualLM.from_name`.
"""

from __future__ import annotations

import asyncio
import json
import sys

import torch

from logprobs.asking import MODEL, gathered, prompts
from tllm.logprobs import AsyncVirtualLM

COUNT = 12
FED = [100, 200, 300]


async def ask(lm):
    asked = prompts(COUNT)
    saved = {"full": torch.stack(await gathered(map(lm.next_token_logprobs, asked)))}
    top = await lm.batch_next_token_logprobs(asked, top_k=5)
    saved["top"] = tuple(top)
    saved["some"] = await lm.batch_next_token_logprobs(asked, token_ids=[7, 70])
    lanes = [lm.open(prompt) for prompt in asked]
    await gathered(lane.next() for lane in lanes)
    for token in FED:
        forks = [lane.fork() for lane in lanes]
        await gathered(lane.close() for lane in lanes)
        lanes = forks
        for lane in lanes:
            lane.feed(token)
        steps = await gathered(lane.next() for lane in lanes)
    saved["lanes"] = torch.stack(steps)
    saved["sample"] = await lm.sample(asked[0], 6, [], temperature=0)
    waiting = [asyncio.ensure_future(lm.next_token_logprobs([9, i])) for i in range(6)]
    await asyncio.sleep(0.005)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await gathered(lane.close() for lane in lanes)
    await lm.next_token_logprobs([1, 2, 3, 4])
    return saved


def main(output: str, options: str) -> None:
    with AsyncVirtualLM.from_name(MODEL, **json.loads(options)) as lm:
        saved = asyncio.run(ask(lm))
        saved["stats"] = lm.stats()
        saved["workers"] = lm.run(lm.engine.intervention_stats())
        saved["consumer"] = lm.run(lm.engine.read_stats(lm.engine.consumers["next_token"]))
    torch.save(saved, output)


if __name__ == "__main__":
    main(*sys.argv[1:])

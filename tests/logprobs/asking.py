"""What these tests ask, and how they compare the answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable

import torch
from tiny_engines import SHARE
from vllm import SamplingParams

from tllm.logprobs import AsyncLM, AsyncVirtualLM

MODEL = "demo/model"
VOCAB = 1348
PLACES, CACHED = 8, 12
"""Sequences that the shared engine runs at once, and answers that it remembers."""
ENGINE = {
    **SHARE,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": PLACES,
    "block_size": 32,
    "num_gpu_blocks_override": 512,
}

#: genlm-backend's own: log-probabilities of one engine, and of two implementations.
SAME_ENGINE, OTHER_ENGINE, CORRELATION = 1e-3, 0.03, 0.99


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Random prompts of different lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, over all log-probabilities."""
    return float(((found - expected).abs() / expected.abs().clamp(min=1e-6)).max())


def agrees(found: torch.Tensor, expected: torch.Tensor, tolerance: float = SAME_ENGINE) -> bool:
    """Whether log-probabilities are the same, and normalised."""
    normalised = abs(float(found.exp().sum(-1).mean()) - 1) < 1e-4
    return normalised and relative_error(found, expected) < tolerance


def correlation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's, of log-probabilities."""
    return float(torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1])


def vllm_logprobs(lm: AsyncVirtualLM, prompt: list[int]) -> torch.Tensor:
    """What vLLM itself gives as the next token's log-probabilities, from the same engine."""

    async def ask() -> torch.Tensor:
        params = SamplingParams(max_tokens=1, logprobs=-1, detokenize=False)
        async for output in lm.engine.generate(
            {"prompt_token_ids": prompt}, params, f"vllm-{random.random()}"
        ):
            given = output.outputs[0].logprobs[0]
        return torch.tensor([given[token].logprob for token in range(lm.vocab_size)])

    return lm.run(ask())


async def greedy(lm: AsyncLM, prompt: list[int], count: int) -> list[int]:
    """The most likely tokens, one query each."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int((await lm.next_token_logprobs(tokens)).argmax()))
    return tokens[len(prompt) :]


async def gathered(waiting: Iterable) -> list:
    return list(await asyncio.gather(*waiting))


def left_in(lm: AsyncVirtualLM) -> dict[str, int]:
    """What the backend, its shared rows and its workers still hold, once it is nothing or a minute
    has passed: workers hear of a request's end with the engine's next step."""
    deadline = time.monotonic() + 60
    while True:
        stats = lm.stats()
        workers = lm.run(lm.engine.intervention_stats())
        left = {name: stats[name] for name in ("in_flight", "kept", "kept_blocks")}
        left["rows_in_use"] = stats["shared_rows"] - stats["free_rows"]
        left["sequences"] = sum(worker["running_sequences"] for worker in workers)
        if not any(left.values()) or time.monotonic() > deadline:
            return {name: count for name, count in left.items() if count}
        time.sleep(0.02)

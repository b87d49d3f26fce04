"""The requests of one round, alike for every engine."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from benchmarks.workload import Workload


class Asked(NamedTuple):
    """One request.

    Attributes:
        due: when it comes, in seconds after the round's beginning; 0 where all come at once.
    """

    prompt_token_ids: list[int]
    max_tokens: int
    due: float


def asked(work: Workload, vocab: int, number: int) -> list[Asked]:
    """The requests of a workload's round; the same number draws the same ones."""
    generator = torch.Generator().manual_seed(number)
    prompts = [
        torch.randint(1, vocab, (work.prompt_tokens,), generator=generator).tolist()
        for _ in range(work.prompts)
    ]
    lengths = [(work.prompt_tokens, work.max_tokens)] * work.prompts
    if work.ragged:
        # Between a quarter and all, of the prompt and of the answer.
        shares = 0.25 + 0.75 * torch.rand(work.prompts, 2, generator=generator)
        most = torch.tensor([work.prompt_tokens, work.max_tokens])
        lengths = [(a, b) for a, b in (shares * most).ceil().int().tolist()]
    due = [0.0] * work.prompts
    if work.arrivals:
        # A Poisson process: the times between are exponential, and the first request is at 0.
        between = torch.empty(work.prompts - 1).exponential_(work.arrivals, generator=generator)
        due = [*accumulate(between.tolist(), initial=0.0)]
    return [
        Asked(prompt[:tokens], most_tokens, when)
        for prompt, (tokens, most_tokens), when in zip(prompts, lengths, due, strict=True)
    ]

"""Sequential Monte Carlo over a language model, checked against the exact posterior.

    python examples/smc.py

A story with gaps: "On Monday Ben felt ___ at the ___. Ben wept". Which mood, which place? Sampling
from the left does not know yet that Ben will weep. The particles find out together, and since the
gaps have few fillings, the exact answer can be enumerated and compared with theirs.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tllm.logprobs import AsyncVirtualLM, Lane

Tokens = tuple[int, ...]


class Gaps:
    """A text of which some tokens are given and others are one of several.

    Args:
        prompt: what comes before.
        allowed: the tokens that may follow, by position; one where the text is given.
    """

    def __init__(self, prompt: Sequence[int], allowed: Sequence[Sequence[int]]) -> None:
        self.prompt = list(prompt)
        self.allowed = [list(tokens) for tokens in allowed]


class Posterior:
    """Probabilities of fillings, and the logarithm of the probability that the text fits at all."""

    def __init__(self, probabilities: dict[Tokens, float], log_evidence: float) -> None:
        self.probabilities = probabilities
        self.log_evidence = log_evidence

    def marginal(self, position: int) -> dict[int, float]:
        """Probabilities of the tokens at one position."""
        found: dict[int, float] = {}
        for tokens, probability in self.probabilities.items():
            found[tokens[position]] = found.get(tokens[position], 0.0) + probability
        return found

    def distance(self, other: Posterior, position: int) -> float:
        """Total variation between marginals, 0 to 1."""
        one, two = self.marginal(position), other.marginal(position)
        return sum(abs(one.get(token, 0.0) - two.get(token, 0.0)) for token in {*one, *two}) / 2


async def exact(lm: AsyncVirtualLM, gaps: Gaps) -> Posterior:
    """Enumerate all fillings: one query for each of their beginnings."""
    scores: dict[Tokens, float] = {(): 0.0}
    for allowed in gaps.allowed:
        asked = [lm.next_token_logprobs([*gaps.prompt, *tokens], only=allowed) for tokens in scores]
        rows = await asyncio.gather(*asked)
        scores = {
            (*tokens, token): score + logprob
            for (tokens, score), row in zip(scores.items(), rows, strict=True)
            for token, logprob in zip(allowed, row.tolist(), strict=True)
        }
    total = float(torch.logsumexp(torch.tensor(list(scores.values())), 0))
    return Posterior({t: math.exp(score - total) for t, score in scores.items()}, total)


async def smc(lm: AsyncVirtualLM, gaps: Gaps, particles: int, seed: int) -> Posterior:
    """Sequential Monte Carlo: every particle is a lane, so a step computes one token for each.

    A particle draws its next token from the model's distribution over the allowed ones, and its
    weight takes the probability of them all. When the effective sample size falls below half of the
    particles, they are drawn anew by weight: light ones end, heavy ones are forked.
    """
    generator = torch.Generator().manual_seed(seed)
    root = lm.open(gaps.prompt)
    lanes: list[Lane] = [root.fork() for _ in range(particles)]
    await root.close()
    weights = torch.zeros(particles)
    log_evidence = 0.0
    for allowed in gaps.allowed:
        rows = await lm.batch_next(lanes, only=allowed)
        chosen = torch.multinomial(rows.softmax(1), 1, generator=generator)[:, 0]
        for lane, choice in zip(lanes, chosen.tolist(), strict=True):
            lane.feed(allowed[choice])
        weights = weights + rows.logsumexp(1)
        shares = weights.softmax(0)
        if 1 / shares.square().sum() < particles / 2:
            log_evidence += float(weights.logsumexp(0)) - math.log(particles)
            weights = torch.zeros(particles)
            survivors = [lanes[i].fork() for i in systematic(shares, generator)]
            await asyncio.gather(*(lane.close() for lane in lanes))
            lanes = survivors
    log_evidence += float(weights.logsumexp(0)) - math.log(particles)
    found: dict[Tokens, float] = {}
    for lane, share in zip(lanes, weights.softmax(0).tolist(), strict=True):
        tokens = lane.tokens[len(gaps.prompt) :]
        found[tokens] = found.get(tokens, 0.0) + share
    await asyncio.gather(*(lane.close() for lane in lanes))
    return Posterior(found, log_evidence)


def systematic(shares: torch.Tensor, generator: torch.Generator) -> list[int]:
    """Each particle as often as its share of the weight says, give or take one."""
    count = len(shares)
    points = (torch.arange(count) + torch.rand(1, generator=generator)) / count
    survivors: list[int] = (
        torch.searchsorted(shares.cumsum(0), points).clamp(max=count - 1).tolist()
    )
    return survivors


async def weeping(lm: AsyncVirtualLM) -> Gaps:
    """On Monday Ben felt (12 moods) at the (6 places). Ben wept"""
    encode = lm.tokenizer.encode
    prompt = encode("On Monday Ben felt")
    moods = await lm.next_token_logprobs(prompt, top_k=12)
    places = await lm.next_token_logprobs(encode("On Monday Ben felt sad at the"), top_k=6)
    rest = [[token] for token in encode(". Ben wept")]
    at_the = [[token] for token in encode(" at the")]
    return Gaps(prompt, [moods.token_ids.tolist(), *at_the, places.token_ids.tolist(), *rest])


def main() -> None:
    """Compare the two."""
    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": 256,
        "kv_cache_memory_bytes": 2**27,
    }
    with AsyncVirtualLM.from_name(
        str(Path(__file__).parents[1] / "demo" / "model"), engine_opts=options
    ) as lm:

        async def compare() -> None:
            gaps = await weeping(lm)
            truth = await exact(lm, gaps)
            found = await smc(lm, gaps, particles=256, seed=0)
            print(f"log evidence: exact {truth.log_evidence:.3f}, found {found.log_evidence:.3f}")
            for position in (0, 3):
                distance = truth.distance(found, position)
                print(f"position {position}: total variation {distance:.3f}")
            theirs, ours = truth.marginal(0), found.marginal(0)
            for token in sorted(theirs, key=theirs.__getitem__, reverse=True):
                word = lm.tokenizer.decode([token])
                print(f"{word:12} exact {theirs[token]:.3f}  found {ours.get(token, 0.0):.3f}")

        asyncio.run(compare())


if __name__ == "__main__":
    main()

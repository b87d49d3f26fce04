"""The example of sequential Monte Carlo finds the posterior that enumeration finds."""

from __future__ import annotations

import asyncio
import math
import statistics

from examples.smc import Posterior, exact, smc, weeping

RUNS, PARTICLES = 8, 64


def test_particles_agree_with_the_exact_posterior(lm):
    """With fixed seeds. The estimate of the evidence is unbiased: the mean of the runs is within
    four standard errors. Marginals of 512 particles, half of them effective, are off by about 0.06.
    """

    async def run():
        gaps = await weeping(lm)
        truth = await exact(lm, gaps)
        return truth, [await smc(lm, gaps, PARTICLES, seed) for seed in range(RUNS)]

    truth, runs = asyncio.run(run())
    assert math.isclose(sum(truth.probabilities.values()), 1, abs_tol=1e-4)
    ratios = [math.exp(found.log_evidence - truth.log_evidence) for found in runs]
    error = statistics.stdev(ratios) / math.sqrt(RUNS)
    assert error < 0.1
    assert abs(statistics.mean(ratios) - 1) < 4 * error
    pooled: dict[tuple[int, ...], float] = {}
    for found in runs:
        for tokens, share in found.probabilities.items():
            pooled[tokens] = pooled.get(tokens, 0.0) + share / RUNS
    together = Posterior(pooled, 0.0)
    for position in (0, 3):
        assert truth.distance(together, position) < 0.15
    sad = sorted(truth.marginal(0).values())[6:]
    assert sum(sad) > 0.99  # half of the moods are ruled out by what comes later

"""What samples are worth: Pass@k, distinct right solutions, validity, and their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.esamp_quality.problems import Problem, read_solution

KS = (1, 4, 16, 64)

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """Of each problem, arrays `[problems]`.

    Attributes:
        right: how many samples are right.
        distinct: how many different right solutions there are among them.
        valid: how many are chains whose every step is right.
    """

    samples: int
    right: Array
    distinct: Array
    valid: Array

    def pass_at(self, k: int) -> Array:
        """The chance that one of k samples is right, of each problem (arXiv 2107.03374)."""
        wrong = self.samples - self.right
        missed = np.ones_like(wrong)
        for i in range(k):
            missed *= np.clip((wrong - i) / (self.samples - i), 0, None)
        return 1 - missed

    def as_dict(self) -> dict[str, Any]:
        """For the file of results."""
        return {
            "samples": self.samples,
            **{
                name: getattr(self, name).astype(int).tolist()
                for name in ("right", "distinct", "valid")
            },
        }

    @classmethod
    def of(cls, given: dict[str, Any]) -> Scores:
        """From the file of results."""
        arrays = {name: np.array(given[name], float) for name in ("right", "distinct", "valid")}
        return cls(given["samples"], **arrays)


def score(problems: Sequence[Problem], samples: Sequence[Sequence[Sequence[int]]]) -> Scores:
    """Scores of what was sampled for each problem."""
    found = [
        [read_solution(problem, tokens) for tokens in given]
        for problem, given in zip(problems, samples, strict=True)
    ]
    counts = {len(each) for each in found}
    if len(counts) != 1:
        raise ValueError(f"problems have {sorted(counts)} samples; all must have as many")
    return Scores(
        counts.pop(),
        np.array([sum(s.right for s in each) for each in found], float),
        np.array([len({s.steps for s in each if s.right}) for each in found], float),
        np.array([sum(s.valid for s in each) for each in found], float),
    )


def interval(values: Array, draws: int = 4000, seed: int = 0) -> tuple[float, float]:
    """95% bootstrap interval of the mean, over problems."""
    rng = np.random.default_rng(seed)
    means = values[rng.integers(len(values), size=(draws, len(values)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)

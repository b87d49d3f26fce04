"""Does ESamp find more? Distinct valid answers among samples of one puzzle, with and without it.

What to expect: guidance `beta * (l - d)` is nothing where the distiller predicts the deep state
exactly, and sharpens the distribution where it predicts little. All samples of a puzzle are in one
state when they choose their answer's first token, so a distiller that has learned leaves that
choice alone; it can only tell samples apart by what they have written already. These answers are
one to four tokens long: a hard case for ESamp, measured as it is.

Seeds make the samples without ESamp the same in every run. With it they differ a little: what a
distiller knows when a token is drawn depends on which samples the engine has computed by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from demo.text import Puzzle, Split, parse_answer, puzzles, valid_answers
from tllm import LLM, SamplingParams

Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Setting:
    """How every puzzle is sampled, in both arms alike."""

    samples: int = 64
    temperature: float = 0.8
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 2026

    def params(self, esamp: dict[str, Any], puzzle: int) -> Any:
        """Sampling parameters of a puzzle; sample i has the seed's i-th random stream."""
        return SamplingParams(
            n=self.samples,
            temperature=self.temperature,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed + puzzle * self.samples,
            # The longest replies are such as " Answer: 23 and 37."
            max_tokens=12,
            stop=["."],
            include_stop_str_in_output=True,
            consumers={"esamp": esamp},
        )


@dataclass(frozen=True, slots=True)
class Arm:
    """What was found, puzzle by puzzle; arrays `[puzzles]`.

    Attributes:
        found: distinct valid answers.
        valid: share of samples that are valid answers.
    """

    found: Array
    valid: Array


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95% bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def chosen(split: Split, count: int | None = None) -> list[Puzzle]:
    """Puzzles of two traits, two bounds or a sum, spread evenly over those of a split."""
    several = [p for p in puzzles(split) if p.family != "one trait"]
    if count is None:
        return several
    return [several[i * len(several) // count] for i in range(count)]


def sample(llm: LLM, asked: Sequence[Puzzle], esamp: dict[str, Any], setting: Setting) -> Arm:
    """Sample answers to the puzzles, each with these options of ESamp.

    The prompt ends before "Answer:", which the model writes itself: the first token that a model
    generates is never guided, and so it must not be the answer.
    """
    params = [setting.params(esamp, number) for number in range(len(asked))]
    prompts = [f"Puzzle: {puzzle.question}" for puzzle in asked]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found, valid = [], []
    for puzzle, output in zip(asked, outputs, strict=True):
        known = valid_answers(puzzle)
        right = [a for s in output.outputs if (a := parse_answer(s.text)) in known]
        found.append(len(set(right)))
        valid.append(len(right) / len(output.outputs))
    return Arm(np.array(found, float), np.array(valid, float))


def paired_bootstrap(
    without: Array, having: Array, draws: int = 10_000, seed: int = 0
) -> tuple[Interval, Interval]:
    """`(difference of means, ratio of means)`, having against without.

    Puzzles are drawn with replacement; a puzzle keeps its two figures together.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(without), size=(draws, len(without)))
    a, b = without[drawn].mean(1), having[drawn].mean(1)
    results = []
    for statistic, value in (
        (b - a, having.mean() - without.mean()),
        (b / a, having.mean() / without.mean()),
    ):
        low, high = np.quantile(statistic, [0.025, 0.975])
        results.append(Interval(float(value), float(low), float(high)))
    return results[0], results[1]

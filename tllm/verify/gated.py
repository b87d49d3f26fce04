"""Conditions of steering as a request gives them, and what they are to make of each token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tllm.verify.reference import Layer, States


def _along(h: Tensor, p: Tensor) -> Tensor:
    return (h @ p)[:, None] * p / p.square().sum()


SCORES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dot": lambda h, p: h @ p,
    "cosine": lambda h, p: torch.cosine_similarity(h, p[None], dim=1),
    "cast": lambda h, p: torch.cosine_similarity(h, torch.tanh(_along(h, p)), dim=1),
}
"""From rows `[rows, hidden]` and a probe's vector `[hidden]`."""


@dataclass(frozen=True, eq=False)
class Judged:
    """A condition on one probe.

    Attributes:
        place: where rows are scored as they arrive.
        vector: the probe's.
        threshold: it holds above it.
        score: one of `SCORES`.
        soft: how steep the strength is there; 0: 0 below, and 1 above.
    """

    place: tuple[str, Layer]
    vector: Tensor
    threshold: float
    score: str = "dot"
    soft: float = 0.0

    name = "judged"

    @property
    def entry(self) -> dict[str, Any]:
        """As `when` takes it."""
        point, layer = self.place
        probe: dict[str, Any] = {"hook": point, "vector": self.vector, "score": self.score}
        if layer is not None:
            probe["layer"] = layer
        soft = {"soft": self.soft} if self.soft else {}
        return {"probe": probe, "above": self.threshold, "name": self.name, **soft}

    def scores(self, states: States) -> Tensor:
        """Of each token, from what arrives at every place."""
        point, layer = self.place
        return SCORES[self.score](states[point][layer], self.vector)

    def strength(self, states: States) -> Tensor:
        """Of each token, 0 to 1."""
        above = self.scores(states) - self.threshold
        return torch.sigmoid(self.soft * above) if self.soft else (above > 0).float()

    def rounding(self, states: States, limit: float) -> Tensor:
        """By how much each score may be off, where rows may be by `limit` of their largest number:
        errors of a row's numbers are taken to have nothing to do with each other."""
        point, layer = self.place
        rows = states[point][layer]
        error = limit * rows.abs().amax(1)
        if self.score == "dot":
            return error * self.vector.norm()
        return error * math.sqrt(rows.shape[1]) / rows.norm(dim=1).clamp(min=1e-30)

    def errors(
        self, scores: Tensor, positions: Sequence[int], states: States, limit: float
    ) -> Tensor:
        """Of what are said to be the scores at some positions. Rounding explains those up to
        `limit`; one that is no number is beyond."""
        off = (scores - self.scores(states)[positions]).abs()
        errors = limit * off / self.rounding(states, limit)[positions].clamp(min=1e-30)
        return errors.nan_to_num(math.inf)

    def is_near(self, states: States, limit: float) -> bool:
        """Whether rounding may decide for one of the tokens."""
        if self.soft:
            return False
        off = (self.scores(states) - self.threshold).abs()
        return bool((off <= self.rounding(states, limit)).any())

    def __str__(self) -> str:
        soft = f", soft {self.soft:.2g}" if self.soft else ""
        return f"where {self.score} at {self.place} is above {self.threshold:.3g}{soft}"


def judged_at(
    place: tuple[str, Layer], vector: Tensor, states: States, score: str, soft: bool
) -> Judged:
    """A condition that decides: its threshold is in the middle of the widest gap between scores of
    some rows, the lowest and highest quarter of them left out.

    Args:
        states: of these rows.
    """
    point, layer = place
    scores = SCORES[score](states[point][layer], vector).sort().values
    quarter = len(scores) // 4
    middle = scores[quarter : len(scores) - quarter]
    widest = int(middle.diff().argmax())
    spread = float(scores[-1 - quarter] - scores[quarter])
    threshold = float(middle[widest : widest + 2].mean())
    return Judged(place, vector, threshold, score, 2 / max(spread, 1e-9) if soft else 0.0)

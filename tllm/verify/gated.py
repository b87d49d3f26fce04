"""Conditions of steering as a request gives them, and what they are to make of each token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
MLP = "mlp"
"""A score that a small MLP gives, made of a probe's vector."""

_UNITS = 6


def _layers(p: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of a small MLP: hidden layers of a few units and fewer, none of them as another."""
    chosen = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chosen)

    widths = (_UNITS, _UNITS - 2)
    first = (p * (1 + normal(widths[0], len(p)))) / p.norm()
    second = normal(widths[1], widths[0]) / widths[0] ** 0.5
    last = normal(1, widths[1])
    return [(first, normal(widths[0])), (second, normal(widths[1])), (last, normal(1))]


def _mlp(h: Tensor, p: Tensor) -> Tensor:
    *hidden, (weight, bias) = _layers(p)
    for each, shift in hidden:
        h = torch.relu(h @ each.T + shift)
    return (h @ weight.T + bias)[:, 0]


@dataclass(frozen=True, eq=False)
class Judged:
    """A condition on one probe.

    Attributes:
        place: where rows are scored as they arrive.
        vector: the probe's.
        threshold: it holds above it.
        score: one of `SCORES`, or `MLP`.
        soft: how steep the strength is there; 0: 0 below, and 1 above.
        scope: the tokens that it decides on, as `when` says it.
        over: what it is judged for, likewise.
        judged: `[tokens]`, the tokens of a sequence that it is judged for; None: all.
        first: how many of them are the prompt's.
    """

    place: tuple[str, Layer]
    vector: Tensor
    threshold: float
    score: str = "dot"
    soft: float = 0.0
    scope: str = "token"
    over: str = "token"
    judged: Tensor | None = None
    first: int = 0

    name = "judged"

    @property
    def remembers(self) -> bool:
        """Whether it decides on other tokens than the one it is judged for."""
        return (self.scope, self.over) != ("token", "token")

    def within(self, judged: Tensor, first: int) -> Judged:
        """The same in a sequence."""
        return replace(self, judged=judged, first=first)

    def meant(self, tokens: Sequence[int]) -> list[int]:
        """For which of these positions, those of an entry, there is a score."""
        return list(tokens) if self.over == "token" else [self.first - 1]

    @property
    def entry(self) -> dict[str, Any]:
        """As `when` takes it."""
        point, layer = self.place
        probe: dict[str, Any] = {"hook": point}
        if self.score == MLP:
            probe |= {"layers": _layers(self.vector)}
        else:
            probe |= {"vector": self.vector, "score": self.score}
        if layer is not None:
            probe["layer"] = layer
        soft = {"soft": self.soft} if self.soft else {}
        given = {"scope": self.scope, "over": self.over}
        memory = {key: value for key, value in given.items() if value != "token"}
        return {"probe": probe, "above": self.threshold, "name": self.name, **soft, **memory}

    def scores(self, states: States) -> Tensor:
        """Of each token, from what arrives at every place."""
        return _score(self.score, self._rows(states), self.vector)

    def _rows(self, states: States) -> Tensor:
        """What is judged for each token."""
        point, layer = self.place
        rows = states[point][layer]
        if self.over == "prompt_last":
            return rows[self.first - 1].expand_as(rows)
        return rows if self.over == "token" else rows[: self.first].mean(0).expand_as(rows)

    def strength(self, states: States) -> Tensor:
        """How much is done to each token, 0 to 1."""
        above = self.scores(states) - self.threshold
        if not self.remembers:
            return torch.sigmoid(self.soft * above) if self.soft else (above > 0).float()
        held = (above > 0).float()
        if self.over != "token":
            return held * (torch.arange(len(held)) >= self.first)
        if self.judged is not None:
            held = held * self.judged[: len(held)]
        before = torch.cat([torch.zeros(1), held[:-1]])
        return before if self.scope == "next" else (before.cumsum(0) > 0).float()

    def rounding(self, states: States, limit: float) -> Tensor:
        """By how much each score may be off, where rows may be by `limit` of their largest number:
        errors of a row's numbers are taken to have nothing to do with each other."""
        point, layer = self.place
        rows = self._rows(states)
        largest = states[point][layer].abs().amax(1)
        if self.over != "token":
            largest = largest[: self.first].amax().expand_as(largest)
        error = limit * largest
        if self.score == "dot":
            return error * self.vector.norm()
        if self.score == MLP:
            (first, _), *others = _layers(self.vector)
            steepest = first.norm()
            for weight, _ in others:
                steepest = steepest * torch.linalg.matrix_norm(weight, 2)
            return error * steepest + 1e-6
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
        if self.remembers:
            soft += f", scope {self.scope}, over {self.over}"
        return f"where {self.score} at {self.place} is above {self.threshold:.3g}{soft}"


def judged_at(
    place: tuple[str, Layer],
    vector: Tensor,
    states: States,
    score: str,
    soft: bool,
    memory: tuple[str, str],
) -> Judged:
    """A condition that decides: its threshold is in the middle of the widest gap between scores of
    some rows, the lowest and highest quarter of them left out.

    Args:
        states: of these rows.
        memory: its scope, and over.
    """
    point, layer = place
    scores = _score(score, states[point][layer], vector).sort().values
    quarter = len(scores) // 4
    middle = scores[quarter : len(scores) - quarter]
    widest = int(middle.diff().argmax())
    spread = float(scores[-1 - quarter] - scores[quarter])
    threshold = float(middle[widest : widest + 2].mean())
    return Judged(place, vector, threshold, score, 2 / max(spread, 1e-9) if soft else 0.0, *memory)


def _score(score: str, rows: Tensor, vector: Tensor) -> Tensor:
    """Of rows `[rows, hidden]`."""
    return _mlp(rows, vector) if score == MLP else SCORES[score](rows, vector)

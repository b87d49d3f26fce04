"""Patching as a request asks for it, and what is to come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tllm.verify.reference import Change, Steers
from tllm.verify.steered import Place


@dataclass(frozen=True, eq=False)
class Patched:
    """One entry of a request.

    Attributes:
        place: a hook point and its layer.
        positions: of the tokens whose rows are patched.
        rows: `[positions, hidden]`, what they become; None for zeros.
        alpha: how much of the new row is in the mixture.
        mask: the dimensions that change; None for all.
    """

    place: Place
    positions: tuple[int, ...]
    rows: Tensor | None
    alpha: float = 1.0
    mask: tuple[int, ...] | None = None

    @property
    def entry(self) -> dict[str, Any]:
        """As `SamplingParams(patch=...)` takes it."""
        point, layer = self.place
        entry: dict[str, Any] = {
            "hook": point,
            "positions": list(self.positions),
            "source": {"zero": True} if self.rows is None else {"tensor": self.rows},
            "alpha": self.alpha,
        }
        if layer is not None:
            entry["layer"] = layer
        if self.mask is not None:
            entry["mask"] = list(self.mask)
        return entry

    def changes(self, hidden: int, length: int) -> list[Change]:
        """What the reference does to a sequence of `length` tokens: a change for each position."""
        dimensions = torch.ones(hidden, dtype=torch.bool)
        if self.mask is not None:
            dimensions = torch.zeros(hidden, dtype=torch.bool)
            dimensions[list(self.mask)] = True
        rows = torch.zeros(len(self.positions), hidden) if self.rows is None else self.rows
        given = {"alpha": self.alpha, "dimensions": dimensions}
        return [
            ("patch", row, given, torch.arange(length) == position)
            for position, row in zip(self.positions, rows, strict=True)
        ]

    def __str__(self) -> str:
        masked = "" if self.mask is None else f", {len(self.mask)} dimensions"
        return f"{self.place} at {list(self.positions)}, alpha {self.alpha}{masked}"


def patch_changes(patches: Sequence[Patched], hidden: int, length: int) -> Steers:
    """What the reference does to a sequence of `length` tokens, by place."""
    found: dict[Place, list[Change]] = {}
    for each in patches:
        found.setdefault(each.place, []).extend(each.changes(hidden, length))
    return found

"""What the workers told of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tllm.spec.hooks import HookPoint, ModelPoints
from tllm.spec.operations import max_reach
from tllm.spec.reading import FloatArray


@dataclass(frozen=True)
class Facts:
    """What may be steered and patched in an engine.

    Attributes:
        points: the hook points of the model by layer.
        vocab_size: the model's tokens.
        dtype: of the model's rows, as torch calls it.
        row_bytes: device memory of one vector.
        max_value: the largest number that the model's dtype holds.
        max_configs, max_mib: the engine's options `max_steering_configs`, `max_steering_mib`.
        max_patch_mib, max_patch_host_mib: the engine's options.
        centers_rows: whether the model's final norm takes the mean off rows, as no RMS norm does.
    """

    points: ModelPoints
    hidden_size: int
    vocab_size: int
    dtype: str
    row_bytes: int
    max_value: float
    max_configs: int
    max_mib: int
    max_patch_mib: int
    max_patch_host_mib: int
    centers_rows: bool

    @classmethod
    def of_workers(cls, answers: Sequence[Mapping[str, Any]]) -> Facts:
        """From the answers of all workers to `attach`."""
        points = ModelPoints.of_stages([answer["points"] for answer in answers])
        told = {each.name: answers[0][each.name] for each in fields(cls)}
        centers = all(answer["centers_rows"] for answer in answers)  # the last stage knows
        return cls(**{**told, "points": points, "centers_rows": centers})

    @cached_property
    def max_reach(self) -> float:
        """The most that may be added to a number of a row."""
        return max_reach(self.max_value, self.hidden_size)

    @cached_property
    def smallest(self) -> float:
        """The smallest number above 0 that the model's dtype holds as exactly as larger ones."""
        return float(torch.finfo(getattr(torch, self.dtype)).smallest_normal)

    @cached_property
    def _checked_widths(self) -> dict[tuple[HookPoint, int | None], tuple[int, ...]]:
        return {}

    def checked_widths(self, point: HookPoint, layer: int | None) -> tuple[int, ...]:
        """As `widths_at`; `ValueError` for a place that the model lacks, or that has no tap."""
        widths = self._checked_widths.get((point, layer))
        if widths is None:
            self.points.check(point, layer)
            widths = self._checked_widths[point, layer] = self.widths_at(point, layer)
        return widths

    def widths_at(self, point: HookPoint, layer: int | None) -> tuple[int, ...]:
        """How many numbers may be given for a row there: as many as heads or experts have, too."""
        if layer is None:
            return (self.hidden_size,)
        layer %= self.points.num_layers
        if point is HookPoint.ROUTER:
            return self.hidden_size, self.points.experts[layer]
        split = self.points.heads.get((point, layer))
        return (self.hidden_size,) if split is None else (self.hidden_size, split.width)

    def widened(self, rows: FloatArray) -> FloatArray:
        """Rows, or one, `[..., numbers]`, filled up with zeros to `[..., hidden]`."""
        ends = [(0, 0)] * (rows.ndim - 1)
        return np.pad(rows, [*ends, (0, self.hidden_size - rows.shape[-1])])

"""Vectors on their way to the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tllm.spec.reading import FloatArray


@dataclass(frozen=True)
class PackedVectors:
    """Arrays by digest as few large ones: pickling thousands of small ones takes longer than all
    else that is done with them.

    Attributes:
        digests, rows: of vectors `[hidden]`, and all of them `[vectors, hidden]`.
        others: arrays of several rows, and of other widths.
    """

    digests: tuple[str, ...]
    rows: FloatArray
    others: Mapping[str, FloatArray]

    @classmethod
    def of(cls, vectors: Mapping[str, FloatArray]) -> PackedVectors:
        """From arrays by digest."""
        widths = {array.shape for array in vectors.values() if array.ndim == 1}
        shape = next(iter(widths), (0,))
        alike = {digest: array for digest, array in vectors.items() if array.shape == shape}
        others = {digest: array for digest, array in vectors.items() if digest not in alike}
        rows = np.stack([*alike.values()]) if alike else np.zeros((0, *shape), np.float32)
        return cls(tuple(alike), rows, others)

    def unpacked(self) -> dict[str, FloatArray]:
        """The arrays by digest; those of one row are views."""
        return {**dict(zip(self.digests, self.rows, strict=True)), **self.others}

"""Sums of vectors: what is added at each point to tokens with a steering row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tllm.runtime.staged import StagedTable
from tllm.runtime.taps import Taps
from tllm.runtime.transfer import upload

_AT_ONCE = 4096
"""Sums that are made together."""


class VectorSums:
    """A table with a sum for each steering row and each point where any adds: they are made on the
    device, when a row is new."""

    def __init__(self, taps: Taps) -> None:
        self._new: dict[int, Sequence[tuple[int, int, float]]] = {}  # by row
        self._places: dict[int, int] = {}  # of points in the table
        self._table = StagedTable((0, 0, taps.hidden_size), 2, taps.dtype, taps.device)

    @property
    def num_bytes(self) -> int:
        return self._table.tensor.nbytes

    @property
    def by_point(self) -> dict[int, torch.Tensor]:
        """The sums of all rows, `[rows, hidden]`."""
        return {point: self._table.tensor[place] for point, place in self._places.items()}

    def note(self, row: int, summands: Sequence[tuple[int, int, float]]) -> None:
        """What is to be added in a new row: point, vector and factor of each summand."""
        if summands:
            for point, _, _ in summands:
                self._places.setdefault(point, len(self._places))
            self._new[row] = summands

    def forget(self, row: int) -> None:
        """A row is nobody's any more."""
        self._new.pop(row, None)

    def grow(self, rows: int) -> bool:
        """Make room for rows; whether it is another tensor now."""
        hidden = self._table.tensor.shape[-1]
        return bool(self._places) and self._table.grow((len(self._places), rows, hidden))

    def make(self, bank: torch.Tensor) -> None:
        """Make the sums of new rows, those of one point in the order of their summands.

        Args:
            bank: the vectors, `[vectors, hidden]`.
        """
        if not self._new:
            return
        _, rows, hidden = self._table.tensor.shape
        flat, device = self._table.tensor.view(-1, hidden), bank.device
        noted = [
            (self._places[point] * rows + row, vector, factor)
            for row, summands in self._new.items()
            for point, vector, factor in summands
        ]
        places, vectors, factors = map(np.array, zip(*noted, strict=True))
        order = np.argsort(places, kind="stable")
        summed, firsts, counts = np.unique(places[order], return_index=True, return_counts=True)
        # Of each summand, which place it is added to, and how many came before it there.
        which = np.repeat(np.arange(len(summed)), counts)
        before = np.arange(len(order)) - firsts[which]
        index = np.zeros((counts.max(), len(summed)), np.int64)
        scale = np.zeros((*index.shape, 1), np.float32)
        index[before, which], scale[before, which, 0] = vectors[order], factors[order]
        for low in range(0, len(summed), _AT_ONCE):
            part = slice(low, low + _AT_ONCE)
            of, by = upload(index[:, part], device), upload(scale[:, part], device)
            total = torch.zeros((of.shape[1], hidden), dtype=torch.float32, device=device)
            for vector, factor in zip(of, by, strict=True):
                total.addcmul_(bank[vector].float(), factor)
            flat.index_copy_(0, upload(summed[part], device), total.to(flat.dtype))
        self._new.clear()

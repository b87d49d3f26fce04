"""Captured rows of some steps, in the order in which they came."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from tllm.consumers.capture.landing import Landed, Slab, is_grouped
from tllm.consumers.capture.row_copier import row_bytes

IntArray = npt.NDArray[np.int32]
Owners = npt.NDArray[np.int64]
"""`[rows]`, the number of the sequence that each is of."""

NOBODY = -1
"""In the place of its sequence's number, of a row that was taken."""

_ROOM = 1024


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows of one step.

    Attributes:
        sequences: whose they are.
        index: `[rows]`, which of `sequences`.
        positions: `[rows]`.
        rows: `[rows, places, hidden]`.
        landed: how they lie in memory for results; None where they do not.
    """

    sequences: Sequence[Hashable]
    index: IntArray
    positions: IntArray
    rows: torch.Tensor
    landed: Landed | None = None

    @property
    def lies_together(self) -> bool:
        """Whether it has many rows of few sequences, which lie together already."""
        if self.landed is not None:
            return self.landed.slab is None
        return len(self.positions) > 4 * len(self.sequences) and is_grouped(self.index)

    def lies_behind(self, other: Chunk) -> bool:
        """Whether each row lies behind that of its sequence in another chunk, which has the same
        sequences."""
        own, before = self.landed, other.landed
        if own is None or before is None or own.slab is None:
            return False
        return own.slab is before.slab and own.step == before.step + 1

    @cached_property
    def data(self) -> npt.NDArray[np.uint8]:
        """`[rows, bytes]`, the same rows."""
        return row_bytes(self.rows)


class UnsortedRows:
    """Chunks of one kind. Which rows are whose stands in one array for all of them, so that those
    of one sequence are found at once.

    Attributes:
        chunks: in the order in which they came; None in the place of one whose rows were all taken.
        nbytes: of their rows.
        takes: how often the rows of a sequence were taken.
    """

    def __init__(self) -> None:
        self.chunks: list[Chunk | None] = []
        self.nbytes = 0
        self.takes = 0
        self._owners: Owners = np.empty(_ROOM, np.int64)
        self._begins = [0]  # at which of all rows each chunk begins, and the next will
        self._left: list[int] = []  # rows of each chunk that were not taken

    def add(self, chunk: Chunk, owners: Owners) -> None:
        """Add the rows of a step."""
        begin = self._begins[-1]
        end = begin + len(owners)
        if end > len(self._owners):
            grown = np.empty(2 * end, np.int64)
            grown[:begin] = self._owners[:begin]
            self._owners = grown
        self._owners[begin:end] = owners
        self.chunks.append(chunk)
        self.nbytes += chunk.rows.nbytes
        self._begins.append(end)
        self._left.append(len(owners))

    def has_any(self, numbers: Sequence[int]) -> bool:
        """Whether there are rows of any of these sequences."""
        return bool(np.isin(self._owners[: self._begins[-1]], numbers).any())

    def take(self, number: int) -> list[tuple[Chunk, int]]:
        """The rows of a sequence, which nobody has from now on: of which chunk, and which there."""
        self.takes += 1
        begins = self._begins
        at = np.flatnonzero(self._owners[: begins[-1]] == number)
        self._owners[at] = NOBODY
        which = np.searchsorted(begins, at, side="right") - 1
        taken = []
        for each, row in zip(which.tolist(), at.tolist(), strict=True):
            chunk = self.chunks[each]
            assert chunk is not None
            taken.append((chunk, row - begins[each]))
            self._left[each] -= 1
            if not self._left[each]:
                self.chunks[each] = None
                self.nbytes -= chunk.rows.nbytes
        return taken

    def runs(self) -> Iterator[tuple[list[Chunk], Owners]]:
        """Chunks that follow each other and lie in the same memory for results, or in none; and
        whose their rows are, or `NOBODY`."""
        present = [number for number, chunk in enumerate(self.chunks) if chunk is not None]
        for _, numbers in groupby(present, self._slab_of):
            run = list(numbers)
            owners = [self._owners[self._begins[each] : self._begins[each + 1]] for each in run]
            yield [chunk for each in run if (chunk := self.chunks[each])], np.concatenate(owners)

    def _slab_of(self, number: int) -> Slab | None:
        chunk = self.chunks[number]
        return None if chunk is None or chunk.landed is None else chunk.landed.slab

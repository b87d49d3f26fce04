"""Captured rows on the host, sorted by sequence when a sequence ends."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tllm.consumers.capture.activations import Rows

IntArray = npt.NDArray[np.int32]

_CHUNKS = 32


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows of one step.

    Attributes:
        sequences: whose they are.
        index: `[rows]`, which of `sequences`.
        positions: `[rows]`.
        rows: `[rows, places, hidden]`.
    """

    sequences: Sequence[Hashable]
    index: IntArray
    positions: IntArray
    rows: torch.Tensor


@dataclass(eq=False)
class _Pieces:
    """What a sequence has, in the order it came."""

    positions: list[IntArray] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)


class HostRows:
    """Rows of the running sequences.

    A step's rows are kept as they came: adding costs one append, whatever the number of sequences
    and hook points. Every few steps, and when a sequence ends, small chunks are sorted by sequence
    in one go. Used on one thread.
    """

    def __init__(self) -> None:
        self._unsorted: dict[Hashable, list[Chunk]] = {}
        self._pieces: dict[Hashable, _Pieces] = {}

    def add(self, kind: Hashable, chunk: Chunk) -> None:
        """Add the rows of a step. Those of a kind have the same places and dtype."""
        chunks = self._unsorted.setdefault(kind, [])
        chunks.append(chunk)
        if len(chunks) >= _CHUNKS:
            self._sort(kind)

    def take(self, kind: Hashable, sequence: Hashable) -> Rows | None:
        """All rows of a sequence, by position; None when there are none."""
        self._sort(kind)
        pieces = self._pieces.pop(sequence, None)
        if pieces is None:
            return None
        positions = np.concatenate(pieces.positions)
        if (np.diff(positions) > 0).all():
            return Rows(positions, pieces.rows)
        order = np.argsort(positions, kind="stable")
        rows = torch.cat(pieces.rows)[torch.from_numpy(order)]
        return Rows(positions[order], [rows])

    def discard(self, sequence: Hashable) -> None:
        """Forget the rows of a sequence that were sorted."""
        self._pieces.pop(sequence, None)

    def _sort(self, kind: Hashable) -> None:
        chunks = self._unsorted.pop(kind, [])
        # Many rows of few sequences need no copy: they lie together already.
        small: list[Chunk] = []
        for chunk in chunks:
            if len(chunk.positions) > 4 * len(chunk.sequences) and _is_grouped(chunk.index):
                self._sort_small(small)
                small = []
                self._cut(chunk)
            else:
                small.append(chunk)
        self._sort_small(small)

    def _cut(self, chunk: Chunk) -> None:
        edges = np.flatnonzero(np.diff(chunk.index, prepend=-1)).tolist()
        for low, high in zip(edges, [*edges[1:], len(chunk.index)], strict=True):
            pieces = self._pieces.setdefault(chunk.sequences[chunk.index[low]], _Pieces())
            pieces.positions.append(chunk.positions[low:high])
            pieces.rows.append(chunk.rows[low:high])

    def _sort_small(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            return
        numbers: dict[Hashable, int] = {}
        owners = []
        for chunk in chunks:
            each = [numbers.setdefault(sequence, len(numbers)) for sequence in chunk.sequences]
            owners.append(np.array(each, np.int64)[chunk.index])
        owner = np.concatenate(owners)
        order = np.argsort(owner, kind="stable")
        positions = np.concatenate([chunk.positions for chunk in chunks])[order]
        # Copied once, out of the page-locked memory that the next steps need.
        rows = torch.cat([chunk.rows for chunk in chunks])
        if len(numbers) > 1:
            rows = rows.index_select(0, torch.from_numpy(order))
        edges = np.searchsorted(owner[order], np.arange(len(numbers) + 1)).tolist()
        for sequence, number in numbers.items():
            low, high = edges[number], edges[number + 1]
            pieces = self._pieces.setdefault(sequence, _Pieces())
            pieces.positions.append(positions[low:high])
            pieces.rows.append(rows[low:high])


def _is_grouped(index: IntArray) -> bool:
    """Whether the rows of each sequence lie together."""
    changes = index[np.flatnonzero(np.diff(index, prepend=-1))]
    return len(changes) == len(set(changes.tolist()))

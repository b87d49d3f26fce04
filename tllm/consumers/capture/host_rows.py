"""Captured rows on the host, sorted by sequence when a sequence ends."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch

from tllm.consumers.by_sequence import by_sequence
from tllm.consumers.capture.activations import CapturedRows
from tllm.consumers.capture.landing import Landed, Slab, is_grouped, runs_by_file, runs_of
from tllm.consumers.capture.row_copier import RowCopier, RowCopy
from tllm.ports import in_order
from tllm.result_memory import ResultMemory
from tllm.stores.queue import SpilledRows, SpillFile

IntArray = npt.NDArray[np.int32]

_CHUNKS, _CHUNK_BYTES = 32, 128 << 20
"""What is sorted in one go: more would wait for longer than the next steps take."""


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

    def of(self, sequence: Hashable) -> Chunk | None:
        """The rows of one sequence; None where it has none."""
        if sequence not in self.sequences:
            return None
        at = np.flatnonzero(self.index == self.sequences.index(sequence))
        if not len(at):
            return None
        first, stop = int(at[0]), int(at[-1]) + 1
        where = slice(first, stop) if stop - first == len(at) else at
        return Chunk((sequence,), _NONE, self.positions[where], self.rows[where], self.landed)


_NONE = np.zeros(0, np.int32)


@dataclass(eq=False)
class _Unsorted:
    """Chunks as they came, and the bytes of their rows.

    Attributes:
        taken: sequences whose rows were taken since.
        looked_at: in how many chunks it was looked for their rows.
    """

    chunks: list[Chunk] = field(default_factory=list)
    nbytes: int = 0
    taken: set[Hashable] = field(default_factory=set)
    looked_at: int = 0

    def has_any(self, sequences: Sequence[Hashable]) -> bool:
        """Whether there may be rows of any of these."""
        return any(each in chunk.sequences for chunk in self.chunks for each in sequences)

    def forget_taken(self) -> None:
        """Of some chunks all rows were taken."""
        left = [chunk for chunk in self.chunks if not self.taken.issuperset(chunk.sequences)]
        if len(left) < len(self.chunks):
            self.chunks, self.nbytes = left, sum(chunk.rows.nbytes for chunk in left)


@dataclass(eq=False)
class _Pieces:
    """What a sequence has, in the order it came.

    Attributes:
        nbytes: of its rows in memory.
        lost: rows that found no place.
    """

    positions: list[IntArray] = field(default_factory=list)
    rows: list[torch.Tensor | SpilledRows] = field(default_factory=list)
    nbytes: int = 0
    lost: int = 0
    reason: str = ""


class HostRows:
    """Rows of the running sequences.

    A step's rows are kept as they came: adding costs one append, whatever the number of sequences
    and hook points. Every few steps chunks are sorted by sequence in one go; of a sequence that
    ends before, its own rows are picked out, as long as that is less work: where many requests come
    and go, one ends in nearly every step. Used on one thread; counters may be read on any.

    Args:
        limit: bytes in memory. Rows beyond it are given up, or written to `spill`; those of a
            sequence are counted until it is taken.
        memory: where rows go when they are sorted.
        spill: takes the rows beyond the limit, as long as it has room.
        leave: rows that lie together already are left where they are; else they are copied, out of
            the page-locked memory that the next steps need.

    Attributes:
        held: bytes in memory.
        dropped: rows that were given up, ever.
        spilled: bytes that were written to `spill`, ever.
    """

    def __init__(
        self, limit: int, memory: ResultMemory, spill: SpillFile | None = None, leave: bool = True
    ) -> None:
        self._limit = limit
        self._memory = memory
        self._leave = leave
        self._spill = spill
        self._copier = RowCopier()
        self._unsorted: dict[Hashable, _Unsorted] = {}
        self._pieces: dict[Hashable, _Pieces] = {}
        self.held = 0
        self.dropped = 0
        self.spilled = 0

    def add(self, kind: Hashable, chunk: Chunk) -> None:
        """Add the rows of a step. Those of a kind have the same places and dtype."""
        if self.held + chunk.rows.nbytes > self._limit:
            self._add_beyond_limit(kind, chunk)
            return
        size = chunk.rows.nbytes
        self.held += size
        several = len(chunk.positions) > len(chunk.sequences)
        unsorted = self._unsorted.get(kind)
        if (several or chunk.landed is not None) and chunk.lies_together:
            if unsorted is not None and unsorted.has_any(chunk.sequences):
                self.sort(kind)  # of two rows of one position the later counts
            self._copier.run(self._cut(chunk))
            return
        if unsorted is None:
            unsorted = self._unsorted[kind] = _Unsorted()
        unsorted.chunks.append(chunk)
        unsorted.nbytes += size
        if len(unsorted.chunks) >= _CHUNKS or unsorted.nbytes >= _CHUNK_BYTES:
            self.sort(kind)

    def sort(self, kind: Hashable) -> None:
        """Give the sequences their rows of the chunks so far."""
        unsorted = self._unsorted.pop(kind, None)
        if unsorted is None:
            return
        copies: list[RowCopy] = []
        slabs = [chunk.landed and chunk.landed.slab for chunk in unsorted.chunks]
        for slab, pairs in groupby(zip(slabs, unsorted.chunks, strict=True), itemgetter(0)):
            chunks = [chunk for _, chunk in pairs]
            if slab is not None:
                self._give_slab(slab, chunks)
            else:
                copies += self._sort_small(chunks)
        self._copier.run(copies)
        for sequence in unsorted.taken:
            self._pieces.pop(sequence, None)

    def take(self, kind: Hashable, sequence: Hashable) -> tuple[CapturedRows | None, str]:
        """All rows of a sequence, by position (None when there are none), and what is missing."""
        self._sort_own(kind, sequence)
        pieces = self._pieces.pop(sequence, None)
        if pieces is None:
            return None, ""
        self.held -= pieces.nbytes
        found = self._read_back(pieces)
        missing = f"{pieces.lost} rows were given up: {pieces.reason}" if pieces.lost else ""
        if not found:
            return None, missing
        positions = np.concatenate(pieces.positions)
        if (np.diff(positions) > 0).all():
            return CapturedRows(positions, found), missing
        order = in_order(positions)
        rows = torch.cat(found)[torch.from_numpy(order)]
        return CapturedRows(positions[order], [rows]), missing

    def _sort_own(self, kind: Hashable, sequence: Hashable) -> None:
        """Give a sequence its rows of the chunks so far; the others theirs, too, where that is no
        more work than to look for those of each that ends."""
        unsorted = self._unsorted.get(kind)
        if unsorted is None:
            return
        unsorted.looked_at += len(unsorted.chunks)
        if unsorted.looked_at > len(unsorted.chunks[-1].sequences):
            self.sort(kind)
            return
        found = (chunk.of(sequence) for chunk in unsorted.chunks)
        if own := [chunk for chunk in found if chunk is not None]:
            pieces = self._pieces.setdefault(sequence, _Pieces())
            for stays, chunks in groupby(own, lambda chunk: chunk.landed is not None):
                if stays:
                    for chunk in chunks:
                        self._append(pieces, chunk.positions, chunk.rows)
                else:
                    self._copy_out(pieces, list(chunks))
        unsorted.taken.add(sequence)
        unsorted.forget_taken()
        if not unsorted.chunks:
            del self._unsorted[kind]

    def _copy_out(self, pieces: _Pieces, own: Sequence[Chunk]) -> None:
        """Give a sequence copies of its own rows."""
        count, first = sum(len(chunk.positions) for chunk in own), own[0].rows
        rows = self._memory.empty((count, *first.shape[1:]), first.dtype)
        begin, copies = 0, []
        for chunk in own:
            copies.append(RowCopy(rows, begin, chunk.rows))
            begin += len(chunk.positions)
        self._copier.run(copies)
        self._append(pieces, np.concatenate([chunk.positions for chunk in own]), rows)

    def take_before(self, sequence: Hashable, position: int, most: int) -> CapturedRows | None:
        """The sorted rows of a running sequence before a position, with their positions at most so
        many bytes. None when there are more, or none, and when some were given up or spilled, or
        did not come in the order of positions."""
        pieces = self._pieces.get(sequence)
        if pieces is None or pieces.lost:
            return None
        taken, left = _Pieces(), _Pieces()
        for positions, rows in zip(pieces.positions, pieces.rows, strict=True):
            count = int(np.searchsorted(positions, position))
            if isinstance(rows, SpilledRows) or (count and left.rows):
                return None  # not in the order of positions
            if count:
                self._append(taken, positions[:count], rows[:count])
            if count < len(positions):
                self._append(left, positions[count:], rows[count:])
        if not taken.rows or taken.nbytes + _positions_bytes(taken.rows) > most:
            return None
        if not (np.diff(np.concatenate(taken.positions)) > 0).all():
            return None
        self._pieces[sequence] = left
        self.held -= taken.nbytes
        found = [rows for rows in taken.rows if isinstance(rows, torch.Tensor)]
        return CapturedRows(np.concatenate(taken.positions), found)

    def close(self) -> None:
        self._unsorted.clear()
        self._copier.close()
        if self._spill is not None:
            for pieces in self._pieces.values():
                for rows in pieces.rows:
                    if isinstance(rows, SpilledRows):
                        self._spill.discard(rows)
            self._spill.close()
        self._pieces.clear()

    def _add_beyond_limit(self, kind: Hashable, chunk: Chunk) -> None:
        self.sort(kind)  # what came before stays before
        for number, sequence in enumerate(chunk.sequences):
            at = np.flatnonzero(chunk.index == number)
            pieces = self._pieces.setdefault(sequence, _Pieces())
            kept, why = self._spilled(chunk.rows[torch.from_numpy(at)])
            if kept is not None:
                pieces.positions.append(chunk.positions[at])
                pieces.rows.append(kept)
                continue
            self.dropped += len(at)
            pieces.lost += len(at)
            pieces.reason = (
                f"rows of running requests filled their {self._limit} bytes of memory{why}; "
                "capture less at once, or raise host_mib or spill_mib"
            )

    def _spilled(self, rows: torch.Tensor) -> tuple[SpilledRows | None, str]:
        """Rows on disk; None, and why, when they are not."""
        if self._spill is None:
            return None, ""
        try:
            kept = self._spill.put(rows.contiguous())
        except OSError as error:
            return None, f" and spilling failed: {error}"
        if kept is None:
            return None, " and the spill file"
        self.spilled += kept.nbytes
        return kept, ""

    def _read_back(self, pieces: _Pieces) -> list[torch.Tensor]:
        """A sequence's rows, those on disk too; what cannot be read is lost."""
        found: list[torch.Tensor] = []
        positions: list[IntArray] = []
        for where, rows in zip(pieces.positions, pieces.rows, strict=True):
            if isinstance(rows, SpilledRows):
                assert self._spill is not None
                try:
                    rows = self._spill.pop(rows)
                except OSError as error:
                    self.dropped += len(rows)
                    pieces.lost += len(rows)
                    pieces.reason = f"spilled rows could not be read: {error}"
                    continue
            found.append(rows)
            positions.append(where)
        pieces.positions = positions
        return found

    def _cut(self, chunk: Chunk) -> list[RowCopy]:
        """Give the sequences of a chunk their rows; what has to be copied for that."""
        copies: list[RowCopy] = []
        stays = self._leave or chunk.landed is not None
        each = chunk.rows.nbytes // max(1, len(chunk.index))
        for runs in [runs_of(chunk.index)] if stays else runs_by_file(chunk.index, each):
            first, stop = runs[0][0], runs[-1][1]
            rows = chunk.rows[first:stop]
            if not stays:
                own = self._memory.empty(tuple(rows.shape), rows.dtype)
                copies.append(RowCopy(own, 0, rows))
                rows = own
            for low, high in runs:
                pieces = self._pieces.setdefault(chunk.sequences[chunk.index[low]], _Pieces())
                self._append(pieces, chunk.positions[low:high], rows[low - first : high - first])
        return copies

    def _give_slab(self, slab: Slab, chunks: Sequence[Chunk]) -> None:
        """Give the sequences their rows of consecutive steps: nothing is copied."""
        landed = chunks[0].landed
        assert landed is not None
        positions = np.stack([chunk.positions for chunk in chunks], 1)
        steps = slab.rows[:, landed.step : landed.step + len(chunks)]
        for sequence, where, rows in zip(chunks[0].sequences, positions, steps, strict=True):
            self._append(self._pieces.setdefault(sequence, _Pieces()), where, rows)

    def _sort_small(self, chunks: Sequence[Chunk]) -> list[RowCopy]:
        """As `_cut`, for chunks whose rows do not lie together."""
        if not chunks:
            return []
        bundles = [(chunk.sequences, chunk.index) for chunk in chunks]
        order, sequences = by_sequence(bundles, lambda each: each)
        positions = np.concatenate([chunk.positions for chunk in chunks])[order]
        # Copied once, out of the page-locked memory that the next steps need.
        rows = self._memory.empty((len(order), *chunks[0].rows.shape[1:]), chunks[0].rows.dtype)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        begin, copies = 0, []
        for chunk in chunks:
            end = begin + len(chunk.positions)
            copies.append(RowCopy(rows, place[begin:end], chunk.rows))
            begin = end
        for sequence, low, high in sequences:
            pieces = self._pieces.setdefault(sequence, _Pieces())
            self._append(pieces, positions[low:high], rows[low:high])
        return copies

    @staticmethod
    def _append(pieces: _Pieces, positions: IntArray, rows: torch.Tensor) -> None:
        pieces.positions.append(positions)
        pieces.rows.append(rows)
        pieces.nbytes += rows.nbytes


def _positions_bytes(rows: Sequence[torch.Tensor | SpilledRows]) -> int:
    """Of rows `[rows, places, hidden]`, with positions for each place."""
    return sum(4 * each.shape[0] * each.shape[1] for each in rows if isinstance(each, torch.Tensor))

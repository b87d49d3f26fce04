"""Captured rows on the host: as they came, and sorted by sequence when a sequence ends."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from tllm.consumers.capture.activations import CapturedRows
from tllm.consumers.capture.landing import Landed, Slab, is_grouped, runs_by_file, runs_of
from tllm.consumers.capture.row_copier import RowCopier, RowCopy, row_bytes
from tllm.ports import in_order
from tllm.result_memory import ResultMemory
from tllm.stores.queue import SpilledRows, SpillFile

IntArray = npt.NDArray[np.int32]
Owners = npt.NDArray[np.int64]
"""`[rows]`, the number of the sequence that each is of."""

_CHUNKS, _CHUNK_BYTES = 32, 128 << 20
"""What is sorted in one go: more would wait for longer than the next steps take."""

_NO_NUMBERS: Owners = np.zeros(0, np.int64)

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
        self._unsorted: dict[Hashable, UnsortedRows] = {}
        self._pieces: dict[Hashable, _Pieces] = {}
        # Of sequences that have rows that are not sorted.
        self._numbers: dict[Hashable, int] = {}
        self._sequences: dict[int, Hashable] = {}
        self._next = 0
        self._numbered: tuple[Sequence[Hashable], Owners] = (), _NO_NUMBERS  # of the last chunk
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
            if unsorted is not None:
                known = [n for s in chunk.sequences if (n := self._numbers.get(s)) is not None]
                if known and unsorted.has_any(known):
                    self.sort(kind)  # of two rows of one position the later counts
            self._copier.run(self._cut(chunk))
            return
        if unsorted is None:
            unsorted = self._unsorted[kind] = UnsortedRows()
        unsorted.add(chunk, self._numbers_of(chunk.sequences)[chunk.index])
        if len(unsorted.chunks) >= _CHUNKS or unsorted.nbytes >= _CHUNK_BYTES:
            self.sort(kind)

    def sort(self, kind: Hashable) -> None:
        """Give the sequences their rows of the chunks so far."""
        unsorted = self._unsorted.pop(kind, None)
        if unsorted is None:
            return
        copies: list[RowCopy] = []
        for chunks, owners in unsorted.runs():
            landed = chunks[0].landed
            if landed is not None and landed.slab is not None:
                self._give_slab(landed.slab, chunks, owners)
            else:
                copies += self._sort_small(chunks, owners)
        self._copier.run(copies)

    def _numbers_of(self, sequences: Sequence[Hashable]) -> Owners:
        """`[sequences]`, by which their unsorted rows are known. Those of a steady batch, which are
        one object, are looked up once."""
        if sequences is not self._numbered[0]:
            numbers = []
            for sequence in sequences:
                number = self._numbers.get(sequence)
                if number is None:
                    number = self._numbers[sequence] = self._next
                    self._sequences[number] = sequence
                    self._next += 1
                numbers.append(number)
            self._numbered = sequences, np.array(numbers, np.int64)
        return self._numbered[1]

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
        if (positions[1:] > positions[:-1]).all():
            return CapturedRows(positions, found), missing
        order = in_order(positions)
        rows = torch.cat(found)[torch.from_numpy(order)]
        return CapturedRows(positions[order], [rows]), missing

    def _sort_own(self, kind: Hashable, sequence: Hashable) -> None:
        """Give a sequence its rows of the chunks so far; the others theirs, too, where that is no
        more work than to look for those of each that ends."""
        number = self._numbers.pop(sequence, None)
        if number is None:
            return
        self._numbered = (), _NO_NUMBERS
        unsorted = self._unsorted.get(kind)
        if unsorted is not None and unsorted.takes <= 2 * len(unsorted.chunks):
            pieces = self._pieces.setdefault(sequence, _Pieces())
            own = groupby(unsorted.take(number), lambda row: row[0].landed is not None)
            for stays, rows in own:
                self._give_own(pieces, list(rows), stays)
            if not any(unsorted.chunks):
                del self._unsorted[kind]
        else:
            self.sort(kind)
        del self._sequences[number]

    def _give_own(self, pieces: _Pieces, own: Sequence[tuple[Chunk, int]], stays: bool) -> None:
        """Give a sequence its own rows of some chunks: copies, unless they stay where they are."""
        positions = np.array([chunk.positions[row] for chunk, row in own], np.int32)
        if stays:
            begin = 0
            for rows in _joined(own):
                self._append(pieces, positions[begin : begin + len(rows)], rows)
                begin += len(rows)
            return
        first = own[0][0].rows
        copied = self._memory.empty((len(own), *first.shape[1:]), first.dtype)
        self._append(pieces, positions, copied)
        if self._copier.shares(copied.nbytes):
            parts = [chunk.rows[row : row + 1] for chunk, row in own]
            self._copier.run([RowCopy(copied, at, part) for at, part in enumerate(parts)])
            return
        target = row_bytes(copied)
        for at, (chunk, row) in enumerate(own):
            target[at] = chunk.data[row]

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

    def _give_slab(self, slab: Slab, chunks: Sequence[Chunk], owners: Owners) -> None:
        """Give the sequences their rows of consecutive steps: nothing is copied."""
        landed = chunks[0].landed
        assert landed is not None
        positions = np.stack([chunk.positions for chunk in chunks], 1)
        steps = slab.rows[:, landed.step : landed.step + len(chunks)]
        for number, where, rows in zip(
            owners[: len(positions)].tolist(), positions, steps, strict=True
        ):
            if number != NOBODY:
                pieces = self._pieces.setdefault(self._sequences[number], _Pieces())
                self._append(pieces, where, rows)

    def _sort_small(self, chunks: Sequence[Chunk], owners: Owners) -> list[RowCopy]:
        """As `_cut`, for chunks whose rows do not lie together."""
        order = np.argsort(owners, kind="stable")
        order = order[np.searchsorted(owners[order], NOBODY, side="right") :]
        positions = np.concatenate([chunk.positions for chunk in chunks])[order]
        # Copied once, out of the page-locked memory that the next steps need. Rows that nobody has
        # go behind all others, into the place of one.
        shape, count = chunks[0].rows.shape[1:], len(order) + (len(order) < len(owners))
        rows = self._memory.empty((count, *shape), chunks[0].rows.dtype)
        place = np.full(len(owners), len(order))
        place[order] = np.arange(len(order))
        begin, copies = 0, []
        for chunk in chunks:
            end = begin + len(chunk.positions)
            copies.append(RowCopy(rows, place[begin:end], chunk.rows))
            begin = end
        for low, high in runs_of(owners[order]):
            pieces = self._pieces.setdefault(self._sequences[int(owners[order[low]])], _Pieces())
            self._append(pieces, positions[low:high], rows[low:high])
        return copies

    @staticmethod
    def _append(pieces: _Pieces, positions: IntArray, rows: torch.Tensor) -> None:
        pieces.positions.append(positions)
        pieces.rows.append(rows)
        pieces.nbytes += rows.nbytes


def _joined(own: Sequence[tuple[Chunk, int]]) -> Iterator[torch.Tensor]:
    """The rows of one sequence in some chunks, which stay where they are: those of consecutive
    steps lie together."""
    runs: list[list[tuple[Chunk, int]]] = []
    for chunk, row in own:
        if runs:
            before, place = runs[-1][-1]
            if row == place and chunk.lies_behind(before):
                runs[-1].append((chunk, row))
                continue
        runs.append([(chunk, row)])
    for run in runs:
        chunk, row = run[0]
        landed = chunk.landed
        if landed is None or landed.slab is None:
            yield chunk.rows[row : row + 1]
        else:
            yield landed.slab.rows[row, landed.step : landed.step + len(run)]


def _positions_bytes(rows: Sequence[torch.Tensor | SpilledRows]) -> int:
    """Of rows `[rows, places, hidden]`, with positions for each place."""
    return sum(4 * each.shape[0] * each.shape[1] for each in rows if isinstance(each, torch.Tensor))

"""Shared memory that workers write results to, who may use it when, and where a worker looks up its
place there."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import weakref
from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tllm.consumers.next_token import ADDRESS_WIDTH, FILE_BITS, HEADER
from tllm.logprobs.query import Answer, AnswerRows, Form, SharedRow
from tllm.shared_memory import FOLDER, IN_MEMORY, WORTHWHILE, SharedRows, room

logger = logging.getLogger(__name__)

_FIRST_ROWS = 16
_ALIGNED = 16
"""Rows begin at a multiple of so many numbers, a line of a cache."""
_LEND_BYTES = 2**16
"""Results smaller than this are copied: that costs less than to know who refers to them."""
_ENTRIES = 512
"""Addresses of a table."""

NOTHING_SENT = (
    "the worker sent no log-probabilities: its consumer 'next_token' has raised (see the log), or "
    "was unregistered"
)


class Arena:
    """Shared rows of one width. A large result is a view of its row, which is free again when
    nobody refers to the result any more. When so many rows are held so that what is on its way
    might want for some, further results are copies.

    Memory grows in few, large files: each costs new pages, and the time of the step that needs it.
    A place is the number of a file and of a row there, as `NextTokenConsumer` takes an address.

    All methods are called on the engine's loop.

    Args:
        numbers: the most values a row holds.
        max_bytes: the most memory of all rows.
    """

    def __init__(self, numbers: int, max_bytes: int) -> None:
        self.width = -(-(HEADER + numbers) // _ALIGNED) * _ALIGNED
        self._row_bytes = 4 * self.width
        self._max_rows = max(2, max_bytes // self._row_bytes)
        self._files: list[_ArenaFile] = []
        self.paths: tuple[str, ...] = ()
        self._free: list[int] = []  # a heap: neighbours are copied in one go
        self._lent: dict[int, _LentRows] = {}
        self._num_lent = 0
        # Filled when results are dropped, at any point of any thread: no lock, no counter.
        self._returned: deque[range] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._rows = 0
        self._most_on_the_way = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def free(self) -> int:
        self._collect()
        return len(self._free)

    def expect(self, rows: int) -> None:
        """So many results will be asked for now: have rows for them, if there is memory, and for
        as many again, since those before are often held until the next are there. Many have rows
        that follow each other, so that they are one tensor as they lie."""
        missing = rows - self.free
        if missing > 0:
            self._grow_if_possible(max(missing, self._rows + 2 * missing))
        many = rows <= len(self._free) and rows * self._row_bytes >= WORTHWHILE
        if many and self._fits(2 * rows) and self._run_of(rows) is None:
            self._grow_if_possible(2 * rows)

    def _fits(self, rows: int) -> bool:
        within = self._rows + rows <= self._max_rows
        return within and (not IN_MEMORY or rows * self._row_bytes <= room())

    def _grow_if_possible(self, wanted: int) -> None:
        if self._rows < self._max_rows:
            with contextlib.suppress(RuntimeError):  # told to whoever asks for a row
                self._grow(wanted)

    def _run_of(self, wanted: int) -> int | None:
        """Where in the list of free rows so many begin that follow each other."""
        self._free.sort()  # still a heap
        found = np.array(self._free, np.int64)
        ends = found[wanted - 1 :]
        begins = np.flatnonzero(ends - found[: len(ends)] == wanted - 1)
        return int(begins[0]) if len(begins) else None

    def lease_many(self, wanted: int) -> list[int]:
        """So many free rows, the last one first; fewer where there is no memory for as many, or
        somebody waits for one. They follow each other where so many do."""
        self.expect(wanted)
        if self._waiting and any(not waiter.done() for waiter in self._waiting):
            return []
        first = self._run_of(wanted) or 0
        taken = self._free[first : first + wanted]
        del self._free[first : first + wanted]  # still a heap
        self._note_on_the_way()
        taken.reverse()
        return taken

    def _take(self) -> int:
        place = heapq.heappop(self._free)
        self._note_on_the_way()
        return place

    def _note_on_the_way(self) -> None:
        on_the_way = self._rows - len(self._free) - self._num_lent
        self._most_on_the_way = max(self._most_on_the_way, on_the_way)

    def _has_free(self) -> bool:
        self._collect()
        return bool(self._free) or (self._rows < self._max_rows and self._grow(self._rows))

    async def lease(self) -> int:
        """A free row; waits for one when there is no more memory."""
        while not self._has_free():
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            self._collect()  # of results that were dropped before others could see who waits
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()  # the row was for this one, who does not take it
                raise
        return self._take()

    def option(self, place: int) -> list[object]:
        """A row as `NextTokenConsumer` takes it."""
        number, row = divmod(place, 1 << FILE_BITS)
        return [self.paths[number], self.width, row]

    def release(self, place: int) -> None:
        """A row is free again."""
        heapq.heappush(self._free, place)
        self._wake()

    def _wake(self) -> None:
        """There is a free row for one of those who wait."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def read(self, place: int, ticket: int) -> Answer:
        """What was written to a row; the row is given back in time.

        Raises `RuntimeError` when it was not written for this ticket.
        """
        number, row = divmod(place, 1 << FILE_BITS)
        _, written, counts = self._files[number]
        if written[row] != ticket:
            self.release(place)
            raise RuntimeError(NOTHING_SENT)
        found = self._taken(range(place, place + 1), *counts[row].tolist())[0]
        lent = SharedRow(self.paths[number], row) if place in self._lent else None
        return replace(found, row=lent)

    def read_rows(self, places: range, tickets: range) -> AnswerRows | None:
        """What was written to rows of one form that follow each other; they are given back in time,
        and, if the answers are large, together.

        Returns:
            None, with nothing given back, when one was not written for its ticket.
        """
        number, first = divmod(places.start, 1 << FILE_BITS)
        _, written, counts = self._files[number]
        if (written[first : first + len(places)] != np.array(tickets)).any():
            return None
        return self._taken(places, *counts[first].tolist())

    def _taken(self, places: range, count: int, num_ids: int) -> AnswerRows:
        """The values of rows, and their ids."""
        number, first = divmod(places.start, 1 << FILE_BITS)
        which = slice(first, first + len(places))
        rows = self._files[number].rows
        rows.unlink()  # the worker has it: nothing is left behind, however this process ends
        values = rows.values[which, HEADER : HEADER + count]
        if not num_ids and 4 * count >= _LEND_BYTES and self._may_lend(len(places)):
            lent = self._lent[places.start] = _LentRows(values, self._came_back)
            lent.places = places
            self._num_lent += len(places)
            return AnswerRows(torch.from_numpy(values))
        ids = rows.values[which, HEADER + count : HEADER + count + num_ids].view(np.int32)
        found = AnswerRows(
            torch.from_numpy(values.copy()), torch.from_numpy(ids.copy()) if num_ids else None
        )
        for place in places:
            self.release(place)
        return found

    def _may_lend(self, rows: int) -> bool:
        """Whether enough rows are left for what is on its way at a time: an eighth at least, half
        of them at most."""
        most = self._max_rows
        left = min(max(most // 8, self._most_on_the_way, 1), most - most // 2)
        return self._num_lent + rows <= most - left

    def _came_back(self, lent: _LentRows) -> None:
        self._returned.append(lent.places)
        # On any thread: somebody may be told who does not wait any more.
        with contextlib.suppress(IndexError, RuntimeError):
            self._waiting[0].get_loop().call_soon_threadsafe(self._collect)

    def close(self) -> None:
        """Remove the files; results keep what they refer to, and whoever waits for a row is told
        that nothing comes."""
        for file in self._files:
            file.rows.unlink()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(RuntimeError(NOTHING_SENT))

    def _collect(self) -> None:
        """Take back the rows of results that nobody refers to any more."""
        while self._returned:
            places = self._returned.popleft()
            del self._lent[places.start]
            self._num_lent -= len(places)
            for place in places:
                self.release(place)

    def _grow(self, wanted: int) -> bool:
        rows = min(max(_FIRST_ROWS, wanted), self._max_rows - self._rows)
        fitting = min(rows, room() // self._row_bytes) if IN_MEMORY else rows
        if not fitting and not self._rows:  # the first ones may take what is left to others
            fitting = min(rows, _FIRST_ROWS)
        try:
            file = SharedRows.create(fitting, self.width) if fitting else None
        except OSError as error:
            if not self._rows:
                raise RuntimeError(
                    f"no room for {fitting * self._row_bytes / 2**20:.0f} MiB of shared rows in "
                    f"{FOLDER}: {error}. Enlarge it (docker run --shm-size=...), or pass "
                    "transport='rpc'"
                ) from error
            file = None
        if file is None or len(file) < rows:
            self._max_rows = self._rows + (0 if file is None else len(file))
            logger.warning(
                "%s has no room for more than %d shared rows: results may wait for one, or are "
                "copied. Enlarge it (docker run --shm-size=...)",
                FOLDER,
                self._max_rows,
            )
        if file is not None:
            self._add(file)
        return file is not None

    def _add(self, file: SharedRows) -> None:
        number = len(self._files)
        tickets = file.values[:, :2].view(np.int64)[:, 0]
        counts = file.values[:, 2:HEADER].view(np.int32)
        self._files.append(_ArenaFile(file, tickets, counts))
        self.paths = (*self.paths, str(file.path))
        self._rows += len(file)
        for row in range(len(file)):
            heapq.heappush(self._free, number << FILE_BITS | row)


def arrived(arena: Arena, place: int, ticket: int) -> Answer | Exception:
    """What `Arena.read` gives or raises."""
    try:
        return arena.read(place, ticket)
    except RuntimeError as unwritten:
        return unwritten


class _ArenaFile(NamedTuple):
    """Shared rows, with what their headers say.

    Attributes:
        tickets: int64 `[rows]`.
        counts: int32 `[rows, 2]`, values and ids.
    """

    rows: SharedRows
    tickets: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int32]


class _LentRows(weakref.ref[Any]):
    """Rows that results are views of; knows when nobody refers to any of these any more."""

    __slots__ = ("places",)
    places: range


class Address:
    """An entry of a table, where a worker finds the ticket and the place of the next result of one
    request.

    Attributes:
        arena: that the places are of.
        told: what the engine was told of it: the form of the results and the number of files; None
            for nothing.
    """

    __slots__ = ("_all", "_entries", "_entry", "_serial", "_table", "arena", "told")

    def __init__(
        self, of: Addresses, arena: Arena, table: SharedRows, entry: int, serial: int
    ) -> None:
        self.arena = arena
        self.told: tuple[Form, int] | None = None
        self._all = of
        self._table, self._entry, self._serial = table, entry, serial
        self._entries = table.values.view(np.int64)
        self._entries[entry] = 0, 0, serial, 0

    def say(self, ticket: int, place: int) -> None:
        """Where the next result goes."""
        entry = self._entries[self._entry]
        entry[0], entry[1] = ticket, place

    def options(self, form: Form) -> dict[str, Any] | None:
        """As `NextTokenConsumer` takes them; None when the engine has them."""
        arena = self.arena
        if self.told == (form, len(arena.paths)):
            return None
        self.told = form, len(arena.paths)
        table = str(self._table.path)
        address = [table, self._entry, self._serial, arena.width, list(arena.paths)]
        return {"address": address, **form.options()}

    def heard(self) -> None:
        """The worker has the table: nothing is left behind, however this process ends."""
        self._table.unlink()

    def give_back(self) -> None:
        """Nothing more is said here. A worker that is late finds another serial."""
        self._entries[self._entry, 2] = 0
        self._all.free.append((self._table, self._entry))


class Addresses:
    """Tables of the addresses of requests.

    Attributes:
        free: tables and entries that nobody uses.
    """

    def __init__(self) -> None:
        self.free: list[tuple[SharedRows, int]] = []
        self._serials = itertools.count(1)
        self._tables: list[SharedRows] = []

    def take(self, arena: Arena) -> Address:
        """A new one. Raises `OSError` when there is no room for a table."""
        if not self.free:
            table = SharedRows.create(_ENTRIES, ADDRESS_WIDTH)
            self._tables.append(table)
            self.free = [(table, entry) for entry in reversed(range(_ENTRIES))]
        return Address(self, arena, *self.free.pop(), next(self._serials))

    def close(self) -> None:
        for table in self._tables:
            table.unlink()

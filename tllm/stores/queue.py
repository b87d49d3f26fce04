"""The bounded queue between those who submit records and the threads that write them."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from tllm.stores.error import StoreError, describe
from tllm.stores.format import as_bytes
from tllm.stores.payload import write_all
from tllm.stores.record import CheckedStack
from tllm.stores.recording import QueuedRows

Overflow = Literal["block", "drop", "spill"]

_SEGMENT_BYTES = 4 << 30
"""That are written to a file before the next is begun; those that were read take no space."""

_SEGMENTS = 32
"""Files that make up the limit where only whole ones give their space back."""

_PAGE = mmap.PAGESIZE

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Flags of `fallocate`."""


@dataclass(eq=False)
class _Segment:
    """A file without a name: it is gone when the process is, however that ends.

    Attributes:
        size: bytes that were written, also those that were read since.
        held: bytes that it takes on disk, in whole pages.
        unread: how many `SpilledRows` nobody has read.
        edges: by page, how many of these begin or end in it. Pages between are of one alone.
    """

    fd: int
    size: int = 0
    held: int = 0
    unread: int = 0
    edges: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, eq=False)
class SpilledRows:
    """Rows on disk.

    Attributes:
        shape: `[rows, ...]`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    _segment: _Segment
    _offset: int

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def edges(self) -> set[int]:
        """The pages of the file in which they begin and end."""
        if not self.nbytes:
            return set()
        return {self._offset // _PAGE, (self._offset + self.nbytes - 1) // _PAGE}


class SpillFile:
    """Takes rows out of memory and gives them back; for several threads.

    What was read gives its space back at once, page by page; where the file system cannot do that,
    when nothing is left to read in the same segment.

    Args:
        folder: where; the system's temporary folder by default.
        limit: bytes that may lie there at a time.

    Attributes:
        used: bytes that lie there, in whole pages.
    """

    def __init__(self, folder: Path | None, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._folder = folder
        self._segments: list[_Segment] = []
        self._has_holes = True
        self._lock = threading.Lock()

    def put(self, tensor: torch.Tensor) -> SpilledRows | None:
        """Write rows, on the CPU; None when they do not fit below the limit. Raises `OSError`."""
        data = as_bytes(tensor.contiguous())
        with self._lock:
            segment = self._filling()
            offset = segment.size
            growth = _in_pages(offset + len(data)) - _in_pages(offset)
            if self.used + growth > self.limit:
                return None
            os.lseek(segment.fd, offset, os.SEEK_SET)
            write_all(segment.fd, [data])
            spilled = SpilledRows(tuple(tensor.shape), tensor.dtype, len(data), segment, offset)
            segment.size += len(data)
            segment.held += growth
            segment.unread += 1
            segment.edges.update(spilled.edges)
            self.used += growth
        return spilled

    def pop(self, spilled: SpilledRows) -> torch.Tensor:
        """Read rows back, once. Raises `OSError`."""
        data = bytearray(spilled.nbytes)
        view = memoryview(data)
        try:
            while len(view):
                at = spilled._offset + spilled.nbytes - len(view)
                count = os.preadv(spilled._segment.fd, [view], at)
                if not count:
                    raise OSError(f"the spill file ended {len(view)} bytes early")
                view = view[count:]
        finally:
            self.discard(spilled)
        if not data:
            return torch.empty(spilled.shape, dtype=spilled.dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(spilled.dtype).view(spilled.shape)

    def discard(self, spilled: SpilledRows) -> None:
        """Nobody will read these rows: their space is given back."""
        segment = spilled._segment
        with self._lock:
            if segment not in self._segments:
                return
            segment.unread -= 1
            if segment.unread:
                self._punch(spilled)
                return
            self.used -= segment.held
            if segment is self._segments[-1]:
                # It is filled again.
                os.ftruncate(segment.fd, 0)
                segment.size = segment.held = 0
                segment.edges.clear()
            else:
                self._segments.remove(segment)
                os.close(segment.fd)

    def close(self) -> None:
        """Let go of all files; what is in them is lost."""
        with self._lock:
            while self._segments:
                os.close(self._segments.pop().fd)
            self.used = 0

    def _filling(self) -> _Segment:
        """The segment to which rows are added."""
        most = _SEGMENT_BYTES if self._has_holes else max(1, self.limit // _SEGMENTS)
        if not self._segments or self._segments[-1].size >= most:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                self._has_holes = _punch_hole(file.fileno(), 0, _PAGE)
                self._segments.append(_Segment(os.dup(file.fileno())))
        return self._segments[-1]

    def _punch(self, spilled: SpilledRows) -> None:
        """Give back the pages of these rows in which nothing else is to be read."""
        segment, edges = spilled._segment, spilled.edges
        segment.edges.subtract(edges)
        free = [page for page in edges if not segment.edges[page]]
        for page in free:
            del segment.edges[page]
        if not edges:
            return
        first, last = min(edges), max(edges)
        start = first if first in free else first + 1
        # More rows will come to the last page that is not full.
        stop = min(last + 1 if last in free else last, segment.size // _PAGE)
        nbytes = (stop - start) * _PAGE
        if nbytes > 0 and self._has_holes and _punch_hole(segment.fd, start * _PAGE, nbytes):
            segment.held -= nbytes
            self.used -= nbytes


@dataclass(eq=False)
class Barrier:
    """Asks a thread to publish all that came before; `stop` also to end."""

    stop: bool = False
    passed: threading.Event = field(default_factory=threading.Event)


_Spilled = Sequence[SpilledRows] | None


class Intake:
    """One queue a thread, first in, first out, with one limit in bytes for all.

    Bytes count from `put` until `release`: also while a thread holds rows back to write them in
    larger blocks. Rows larger than the limit are let in when nothing else is there.

    Args:
        threads: number of queues.
        overflow: what `put` does when there is no room: `block` waits, `drop` refuses, `spill`
            leaves the rows on disk until their turn comes, and refuses when the spill file is full.
    """

    def __init__(self, threads: int, limit: int, overflow: Overflow, spill: SpillFile) -> None:
        self._limit = limit
        self._overflow = overflow
        self._spill = spill
        self._queues: list[deque[tuple[QueuedRows, _Spilled] | Barrier]] = [
            deque() for _ in range(threads)
        ]
        self._loads = [0] * threads
        self._changed = threading.Condition()
        self._waiting = 0
        self._turn = -1
        self._closed = False
        self.used = 0
        self.peak = 0
        self.blocked_seconds = 0.0
        self.spilled_items = 0
        self.spilled_bytes = 0

    @property
    def room(self) -> int:
        """Bytes that are let in at once."""
        return self._limit - self.used

    @property
    def crowded(self) -> bool:
        """Whether somebody waits for room."""
        return self._waiting > 0

    def lightest(self) -> int:
        """The thread with the least to do; of several, each in turn."""
        with self._changed:
            count = len(self._loads)
            self._turn = (self._turn + 1) % count
            turns = [(self._turn + i) % count for i in range(count)]
            return min(turns, key=self._loads.__getitem__)

    def put(self, thread: int, item: QueuedRows) -> StoreError | None:
        """Queue rows; the error, and nothing queued, when there is no room for them."""
        nbytes = item.nbytes
        with self._changed:
            if nbytes and not self._fits(nbytes):
                if self._overflow == "block":
                    self._wait(nbytes)
                elif self._overflow == "drop":
                    return StoreError(
                        f"{item.recording.what}: {nbytes} bytes were dropped, the queue of "
                        f"{self._limit} bytes was full",
                        "dropped",
                    )
            if self._closed:
                return closed_error()
            if not nbytes or self._fits(nbytes):
                self._push(thread, item, None)
                return None
        return self._put_on_disk(thread, item)

    def put_barrier(self, thread: int, barrier: Barrier) -> None:
        """Raises `StoreError` when the threads end: nobody would come to it."""
        with self._changed:
            if self._closed:
                raise closed_error()
            self._queues[thread].append(barrier)
            self._changed.notify_all()

    def close(self, last: Sequence[Barrier]) -> None:
        """The last entry of each queue; what comes later, or waits for room now, is refused."""
        with self._changed:
            self._closed = True
            for queue, barrier in zip(self._queues, last, strict=True):
                queue.append(barrier)
            self._changed.notify_all()

    def pop(
        self, thread: int, deadline: float | None, holding: bool
    ) -> QueuedRows | Barrier | None:
        """The next entry of a thread; None at the deadline, or when others wait for its memory.

        Args:
            deadline: by `time.monotonic`; None waits for ever.
            holding: the thread has rows that it could write to make room.
        """
        queue = self._queues[thread]
        with self._changed:
            while not queue:
                if holding and self._waiting:
                    return None
                timeout = None if deadline is None else deadline - time.monotonic()
                if timeout is not None and timeout <= 0:
                    return None
                self._changed.wait(timeout)
            entry = queue.popleft()
            if isinstance(entry, Barrier):
                return entry
            item, spilled = entry
            self._loads[thread] -= item.nbytes
            if spilled is not None:
                # Rows that come back from disk may exceed the limit, by one entry a thread.
                self._use(item.nbytes)
        if spilled is not None:
            self._pop_from_disk(item, spilled)
        return item

    def release(self, nbytes: int) -> None:
        """Bytes of rows need no memory any more."""
        if nbytes:
            with self._changed:
                self.used -= nbytes
                self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        return self.used == 0 or self.used + nbytes <= self._limit

    def _use(self, nbytes: int) -> None:
        self.used += nbytes
        self.peak = max(self.peak, self.used)

    def _wait(self, nbytes: int) -> None:
        start = time.monotonic()
        self._waiting += 1
        self._changed.notify_all()
        try:
            while not self._fits(nbytes) and not self._closed:
                self._changed.wait()
        finally:
            self._waiting -= 1
            self.blocked_seconds += time.monotonic() - start

    def _push(self, thread: int, item: QueuedRows, spilled: _Spilled) -> None:
        item.queued = True
        self._queues[thread].append((item, spilled))
        self._loads[thread] += item.nbytes
        if spilled is None:
            self._use(item.nbytes)
        self._changed.notify_all()

    def _put_on_disk(self, thread: int, item: QueuedRows) -> StoreError | None:
        """The rows go to the spill file, their entry to its place in the queue."""
        what = f"{item.recording.what}: {item.nbytes} bytes were dropped"
        spilled: list[SpilledRows] = []
        error: StoreError | None = None
        for stack in item.stacks:
            try:
                kept = self._spill.put(stack.tensor)
            except OSError as failure:
                error = StoreError.from_os_error(f"{what}, spilling failed", failure)
                break
            if kept is None:
                full = f"the queue was full and the spill file had its {self._spill.limit} bytes"
                error = StoreError(f"{what}, {full}", "dropped")
                break
            spilled.append(kept)
        if error is None:
            # Not views of the rows: those would keep their memory.
            left = [replace(stack, tensor=torch.empty(0)) for stack in item.stacks]
            with self._changed:
                if not self._closed:
                    item.stacks = left
                    self.spilled_items += 1
                    self.spilled_bytes += sum(kept.nbytes for kept in spilled)
                    self._push(thread, item, spilled)
                    return None
            error = closed_error()
        for kept in spilled:
            self._spill.discard(kept)
        return error

    def _pop_from_disk(self, item: QueuedRows, spilled: Sequence[SpilledRows]) -> None:
        stacks: list[CheckedStack] = []
        failure: OSError | None = None
        for stack, kept in zip(item.stacks, spilled, strict=True):
            try:
                stacks.append(replace(stack, tensor=self._spill.pop(kept)))
            except OSError as error:
                failure = error
        item.stacks = stacks
        if failure is not None:
            what = f"{item.recording.what}: spilled rows could not be read"
            lost = StoreError.from_os_error(what, failure)
            item.lost = {**item.lost, f"spilled rows were lost: {describe(failure)}": lost}
            item.stacks = ()
            self.release(item.nbytes)


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None), "fallocate", None)  # Linux has it alone
    if function is not None:
        function.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
    return function


def _punch_hole(fd: int, offset: int, nbytes: int) -> bool:
    """Take whole pages of a file, which stays as long, off the disk; whether that could be done."""
    fallocate = _fallocate()
    return fallocate is not None and fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, nbytes) == 0


def closed_error() -> StoreError:
    """What is said of a record that comes when the writer has been closed."""
    return StoreError("the writer is closed; open another one", "closed")

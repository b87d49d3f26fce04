"""Memory for results: shared files that are used again when nobody has the results any more.

New pages of shared memory cost more than what is written into them: the system clears each, and
maps it with a fault. So a worker keeps its files, and asks of each whether a reader has it or may
still come for it (`answers.py` opens them). A GPU writes into memory that is used again by
itself (`ResultMemory.used_before`); to page-lock memory that is used once would cost more than the
host's copy does. Where rows need new memory, other threads allocate its pages while the forward
pass computes the rows (`ResultMemory.make_ready`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import mmap
import os
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from tllm.cuda_runtime import page_lock, page_unlock
from tllm.shared_memory import (
    FOLDER,
    IN_MEMORY,
    WORTHWHILE,
    Bytes,
    SharedFile,
    populate,
    room,
    sweep,
)

_KEPT_S = 10.0
"""How long memory that nobody uses is kept, at least; at most twice as long."""

_KEPT_SHARE = 4
"""Of the memory that can be shared, one part in so many is kept at most."""

_SMALL_PIECE = 4 << 20
"""Bytes of the files that small results share."""

_ALIGNMENT = 64
"""Of small results in such a file, in bytes."""

_MOST_MAKERS = 8
"""Threads that allocate the pages of new memory, at most; at most half as many as processors."""

_Buffer: TypeAlias = "ctypes.Array[ctypes.c_uint8]"

_T = TypeVar("_T")


class ResultPiece:
    """A shared file of a worker, used for one result after another.

    Args:
        populated: its pages are mapped, too; that takes longer, and is worth it on a thread that
            nobody waits for.

    Raises `OSError` when there is no room, or no file descriptor.

    Attributes:
        file: under the worker's name for it; readers are given links.
        capacity: bytes.
        address: of the first one.
        let_go: when the worker last had no use for it.
    """

    def __init__(self, capacity: int, populated: bool = False) -> None:
        self.file = SharedFile.reserve(capacity, backed=not populated)
        self.capacity = capacity
        self.let_go = 0.0
        try:
            with self.file.path.open("r+b") as opened:
                self._mapped = mmap.mmap(opened.fileno(), 0)
                self._descriptor = os.dup(opened.fileno())
        except OSError:  # no descriptor is left: the memory must not stay
            self.file.release()
            raise
        self.address = ctypes.addressof(ctypes.c_uint8.from_buffer(self._mapped))
        # A process that ends closes it anyway, and its threads may still ask whether it is held.
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self._page_locked: bool | None = None
        if populated:
            self._populate()

    def _populate(self) -> None:
        try:
            populate(self.address, self.capacity)
        except OSError as error:
            if error.errno != errno.EINVAL:
                self.file.release()
                raise
            self.file.back(0, self.capacity)  # an older Linux

    def lock_pages(self, device: torch.device) -> bool:
        """Whether a GPU can write into it, from now on at the latest."""
        if self._page_locked is None:
            self._page_locked = page_lock(self.address, self.capacity, device)
            if self._page_locked:
                # On whichever thread: a timer's, or the one that collects garbage.
                weakref.finalize(self, page_unlock, self.address, device).atexit = False
        return self._page_locked

    def buffer(self, nbytes: int) -> _Buffer:
        """Its first bytes, for one use: whatever is made of them refers to this object."""
        return (ctypes.c_uint8 * nbytes).from_buffer(self._mapped)

    @property
    def is_held(self) -> bool:
        """Whether a reader has it mapped, or has a link that he did not open yet.

        A reader locks the file before he removes his link (`SharedFile.hold`), so whoever is missed
        by the first question is found by the second.
        """
        if os.fstat(self._descriptor).st_nlink > 1:
            return True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False


class _Coming(NamedTuple):
    """Memory that is made ready.

    Attributes:
        piece: None when it cannot be had.
    """

    capacity: int
    since: float
    piece: Future[ResultPiece | None]


class ResultMemory:
    """Hands out memory for rows that will be results. Large pieces are shared files.

    Any thread may ask. Small pieces lie in one file beside each other. What is not shared, for want
    of room (a quarter is left to others), is copied on its way to the user as anything else is.

    Args:
        most: shared files at a time; each has a file of its own.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._pieces: dict[int, tuple[int, ResultPiece]] = {}
        self._kept: deque[ResultPiece] = deque()
        self._coming: deque[_Coming] = deque()
        self._makers: ThreadPoolExecutor | None = None
        # Of the file that small results share at present, as long as anybody has one of them, and
        # how many of its bytes they have.
        self._small: Callable[[], _Buffer | None] = _nothing
        self._small_used = 0
        self._small_lock = threading.Lock()
        self._keeper: threading.Timer | None = None
        folder = os.statvfs(FOLDER)
        self._most_kept = folder.f_blocks * folder.f_frsize // _KEPT_SHARE
        weakref.finalize(self, _release, self._kept, self._coming)
        if most:
            sweep()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A CPU tensor whose values are undefined: fill all of it, since they may be those of
        another request."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        raw = self._shared(nbytes) if nbytes >= WORTHWHILE else self._beside_others(nbytes)
        if raw is None:
            # numpy asks the system for huge pages, which torch does not: filling new memory is
            # three times as fast.
            raw = np.empty(nbytes, np.uint8)
        return torch.from_numpy(raw).view(dtype).view(shape)

    def used_before(self, least: int, most: int, device: torch.device) -> torch.Tensor | None:
        """Memory `[bytes]` uint8 of between so many bytes that has held a result before and that
        nobody has any more; `device` may write into it without the host. None where there is none.

        Its values are undefined, as those of `empty`.
        """
        piece = self._largest_kept(least, most)
        if piece is None:
            return None
        if device.type == "cuda" and not piece.lock_pages(device):
            self._kept.append(piece)
            return None
        return torch.from_numpy(_bytes(self._in_use(piece, piece.capacity)))

    def make_ready(self, sizes: Sequence[int]) -> None:
        """Rows of so many bytes each are on their way, and `empty` will be asked for memory for
        them, of which there is none that was used before: allocate its pages on other threads
        meanwhile."""
        capacities = [_capacity(nbytes) for nbytes in sizes if nbytes >= WORTHWHILE]
        wanted = bool(capacities) and IN_MEMORY
        if not wanted or not self._has_room(sum(capacities), len(capacities)):
            return
        if self._makers is None:
            threads = max(1, min(_MOST_MAKERS, len(os.sched_getaffinity(0)) // 2))
            self._makers = ThreadPoolExecutor(threads, "tllm-memory")
        for capacity in capacities:
            try:
                piece = self._makers.submit(_populated, capacity)
            except RuntimeError:  # there are no more threads: it is made when it is asked for
                break
            self._coming.append(_Coming(capacity, time.monotonic(), piece))
        self._keep_looking()

    def locate(self, views: Sequence[memoryview]) -> list[tuple[SharedFile, int] | None]:
        """The file that some bytes are in, and where in it; None for those that are not
        shared."""
        pieces = dict(self._pieces)
        if not pieces:
            return [None] * len(views)
        starts = sorted(pieces)
        found: list[tuple[SharedFile, int] | None] = []
        for view in views:
            address = np.frombuffer(view, np.uint8).ctypes.data if len(view) else 0
            number = bisect_right(starts, address) - 1
            if number >= 0:
                nbytes, piece = pieces[starts[number]]
                offset = address - starts[number]
                found.append((piece.file, offset) if offset + len(view) <= nbytes else None)
            else:
                found.append(None)
        return found

    def trim(self, age: float = 0.0) -> None:
        """Give back what is kept for nothing for so many seconds, or beyond a share of all memory.
        Readers keep what they have."""
        now = time.monotonic()
        for _ in range(len(self._coming)):
            coming = _first(self._coming)
            if coming is None:
                break
            if now - coming.since < age or not coming.piece.done():
                self._coming.append(coming)
            elif (piece := coming.piece.result()) is not None:
                piece.file.release()
        kept = 0
        for _ in range(len(self._kept)):
            piece = _first(self._kept)
            if piece is None:
                return
            kept += piece.capacity
            if now - piece.let_go < age and kept <= self._most_kept:
                self._kept.append(piece)
            else:
                piece.file.release()

    def _shared(self, nbytes: int) -> Bytes | None:
        """A piece of a file that nobody else has."""
        buffer = self._file(nbytes)
        return None if buffer is None else _bytes(buffer)

    def _beside_others(self, nbytes: int) -> Bytes | None:
        """Bytes of a file that small results share."""
        if not self._most:
            return None
        taken = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._small_lock:
            buffer = self._small()
            if buffer is None or self._small_used + taken > len(buffer):
                buffer = self._file(_SMALL_PIECE)
                if buffer is None:
                    return None
                self._small, self._small_used = weakref.ref(buffer), 0
            begin = self._small_used
            self._small_used += taken
        return _bytes(buffer)[begin : begin + nbytes]

    def _file(self, nbytes: int) -> _Buffer | None:
        """The first bytes of a file that nobody has."""
        piece = (
            self._ready_one(nbytes, 2 * nbytes)
            or self._kept_one(nbytes, 2 * nbytes)
            or self._made(nbytes)
        )
        return None if piece is None else self._in_use(piece, nbytes)

    def _in_use(self, piece: ResultPiece, nbytes: int) -> _Buffer:
        """The first bytes of a piece, which is kept again when nothing refers to them."""
        self._pieces[piece.address] = nbytes, piece
        buffer = piece.buffer(nbytes)
        weakref.finalize(buffer, self._let_go, piece.address)
        return buffer

    def _kept_one(self, least: int, most: int) -> ResultPiece | None:
        """One of those that are kept, of between so many bytes, that no reader has."""
        for _ in range(len(self._kept)):
            piece = _first(self._kept)
            if piece is None:
                return None
            if least <= piece.capacity <= most and not piece.is_held:
                return piece
            self._kept.append(piece)
        return None

    def _largest_kept(self, least: int, most: int) -> ResultPiece | None:
        """Likewise, the largest: what lands in few files is a result in few pieces."""
        fitting = [piece for piece in list(self._kept) if least <= piece.capacity <= most]
        for piece in sorted(fitting, key=lambda each: each.capacity, reverse=True):
            if not piece.is_held:
                try:
                    self._kept.remove(piece)
                except ValueError:  # another thread has it
                    continue
                return piece
        return None

    def _ready_one(self, least: int, most: int) -> ResultPiece | None:
        """One of those that are made ready, of between so many bytes; waits for it."""
        for _ in range(len(self._coming)):
            coming = _first(self._coming)
            if coming is None:
                return None
            if not least <= coming.capacity <= most:
                self._coming.append(coming)
            elif (piece := coming.piece.result()) is not None:
                return piece
        return None

    def _made(self, nbytes: int) -> ResultPiece | None:
        if not IN_MEMORY:
            return None
        capacity = _capacity(nbytes)
        if not self._has_room(capacity):
            self.trim()
            if not self._has_room(capacity):
                return None
        try:
            return ResultPiece(capacity)
        except OSError:
            return None

    def _has_room(self, nbytes: int, pieces: int = 1) -> bool:
        coming = list(self._coming)
        if len(self._pieces) + len(self._kept) + len(coming) + pieces > self._most:
            return False
        # What is still to be allocated takes no room yet.
        nbytes += sum(each.capacity for each in coming if not each.piece.done())
        return nbytes <= room()

    def _let_go(self, address: int) -> None:
        """Nobody in this process refers to a piece. Who was given it has a link of his own."""
        _, piece = self._pieces.pop(address)
        piece.let_go = time.monotonic()
        self._kept.append(piece)
        self.trim(_KEPT_S)
        self._keep_looking()

    def _keep_looking(self) -> None:
        if self._keeper is None:
            self._look_again()

    def _look_again(self) -> None:
        """Look after what is kept until nothing is."""
        known = weakref.ref(self)

        def look() -> None:
            memory = known()
            if memory is not None:
                memory._keeper = None
                memory.trim(_KEPT_S)
                if memory._kept or memory._coming:
                    memory._look_again()

        self._keeper = threading.Timer(_KEPT_S, look)
        self._keeper.daemon = True
        try:
            self._keeper.start()
        except RuntimeError:  # the interpreter is ending
            self.trim()


def _bytes(buffer: _Buffer) -> Bytes:
    """The same memory; it refers to the buffer."""
    return np.frombuffer(memoryview(buffer), np.uint8)


def _nothing() -> None:
    """In the place of a reference."""


def _capacity(nbytes: int) -> int:
    """So many bytes or up to an eighth more, so that results of about one size share pieces."""
    step = max(WORTHWHILE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def _populated(capacity: int) -> ResultPiece | None:
    """A new piece; None when there is no room."""
    try:
        return ResultPiece(capacity, populated=True)
    except OSError:
        return None


def _first(pieces: deque[_T]) -> _T | None:
    """Taken out of what other threads and the garbage collector take from and add to at any
    time."""
    try:
        return pieces.popleft()
    except IndexError:
        return None


def _release(kept: deque[ResultPiece], coming: deque[_Coming]) -> None:
    while coming:
        if (piece := coming.popleft().piece.result()) is not None:
            kept.append(piece)
    while kept:
        kept.popleft().file.release()

"""Memory for results that the user's process can map, instead of being sent a copy."""

from __future__ import annotations

import math
import mmap
import os
import uuid
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

SHARED_FOLDER = Path("/dev/shm")
"""Where files are memory that all processes of a host can map."""

WORTHWHILE = 1 << 20
"""Bytes from which on sharing costs less than copying."""

_NAME = "tllm-rows-"


class ResultMemory:
    """Hands out memory for rows that will be results. Large pieces are shared memory.

    Any thread may ask. What is not shared, for want of room (a quarter is left to others) or
    because it is small, is copied on its way to the user as anything else is.

    Args:
        most: pieces of shared memory at a time; each has a file of its own.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._pieces: dict[int, tuple[int, Path]] = {}
        if most:
            _remove_left_behind()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A CPU tensor whose values are undefined."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        raw = self._shared(nbytes) if nbytes >= WORTHWHILE else None
        if raw is None:
            # numpy asks the system for huge pages, which torch does not: filling new memory is
            # three times as fast.
            raw = np.empty(nbytes, np.uint8)
        return torch.from_numpy(raw).view(dtype).view(shape)

    def locate(self, views: Sequence[memoryview]) -> list[tuple[Path, int] | None]:
        """The file that some bytes are in, and where in it; None for those that are not shared."""
        pieces = dict(self._pieces)
        if not pieces:
            return [None] * len(views)
        starts = sorted(pieces)
        found: list[tuple[Path, int] | None] = []
        for view in views:
            address = np.frombuffer(view, np.uint8).ctypes.data if len(view) else 0
            number = bisect_right(starts, address) - 1
            if number >= 0:
                nbytes, path = pieces[starts[number]]
                offset = address - starts[number]
                found.append((path, offset) if offset + len(view) <= nbytes else None)
            else:
                found.append(None)
        return found

    def _shared(self, nbytes: int) -> np.ndarray | None:
        if len(self._pieces) >= self._most or not SHARED_FOLDER.is_dir():
            return None
        room = os.statvfs(SHARED_FOLDER)
        # The engine's own processes need shared memory too.
        if nbytes > (room.f_bavail - room.f_blocks // 4) * room.f_frsize:
            return None
        path = SHARED_FOLDER / f"{name_prefix()}{os.getpid()}-{uuid.uuid4().hex}"
        try:
            with path.open("x+b") as file:
                # A write into a mapping that finds no room is a signal; this is an error.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                memory = mmap.mmap(file.fileno(), nbytes)
        except OSError:
            path.unlink(missing_ok=True)
            return None
        raw = np.frombuffer(memory, np.uint8)
        address = raw.ctypes.data
        self._pieces[address] = nbytes, path
        weakref.finalize(memory, self._forget, address, path)
        return raw

    def _forget(self, address: int, path: Path) -> None:
        """Nobody in this process refers to a piece. Who was given it has a link of his own."""
        self._pieces.pop(address, None)
        path.unlink(missing_ok=True)


def name_prefix() -> str:
    """How the names begin of files whose process id means something here: containers may share
    the folder and not the process ids."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"{_NAME}{namespace}-"


def _remove_left_behind() -> None:
    """Remove what processes that were killed could not."""
    if not SHARED_FOLDER.is_dir():
        return
    owners = name_prefix()
    for path in SHARED_FOLDER.glob(f"{owners}*"):
        owner = path.name.removeprefix(owners).partition("-")[0]
        if not Path("/proc", owner).exists():
            path.unlink(missing_ok=True)

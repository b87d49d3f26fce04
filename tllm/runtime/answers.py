"""Answers of a worker to the user's process: large tensors through shared memory."""

from __future__ import annotations

import atexit
import mmap
import os
import pickle
import re
import time
import uuid
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_FOLDER = Path("/dev/shm")
_TOKEN = re.compile("tllm-[0-9a-f]{32}")
_KEPT_S = 600.0
_WORTHWHILE = 1 << 20
_PIECE = 32 << 20
_ALIGNMENT = 64


class SharedFolder:
    """The user's end: says whether a worker is on the same host, by a file that both can see."""

    def __init__(self) -> None:
        self.token = ""
        if _FOLDER.is_dir() and os.access(_FOLDER, os.W_OK):
            self.token = f"tllm-{uuid.uuid4().hex}"
            probe = _FOLDER / self.token
            probe.touch()
            weakref.finalize(self, probe.unlink, missing_ok=True)


class AnswerWriter:
    """The worker's end: makes answers into bytes.

    Their arrays are in shared memory if both ends see it and there is room.
    """

    def __init__(self) -> None:
        self._written: deque[tuple[float, Path]] = deque()
        atexit.register(self._forget, 0.0)

    def encode(self, answer: Any, token: str) -> bytes:
        """An answer for whoever gave this token of its `SharedFolder`; empty for none."""
        if _TOKEN.fullmatch(token) and (_FOLDER / token).is_file():
            buffers: list[pickle.PickleBuffer] = []
            body = pickle.dumps(answer, protocol=5, buffer_callback=buffers.append)
            shared = self._share([buffer.raw() for buffer in buffers], token)
            if shared is not None:
                return pickle.dumps((body, *shared))
        return pickle.dumps((pickle.dumps(answer, protocol=5), None, ()))

    def _share(
        self, views: Sequence[memoryview], token: str
    ) -> tuple[str, list[tuple[int, int]]] | None:
        """Name of the file that holds the views, and where; None when bytes are better."""
        sizes = [-(-len(view) // _ALIGNMENT) * _ALIGNMENT for view in views]
        if sum(sizes) < _WORTHWHILE:
            return None
        starts = [0, *accumulate(sizes)]
        path = _FOLDER / f"{token}-{uuid.uuid4().hex}"
        self._forget(_KEPT_S)
        self._written.append((time.monotonic(), path))
        try:
            _write(path, views, starts[:-1], starts[-1])
        except OSError:  # no room
            path.unlink(missing_ok=True)
            return None
        return path.name, [(start, len(view)) for start, view in zip(starts, views, strict=False)]

    def _forget(self, age: float) -> None:
        """Remove what nobody came for: readers remove what they have opened."""
        while self._written and time.monotonic() - self._written[0][0] >= age:
            self._written.popleft()[1].unlink(missing_ok=True)


def _write(path: Path, views: Sequence[memoryview], offsets: Sequence[int], size: int) -> None:
    with path.open("x+b") as file:
        # A write into a mapping that finds no room is a signal; this is an error.
        os.posix_fallocate(file.fileno(), 0, size)
        with mmap.mmap(file.fileno(), size) as memory:
            _copy(np.frombuffer(memory, np.uint8), views, offsets)


def _copy(
    target: npt.NDArray[np.uint8], views: Sequence[memoryview], offsets: Sequence[int]
) -> None:
    pieces = [
        (start + low, view[low : low + _PIECE])
        for start, view in zip(offsets, views, strict=True)
        for low in range(0, len(view), _PIECE)
    ]

    def copy(piece: tuple[int, memoryview]) -> None:
        start, source = piece
        np.copyto(target[start : start + len(source)], np.frombuffer(source, np.uint8))

    # numpy lets go of the interpreter while it copies.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        list(threads.map(copy, pieces))


def decode(payload: bytes) -> Any:
    """The answer; arrays in shared memory stay there, and go when nobody holds them any more."""
    body, name, places = pickle.loads(payload)
    if name is None:
        return pickle.loads(body)
    path = _FOLDER / name
    try:
        with path.open("r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0))
    finally:
        path.unlink(missing_ok=True)
    return pickle.loads(body, buffers=[memory[start : start + size] for start, size in places])

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

from tllm.ports.result_memory import SHARED_FOLDER, WORTHWHILE, ResultMemory

_FOLDER = SHARED_FOLDER
_TOKEN = re.compile("tllm-[0-9a-f]{32}")
_KEPT_S = 600.0
_PIECE = 32 << 20
_ALIGNMENT = 64

_Place = tuple[int, int, int] | bytes
"""Number of the file, first byte and number of bytes; or the bytes themselves."""


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

    Their arrays are in shared memory if both ends see it and there is room. Those that are there
    already are not copied.

    Args:
        memory: where results may lie.
    """

    def __init__(self, memory: ResultMemory | None = None) -> None:
        self._memory = memory
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
    ) -> tuple[list[str], list[_Place]] | None:
        """Names of the files that hold the views, and where; None when bytes are better."""
        self._forget(_KEPT_S)
        names: list[str] = []
        places: list[_Place] = [b""] * len(views)
        linked: dict[Path, int] = {}
        copied = []
        located = self._memory.locate(views) if self._memory else [None] * len(views)
        for i, (view, found) in enumerate(zip(views, located, strict=True)):
            number = None if found is None else self._link(found[0], linked, names, token)
            if found is None or number is None:
                copied.append(i)
            else:
                places[i] = number, found[1], len(view)
        sizes = [-(-len(views[i]) // _ALIGNMENT) * _ALIGNMENT for i in copied]
        if sum(sizes) < WORTHWHILE:
            if not names:
                return None
            for i in copied:
                places[i] = bytes(views[i])
            return names, places
        starts = [0, *accumulate(sizes)]
        path = self._new_name(token)
        try:
            _write(path, [views[i] for i in copied], starts[:-1], starts[-1])
        except OSError:  # no room
            path.unlink(missing_ok=True)
            return None
        for i, start in zip(copied, starts, strict=False):
            places[i] = len(names), start, len(views[i])
        names.append(path.name)
        return names, places

    def _link(
        self, path: Path, linked: dict[Path, int], names: list[str], token: str
    ) -> int | None:
        """The number of a file among those of an answer, under a name that is the reader's."""
        if path not in linked:
            name = self._new_name(token)
            try:
                os.link(path, name)
            except OSError:
                return None
            linked[path] = len(names)
            names.append(name.name)
        return linked[path]

    def _new_name(self, token: str) -> Path:
        path = _FOLDER / f"{token}-{uuid.uuid4().hex}"
        self._written.append((time.monotonic(), path))
        return path

    def _forget(self, age: float) -> None:
        """Remove what nobody came for: readers remove what they have opened."""
        while self._written and time.monotonic() - self._written[0][0] >= age:
            self._written.popleft()[1].unlink(missing_ok=True)


def _write(path: Path, views: Sequence[memoryview], offsets: Sequence[int], size: int) -> None:
    with path.open("x+b") as file:
        file.truncate(size)
        target = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        _copy(file.fileno(), target, views, offsets)


def _copy(
    descriptor: int,
    target: npt.NDArray[np.uint8],
    views: Sequence[memoryview],
    offsets: Sequence[int],
) -> None:
    pieces = [
        (start + low, view[low : low + _PIECE])
        for start, view in zip(offsets, views, strict=True)
        for low in range(0, len(view), _PIECE)
    ]

    def copy(piece: tuple[int, memoryview]) -> None:
        start, source = piece
        # A write into a mapping that finds no room is a signal; this is an error.
        os.posix_fallocate(descriptor, start, max(1, len(source)))
        np.copyto(target[start : start + len(source)], np.frombuffer(source, np.uint8))

    large = [piece for piece in pieces if len(piece[1]) >= WORTHWHILE]
    for piece in pieces:
        if len(piece[1]) < WORTHWHILE:
            copy(piece)
    if large:
        # Both calls let go of the interpreter.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1, len(large))) as threads:
            list(threads.map(copy, large))


def decode(payload: bytes) -> Any:
    """The answer; arrays in shared memory stay there, and go when nobody holds them any more."""
    body, names, places = pickle.loads(payload)
    if names is None:
        return pickle.loads(body)
    files = []
    try:
        for name in names:
            with (_FOLDER / name).open("r+b") as file:
                files.append(memoryview(mmap.mmap(file.fileno(), 0)))
    finally:
        for name in names:
            (_FOLDER / name).unlink(missing_ok=True)
    buffers = [
        bytearray(place) if isinstance(place, bytes) else files[place[0]][place[1] :][: place[2]]
        for place in places
    ]
    return pickle.loads(body, buffers=buffers)

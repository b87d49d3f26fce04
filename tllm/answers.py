"""Answers of a worker to the user's process: large tensors through shared memory.

An answer is a pickle of `(body, names, places)`: the pickled answer without its buffers, the files
of shared memory that hold those, and where each buffer is. `AnswerWriter` makes it in the worker,
`decode` and `leave` read it in the user's process.
"""

from __future__ import annotations

import atexit
import os
import pickle
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from tllm.result_memory import ResultMemory
from tllm.shared_memory import FOLDER, IN_MEMORY, NAME, WORTHWHILE, SharedFile, room, sweep

_KEPT_S = 600.0
"""How long an answer waits for its reader."""

_LOOKED_AT = 16
"""Names of earlier answers that are looked at with each answer, beyond as many as were added since:
a reader removes his, and looking takes a system call."""

_LINKED = 64 << 10
"""Bytes of a file that are worth a link to it: of less, a copy costs no more, and does not hold all
of the file as long as anybody has them."""

_LITTLE = 8
"""An answer that has less than one part in so many of a file is copied out of it, if that costs no
more than to share it: the rest of the file would be held as long as anybody has the answer."""

_PIECE = 32 << 20
_ALIGNMENT = 64

_Place = tuple[int, int, int] | bytes
"""Number of the file, first byte and number of bytes; or the bytes themselves."""


class AnswerWriter:
    """The worker's end: makes answers into bytes.

    Their arrays are in shared memory if both ends see it and there is room. Those that are there
    already are not copied.

    Args:
        memory: where results may lie.
    """

    def __init__(self, memory: ResultMemory | None = None) -> None:
        self._memory = memory
        self._written: deque[tuple[float, SharedFile]] = deque()
        self._added = 0  # since they were looked at
        atexit.register(self._forget, 0.0)

    def encode(self, answer: Any, token: str) -> bytes:
        """An answer for whoever gave this token of its `SharedFolder`; empty for none."""
        if NAME.fullmatch(token) and (FOLDER / token).is_file():
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
        held = Counter[SharedFile]()
        for view, found in zip(views, located, strict=True):
            if found is not None:
                held[found[0]] += len(view)
        for i, (view, found) in enumerate(zip(views, located, strict=True)):
            number = None
            if found is not None and held[found[0]] >= _LINKED:
                number = self._link(found[0], linked, names, token)
            if found is None or number is None:
                copied.append(i)
            else:
                places[i] = number, found[1], len(view)
        sizes = [-(-len(views[i]) // _ALIGNMENT) * _ALIGNMENT for i in copied]
        starts = [0, *accumulate(sizes)]
        file = self._copied([views[i] for i in copied], starts, token)
        if file is None:
            if not names:
                return None
            for i in copied:
                places[i] = bytes(views[i])
            return names, places
        for i, start in zip(copied, starts, strict=False):
            places[i] = len(names), start, len(views[i])
        names.append(self._noted(file))
        return names, places

    @staticmethod
    def _copied(
        views: Sequence[memoryview], starts: Sequence[int], token: str
    ) -> SharedFile | None:
        """A file with copies of the views at these offsets, the last of which is its size; None
        when it is not worthwhile, or there is no room."""
        if not WORTHWHILE <= starts[-1] <= room():
            return None
        try:
            file = SharedFile.reserve(starts[-1], token, backed=False)
        except OSError:
            return None
        try:
            _copy(file, views, starts)
        except OSError:
            file.release()
            return None
        return file

    def _link(
        self, file: SharedFile, linked: dict[Path, int], names: list[str], token: str
    ) -> int | None:
        """The number of a file among those of an answer, under a name that is the reader's."""
        if file.path not in linked:
            try:
                name = self._noted(file.link(token))
            except OSError:
                return None
            linked[file.path] = len(names)
            names.append(name)
        return linked[file.path]

    def _noted(self, file: SharedFile) -> str:
        self._written.append((time.monotonic(), file))
        self._added += 1
        return file.path.name

    def _forget(self, age: float) -> None:
        """Remove names that nobody came for in so many seconds; others who came have removed
        theirs."""
        now = time.monotonic()
        most = self._added + _LOOKED_AT if age else len(self._written)
        self._added = 0
        for _ in range(min(len(self._written), most)):
            since, file = self._written.popleft()
            if now - since >= age:
                file.release()
            elif file.path.exists():
                self._written.append((since, file))


def _copy(file: SharedFile, views: Sequence[memoryview], offsets: Sequence[int]) -> None:
    """Copy bytes to these offsets, large ones on several threads. Raises `OSError`."""
    target = file.map()
    pieces = [
        (start + low, view[low : low + _PIECE])
        for start, view in zip(offsets, views, strict=False)
        for low in range(0, len(view), _PIECE)
    ]

    def copy(piece: tuple[int, memoryview]) -> None:
        start, source = piece
        file.back(start, len(source))
        np.copyto(target[start : start + len(source)], np.frombuffer(source, np.uint8))

    large = [piece for piece in pieces if len(piece[1]) >= WORTHWHILE]
    for piece in pieces:
        if len(piece[1]) < WORTHWHILE:
            copy(piece)
    if large:
        # Both calls let go of the interpreter.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1, len(large))) as threads:
            list(threads.map(copy, large))


class SharedFolder:
    """The user's end: says whether a worker is on the same host, by a file that both can see.

    Attributes:
        token: the file's name, given to workers with each call; empty without shared memory.
    """

    def __init__(self) -> None:
        self.token = ""
        if IN_MEMORY:
            sweep()
            file = SharedFile.reserve(1, backed=False)
            self.token = file.path.name
            weakref.finalize(self, _release, file, os.getpid())


def _release(file: SharedFile, owner: int) -> None:
    """Remove a file of this process; one that is forked from it has the object, too."""
    if os.getpid() == owner:
        file.release()


def decode(payload: bytes) -> Any:
    """The answer; arrays in shared memory stay there, and go when nobody holds them any more."""
    body, names, places = pickle.loads(payload)
    if names is None:
        return pickle.loads(body)
    files = [SharedFile(FOLDER / name) for name in names]
    try:
        memory = [file.hold() for file in files]
    finally:
        for file in files:
            file.release()
    used = Counter[int]()
    for place in places:
        if not isinstance(place, bytes):
            used[place[0]] += place[2]
    buffers: list[Any] = []
    for place in places:
        if isinstance(place, bytes):
            buffers.append(bytearray(place))
            continue
        number, begin, nbytes = place
        own = memory[number][begin : begin + nbytes]
        little = used[number] < min(WORTHWHILE, len(memory[number]) / _LITTLE)
        buffers.append(own.copy() if little else own.data)
    return pickle.loads(body, buffers=buffers)


def leave(payload: bytes) -> None:
    """Nobody wants the answer: what it has in shared memory goes."""
    _, names, _ = pickle.loads(payload)
    for name in names or ():
        SharedFile(FOLDER / name).release()

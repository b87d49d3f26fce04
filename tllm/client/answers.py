"""Answers of the workers, as the user's process reads them: `tllm.runtime.answers` writes them."""

from __future__ import annotations

import os
import pickle
import weakref
from collections import Counter
from typing import Any

from tllm.shared_memory import FOLDER, IN_MEMORY, WORTHWHILE, SharedFile, sweep

_LITTLE = 8
"""An answer that has less than one part in so many of a file is copied out of it, if that costs no
more than to share it: the rest of the file would be held as long as anybody has the answer."""


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

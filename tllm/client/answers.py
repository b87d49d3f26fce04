"""Answers of the workers, as the user's process reads them: `tllm.runtime.answers` writes them."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

from tllm.shared_memory import FOLDER, IN_MEMORY, SharedFile, sweep


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
            weakref.finalize(self, file.release)


def decode(payload: bytes) -> Any:
    """The answer; arrays in shared memory stay there, and go when nobody holds them any more."""
    body, names, places = pickle.loads(payload)
    if names is None:
        return pickle.loads(body)
    files = [SharedFile(FOLDER / name) for name in names]
    try:
        memory = [file.hold().data for file in files]
    finally:
        for file in files:
            file.release()
    buffers = [
        bytearray(place) if isinstance(place, bytes) else memory[place[0]][place[1] :][: place[2]]
        for place in places
    ]
    return pickle.loads(body, buffers=buffers)


def leave(payload: bytes) -> None:
    """Nobody wants the answer: what it has in shared memory goes."""
    _, names, _ = pickle.loads(payload)
    for name in names or ():
        SharedFile(FOLDER / name).release()

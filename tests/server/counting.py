"""Another process of the API server, which counts the same requests in flight."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.forked_processes import EnvironedProcess, preload
from tllm.server.limits import LimitsByKey, parse_limits


@contextmanager
def another(limits: dict[str, Any], folder: Path, asked: dict[str, Any]) -> Iterator[Connection]:
    """A process in which a request of the first key has begun, and ends when it is sent anything.
    It is killed in the end."""
    here, there = multiprocessing.Pipe()
    preload()
    process = EnvironedProcess(target=_begin, args=(there, limits, folder, asked))
    process.start()
    assert here.recv() == "begun"
    try:
        yield here
    finally:
        process.kill()
        process.join()


def _begin(told: Connection, limits: dict[str, Any], folder: Path, asked: dict[str, Any]) -> None:
    end = LimitsByKey(parse_limits(limits), folder).begin(1, asked)
    told.send("begun")
    told.recv()
    end()
    told.send("ended")
    told.recv()

"""Few cores, and neighbours that keep them busy: a rented machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

CORES = 4
NEIGHBOURS = 8


class Load:
    """While it is entered, this process and all that it has started run on few cores, together with
    busy neighbours.

    The neighbours have the same cores, and no others: with the whole machine to choose from they
    would be put where nobody else runs, and be felt by nobody. Threads that are started meanwhile
    inherit the cores. Afterwards every thread has its own again.

    Args:
        cores: how many of those that this process may use; as many as there are, if fewer.
        neighbours: processes that do nothing but compute.

    Attributes:
        cores: which.
    """

    def __init__(self, cores: int = CORES, neighbours: int = NEIGHBOURS) -> None:
        self.cores = sorted(os.sched_getaffinity(0))[:cores]
        self._count = neighbours
        self._before: dict[int, set[int]] = {}
        self._all: set[int] = set()
        self._neighbours: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Load:
        self._all = os.sched_getaffinity(0)
        self._before = {thread: _cores_of(thread) for thread in _threads()}
        try:
            # A thread may have been started by one that had all cores still: look again.
            while loose := [each for each in _threads() if _cores_of(each) - {*self.cores}]:
                for thread in loose:
                    _pin(thread, {*self.cores})
            command = [sys.executable, "-S", "-m", "benchmarks.neighbour", str(os.getpid())]
            place = Path(__file__).parents[1]
            self._neighbours = [subprocess.Popen(command, cwd=place) for _ in range(self._count)]
        except BaseException:
            self._leave()
            raise
        self._began = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()

    def _leave(self) -> None:
        for neighbour in self._neighbours:
            neighbour.kill()
        for neighbour in self._neighbours:
            neighbour.wait()
        for thread in _threads():
            _pin(thread, self._before.get(thread, self._all))

    def described(self) -> dict[str, Any]:
        """The cores, the neighbours, and how many cores' time these have had until now."""
        times = [psutil.Process(each.pid).cpu_times() for each in self._neighbours]
        had = sum(each.user + each.system for each in times)
        return {
            "cores": self.cores,
            "neighbours": len(self._neighbours),
            "cores_of_neighbours": round(had / (time.monotonic() - self._began), 2),
        }


def _threads() -> list[int]:
    """Threads of this process and of all that descend from it."""
    this = psutil.Process()
    found: list[int] = []
    for process in (this, *this.children(recursive=True)):
        try:
            found += [int(each.name) for each in Path(f"/proc/{process.pid}/task").iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _cores_of(thread: int) -> set[int]:
    try:
        return os.sched_getaffinity(thread)
    except ProcessLookupError:
        return set()


def _pin(thread: int, cores: set[int]) -> None:
    try:
        os.sched_setaffinity(thread, cores)
    except ProcessLookupError:
        return

"""Processes that begin with everything imported.

On a CPU an engine outside the test's process is two more processes, and each begins with 7 s of
imports. Where a module asks for `forked_processes`, a server process imports all of it once, and
what vLLM or we would `spawn` is forked from it: as fresh as a spawned process, with the environment
and arguments of who starts it. Everywhere else, and in programs that tests run, processes are
spawned as anybody's.
"""

from __future__ import annotations

import multiprocessing.context as contexts
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

_IMPORTED = [
    __name__,
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "tllm.engine.worker",
]


class EnvironedProcess(contexts.ForkServerProcess):
    """Takes over the environment of who starts it, and not that in which its server started."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"environ": dict(os.environ)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        environ = state.pop("environ")
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)
        self.__dict__.update(state)


class ForkedProcess(EnvironedProcess):
    """What it spawns is forked too."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        contexts._concrete_contexts["spawn"] = ForkedContext()


class ForkedContext(contexts.ForkServerContext):
    """Stands in the place of `multiprocessing.get_context("spawn")`."""

    Process = ForkedProcess


@contextmanager
def forking() -> Iterator[None]:
    """What is spawned in here is forked."""
    spawning = contexts._concrete_contexts["spawn"]
    forkserver.set_forkserver_preload(_IMPORTED)
    forkserver.ensure_running()  # before a test changes the environment, which it keeps
    contexts._concrete_contexts["spawn"] = ForkedContext()
    try:
        yield
    finally:
        contexts._concrete_contexts["spawn"] = spawning

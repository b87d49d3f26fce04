"""Processes that begin with everything imported.

On a CPU an engine outside the test's process is two more processes, and each begins with 7 s of
imports. Where a module asks for `forked_processes`, a server process imports all of it once, and
what vLLM or we would `spawn` is forked from it: as fresh as a spawned process, with the environment
and arguments of who starts it. Everywhere else, and in programs that tests run, processes are
spawned as anybody's.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import multiprocessing.context as contexts
import os
import runpy
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import Any

OF_VLLM = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


class EnvironedProcess(contexts.ForkServerProcess):
    """Takes over the environment of who starts it, and not that in which its server started.

    Attributes:
        environment: what it has beside that.
    """

    environment: Mapping[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        forkserver.ensure_running()
        address = forkserver._forkserver._forkserver_address
        return self.__dict__ | {"environ": os.environ | self.environment, "server": address}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Python would start another server, in which nothing is imported.
        forkserver._forkserver._forkserver_address = state.pop("server")
        forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None
        environ = state.pop("environ")
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)
        if "PYTHONFAULTHANDLER" in environ:
            faulthandler.enable()
        if values := sys.modules.get("prometheus_client.values"):  # looks at it when imported
            vars(values)["ValueClass"] = values.get_value_class()
        self.__dict__.update(state)


class ForkedProcess(EnvironedProcess):
    """What it spawns is forked too. It prints where its parent does, and is of its group, and not
    as the server."""

    def __getstate__(self) -> dict[str, Any]:
        prints = [reduction.DupFd(number) for number in (1, 2)]
        return super().__getstate__() | {"prints": prints, "group": os.getpgrp()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if (group := state.pop("group")) != os.getpgrp():
            os.setpgid(0, group)
        for number, duplicate in enumerate(state.pop("prints"), start=1):
            file = duplicate.detach()
            os.dup2(file, number)
            os.close(file)
        super().__setstate__(state)
        contexts._concrete_contexts["spawn"] = ForkedContext()


class ScriptProcess(EnvironedProcess):
    """`python SCRIPT ARGUMENTS`, in a group of its own."""

    def __init__(
        self,
        script: str | Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        cwd: str | Path | None = None,
        forks: bool = False,
    ) -> None:
        """`log`: the file to which it prints; `forks`: whether what it spawns is forked."""
        super().__init__(target=_run_script, args=(str(script), arguments, log, cwd, forks))
        self.environment = environment

    def start(self) -> None:
        preload()
        super().start()


def _run_script(
    script: str, arguments: Sequence[str], log: Path, cwd: str | Path | None, forks: bool
) -> None:
    if forks:
        contexts._concrete_contexts["spawn"] = ForkedContext()
    os.setpgrp()
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(cwd or ".")
    tempfile.tempdir = None  # of the new environment
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[0:0] = [str(Path(script).parent), *filter(None, named)]
    importlib.invalidate_caches()
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:  # what an interpreter does at its end, and a process of `multiprocessing` does not
        threading._shutdown()
        atexit._run_exitfuncs()


class ForkedContext(contexts.ForkServerContext):
    """Stands in the place of `multiprocessing.get_context("spawn")`."""

    Process = ForkedProcess


def preload() -> None:
    """Start the server, unless it runs. Best before a test changes the environment, which it
    keeps."""
    forkserver.set_forkserver_preload([__name__, *OF_VLLM, "tests.preloaded"])
    forkserver.ensure_running()


@contextmanager
def forking() -> Iterator[None]:
    """What is spawned in here is forked."""
    spawning = contexts._concrete_contexts["spawn"]
    preload()
    contexts._concrete_contexts["spawn"] = ForkedContext()
    try:
        yield
    finally:
        contexts._concrete_contexts["spawn"] = spawning


def forked() -> AbstractContextManager[None]:
    """What is spawned in here is forked, unless there is a GPU: who has asked for one cannot."""
    import torch  # not at the top: each process of a server that a command starts imports this

    return nullcontext() if torch.cuda.is_available() else forking()

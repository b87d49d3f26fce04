"""Scripts that run in a process of their own, and that tell where they were when they hang."""

import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

import torch

from tests.forked_processes import ScriptProcess

LEAVES_S = 30.0
"""How long the processes that a script started may take to end after it."""

TESTS = Path(__file__).parent

TLLM = Path(sys.executable).with_name("tllm")
"""The installed command, which is a script."""


def python_path() -> dict[str, str]:
    """The environment of a process that imports tLLM and these tests."""
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


class HungError(Exception):
    """A script was not done in its time."""


class CommandProcess:
    """A command, with the methods of a process of `multiprocessing`."""

    def __init__(self, command, environment, log, cwd=None):
        self._given, self._log = (command, environment, cwd), log

    def start(self):
        command, environment, cwd = self._given
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.terminate, self.kill = self._process.terminate, self._process.kill

    @property
    def exitcode(self):
        return self._process.poll()

    def join(self, timeout=None):
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)


def script_process(script, *arguments, log, environment, cwd=None, prefix=(), forks=False):
    """The process of `run_script`, which is to be started."""
    script, arguments = getattr(script, "__file__", script), [*map(str, arguments)]
    environment = {**environment, "PYTHONFAULTHANDLER": "1"}
    if prefix or torch.cuda.is_available():  # who has asked for a GPU cannot fork
        command = [*prefix, sys.executable, script, *arguments]
        return CommandProcess(command, os.environ | environment, Path(log), cwd)
    return ScriptProcess(script, arguments, environment, Path(log), cwd, forks)


def run_script(
    script, *arguments, log, environment, timeout, cwd=None, attempts=1, prefix=(), forks=False
):
    """`PREFIX python SCRIPT ARGUMENTS`, with all processes that it starts, in one group. On a CPU,
    and without a prefix, the script's process has vLLM imported already; where it `forks`, all do.

    What they print goes to the file `log`, not through a pipe, which a process left behind would
    hold open. Fails with the end of that file when the script fails, is not done in `timeout`
    seconds, or leaves a process behind; in the last two cases each Python process first writes
    its threads' stacks there.

    With two `attempts` a script that hung is run once more, and the stacks are a warning at the
    end of the run. For engines of several processes, which once in some hundred starts on a busy
    machine do not come up. A script that fails is never run again.
    """
    name = getattr(script, "__file__", script)
    for left in reversed(range(attempts)):
        try:
            process = script_process(
                script,
                *arguments,
                log=log,
                environment=environment,
                cwd=cwd,
                prefix=prefix,
                forks=forks,
            )
            process.start()
            _wait_for(process, name, Path(log), timeout)
            break
        except HungError as hung:
            if not left:
                raise
            warnings.warn(f"run again: {hung}", stacklevel=2)


def run_command(script, *arguments, log, environment, timeout=300, cwd=None, forks=False):
    """The exit status of `python SCRIPT ARGUMENTS`, and what it printed; else as `run_script`."""
    process = script_process(
        script, *arguments, log=log, environment=environment, cwd=cwd, forks=forks
    )
    process.start()
    _wait_for(process, script, log, timeout, fails=True)
    return process.exitcode, log.read_text()


def _wait_for(process, name, log, timeout, fails=False):
    """`fails`: whether it may."""
    process.join(timeout)
    if process.exitcode is None:
        _abort(process.pid)
        process.join()
        raise HungError(f"{name} was not done in {timeout} s:\n{_end_of(log)}")
    status = process.exitcode
    assert fails or status == 0, f"{name} ended with status {status}:\n{_end_of(log)}"
    deadline = time.monotonic() + LEAVES_S
    while _is_there(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    if _is_there(process.pid):
        _abort(process.pid)
        raise AssertionError(f"{name} left a process behind:\n{_end_of(log)}")


def _is_there(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _abort(group):
    """Have each process write its stacks (`PYTHONFAULTHANDLER`), and end them all."""
    for signum in (signal.SIGABRT, signal.SIGKILL):
        if _is_there(group):
            os.killpg(group, signum)
            time.sleep(3)


def _end_of(log, characters=12_000):
    return log.read_text(errors="replace")[-characters:]

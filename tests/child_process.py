"""Scripts that run in a process of their own, and that tell where they were when they hang."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

LEAVES_S = 30.0
"""How long the processes that a script started may take to end after it."""


class HungError(Exception):
    """A script was not done in its time."""


def run_script(script, *arguments, log, environment, timeout, cwd=None, attempts=1, prefix=()):
    """`PREFIX python SCRIPT ARGUMENTS`, with all processes that it starts, in one group.

    What they print goes to the file `log`, not through a pipe, which a process left behind would
    hold open. Fails with the end of that file when the script fails, is not done in `timeout`
    seconds, or leaves a process behind; in the last two cases each Python process first writes
    its threads' stacks there.

    With two `attempts` a script that hung is run once more, and the stacks are a warning at the
    end of the run. For engines of several processes, which once in some hundred starts on a busy
    machine do not come up. A script that fails is never run again.
    """
    name = script = getattr(script, "__file__", script)
    command = [*prefix, sys.executable, script, *map(str, arguments)]
    for left in reversed(range(attempts)):
        try:
            _run(name, command, Path(log), os.environ | environment, timeout, cwd)
            break
        except HungError as hung:
            if not left:
                raise
            warnings.warn(f"run again: {hung}", stacklevel=2)


def _run(name, command, log, environment, timeout, cwd):
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment | {"PYTHONFAULTHANDLER": "1"},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        status = process.wait(timeout)
    except subprocess.TimeoutExpired:
        _abort(process.pid)
        process.wait()
        raise HungError(f"{name} was not done in {timeout} s:\n{_end_of(log)}") from None
    assert status == 0, f"{name} ended with status {status}:\n{_end_of(log)}"
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

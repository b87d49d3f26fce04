"""`python serving.py serve MODEL ...`: `tllm serve`, which becomes vLLM's server in this process,
and does not begin a new interpreter that has everything to import."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence

from tllm.cli import app


def become(program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """`os.execve`, for what is run with `python -m MODULE`."""
    assert program == sys.executable and arguments[1] == "-m", arguments
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [*arguments[2:]]
    runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    os.execve = become  # type: ignore[assignment]
    app()

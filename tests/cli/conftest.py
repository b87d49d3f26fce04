"""Commands, run as a user would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from child_process import run_command

ROOT = Path(__file__).parents[2]

#: Which model runner a test process drives is no business of a user's command.
_HARNESS = ("VLLM_USE_V2_MODEL_RUNNER", "TRITON_INTERPRET")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """`run(script, *arguments)`: the exit status of a Python script, and what it printed. It runs
    in a process of its own, which has vLLM imported already."""
    for name in _HARNESS:
        monkeypatch.delenv(name, raising=False)

    def call(script: Path, *arguments: str | Path, **environment: str) -> tuple[int, str]:
        log = tmp_path / "log"
        return run_command(script, *arguments, log=log, environment=environment, cwd=ROOT)

    return call

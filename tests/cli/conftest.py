"""Commands, run as a user would."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Which model runner a test process drives is no business of a user's command.
_HARNESS = ("VLLM_USE_V2_MODEL_RUNNER", "TRITON_INTERPRET")


@pytest.fixture
def run() -> Callable[..., str]:
    """`run(*command)`: its output; fails the test when the command fails."""

    def call(*command: str | Path) -> str:
        result = subprocess.run(
            command,
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name not in _HARNESS},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return call

"""Rounds with fixed seeds; `python -m tests.fuzz` takes others, and as long as it is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import served
from fuzz.rounds import attack

SEED = int(os.environ.get("TLLM_FUZZ_SEED", "1"))
SECONDS = os.environ.get("TLLM_FUZZ_SECONDS")
RUNNER = os.environ["TLLM_TEST_RUNNER"]
ROUNDS = {"v1": 4, "v2": 2}


def test_requests_that_run_together_are_as_alone_and_leave_nothing(attacked):
    seconds = float(SECONDS) if SECONDS else None
    assert attack(attacked, SEED, rounds=None if seconds else ROUNDS[RUNNER], seconds=seconds)


@pytest.mark.skipif(RUNNER != "v1", reason="the interpreted V2 runner is set up in one process")
def test_requests_that_are_served_are_as_alone_and_leave_nothing(tiny_model, tmp_path):
    tests = Path(__file__).parents[1]
    arguments = [tiny_model, str(tmp_path), str(SEED), SECONDS or "45"]
    done = subprocess.run(
        [sys.executable, served.__file__, *arguments],
        env=os.environ | {"PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"},
        capture_output=True,
        text=True,
        timeout=300 + float(SECONDS or 45),
    )
    assert done.returncode == 0, done.stderr[-6000:]

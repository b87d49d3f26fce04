"""Rounds with fixed seeds; `python -m tests.fuzz` takes others, and as long as it is told."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from child_process import run_script

from fuzz import served
from fuzz.rounds import attack

SEED = int(os.environ.get("TLLM_FUZZ_SEED", "1"))
SECONDS = os.environ.get("TLLM_FUZZ_SECONDS")
RUNNER = os.environ["TLLM_TEST_RUNNER"]
ROUNDS = {"v1": 4, "v2": 1}  # what is interpreted takes minutes


def test_requests_that_run_together_are_as_alone_and_leave_nothing(attacked):
    seconds = float(SECONDS) if SECONDS else None
    assert attack(attacked, SEED, rounds=None if seconds else ROUNDS[RUNNER], seconds=seconds)


# Arguments of the engine, and how often CI attacks it: not how long, so that the seeds are the same
# on every machine.
SERVED = {
    "one process": ({}, 2),
    "compiled, on two ranks": (
        {
            "enforce_eager": False,
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
        },
        1,
    ),
}


@pytest.mark.skipif(RUNNER != "v1", reason="the interpreted V2 runner is set up in one process")
@pytest.mark.parametrize("served_by", SERVED)
def test_requests_that_are_served_are_as_alone_and_leave_nothing(served_by, tiny_model, tmp_path):
    options, rounds = SERVED[served_by]
    seconds = float(SECONDS or 0)
    tests = Path(__file__).parents[1]
    paths = str(tests.parent), str(tests), os.environ.get("PYTHONPATH")
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if "tensor_parallel_size" in options:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    run_script(
        served,
        *(tiny_model, tmp_path, SEED, 0 if SECONDS else rounds, seconds, json.dumps(options)),
        log=tmp_path / "log",
        environment=environment,
        timeout=500 + seconds,
    )

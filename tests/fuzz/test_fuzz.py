"""Rounds with fixed seeds; `python -m tests.fuzz` takes others, and as long as it is told."""

from __future__ import annotations

import json
import os

import pytest
from child_process import python_path, run_script
from engine.drafting import INTERPRETED, DraftedModel

from fuzz import served
from fuzz.rounds import TIGHT, attack

SEED = int(os.environ.get("TLLM_FUZZ_SEED", "1"))
SECONDS = os.environ.get("TLLM_FUZZ_SECONDS")
ROUNDS = 1 if INTERPRETED else 4  # what is interpreted takes minutes


def test_requests_that_run_together_are_as_alone_and_leave_nothing(attacked):
    seconds = float(SECONDS) if SECONDS else None
    assert attack(attacked, SEED, rounds=None if seconds else ROUNDS, seconds=seconds)


# Arguments of the engine, and how often CI attacks it: not how long, so that the seeds are the same
# on every machine.
SERVED = {
    "one process": ({}, 2),
    "on two ranks": (
        {
            "enforce_eager": not SECONDS,  # to compile takes them longer than the attack
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
        },
        1,
    ),
}
DRAFTING = TIGHT | {"enable_chunked_prefill": True, "async_scheduling": False}


def attack_served(model, folder, options, rounds):
    """Attack the engine that a process of its own serves."""
    seconds = float(SECONDS or 0)
    environment = python_path()
    if "tensor_parallel_size" in options:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    run_script(
        served,
        *(model, folder, SEED, 0 if SECONDS else rounds, seconds, json.dumps(options)),
        log=folder / "log",
        environment=environment,
        timeout=500 + seconds,
        forks=True,
    )


not_interpreted = pytest.mark.skipif(
    INTERPRETED, reason="the interpreted V2 runner is set up in one process"
)


@not_interpreted
@pytest.mark.parametrize("served_by", SERVED)
def test_requests_that_are_served_are_as_alone_and_leave_nothing(served_by, tiny_model, tmp_path):
    attack_served(tiny_model, tmp_path, *SERVED[served_by])


@not_interpreted
@pytest.mark.skipif(not SECONDS, reason="starts two engines; runs by `python -m tests.fuzz`")
@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_requests_that_are_served_with_drafts_are_as_without(method, tiny_model, tmp_path):
    made = DraftedModel.made(method, tmp_path, tiny_model)
    options = DRAFTING | {"speculative_config": made.speculative_config}
    attack_served(made.path, tmp_path, options, 0)

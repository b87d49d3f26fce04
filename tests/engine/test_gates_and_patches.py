"""Requests with conditions and patches at once against `transformers`, in mixed batches.

More of them, and others: `python -m tests.engine --requests 300 --seed 7`.
"""

from __future__ import annotations

import os

from engine.test_conditions import INTERPRETED, run_random
from engine.test_patching import Asked as Patched

REQUESTS = int(os.environ.get("TLLM_ORACLE_REQUESTS", 16 if INTERPRETED else 64))
SEED = int(os.environ.get("TLLM_ORACLE_SEED", "2"))


def test_gated_and_patched_requests_are_as_transformers_has_them(llm, reference):
    """A probe sees a row as it arrives, and what it decides on is done to the patched row; prompts
    in chunks, cached prefixes, two samples, beside requests that are plain or do one of both."""
    before = llm.intervention_stats()[0]["rows_patched"]
    run_random(llm, reference, SEED, REQUESTS, Patched(SEED))
    assert llm.intervention_stats()[0]["rows_patched"] > before + REQUESTS // 2


def test_gated_and_patched_requests_that_preempt_each_other(tight_llm, reference):
    run_random(tight_llm, reference, SEED + 1, REQUESTS // 2, Patched(SEED + 1))

"""`python -m tests.engine --requests 300 --seed 7`: random requests with conditions and patches
against `transformers`, as many as told, and half as many that preempt each other."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import pytest

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    os.environ |= {
        "TLLM_ORACLE_REQUESTS": str(given.requests),
        "TLLM_ORACLE_SEED": str(given.seed),
    }
    print(f"seed {given.seed}", flush=True)
    tests = str(Path(__file__).with_name("test_gates_and_patches.py"))
    sys.exit(pytest.main([tests, "-q", "-p", "no:cacheprovider", "--timeout=3600"]))

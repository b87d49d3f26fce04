"""`python -m tests.fuzz --seconds 600 --seed 7`: attack each engine so long, from this seed on."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import pytest

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of all engines together")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first round")
    parser.add_argument("-k", default="", help="engines, as pytest takes it")
    given = parser.parse_args()
    os.environ |= {"TLLM_FUZZ_SECONDS": str(given.seconds / 9), "TLLM_FUZZ_SEED": str(given.seed)}
    print(f"seed {given.seed}", flush=True)
    folder = str(Path(__file__).parent)
    options = ["-q", "-p", "no:cacheprovider", f"--timeout={given.seconds + 600}", "-k", given.k]
    sys.exit(pytest.main([folder, *options]))

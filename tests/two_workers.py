"""Why engines with two workers, ranks, stages or replicas, cannot be tested here."""

import os

import pytest
import torch

WHY_NOT = ""
if os.environ.get("TRITON_INTERPRET") == "1":
    WHY_NOT = "the interpreted V2 runner is set up in this process only"
elif torch.cuda.device_count() == 1:
    WHY_NOT = "two workers need two GPUs, or none"

needs_two_workers = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def skip_without_two_workers() -> None:
    """For fixtures, which marks do not reach."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)

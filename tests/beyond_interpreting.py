"""A mark of tests that would take Triton's interpreter minutes."""

import pytest

from tllm.runtime.kernels.backend import INTERPRETED

beyond_interpreting = pytest.mark.skipif(
    INTERPRETED, reason="many passes in Triton's interpreter; runs on the V1 runner and on a GPU"
)
"""For tests that show nothing of the V2 runner which quicker ones do not show."""

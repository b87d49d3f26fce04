"""What is too much for Triton's interpreter."""

import pytest

from tllm.runtime.kernels.backend import INTERPRETED

beyond_interpreting = pytest.mark.skipif(
    INTERPRETED, reason="many passes in Triton's interpreter; runs on the V1 runner and on a GPU"
)
"""Of a test whose passes are as many others' are: what it shows does not depend on the runner."""

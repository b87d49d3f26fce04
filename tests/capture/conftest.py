"""What these tests share beside the tiny engines."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from two_workers import skip_without_two_workers

from capture import serving
from capture.truth import Truth
from tests.forked_processes import forked


@pytest.fixture(scope="session")
def truth(tiny_model):
    return Truth(tiny_model)


@pytest.fixture(scope="session")
def served(tiny_model, tmp_path_factory):
    """What the user of an `AsyncLLM` with two ranks saw, and the folder of the store it wrote."""
    skip_without_two_workers()
    root: Path = tmp_path_factory.mktemp("serving") / "store"
    with pytest.MonkeyPatch.context() as patch, forked():
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        return asyncio.run(serving.serve(tiny_model, str(root))), root


@pytest.fixture(scope="session")
def runner():
    """Which of vLLM's model runners this process tests."""
    return os.environ["TLLM_TEST_RUNNER"]

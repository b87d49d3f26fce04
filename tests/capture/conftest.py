"""The engines that these tests share."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from engine.conftest import TINY_ENGINE
from engine.reference import save_tiny_model
from vllm.platforms.cpu import CpuPlatform

from capture import serving
from capture.truth import Truth
from tllm import LLM


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Path of the tiny model."""
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny-qwen2")))


@pytest.fixture(scope="session")
def truth(tiny_model):
    return Truth(tiny_model)


@pytest.fixture(scope="session")
def engine(tiny_model):
    """Prompts longer than 24 tokens are computed in chunks."""
    return LLM(tiny_model, max_num_batched_tokens=24, **TINY_ENGINE)


@pytest.fixture(scope="session")
def tight_engine(tiny_model):
    """Sequences preempt each other, and steps are scheduled ahead, as on a GPU."""
    settle = CpuPlatform.check_and_update_config

    @staticmethod
    def settle_and_schedule_ahead(vllm_config):
        settle(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    options = TINY_ENGINE | {"max_model_len": 160, "num_gpu_blocks_override": 8}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", settle_and_schedule_ahead)
        llm = LLM(tiny_model, max_num_batched_tokens=24, **options)
    assert llm.llm_engine.engine_core.engine_core.async_scheduling
    return llm


@pytest.fixture(scope="session")
def served(tiny_model, tmp_path_factory):
    """What the user of an `AsyncLLM` with two ranks saw, and the folder of the store it wrote."""
    if os.environ["TLLM_TEST_RUNNER"] != "v1":
        pytest.skip("the interpreted V2 runner is set up in this process only")
    root: Path = tmp_path_factory.mktemp("serving") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        return asyncio.run(serving.serve(tiny_model, str(root))), root


def _clean(llm):
    yield llm
    llm.clear_consumers()
    llm.reset_prefix_cache()


@pytest.fixture
def llm(engine):
    """The shared engine, without consumers."""
    yield from _clean(engine)


@pytest.fixture
def tight_llm(tight_engine):
    """The shared engine that preempts, without consumers."""
    yield from _clean(tight_engine)


@pytest.fixture(scope="session")
def runner():
    """Which of vLLM's model runners this process tests."""
    return os.environ["TLLM_TEST_RUNNER"]

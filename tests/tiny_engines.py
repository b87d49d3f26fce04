"""The tiny model, and the engines that the tests of rows, ports, steering and capture share.

vLLM is imported when the first of them is asked for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tllm.spec.hooks import HookPoint

SHARE: dict[str, Any] = {}
"""What an engine takes of a GPU, said and not profiled: several of one process share it."""
if torch.cuda.is_available():
    SHARE = {"gpu_memory_utilization": 0.04, "kv_cache_memory_bytes": 2**28}

TINY_ENGINE: dict[str, Any] = {
    **SHARE,
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 32,
    "num_gpu_blocks_override": 512,  # 40 MiB; several engines live side by side
    "disable_log_stats": True,
    "hook_points": [point.value for point in HookPoint if point.value not in ("q", "k", "v")],
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Path of the tiny model."""
    from engine.reference import save_tiny_model

    return str(save_tiny_model(tmp_path_factory.mktemp("tiny-qwen2")))


@pytest.fixture(scope="session")
def tiny_engine(tiny_model):
    """Prompts longer than 24 tokens are computed in chunks."""
    from tllm import LLM

    return LLM(tiny_model, max_num_batched_tokens=24, **TINY_ENGINE)


@pytest.fixture(scope="session")
def tight_engine(tiny_model):
    """7 blocks of 32 tokens for 8 sequences, which preempt each other; schedules a step ahead."""
    from engine.ahead import scheduling_ahead

    from tllm import LLM

    options = TINY_ENGINE | {"max_model_len": 160, "num_gpu_blocks_override": 8}
    with scheduling_ahead():
        llm = LLM(tiny_model, max_num_batched_tokens=24, **options)
    assert llm.llm_engine.engine_core.engine_core.async_scheduling
    return llm


def _clean(llm):
    yield llm
    llm.clear_consumers()
    llm.reset_prefix_cache()


@pytest.fixture
def llm(tiny_engine):
    """The shared engine, without consumers."""
    yield from _clean(tiny_engine)


@pytest.fixture
def tight_llm(tight_engine):
    """The shared engine that preempts, without consumers."""
    yield from _clean(tight_engine)

"""What these tests are compared with."""

from __future__ import annotations

import pytest
import vllm
from tiny_engines import TINY_ENGINE
from vllm.distributed.parallel_state import model_parallel_is_initialized

from engine.reference import Reference
from tllm.engine.worker import InterventionWorker


@pytest.fixture(scope="session")
def reference(tiny_model):
    return Reference(tiny_model)


@pytest.fixture(scope="session")
def kept_plain_engine(tiny_model):
    """vLLM as it is."""
    options = {name: value for name, value in TINY_ENGINE.items() if name != "hook_points"}
    return vllm.LLM(tiny_model, **options | {"skip_tokenizer_init": False})


@pytest.fixture
def plain_engine(kept_plain_engine):
    """vLLM as it is. An engine that ends takes the process groups of all others along, of which
    only ours make them anew."""
    if not model_parallel_is_initialized():
        core = kept_plain_engine.llm_engine.engine_core.engine_core
        InterventionWorker._join_groups(core.model_executor.driver_worker.worker)
    return kept_plain_engine

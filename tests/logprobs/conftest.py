"""The engine that these tests share, and what `transformers` says of the same model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from logprobs.asking import ENGINE, MODEL
from tllm.logprobs import AsyncVirtualLM, TransformersLM

if os.environ["TRITON_INTERPRET"] == "1":
    paths = [str(Path(__file__).parent / "interpreted"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


@pytest.fixture(scope="session")
def shared_lm():
    """The demo model, 8 sequences and 31 blocks of 32 tokens. No test may wait for the timeout."""
    engine = ENGINE | {"max_logprobs": -1, "num_gpu_blocks_override": 32}
    options = {"cache_size": 4, "timeout": 300.0, "idle_seconds": 2.0}
    lm = AsyncVirtualLM.from_name(MODEL, engine_opts=engine, **options)
    yield lm
    lm.cleanup()


@pytest.fixture
def lm(shared_lm):
    """The shared engine, which every test must leave as it found it."""
    shared_lm.clear_cache()
    yield shared_lm
    shared_lm.clear_lora()
    left = shared_lm.stats()
    assert (left["in_flight"], left["kept"], left["kept_blocks"]) == (0, 0, 0)
    assert shared_lm.run(shared_lm.engine.intervention_stats())[0]["running_sequences"] == 0


@pytest.fixture(scope="session")
def reference():
    """The demo model in `transformers`."""
    return TransformersLM.from_name(MODEL)

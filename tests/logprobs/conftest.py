"""The engine that these tests share, and what `transformers` says of the same model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from adapters import save_adapter

from logprobs.asking import CACHED, ENGINE, MODEL, left_in
from tests.forked_processes import forked
from tllm.logprobs import AsyncVirtualLM, TransformersLM

if os.environ["TRITON_INTERPRET"] == "1":
    paths = [str(Path(__file__).parent / "interpreted"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


ON_GPU = torch.cuda.is_available()


@pytest.fixture(scope="session")
def adapters(tmp_path_factory):
    """Paths of two adapters of the demo model, by name."""
    if ON_GPU:
        pytest.skip("vLLM's kernels for adapters on a GPU refuse float32")
    folder, seeds = tmp_path_factory.mktemp("adapters"), {"one": 1, "two": 2}
    return {name: str(save_adapter(folder / name, MODEL, seed)) for name, seed in seeds.items()}


@pytest.fixture(scope="session")
def shared_lm(request):
    """The demo model with two adapters, in an engine process with 31 blocks of 32 tokens.

    No test may wait for the timeout.
    """
    engine = ENGINE | {"max_logprobs": -1, "num_gpu_blocks_override": 32}
    if not ON_GPU:
        engine |= {"enable_lora": True, "max_loras": 6, "max_lora_rank": 8}
    options = {"cache_size": CACHED, "timeout": 3600.0, "idle_seconds": 3.0}
    with forked():
        lm = AsyncVirtualLM.from_name(MODEL, engine_opts=engine, **options)
    with lm:
        if not ON_GPU:
            for name, path in request.getfixturevalue("adapters").items():
                lm.add_new_lora(path, name)
        yield lm


@pytest.fixture
def lm(shared_lm):
    """The shared engine, which every test must leave as it found it."""
    shared_lm.clear_cache()
    yield shared_lm
    shared_lm.clear_lora()
    assert not left_in(shared_lm)


@pytest.fixture(scope="session")
def reference():
    """The demo model in `transformers`."""
    return TransformersLM.from_name(MODEL)

"""Taps that are one op with the norm after them, in a model that is compiled.

The Makefile puts this first in its pass: in a process in which hundreds of tests had been
interpreted before, on a busy machine, the compiler was seen to end the process.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.utils._triton
from tiny_engines import TINY_ENGINE

from engine.asking import generate, greedy, tokens_of
from engine.reference import HIDDEN, LAYERS, Addition
from tllm import LLM
from tllm.runtime.kernels.backend import INTERPRETED

PROMPTS = [[5, 6, 7, 8, 9, 10], list(range(20, 60)), [200, 201]]
TOKENS = 3 if INTERPRETED else 8
VECTORS = 5 * torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(11))
AT = ("post_block", 1)


class NoBackend:
    """In place of a Triton that compiles."""

    @staticmethod
    def hash():
        return "interpreted"


@pytest.fixture
def left(tiny_model, monkeypatch):
    """What is left of the model of an engine that was let go, and is part of a cycle as one in a
    notebook may be, whenever another model is loaded."""
    llm = LLM(tiny_model, **TINY_ENGINE)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    llm.notebook, model = [llm], weakref.ref(worker.model_runner.get_model())
    load_model, left = type(worker).load_model, []

    def load(*args, **kwargs):
        left.append(model())
        load_model(*args, **kwargs)

    monkeypatch.setattr(type(worker), "load_model", load)
    gc.disable()
    try:
        del llm, worker
        assert model() is not None
        yield left
    finally:
        gc.enable()


@pytest.mark.kernels
def test_taps_with_their_norms_are_compiled(tiny_model, reference, monkeypatch, left):
    """And nothing is collected meanwhile: vLLM's linear layers of a CPU read a tensor as they end,
    which would be traced."""
    if INTERPRETED:  # the compiler asks which Triton there is, to name what it keeps
        monkeypatch.setattr(torch.utils._triton, "triton_backend", lambda: NoBackend)
    compiled = LLM(tiny_model, **TINY_ENGINE | {"enforce_eager": False})
    assert compiled.llm_engine.vllm_config.compilation_config.mode
    assert left == [None]
    assert compiled.intervention_stats()[0]["norms_fused"] == 2 * LAYERS
    asked = (VECTORS[0], None, VECTORS[1])
    expected = [
        reference.greedy(prompt, TOKENS, [] if vector is None else [Addition(AT, vector)])
        for prompt, vector in zip(PROMPTS, asked, strict=True)
    ]
    params = [
        greedy(TOKENS)
        if vector is None
        else greedy(TOKENS, steering_vectors={AT[0]: {AT[1]: vector}})
        for vector in asked
    ]
    assert tokens_of(generate(compiled, PROMPTS, params)) == expected

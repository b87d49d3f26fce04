"""Taps that are one op with the norm after them, in a model that is compiled.

The Makefile puts this first in its pass: in a process in which hundreds of tests had been
interpreted before, on a busy machine, the compiler was seen to end the process.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.utils._triton
from tiny_engines import TINY_ENGINE

from engine.asking import generate, greedy, tokens_of
from engine.reference import HIDDEN, LAYERS, Addition
from tllm import LLM

PROMPTS = [[5, 6, 7, 8, 9, 10], list(range(20, 60)), [200, 201]]
INTERPRETED = os.environ["TLLM_TEST_RUNNER"] == "v2"
TOKENS = 3 if INTERPRETED else 8
VECTORS = 5 * torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(11))
AT = ("post_block", 1)


class NoBackend:
    """In place of a Triton that compiles."""

    @staticmethod
    def hash():
        return "interpreted"


@pytest.mark.kernels
def test_taps_with_their_norms_are_compiled(tiny_model, reference, monkeypatch):
    if INTERPRETED:  # the compiler asks which Triton there is, to name what it keeps
        monkeypatch.setattr(torch.utils._triton, "triton_backend", lambda: NoBackend)
    compiled = LLM(tiny_model, **TINY_ENGINE | {"enforce_eager": False})
    assert compiled.llm_engine.vllm_config.compilation_config.mode
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

"""Engines that draft tokens by looking them up in a sequence's own text."""

from __future__ import annotations

from typing import Any

from tiny_engines import TINY_ENGINE

from tllm import LLM

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


def drafting_llm(model: str) -> LLM:
    """Few blocks, so that sequences preempt each other; prompts are computed in chunks."""
    options = TINY_ENGINE | {"max_model_len": 160, "num_gpu_blocks_override": 8}
    llm = LLM(model, max_num_batched_tokens=24, speculative_config=NGRAM, **options)
    _let_other_engines_start()
    return llm


def _let_other_engines_start() -> None:
    """vLLM 0.32 looks at every object of every module when an engine starts on a CPU, and stumbles
    over one of numba, which n-gram drafting has imported: it answers to every name."""
    from llvmlite.binding import ffi

    symbol = ffi._lib_wrapper.__getattr__

    def symbol_that_has_one(library: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return symbol(library, name)

    ffi._lib_wrapper.__getattr__ = symbol_that_has_one

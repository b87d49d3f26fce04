"""Engines that draft tokens, by each method that tLLM runs with."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from oldest_vllm import ON_0_30
from tiny_engines import TINY_ENGINE

from engine.ahead import scheduling_ahead
from engine.drafters import save_drafted_model, save_eagle, save_eagle3, save_mimo
from tllm import LLM
from tllm.runtime.kernels.backend import INTERPRETED

ON_V2 = os.environ["TLLM_TEST_RUNNER"] == "v2"

METHODS = ["ngram", "eagle3", "eagle", "mtp", "eagle3-compiled"]
"""How tokens are drafted; `-compiled` where model and drafter are, and `-ahead` on the V2 runner
where a step is scheduled before the tokens of the last are known. Others by hand, as
`TLLM_TEST_DRAFTS="eagle-ahead-compiled mtp-ahead-compiled"`."""
if INTERPRETED:  # vLLM's kernel for n-grams is beyond Triton's interpreter
    METHODS = ["eagle3-ahead"]
elif ON_V2:
    METHODS = ["ngram", "eagle", "eagle-ahead", "eagle3-ahead", "mtp-ahead"]
if asked := os.environ.get("TLLM_TEST_DRAFTS"):
    METHODS = asked.split()

however_drafted = pytest.mark.parametrize(
    "drafting_model", METHODS if ON_V2 or asked else METHODS[:2], indirect=True, scope="module"
)
"""Of a test of what is made of accepted tokens: drafted without a model and with one is enough. The
methods are the first, since pytest makes an engine anew where a parameter has another number."""


@dataclass(frozen=True)
class DraftedModel:
    """A model that tokens are drafted for.

    Attributes:
        path: what the engine loads.
        plain: the same model as `transformers` knows it.
        speculative_config: of the engine.
        ahead: whether the engine schedules a step ahead.
        compiled: whether model and drafter are compiled, where vLLM has them compiled.
    """

    path: str
    plain: str
    speculative_config: dict[str, Any]
    ahead: bool = False
    compiled: bool = False

    @classmethod
    def made(cls, method: str, folder: Path, tiny_model: str) -> DraftedModel:
        """A model with its drafter, in a folder."""
        skip_without_drafts()
        method, *how = method.split("-")
        ahead, compiled = "ahead" in how, "compiled" in how
        config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
        if method == "ngram":
            config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
            return cls(tiny_model, tiny_model, config, ahead, compiled)
        plain = save_drafted_model(folder / "model")
        path = plain
        if method == "mtp":
            path = save_mimo(folder / "mimo", plain)
        else:
            save = save_eagle if method == "eagle" else save_eagle3
            config["model"] = str(save(folder / "drafter", plain))
        return cls(str(path), str(plain), config, ahead, compiled)

    def llm(self) -> LLM:
        """Few blocks, so that sequences preempt each other; prompts are computed in chunks."""
        options = TINY_ENGINE | {"max_model_len": 160, "num_gpu_blocks_override": 8}
        options |= {"max_num_batched_tokens": 24, "speculative_config": self.speculative_config}
        options["enforce_eager"] = not self.compiled
        with scheduling_ahead() if self.ahead else nullcontext():
            llm = LLM(self.path, async_scheduling=self.ahead, **options)
        assert llm.llm_engine.engine_core.engine_core.async_scheduling is self.ahead
        if self.speculative_config["method"] == "ngram" and not ON_V2:
            _let_other_engines_start()
        return llm


def skip_without_drafts() -> None:
    if ON_0_30 and not torch.cuda.is_available() and not ON_V2:
        pytest.skip(
            "vLLM 0.30 itself cannot draft on a CPU: launching its rejection sampler raises"
        )


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

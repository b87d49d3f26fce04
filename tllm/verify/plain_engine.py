"""What untouched vLLM says, where `transformers` cannot be asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def log_probabilities(
    model: str, engine: Mapping[str, Any], sequences: Sequence[list[int]]
) -> list[list[float]]:
    """Of each token but the first of each sequence, after those before it.

    Args:
        engine: arguments of `vllm.LLM`.
    """
    from vllm import LLM

    llm = LLM(model, **engine)
    try:
        return _asked(llm, sequences)
    finally:
        llm.llm_engine.engine_core.shutdown()  # else this process would wait for the engine's


def _asked(llm: Any, sequences: Sequence[list[int]]) -> list[list[float]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": sequence} for sequence in sequences]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [
            found[token].logprob
            for token, found in zip(sequence[1:], output.prompt_logprobs[1:], strict=True)
            if found is not None
        ]
        for sequence, output in zip(sequences, outputs, strict=True)
    ]

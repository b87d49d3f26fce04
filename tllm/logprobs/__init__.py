"""Next-token log-probabilities for controlled generation."""

from collections.abc import Callable, Mapping
from typing import Any

from tllm.logprobs.base import AsyncLM, Token
from tllm.logprobs.cache import OutputCache
from tllm.logprobs.lane import Lane
from tllm.logprobs.query import TopLogprobs
from tllm.logprobs.transformers_lm import TransformersLM
from tllm.logprobs.virtual_lm import AsyncVirtualLM
from tllm.spec.reading import require_one_of

__all__ = [
    "AsyncLM",
    "AsyncVirtualLM",
    "Lane",
    "OutputCache",
    "Token",
    "TopLogprobs",
    "TransformersLM",
    "load_model_by_name",
]

_BACKENDS: Mapping[str, Callable[..., AsyncLM]] = {
    "vllm": AsyncVirtualLM.from_name,
    "hf": TransformersLM.from_name,
}


def load_model_by_name(
    name: str, backend: str | None = None, llm_opts: Mapping[str, Any] | None = None
) -> AsyncLM:
    """A model that is asked for next-token log-probabilities.

    Args:
        name: a path, or a name on the Hugging Face hub.
        backend: `vllm` (the default), or `hf`: plain `transformers`, slow and simple.
        llm_opts: arguments of the backend's `from_name`.

    Raises:
        ValueError: for an unknown backend.
    """
    chosen = "vllm" if backend is None else backend
    require_one_of("backend", chosen, _BACKENDS)
    return _BACKENDS[chosen](name, **(llm_opts or {}))

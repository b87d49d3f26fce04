"""tLLM: read, steer, patch and learn from a model's activations while vLLM serves it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tllm.version import __version__

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs, EngineArgs, RequestOutput, TokensPrompt

    from tllm.client.llm import (
        LLM,
        AsyncLLM,
        AsyncLLMEngine,
        attach,
        clear_consumers,
        make_llm,
        register_consumer,
    )
    from tllm.params import BeamSearchParams, PoolingParams, SamplingParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "EngineArgs",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "TokensPrompt",
    "__version__",
    "attach",
    "clear_consumers",
    "make_llm",
    "register_consumer",
]

_THEIRS = ("AsyncEngineArgs", "EngineArgs", "RequestOutput", "TokensPrompt")
_PARAMS = ("BeamSearchParams", "PoolingParams", "SamplingParams")


def __getattr__(name: str) -> Any:
    # Lazily: vLLM imports this package for its plugin in each of its processes, before it is
    # itself imported.
    if name not in __all__:
        raise AttributeError(f"module 'tllm' has no attribute {name!r}")
    module = "vllm" if name in _THEIRS else "tllm.params" if name in _PARAMS else "tllm.client.llm"
    return getattr(import_module(module), name)

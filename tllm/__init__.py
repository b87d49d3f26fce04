"""tLLM: read, steer, patch and learn from a model's activations while vLLM serves it."""

from typing import TYPE_CHECKING, Any

from tllm.version import __version__

if TYPE_CHECKING:
    from tllm.llm import (
        LLM,
        AsyncLLM,
        AsyncLLMEngine,
        clear_consumers,
        make_llm,
        register_consumer,
    )
    from tllm.params import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncLLMEngine",
    "SamplingParams",
    "__version__",
    "clear_consumers",
    "make_llm",
    "register_consumer",
]


def __getattr__(name: str) -> Any:
    # Lazily: vLLM imports this package for its plugin in each of its processes, before it is
    # itself imported.
    if name == "SamplingParams":
        from tllm.params import SamplingParams

        return SamplingParams
    if name in __all__:
        import tllm.llm

        return getattr(tllm.llm, name)
    raise AttributeError(f"module 'tllm' has no attribute {name!r}")

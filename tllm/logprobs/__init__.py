"""Next-token log-probabilities for controlled generation."""

from tllm.logprobs.base import AsyncLM
from tllm.logprobs.cache import OutputCache
from tllm.logprobs.lane import Lane
from tllm.logprobs.loading import load_model_by_name
from tllm.logprobs.question import TopLogprobs
from tllm.logprobs.transformers_lm import TransformersLM
from tllm.logprobs.virtual_lm import AsyncVirtualLM

__all__ = [
    "AsyncLM",
    "AsyncVirtualLM",
    "Lane",
    "OutputCache",
    "TopLogprobs",
    "TransformersLM",
    "load_model_by_name",
]

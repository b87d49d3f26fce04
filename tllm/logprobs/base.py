"""What every backend does."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Self = TypeVar("Self", bound="AsyncLM")


class AsyncLM(ABC):
    """A language model that is asked for next-token log-probabilities.

    Attributes:
        tokenizer: the model's, or None when it was not loaded.
        vocab_size: number of log-probabilities of a token.
    """

    tokenizer: Any
    vocab_size: int

    @abstractmethod
    def next_token_logprobs(
        self, prompt: Sequence[int], /, *, lora_name: str | None = None
    ) -> Awaitable[torch.Tensor]:
        """Log-probabilities `[vocab]` float32 of the token after a prompt."""

    @abstractmethod
    def next_token_logprobs_sync(
        self, prompt: Sequence[int], /, *, lora_name: str | None = None
    ) -> torch.Tensor:
        """`next_token_logprobs` for callers without an event loop."""

    @abstractmethod
    def batch_next_token_logprobs(
        self, prompts: Sequence[Sequence[int]], /, *, lora_name: str | None = None
    ) -> Awaitable[torch.Tensor]:
        """Log-probabilities `[batch, vocab]` float32; row i belongs to prompt i."""

    @abstractmethod
    def batch_next_token_logprobs_sync(
        self, prompts: Sequence[Sequence[int]], /, *, lora_name: str | None = None
    ) -> torch.Tensor:
        """`batch_next_token_logprobs` for callers without an event loop."""

    @abstractmethod
    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        eos_token_ids: Sequence[int],
        temperature: float = 1.0,
        seed: int | None = None,
    ) -> list[int]:
        """Tokens of a completion, without the token of `eos_token_ids` that ended it."""

    async def batch_sample(
        self,
        prompt_token_ids_list: Sequence[Sequence[int]],
        max_tokens: int,
        eos_token_ids: Sequence[int],
        temperature: float = 1.0,
        seed: int | None = None,
        **options: Any,
    ) -> list[list[int]]:
        """A completion for each prompt, all with the same seed; options as `sample` takes them."""
        if not len(prompt_token_ids_list):
            raise ValueError("no prompts were given; give at least one")
        samples = (
            self.sample(prompt, max_tokens, eos_token_ids, temperature, seed, **options)
            for prompt in prompt_token_ids_list
        )
        return list(await asyncio.gather(*samples))

    def clear_cache(self) -> None:
        """Forget earlier answers."""

    def reset_async_queries(self) -> None:
        """Give up the queries that nobody will wait for any more."""

    def cleanup(self) -> None:
        """Free what the model holds. Safe to call again."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cleanup()

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.cleanup)

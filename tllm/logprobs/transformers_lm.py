"""`TransformersLM`: the same calls on plain `transformers`, as a slow and simple reference."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence, Set
from typing import Any

import torch

from tllm.logprobs.base import AsyncLM
from tllm.logprobs.query import checked_tokens
from tllm.spec.reading import whole_number


class TransformersLM(AsyncLM):
    """One forward pass of the whole prompt for each query, without a cache.

    Made by `from_name`. Adapters are not supported; use the `vllm` backend.

    Args:
        model: a causal language model.
        tokenizer: or None.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self._model: Any = model.eval()
        self._lock = threading.Lock()
        self.tokenizer = tokenizer
        self.vocab_size = int(model.config.get_text_config().vocab_size)

    @classmethod
    def from_name(cls, model_name: str, **options: Any) -> TransformersLM:
        """Load a model.

        Args:
            model_name: a path, or a name on the Hugging Face hub.
            **options: of `AutoModelForCausalLM.from_pretrained`; `dtype` is float32 unless given.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(
            model_name, **{"dtype": torch.float32, **options}
        )
        try:
            tokenizer = AutoTokenizer.from_pretrained(model_name)
        except (OSError, ValueError):  # a folder without one
            tokenizer = None
        return cls(model, tokenizer)

    @property
    def underlying_model(self) -> Any:
        """The model of `transformers`."""
        return self._model

    async def next_token_logprobs(
        self, token_ids: Sequence[int], *, lora_name: str | None = None
    ) -> torch.Tensor:
        return await asyncio.to_thread(
            self.next_token_logprobs_sync, token_ids, lora_name=lora_name
        )

    @torch.no_grad()  # not inference mode, whose tensors nobody may change or learn by
    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], *, lora_name: str | None = None
    ) -> torch.Tensor:
        """As `AsyncLM`'s."""
        if self._model is None:
            raise RuntimeError("cleanup() was called: this model is gone; make another")
        if lora_name is not None:
            raise ValueError(
                f"lora_name={lora_name!r}: the 'hf' backend has no adapters; use backend='vllm'"
            )
        tokens = checked_tokens(token_ids, self.vocab_size, "the prompt")
        if not tokens:
            raise ValueError("the prompt is empty; give at least one token")
        with self._lock:
            ids = torch.tensor([tokens], device=self._model.device)
            logits = self._model(ids, use_cache=False).logits[0, -1]
        return torch.log_softmax(logits.float(), -1).cpu().clone()

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        eos_token_ids: Sequence[int] | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
    ) -> list[int]:
        max_tokens = whole_number(max_tokens, "max_tokens=", 1)
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        if eos_token_ids is None:
            own = self._model.generation_config.eos_token_id
            ends = {own} if isinstance(own, int) else set(own or ())
        else:
            given = list(eos_token_ids) if isinstance(eos_token_ids, Set) else eos_token_ids
            ends = set(checked_tokens(given, self.vocab_size, "eos_token_ids"))
        tokens: list[int] = []
        while len(tokens) < max_tokens:
            found = await self.next_token_logprobs([*prompt_token_ids, *tokens])
            if temperature == 0:
                token = int(found.argmax())
            else:
                weights = torch.softmax(found / temperature, -1)
                token = int(torch.multinomial(weights, 1, generator=generator))
            if token in ends:
                break
            tokens.append(token)
        return tokens

    def cleanup(self) -> None:
        self._model = None

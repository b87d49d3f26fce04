"""One particle: a sequence that is extended token by token."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from vllm.lora.request import LoRARequest

from tllm.logprobs.question import Form, Interventions, Question, TopLogprobs, checked_tokens
from tllm.logprobs.service import Particle

if TYPE_CHECKING:
    from tllm.logprobs.virtual_lm import AsyncVirtualLM


class Lane:
    """A sequence that stays in the engine: a step computes its new tokens and nothing else.

    Made by `AsyncVirtualLM.open`. `next` and `feed` alternate; `fork` may be called at any time,
    and costs nothing until the fork is used. Close a lane when it is done, or use it as a context
    manager: until then it may hold a place in the engine. A lane that is idle may lose that
    place to others; its next step then costs a short prefill.
    """

    def __init__(
        self,
        model: AsyncVirtualLM,
        tokens: list[int],
        lora: LoRARequest | None,
        interventions: Interventions,
    ) -> None:
        self._model = model
        self._tokens = tokens
        self._lora = lora
        self._interventions = interventions
        self._particle = Particle()
        self._asking = 0
        self._closed = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt, and what was fed."""
        return tuple(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    async def next(
        self, *, top_k: int | None = None, token_ids: Sequence[int] | None = None
    ) -> torch.Tensor | TopLogprobs:
        """The log-probabilities of the next token; arguments and results as those of
        `AsyncVirtualLM.next_token_logprobs`."""
        question = self._question(top_k, token_ids)
        self._asking += 1
        try:
            return (await self._model._ask(question, self._particle)).result
        finally:
            self._asking -= 1

    def next_sync(
        self, *, top_k: int | None = None, token_ids: Sequence[int] | None = None
    ) -> torch.Tensor | TopLogprobs:
        """`next` for callers without an event loop."""
        question = self._question(top_k, token_ids)
        return self._model._ask_sync([(question, self._particle)])[0].result

    def _question(self, top_k: int | None, token_ids: Sequence[int] | None) -> Question:
        self._check_open()
        form = Form.of(top_k, token_ids, self._model.vocab_size)
        tokens = tuple(self._tokens)
        self._model._check_length(tokens)
        return Question(tokens, form, self._lora, self._interventions)

    def feed(self, *tokens: int) -> None:
        """Append one token or more. Nothing is computed before `next`."""
        self._check_open()
        if not tokens:
            raise ValueError("feed() needs at least one token")
        if self._asking:
            raise RuntimeError("feed() was called while next() is awaited; await it first")
        given = tuple(map(operator.index, tokens))
        self._tokens += checked_tokens(given, self._model.vocab_size, "feed()")

    def fork(self) -> Lane:
        """A lane with the same tokens. What was computed for them is not computed again, but for
        what does not fill a block of the KV cache."""
        self._check_open()
        child = Lane(self._model, list(self._tokens), self._lora, self._interventions)
        if not self._interventions.results:  # else the kept request's rows are its own
            self._model._fork(self._particle, child._particle)
        return child

    async def close(self) -> list[Any]:
        """Give the lane's place in the engine back.

        Returns:
            vLLM's outputs of the requests that served the lane, when consumers have something to
            say about them (`consumers=` or `capture=` was given to `open`): usually one, more when
            the lane had lost its place. Empty otherwise.
        """
        if self._closed:
            return []
        self._closed = True
        return await self._model._close(self._particle)

    def close_sync(self) -> list[Any]:
        """`close` for callers without an event loop."""
        if self._closed:
            return []
        self._closed = True
        return self._model._close_sync(self._particle)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the lane is closed; open another, or fork one that is open")

    async def __aenter__(self) -> Lane:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if not self._closed:
            self._model._abandon(self._particle)

"""A lane: a sequence that is extended token by token, and stays in the engine meanwhile."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tllm.logprobs.kept import Holder
from tllm.logprobs.loop import EngineLoop, Mailbox
from tllm.logprobs.query import Answer, Form, Query, TopLogprobs, checked_tokens
from tllm.logprobs.service import Service


class Lane:
    """A sequence that stays in the engine: a step computes its new tokens and nothing else.

    Made by `AsyncVirtualLM.open`. `next` and `feed` alternate; `fork` may be called at any time,
    and costs nothing until the fork is used. Close a lane when it is done, or use it as a context
    manager: until then it may hold a place in the engine. A lane that is idle may lose that
    place to others; its next step then costs a short prefill.
    """

    def __init__(self, loop: EngineLoop, mailbox: Mailbox, service: Service, query: Query) -> None:
        self._loop = loop
        self._mailbox = mailbox
        self._service = service
        self._vocab_size = service.vocab_size
        self._query = query
        self._tokens = list(query.tokens)
        self._holder = Holder()
        self._asking = 0
        self._closed = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt, and what was fed."""
        return tuple(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    async def next(
        self, *, top_k: int | None = None, only: Sequence[int] | None = None
    ) -> torch.Tensor | TopLogprobs:
        """The log-probabilities of the next token; arguments and results as those of
        `AsyncVirtualLM.next_token_logprobs`."""
        return (await self.ask_all(self._mailbox, [self], top_k, only))[0].result

    def next_sync(
        self, *, top_k: int | None = None, only: Sequence[int] | None = None
    ) -> torch.Tensor | TopLogprobs:
        """`next` for callers without an event loop."""
        return self._loop.run(self.ask_all(self._mailbox, [self], top_k, only))[0].result

    @staticmethod
    async def ask_all(
        mailbox: Mailbox,
        lanes: Sequence[Lane],
        top_k: int | None,
        only: Sequence[int] | None,
    ) -> Sequence[Answer]:
        """The answers to a step of some lanes of the model that a mailbox is of."""
        listed = isinstance(lanes, list | tuple)
        if not (listed and lanes and all(isinstance(lane, Lane) for lane in lanes)):
            raise ValueError(f"lanes={lanes!r:.80} must be a list of lanes, one at least")
        if any(lane._mailbox is not mailbox for lane in lanes):
            raise ValueError("a lane is of another model; step it with the one that opened it")
        form = Form.of(top_k, only, lanes[0]._vocab_size)
        queries = [lane._next_query(form) for lane in lanes]
        for lane in lanes:
            lane._asking += 1
        try:
            return await mailbox.ask(queries, [lane._holder for lane in lanes])
        finally:
            for lane in lanes:
                lane._asking -= 1

    def _next_query(self, form: Form) -> Query:
        self._check_open()
        self._service.check_length(self._tokens)
        tokens, query = self._tokens, self._query
        return Query(tokens, len(tokens), form, query.lora, query.interventions)

    def feed(self, *tokens: int) -> None:
        """Append one token or more. Nothing is computed before `next`."""
        self._check_open()
        if not tokens:
            raise ValueError("feed() needs at least one token")
        if self._asking:
            raise RuntimeError("feed() was called while next() is awaited; await it first")
        if len(tokens) == 1 and type(tokens[0]) is int and 0 <= tokens[0] < self._vocab_size:
            self._tokens.append(tokens[0])
            return
        try:
            if bool in map(type, tokens):
                raise TypeError
            given = tuple(map(operator.index, tokens))
        except TypeError:
            raise TypeError(
                f"feed() was given {tokens!r:.60}; give token ids, each as an argument: feed(5, 6)"
            ) from None
        self._tokens += checked_tokens(given, self._vocab_size, "feed()")

    def fork(self) -> Lane:
        """A lane with the same tokens. What was computed for them is not computed again, but for
        what does not fill a block of the KV cache."""
        self._check_open()
        tokens, of = self.tokens, self._query
        query = Query.of(tokens, of.form, of.lora, of.interventions)
        child = Lane(self._loop, self._mailbox, self._service, query)
        if not query.interventions.results:  # else the kept request's rows are its own
            self._loop.tell(self._holder.share, child._holder, len(tokens))
        return child

    async def close(self) -> list[Any]:
        """Give the lane's place in the engine back.

        Returns:
            vLLM's outputs of the requests that served the lane, when consumers have something to
            say about them (`consumers=` or `capture=` was given to `open`): usually one, more when
            the lane had lost its place. Empty otherwise. Closed again, it gives the same.
        """
        self._end()
        if self._loop.closed:
            return []
        return await self._loop.wait_for(self._service.close(self._holder))

    def close_sync(self) -> list[Any]:
        """`close` for callers without an event loop."""
        self._end()
        return [] if self._loop.closed else self._loop.run(self._service.close(self._holder))

    def _end(self) -> None:
        self._closed = True
        self._query = replace(self._query, lora=None)  # which may have been replaced since

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the lane is closed; open another, or fork one that is open")

    async def __aenter__(self) -> Lane:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a lane cannot be copied or pickled, since its place in the engine is its own; fork() "
            "gives another with the same tokens"
        )

    def __del__(self) -> None:
        if not self._closed and self._loop.is_ours and self._loop.loop.is_running():
            self._loop.post(self._service.abandon, self._holder)

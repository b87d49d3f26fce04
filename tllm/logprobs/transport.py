"""How results come from the workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import torch

from tllm.client.llm import AsyncLLM
from tllm.consumers.next_token import NextTokenConsumer
from tllm.consumers.next_token_results import DroppedResult, NextToken
from tllm.logprobs.arena import NOTHING_SENT, Addresses, Arena
from tllm.logprobs.query import WHOLE, Answer, Form
from tllm.spec.reading import require_one_of

logger = logging.getLogger(__name__)

CONSUMER = NextTokenConsumer.consumer_id

Kind = Literal["shared", "rpc"]


class Reply:
    """Where one result will arrive. Either `read` or `close` ends it.

    Attributes:
        options: as `NextTokenConsumer` takes them.
        leased: the row of shared memory where it arrives, if it does.
    """

    def __init__(
        self, transport: Transport, form: Form, ticket: int, leased: tuple[Arena, int] | None
    ) -> None:
        self.ticket = ticket
        self.options: dict[str, Any] = {"ticket": ticket, **form.options()}
        self._transport = transport
        self.leased = leased
        self._open = True
        if leased is not None:
            arena, place = leased
            self.options["place"] = arena.option(place)

    async def read(self) -> Answer:
        """The result, once the engine's output of the step is there."""
        if self.leased is not None:
            self._open = False
            arena, place = self.leased
            return arena.read(place, self.ticket)
        found = await self._transport.fetch(self.ticket)
        self._open = False
        ids = None if found.token_ids is None else torch.from_numpy(found.token_ids)
        return Answer(torch.from_numpy(found.values), ids)

    def close(self) -> None:
        """Give up a result that was not read."""
        if self._open:
            self._open = False
            self._transport.give_up(self.ticket, self.leased)


class Transport:
    """One for each engine; everything here runs on the engine's own event loop.

    Args:
        kind: `shared` memory, or `rpc` when the workers are on other hosts.
        shared_bytes: the most memory for results on their way.
        spawn: runs a coroutine that nobody waits for.

    Attributes:
        is_shared: whether results come through shared memory.
        addresses: of those of requests that are asked again and again; they belong to the arenas
            that there are.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        kind: Kind,
        shared_bytes: int,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        require_one_of("transport", kind, Kind)
        self.is_shared = kind == "shared"
        self.addresses = Addresses()
        self._engine = engine
        self._registration = engine.registration_of(CONSUMER)
        self._vocab_size = engine.model_config.get_vocab_size()
        self._shared_bytes = shared_bytes
        self._spawn = spawn
        self._next_ticket = 1
        self._arenas: dict[int, Arena] = {}
        self._to_fetch: dict[int, asyncio.Future[NextToken]] = {}

    def lease_many(self, form: Form, results: int) -> list[int]:
        """Rows of `arena(form)` for so many results; fewer where there is no memory."""
        return self.arena(form).lease_many(results) if self.is_shared else []

    def ticket(self) -> int:
        """A number that no other result of this engine has."""
        return self.tickets(1).start

    def tickets(self, results: int) -> range:
        """So many such numbers."""
        first, self._next_ticket = self._next_ticket, self._next_ticket + results
        return range(first, self._next_ticket)

    async def reply(self, form: Form) -> Reply:
        """Where a result will arrive; waits for a free row."""
        if not self.is_shared:
            return Reply(self, form, self.ticket(), None)
        arena = self.arena(form)
        return Reply(self, form, self.ticket(), (arena, await arena.lease()))

    def arena(self, form: Form) -> Arena:
        """Shared rows that are wide enough for a result."""
        if (registration := self._engine.registration_of(CONSUMER)) != self._registration:
            self._registration = registration
            self._begin_anew()
        numbers = self._vocab_size
        if form is not WHOLE:  # few widths: powers of two
            numbers = 1 << max(6, (form.numbers(numbers) - 1).bit_length())
        if numbers not in self._arenas:
            self._arenas[numbers] = Arena(numbers, self._shared_bytes)
        return self._arenas[numbers]

    def _begin_anew(self) -> None:
        """The consumer was registered again: its copies in the workers do not know the files, whose
        names are gone. What is on its way hears of it where it would have arrived."""
        self.close()
        self.addresses, self._arenas = Addresses(), {}

    def give_up(self, ticket: int, leased: tuple[Arena, int] | None) -> None:
        """Forget a result; its row is used again once no worker can write to it any more."""
        self._spawn(self._given_up(ticket, leased))

    async def _given_up(self, ticket: int, leased: tuple[Arena, int] | None) -> None:
        try:
            await self._engine.call_consumer(CONSUMER, "forget", [] if leased else [ticket])
        except Exception as error:  # a dead engine writes nothing, nor does a detached consumer
            logger.debug("result %d was not forgotten by the workers: %s", ticket, error)
        if leased is not None:
            arena, place = leased
            arena.release(place)

    def fetch(self, ticket: int) -> asyncio.Future[NextToken]:
        """Fetch a result from the workers, together with all others that are ready now."""
        loop = asyncio.get_running_loop()
        if not self._to_fetch:
            loop.call_soon(lambda: self._spawn(self._fetch_all()))
        self._to_fetch[ticket] = loop.create_future()
        return self._to_fetch[ticket]

    async def _fetch_all(self) -> None:
        wanted, self._to_fetch = self._to_fetch, {}
        failure: Exception = RuntimeError(NOTHING_SENT)
        try:
            answers = await self._engine.call_consumer(CONSUMER, "pop", list(wanted))
        except Exception as error:
            answers, failure = [], error
        # One worker answers; the others have nothing.
        found = {ticket: result for answer in answers for ticket, result in answer.items()}
        for ticket, future in wanted.items():
            if future.done():
                continue
            result = found.get(ticket)
            if isinstance(result, DroppedResult):
                future.set_exception(RuntimeError(result.error))
            elif result is not None:
                future.set_result(result)
            else:
                future.set_exception(failure)

    def stats(self) -> dict[str, int]:
        """Rows of shared memory."""
        return {
            "shared_rows": sum(map(len, self._arenas.values())),
            "free_rows": sum(arena.free for arena in self._arenas.values()),
        }

    def close(self) -> None:
        self.addresses.close()
        for arena in self._arenas.values():
            arena.close()

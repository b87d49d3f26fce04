"""Where the workers put results, and how they are fetched from there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, get_args

import torch
from vllm.v1.engine.exceptions import EngineDeadError

from tllm.consumers.next_token import NextToken, NextTokenConsumer
from tllm.llm import AsyncLLM
from tllm.logprobs.arena import Arena, Place
from tllm.logprobs.question import Form

Transport = Literal["shared", "rpc"]
CONSUMER = NextTokenConsumer.consumer_id


class Rows:
    """One for each engine; everything here runs on the engine's own event loop.

    Args:
        transport: `shared` memory, or `rpc` when the workers are on other hosts.
        shared_bytes: the most memory for results on their way.

    Attributes:
        shared: whether results come in shared memory.
        tickets: of results, each used once.
    """

    def __init__(self, engine: AsyncLLM, transport: Transport, shared_bytes: int) -> None:
        if transport not in get_args(Transport):
            raise ValueError(
                f"transport={transport!r} is not known; choose one of "
                f"{', '.join(get_args(Transport))}"
            )
        self.shared = transport == "shared"
        self.tickets = itertools.count(1)
        self._engine = engine
        self._vocab_size = engine.model_config.get_vocab_size()
        self._shared_bytes = shared_bytes
        self._arenas: dict[int, Arena] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._to_take: dict[int, asyncio.Future[NextToken]] = {}

    @asynccontextmanager
    async def one(self, form: Form) -> AsyncIterator[tuple[dict[str, Any], Callable[[], Any]]]:
        """Where a result goes: options for the worker, and how to get it from there."""
        ticket = next(self.tickets)
        fetched = False
        if not self.shared:

            async def take() -> tuple[torch.Tensor, torch.Tensor | None]:
                nonlocal fetched
                found = await self._take(ticket)
                fetched = True
                ids = None if found.token_ids is None else torch.from_numpy(found.token_ids)
                return torch.from_numpy(found.values), ids

            try:
                yield {"ticket": ticket, **form.options()}, take
            finally:
                if not fetched:
                    self.in_background(self._settle([ticket]))
            return
        arena = self.arena(form)
        place = await arena.lease()

        async def read() -> tuple[torch.Tensor, torch.Tensor | None]:
            nonlocal fetched
            fetched = True
            return arena.read(place, ticket)

        try:
            yield self.options(form, arena, place, ticket), read
        finally:
            if not fetched:
                self.give_up(arena, place)

    def arena(self, form: Form) -> Arena:
        """Shared rows that are wide enough for a result."""
        numbers = form.numbers(self._vocab_size)
        if form != Form():  # few widths: powers of two
            numbers = 1 << max(6, (numbers - 1).bit_length())
        if numbers not in self._arenas:
            self._arenas[numbers] = Arena(numbers, self._shared_bytes)
        return self._arenas[numbers]

    def has_room(self, form: Form) -> bool:
        """Whether there is a row at once. Where shared memory has no room, whoever asks for a row
        is told."""
        try:
            return self.arena(form).free_now()
        except RuntimeError:
            return False

    @staticmethod
    def options(form: Form, arena: Arena, place: Place, ticket: int) -> dict[str, Any]:
        """As `NextTokenConsumer` takes them."""
        return {"ticket": ticket, "place": arena.option(place), **form.options()}

    def give_up(self, arena: Arena, place: Place) -> None:
        """Use a row again once no worker can write to it any more."""
        self.in_background(self._reuse(arena, place))

    def in_background(self, work: Any) -> None:
        """Run a coroutine that nobody waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def stats(self) -> dict[str, int]:
        """Rows of shared memory."""
        return {
            "shared_rows": sum(map(len, self._arenas.values())),
            "free_rows": sum(arena.free for arena in self._arenas.values()),
        }

    def close(self) -> None:
        """Give the shared memory back."""
        for arena in self._arenas.values():
            arena.close()

    async def _settle(self, tickets: list[int]) -> None:
        # A dead engine writes nothing any more, nor does a consumer that is detached.
        with suppress(EngineDeadError, RuntimeError, ValueError):
            await self._engine.call_consumer(CONSUMER, "settle", tickets)

    async def _reuse(self, arena: Arena, place: Place) -> None:
        await self._settle([])
        arena.release(place)

    def _take(self, ticket: int) -> asyncio.Future[NextToken]:
        """Fetch a result from the workers, together with all others that are ready now."""
        loop = asyncio.get_running_loop()
        if not self._to_take:
            loop.call_soon(lambda: self.in_background(self._take_all()))
        self._to_take[ticket] = loop.create_future()
        return self._to_take[ticket]

    async def _take_all(self) -> None:
        wanted, self._to_take = self._to_take, {}
        try:
            answers = await self._engine.call_consumer(CONSUMER, "take", list(wanted))
        except Exception as error:
            answers, failure = [], error
        else:
            failure = RuntimeError(
                "the worker has no log-probabilities: its consumer 'next_token' has raised (see "
                "the log), or was unregistered"
            )
        # One worker answers; the others have nothing.
        found = {ticket: result for answer in answers for ticket, result in answer.items()}
        for ticket, future in wanted.items():
            if future.done():
                continue
            if ticket in found:
                future.set_result(found[ticket])
            else:
                future.set_exception(failure)

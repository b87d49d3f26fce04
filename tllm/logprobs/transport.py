"""How results come from the workers: the memory they are written to, and who may use it when."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from tllm.client.llm import AsyncLLM
from tllm.consumers.next_token import HEADER, NextToken, NextTokenConsumer
from tllm.logprobs.query import WHOLE, Answer, Form
from tllm.shared_memory import FOLDER, SharedRows

logger = logging.getLogger(__name__)

CONSUMER = NextTokenConsumer.consumer_id

Kind = Literal["shared", "rpc"]

_FIRST_ROWS = 16
_LEND_BYTES = 2**16
"""Results smaller than this are copied: that costs less than to know who refers to them."""

_NOTHING_SENT = (
    "the worker sent no log-probabilities: its consumer 'next_token' has raised (see the log), or "
    "was unregistered"
)


class ArenaRow(NamedTuple):
    """A row that is reserved for one result: the index of its file, and its index there."""

    file: int
    row: int


class Arena:
    """Shared rows of one width. A large result is a view of its row, which is free again when
    nobody refers to the result any more. When half of the rows are held so, further results are
    copies.

    All methods are called on the engine's loop.

    Args:
        numbers: the most values a row holds.
        max_bytes: the most memory of all rows.
    """

    def __init__(self, numbers: int, max_bytes: int) -> None:
        self.width = HEADER + numbers
        self._max_rows = max(2, max_bytes // (4 * self.width))
        self._files: list[SharedRows] = []
        self._free: list[ArenaRow] = []  # a heap: neighbours are copied in one go
        # Filled by finalizers, which may run at any point of any thread: no lock, no counter.
        self._returned: deque[ArenaRow] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._rows = 0
        self._lent = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def free(self) -> int:
        """Rows that nobody uses."""
        self._collect()
        return len(self._free)

    def lease_now(self) -> ArenaRow | None:
        """A free row, if there is one that nobody waits for. Raises `RuntimeError` when there is
        no memory for any row."""
        waited_for = any(not waiter.done() for waiter in self._waiting)
        return None if waited_for or not self._has_free() else heapq.heappop(self._free)

    def _has_free(self) -> bool:
        self._collect()
        return bool(self._free) or (self._rows < self._max_rows and self._grow())

    async def lease(self) -> ArenaRow:
        """A free row; waits for one when there is no more memory."""
        while not self._has_free():
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter
        return heapq.heappop(self._free)

    def option(self, place: ArenaRow) -> list[object]:
        """A row as `NextTokenConsumer` takes it."""
        return [str(self._files[place.file].path), self.width, place.row]

    def release(self, place: ArenaRow) -> None:
        """A row is free again."""
        heapq.heappush(self._free, place)
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def read(self, place: ArenaRow, ticket: int) -> Answer:
        """What was written to a row; the row is given back in time.

        Raises `RuntimeError` when it was not written for this ticket.
        """
        file = self._files[place.file]
        row = file.values[place.row]
        header = row[:HEADER].copy().view(np.int32)
        if int(header[:2].view(np.int64)[0]) != ticket:
            self.release(place)
            raise RuntimeError(_NOTHING_SENT)
        file.unlink()  # the worker has it: nothing is left behind, however this process ends
        count, num_ids = int(header[2]), int(header[3])
        values = row[HEADER : HEADER + count]
        ids = row[HEADER + count : HEADER + count + num_ids].view(np.int32)
        if values.nbytes >= _LEND_BYTES and not num_ids and 2 * self._lent < self._max_rows - 1:
            self._lent += 1
            weakref.finalize(values, self._returned.append, place).atexit = False
            return Answer(torch.from_numpy(values))
        answer = Answer(
            torch.from_numpy(values.copy()), torch.from_numpy(ids.copy()) if num_ids else None
        )
        self.release(place)
        return answer

    def close(self) -> None:
        """Remove the files; results keep what they refer to."""
        for file in self._files:
            file.unlink()
        for waiter in self._waiting:
            waiter.cancel()

    def _collect(self) -> None:
        """Take back the rows of results that nobody refers to any more."""
        while self._returned:
            self._lent -= 1
            heapq.heappush(self._free, self._returned.popleft())

    def _grow(self) -> bool:
        rows = min(max(_FIRST_ROWS, self._rows), self._max_rows - self._rows)
        try:
            file = SharedRows.create(rows, self.width)
        except OSError as error:
            if not self._rows:
                raise RuntimeError(
                    f"no room for {rows * self.width * 4 / 2**20:.0f} MiB of shared rows in "
                    f"{FOLDER}: {error}. Enlarge it (docker run --shm-size=...), or pass "
                    "transport='rpc'"
                ) from error
            logger.warning(
                "%s has no room for more than %d shared rows: results may wait for one",
                FOLDER,
                self._rows,
            )
            self._max_rows = self._rows
            return False
        number = len(self._files)
        self._files.append(file)
        self._rows += rows
        for row in range(rows):
            heapq.heappush(self._free, ArenaRow(number, row))
        return True


class Reply:
    """Where one result will arrive. Either `read` or `close` ends it.

    Attributes:
        ticket: of the result.
        options: as `NextTokenConsumer` takes them.
    """

    def __init__(
        self, transport: Transport, form: Form, ticket: int, leased: tuple[Arena, ArenaRow] | None
    ) -> None:
        self.ticket = ticket
        self.options: dict[str, Any] = {"ticket": ticket, **form.options()}
        self._transport = transport
        self._leased = leased
        self._open = True
        if leased is not None:
            arena, place = leased
            self.options["place"] = arena.option(place)

    def read_now(self) -> Answer:
        """The result, which is in shared memory once the engine's output of the step is there."""
        assert self._leased is not None
        self._open = False
        arena, place = self._leased
        return arena.read(place, self.ticket)

    async def read(self) -> Answer:
        """The result, once the engine's output of the step is there."""
        if self._leased is not None:
            return self.read_now()
        found = await self._transport.fetch(self.ticket)
        self._open = False
        ids = None if found.token_ids is None else torch.from_numpy(found.token_ids)
        return Answer(torch.from_numpy(found.values), ids)

    def close(self) -> None:
        """Give up a result that was not read."""
        if self._open:
            self._open = False
            self._transport.give_up(self.ticket, self._leased)


class Transport:
    """One for each engine; everything here runs on the engine's own event loop.

    Args:
        kind: `shared` memory, or `rpc` when the workers are on other hosts.
        shared_bytes: the most memory for results on their way.
        spawn: runs a coroutine that nobody waits for.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        kind: Kind,
        shared_bytes: int,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        if kind not in get_args(Kind):
            raise ValueError(
                f"transport={kind!r} is not known; choose one of {', '.join(get_args(Kind))}"
            )
        self._shared = kind == "shared"
        self._engine = engine
        self._vocab_size = engine.model_config.get_vocab_size()
        self._shared_bytes = shared_bytes
        self._spawn = spawn
        self._tickets = itertools.count(1)
        self._arenas: dict[int, Arena] = {}
        self._to_fetch: dict[int, asyncio.Future[NextToken]] = {}

    def reply_now(self, form: Form) -> Reply | None:
        """Where a result will arrive in shared memory, if there is room at once. Where there is no
        memory at all, whoever calls `reply` is told."""
        if not self._shared:
            return None
        arena = self._arena(form)
        try:
            place = arena.lease_now()
        except RuntimeError:
            return None
        return None if place is None else Reply(self, form, next(self._tickets), (arena, place))

    async def reply(self, form: Form) -> Reply:
        """Where a result will arrive; waits for a free row."""
        if not self._shared:
            return Reply(self, form, next(self._tickets), None)
        arena = self._arena(form)
        return Reply(self, form, next(self._tickets), (arena, await arena.lease()))

    def _arena(self, form: Form) -> Arena:
        """Shared rows that are wide enough for a result."""
        numbers = self._vocab_size
        if form is not WHOLE:  # few widths: powers of two
            numbers = 1 << max(6, (form.numbers(numbers) - 1).bit_length())
        if numbers not in self._arenas:
            self._arenas[numbers] = Arena(numbers, self._shared_bytes)
        return self._arenas[numbers]

    def give_up(self, ticket: int, leased: tuple[Arena, ArenaRow] | None) -> None:
        """Forget a result; its row is used again once no worker can write to it any more."""
        self._spawn(self._given_up(ticket, leased))

    async def _given_up(self, ticket: int, leased: tuple[Arena, ArenaRow] | None) -> None:
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
        failure: Exception = RuntimeError(_NOTHING_SENT)
        try:
            answers = await self._engine.call_consumer(CONSUMER, "pop", list(wanted))
        except Exception as error:
            answers, failure = [], error
        # One worker answers; the others have nothing.
        found = {ticket: result for answer in answers for ticket, result in answer.items()}
        for ticket, future in wanted.items():
            if future.done():
                continue
            if ticket in found:
                future.set_result(found[ticket])
            else:
                future.set_exception(failure)

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

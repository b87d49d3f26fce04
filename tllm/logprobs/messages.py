"""What goes to an engine in bulk; everything here runs on the engine's own loop."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from tllm.client.llm import AsyncLLM
from tllm.engine.bulk import Bulk, BulkInputs, BulkItem, Ended
from tllm.logprobs.query import NEXT_TOKEN, Form, Interventions, Query

_PLAIN = Interventions()


class Messages:
    """Gathers what is asked of an engine together, and sends it in as few messages as can be: one
    for the requests of each form, and what goes on with the first of them.

    Args:
        ended: told of the tickets that were sent, see `Bulk`.
        spawn: runs a coroutine that nobody waits for.
    """

    def __init__(
        self, engine: AsyncLLM, ended: Ended, spawn: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self.engine = engine
        self.bulk = Bulk(engine, ended)
        self._spawn = spawn
        self._prefix = uuid.uuid4().hex[:8]
        self._numbers = itertools.count(1)
        self._begun: dict[tuple[Form, bool], list[BulkItem]] = {}
        self._continued = BulkInputs([], [], [], [])
        self._unneeded: list[str] = []

    def new_request_id(self) -> str:
        """A name that no other request of the engine has."""
        return f"logprobs-{self._prefix}-{next(self._numbers)}"

    def takes(self, query: Query) -> bool:
        """Whether a query asks for nothing that has to be done before it is sent."""
        return query.lora is None and not query.interventions.asked and self.engine.takes_plain()

    def begin(self, form: Form, item: BulkItem) -> None:
        """A request is sent with the others of its form. Where its result goes, its own options
        say."""
        self._begun.setdefault((form, item.streamed), []).append(item)

    def go_on(
        self, ticket: int, engine_id: str, tokens: Sequence[int], consumers: Any = None
    ) -> None:
        """The next tokens of a streamed request are sent with the others.

        Args:
            consumers: options by consumer id, where it asks otherwise than before.
        """
        continued = self._continued
        if consumers is not None:
            continued.consumers.append((len(continued.tickets), consumers))
        continued.tickets.append(ticket)
        continued.request_ids.append(engine_id)
        continued.tokens.append(tokens)

    def send(self) -> None:
        """Send what was begun and what goes on."""
        begun, self._begun = self._begun, {}
        continued, self._continued = self._continued, BulkInputs([], [], [], [])
        self.bulk.expect(continued.tickets, continued.request_ids)
        for (form, streamed), items in begun.items():
            tickets = [item.ticket for item in items]
            self.bulk.expect(tickets, (item.request_id for item in items))
            asked = _PLAIN.applied_to(NEXT_TOKEN, form.options())
            try:
                params = self.engine.prepared_plain(asked, streamed=streamed)
            except Exception as error:
                self.bulk.end(tickets, error)
                continue
            self._spawn(self.bulk.send(params, items, continued))
            continued = BulkInputs([], [], [], [])
        if continued.tickets:
            self._spawn(self.bulk.send(NEXT_TOKEN, continued=continued))

    def abort(self, request_id: str) -> None:
        """A request that was begun is not needed any more, nor are others that end with it."""
        if not self._unneeded:
            asyncio.get_running_loop().call_soon(self._send_unneeded)
        self._unneeded.append(request_id)

    def _send_unneeded(self) -> None:
        unneeded, self._unneeded = self._unneeded, []
        self._spawn(self._given_up(unneeded))

    async def _given_up(self, request_ids: list[str]) -> None:
        with suppress(Exception):  # a dead engine has none of them
            await self.bulk.abort_requests(request_ids)

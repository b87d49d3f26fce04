"""What goes to an engine in bulk: queries, and turns of lanes. Everything here runs on the engine's
own loop."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from tllm.client.admission import NewsError
from tllm.client.llm import AsyncLLM
from tllm.engine.bulk import Bulk, BulkInputs, BulkItem, Ended
from tllm.logprobs.arena import Arena, arrived
from tllm.logprobs.kept import Admission, Holder, KeptRequest, LaneClosedError
from tllm.logprobs.loop import Waiter
from tllm.logprobs.query import NEXT_TOKEN, Answer, AnswerRows, Form, Interventions, Query
from tllm.logprobs.transport import CONSUMER, Transport

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


class _Turn:
    """The turn of one kept request, and who waits for it.

    Attributes:
        waiter: whose lane goes on with the request.
        others: who asked for the same while it was under way: the lane again, after its caller was
            cancelled, or a fork.
        known: tokens of the request before it; 0 for its first.
        key: of first turns, equal for those that say the same.
        ticket, place: where its answer arrives.
    """

    __slots__ = ("key", "known", "others", "place", "request", "ticket", "waiter")

    def __init__(self, waiter: Waiter, request: KeptRequest, key: Hashable = None) -> None:
        self.waiter = waiter
        self.others: list[Waiter] = []
        self.request = request
        self.known = request.tokens
        self.key = key
        self.ticket = self.place = -1

    @property
    def arena(self) -> Arena:
        """Where its answer arrives."""
        assert self.request.address is not None
        return self.request.address.arena

    def is_asked_by(self, waiter: Waiter) -> bool:
        """Whether somebody, who holds the same request, asks for the same."""
        own, other = self.waiter.query, waiter.query
        return (
            own.num_tokens == other.num_tokens
            and own.form == other.form
            and own.tokens_from(self.known) == other.tokens_from(self.known)
        )


class BulkTurns:
    """Turns of lanes' kept requests: those that come together are one message.

    Args:
        messages: what the turns are sent in.
        keep: makes the request that is kept for a lane.
        again: serves those who go on otherwise, after somebody else's lane was closed, or after
            something was registered.

    Attributes:
        computed: turns that were begun.
        shared: how many asked for what was under way.
    """

    def __init__(
        self,
        transport: Transport,
        admission: Admission,
        messages: Messages,
        keep: Callable[[Query, Holder], KeptRequest],
        again: Callable[[Iterable[Waiter]], None],
    ) -> None:
        self._bulk = messages.bulk
        self._transport = transport
        self._admission = admission
        self._messages = messages
        self._keep = keep
        self._again = again
        self._running: dict[KeptRequest, _Turn] = {}
        self._first: dict[Hashable, _Turn] = {}
        self._sent: dict[int, _Turn] = {}
        self.computed = 0
        self.shared = 0

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, waiters: Iterable[Waiter], version: Hashable) -> list[Waiter]:
        """Begin the turns of those whose lane's request waits for what the lane has more than it,
        or who have none and ask for nothing else. `Messages.send` sends them.

        Args:
            version: of what answers depend on, see `Versions`.

        Returns:
            The others.
        """
        rest: list[Waiter] = []
        turns: list[_Turn] = []
        running = self._running
        for waiter in waiters:
            holder, query = waiter.holder, waiter.query
            if holder is None or holder.closed:
                rest.append(waiter)
                continue
            request = holder.request
            if request is not None and not request.open:  # it was parked
                self._admission.let_go(holder)
                request = None
            if request is None:
                turn = self._begun(waiter, holder, version)
            elif (turn := running.get(request)) is not None:
                turn = self._joined(waiter, turn)
            elif (
                request.turns
                or request.version != version
                or request.tokens >= query.num_tokens
                or query.interventions.results
                or not self._is_known(request)
            ):
                turn = None
            else:
                holder.take_over(request)
                running[request] = turn = _Turn(waiter, request)
            if turn is None:
                rest.append(waiter)
            elif turn.waiter is waiter:
                turns.append(turn)
        for form, of_form in _by_form(turns).items():
            rest += self._say(form, of_form)
        return rest

    def _joined(self, waiter: Waiter, turn: _Turn) -> _Turn | None:
        """The turn, if somebody else waits for it now."""
        if not turn.is_asked_by(waiter):
            return None
        turn.others.append(waiter)
        self.shared += 1
        return turn

    def _begun(self, waiter: Waiter, holder: Holder, version: Hashable) -> _Turn | None:
        """The first turn of a request for a lane, or somebody else's that says the same."""
        query = waiter.query
        if not (self._messages.takes(query) and self._transport.is_shared):
            return None
        key = version, query.form, query.tokens
        if key in self._first:
            return self._joined(waiter, self._first[key])
        try:
            request = self._keep(query, holder)
        except ValueError:  # the others' way tells who asked
            return None
        self._running[request] = self._first[key] = turn = _Turn(waiter, request, key)
        return turn

    def _is_known(self, request: KeptRequest) -> bool:
        """Whether the engine's own id of a request is known."""
        if request.engine_id is None:
            request.engine_id = self._bulk.engine_id(request.request_id)
        return request.engine_id is not None

    def _say(self, form: Form, turns: Sequence[_Turn]) -> list[Waiter]:
        """Say where answers of one form go, and what is asked. Returns those who wait for turns for
        which there is no room in shared memory."""
        places = self._transport.lease_many(form, len(turns))
        arena = self._transport.arena(form)
        tickets = iter(self._transport.tickets(len(turns)))
        left: list[Waiter] = []
        for turn in turns:
            request = turn.request
            address = request.address_in(arena, self._transport.addresses) if places else None
            if address is None:
                self._forget(turn)
                left += turn.waiter, *turn.others
                continue
            turn.place, turn.ticket = places.pop(), next(tickets)
            address.say(turn.ticket, turn.place)
            options = address.options(form)
            consumers = None if options is None else {CONSUMER: options}
            tokens = turn.waiter.query.tokens_from(turn.known)
            self._admission.begin_turn(request, turn.known + len(tokens))
            request.begin_turn(len(tokens), partial(self._bulk.end, (turn.ticket,)))
            self._sent[turn.ticket] = turn
            self.computed += 1
            if turn.known:
                self._messages.go_on(turn.ticket, request.engine_id or "", tokens, consumers)
                continue
            name = self._messages.new_request_id()
            request.begin(name, partial(self._messages.abort, name))
            self._bulk.expect_end(name, request.lose)
            item = BulkItem(turn.ticket, name, tokens, consumers, streamed=True)
            self._messages.begin(form, item)
        for place in places:
            arena.release(place)
        return left

    def _forget(self, turn: _Turn) -> None:
        """A turn is not under way any more."""
        del self._running[turn.request]
        if turn.key is not None:
            del self._first[turn.key]

    def end(self, tickets: Sequence[int], error: Exception | None) -> None:
        """Turns were computed, or were not; tickets of others are passed over."""
        now = asyncio.get_running_loop().time()
        sent = self._sent
        turns = [turn for ticket in tickets if (turn := sent.pop(ticket, None)) is not None]
        if not turns:
            return
        turns.sort(key=lambda turn: turn.ticket)
        together = None if error is not None else _read_together(turns)
        outcomes: list[Answer | Exception] = []
        if together is None:
            outcomes = [error or arrived(turn.arena, turn.place, turn.ticket) for turn in turns]
        for turn in turns:
            request = turn.request
            self._forget(turn)
            if error is not None:
                self._transport.give_up(turn.ticket, (turn.arena, turn.place))
                request.give_up()
            elif request.address is not None:
                request.address.heard()
            request.end_turn(now)
            self._admission.end_turn(request)
        self._admission.make_room()
        if together is not None:
            turns[0].waiter.pending.answered_together(together)
            return
        for turn, outcome in zip(turns, outcomes, strict=True):
            tell([turn.waiter, *turn.others], outcome, self._again)


def _by_form(turns: Iterable[_Turn]) -> dict[Form, list[_Turn]]:
    """Turns by what is wanted; who asks together has one form."""
    found: dict[Form, list[_Turn]] = {}
    form: Form | None = None
    for turn in turns:
        if form is None or turn.waiter.query.form is not form:
            form = turn.waiter.query.form
            of_form = found.setdefault(form, [])
        of_form.append(turn)
    return found


def _read_together(turns: Sequence[_Turn]) -> AnswerRows | None:
    """What was written for turns, in the order of their tickets, if these are all that one caller
    asked for in one call, nobody else did, and their rows follow each other."""
    first, last, count = turns[0], turns[-1], len(turns)
    pending = first.waiter.pending
    if (
        count != len(pending.waiters)
        or not (last.ticket - first.ticket == last.place - first.place == count - 1)
        or any(turn.waiter.pending is not pending or turn.others for turn in turns)
    ):
        return None
    tickets = range(first.ticket, last.ticket + 1)
    return first.arena.read_rows(range(first.place, last.place + 1), tickets)


def tell(
    waiters: Sequence[Waiter],
    outcome: Answer | Exception,
    again: Callable[[Iterable[Waiter]], None],
) -> None:
    """Tell those who wait for one answer; each has memory of his own. That a lane was closed
    concerns nobody else: those go on by `again`. So do all where something was registered
    meanwhile, which may steer them."""
    if isinstance(outcome, NewsError):
        again([each for each in waiters if each.is_awaited])
        return
    if isinstance(outcome, LaneClosedError):
        closed = [each for each in waiters if each.holder is not None and each.holder.closed]
        again([each for each in waiters if each not in closed and each.is_awaited])
        waiters = closed
    for i, waiter in enumerate(waiters):
        last = i == len(waiters) - 1
        waiter.resolve(outcome if last or isinstance(outcome, Exception) else outcome.copy())

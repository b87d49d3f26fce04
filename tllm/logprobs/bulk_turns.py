"""Turns of lanes that go to the engine in bulk; everything here runs on the engine's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

import vllm

from tllm.client.llm import AsyncLLM
from tllm.engine.bulk import Bulk, BulkInputs
from tllm.logprobs.kept import Admission, KeptRequest, LaneClosedError
from tllm.logprobs.loop import Waiter
from tllm.logprobs.query import Answer, AnswerRows, Form
from tllm.logprobs.transport import CONSUMER, Address, Arena, Transport


class _Turn:
    """The turn of one kept request, and who waits for it.

    Attributes:
        waiter: whose lane goes on with the request.
        others: who asked for the same while it was under way: the lane again, after its caller was
            cancelled, or a fork.
        known: tokens of the request before it.
        ticket, place: where its answer arrives.
    """

    __slots__ = ("known", "others", "place", "request", "ticket", "waiter")

    def __init__(self, waiter: Waiter, request: KeptRequest) -> None:
        self.waiter = waiter
        self.others: list[Waiter] = []
        self.request = request
        self.known = request.tokens
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
    """The next turns of lanes' kept requests: those that come together are one message.

    Args:
        params: of a request that draws one token; a message needs some.
        spawn: runs a coroutine that nobody waits for.
        again: serves those whose lane goes on otherwise, after somebody else's was closed.

    Attributes:
        computed: turns that were begun.
        shared: how many asked for what was under way.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        transport: Transport,
        admission: Admission,
        bulk: Bulk,
        params: vllm.SamplingParams,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        again: Callable[[Iterable[Waiter]], None],
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._admission = admission
        self._bulk = bulk
        self._params = params
        self._spawn = spawn
        self._again = again
        self._running: dict[KeptRequest, _Turn] = {}
        self._sent: dict[int, _Turn] = {}
        self._messages: list[BulkInputs] = []
        self.computed = 0
        self.shared = 0

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, waiters: Iterable[Waiter]) -> list[Waiter]:
        """Begin the turns of those whose lane's request waits for what the lane has more than it.
        `send` sends them.

        Returns:
            The others.
        """
        rest: list[Waiter] = []
        by_form: dict[Form, list[_Turn]] = {}
        version, running, form = self._engine.steering.version, self._running, None
        for waiter in waiters:
            holder, query = waiter.holder, waiter.query
            request = None if holder is None or holder.closed else holder.request
            if holder is None or request is None:
                rest.append(waiter)
            elif (turn := running.get(request)) is not None and turn.is_asked_by(waiter):
                turn.others.append(waiter)
                self.shared += 1
            elif (
                request.turns
                or turn is not None
                or not request.open
                or request.steering != version
                or request.tokens >= query.num_tokens
                or query.interventions.results
                or not self._is_known(request)
            ):
                rest.append(waiter)
            else:
                holder.take_over(request)
                if query.form is not form:
                    form = query.form
                    of_form = by_form.setdefault(form, [])
                running[request] = turn = _Turn(waiter, request)
                of_form.append(turn)
        for form, turns in by_form.items():
            rest += self._say(form, turns)
        return rest

    def _is_known(self, request: KeptRequest) -> bool:
        """Whether the engine's own id of a request is known."""
        if request.engine_id is None:
            request.engine_id = self._bulk.engine_id(request.request_id)
        return request.engine_id is not None

    def _say(self, form: Form, turns: Sequence[_Turn]) -> list[Waiter]:
        """Say where answers of one form go, and make a message of the turns. Returns those who wait
        for turns for which there is no room in shared memory."""
        places = self._transport.lease_many(form, len(turns))
        arena = self._transport.arena(form)
        tickets = iter(self._transport.tickets(len(turns)))
        message = BulkInputs([], [], [], [])
        left: list[Waiter] = []
        for turn in turns:
            request = turn.request
            address = address_of(request, arena) if places else None
            if address is None:
                del self._running[request]
                left += turn.waiter, *turn.others
                continue
            turn.place, turn.ticket = places.pop(), next(tickets)
            address.say(turn.ticket, turn.place)
            options = address.options(form)
            if options is not None:
                message.consumers.append((len(message.tickets), {CONSUMER: options}))
            tokens = turn.waiter.query.tokens_from(turn.known)
            self._admission.begin_turn(request, turn.known + len(tokens))
            request.begin_turn(len(tokens), partial(self._bulk.end, (turn.ticket,)))
            self._sent[turn.ticket] = turn
            message.tickets.append(turn.ticket)
            message.request_ids.append(request.engine_id or "")
            message.tokens.append(tokens)
        for place in places:
            arena.release(place)
        if message.tickets:
            self.computed += len(message.tickets)
            self._bulk.expect(message.tickets, message.request_ids)
            self._messages.append(message)
        return left

    def send(self) -> None:
        """Send what was begun."""
        messages, self._messages = self._messages, []
        for message in messages:
            self._spawn(self._bulk.send(self._params, continued=message))

    def end(self, tickets: Sequence[int], error: Exception | None) -> None:
        """Turns were computed, or were not; tickets of others are passed over."""
        now = asyncio.get_running_loop().time()
        sent = self._sent
        turns = [turn for ticket in tickets if (turn := sent.pop(ticket, None)) is not None]
        if not turns:
            return
        turns.sort(key=lambda turn: turn.ticket)
        outcomes: Sequence[Answer | Exception]
        outcomes = [error] * len(turns) if error is not None else _arrived(turns)
        for turn in turns:
            request = turn.request
            del self._running[request]
            if error is not None:
                self._transport.give_up(turn.ticket, (turn.arena, turn.place))
            elif request.address is not None:
                request.address.heard()
            request.end_turn(now)
            self._admission.end_turn(request)
        self._admission.make_room()
        if isinstance(outcomes, AnswerRows) and _are_asked_together(turns):
            turns[0].waiter.pending.answered_together(outcomes)
            return
        for turn, outcome in zip(turns, outcomes, strict=True):
            self._tell(turn, outcome)

    def _tell(self, turn: _Turn, outcome: Answer | Exception) -> None:
        waiters = [turn.waiter, *turn.others]
        if isinstance(outcome, LaneClosedError):  # that concerns nobody whose lane is open
            self._again([each for each in waiters if each.holder and not each.holder.closed])
            waiters = [each for each in waiters if each.holder and each.holder.closed]
        for waiter in waiters[1:]:
            waiter.resolve(outcome if isinstance(outcome, Exception) else outcome.copy())
        for waiter in waiters[:1]:
            waiter.resolve(outcome)


def _are_asked_together(turns: Sequence[_Turn]) -> bool:
    """Whether these are all that one caller asked for in one call, and nobody else did."""
    pending = turns[0].waiter.pending
    return len(turns) == len(pending.waiters) and all(
        turn.waiter.pending is pending and not turn.others for turn in turns
    )


def _arrived(turns: Sequence[_Turn]) -> Sequence[Answer | Exception]:
    """What was written for turns, in the order of their tickets. Rows that follow each other are
    read together, but not if they would be lent together to several who wait."""
    first, last, count = turns[0], turns[-1], len(turns)
    arena = first.arena
    if (
        last.ticket - first.ticket == last.place - first.place == count - 1
        and last.arena is arena
        and (arena.copies or _are_asked_together(turns))
    ):
        places = range(first.place, last.place + 1)
        rows = arena.read_rows(places, range(first.ticket, last.ticket + 1))
        if rows is not None:
            return rows
    return [_read(turn) for turn in turns]


def _read(turn: _Turn) -> Answer | Exception:
    try:
        return turn.arena.read(turn.place, turn.ticket)
    except RuntimeError as unwritten:
        return unwritten


def address_of(request: KeptRequest, arena: Arena) -> Address | None:
    """Where a worker looks up the places of a request's results; None without room for a table."""
    address = request.address
    if address is None or address.arena is not arena:
        try:
            other = arena.addresses.take(arena)
        except OSError:
            return None  # it keeps the one that it has
        if address is not None:
            address.give_back()
        address = request.address = other
    return address

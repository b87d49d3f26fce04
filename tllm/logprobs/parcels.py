"""Questions that go to the engine together, with no vLLM output of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import vllm

from tllm.engine.bulk import Bulk, Item
from tllm.llm import AsyncLLM
from tllm.logprobs.admission import Admission
from tllm.logprobs.arena import Arena, Place
from tllm.logprobs.kept_request import KeptRequest
from tllm.logprobs.question import Answer, Form, Interventions, Question
from tllm.logprobs.rows import CONSUMER, Rows

Done = Callable[[Answer | Exception], None]
"""Called once, with the outcome."""

_PLAIN = Interventions()


@dataclass(eq=False)
class _Sent:
    """A question on its way.

    Attributes:
        request: the kept request whose turn it is; None for a query.
        blocks: what a query holds of the KV cache.
    """

    done: Done
    arena: Arena
    place: Place
    request: KeptRequest | None
    blocks: int


class Parcels:
    """Collects questions until `send`. A question that is not taken goes alone.

    Args:
        query: parameters of a query.
    """

    def __init__(
        self, engine: AsyncLLM, rows: Rows, admission: Admission, query: vllm.SamplingParams
    ) -> None:
        self._engine = engine
        self._rows = rows
        self._admission = admission
        self._query = query
        self._bulk = Bulk(engine, self._ended)
        self._sent: dict[int, _Sent] = {}
        self._begun: dict[Form, list[Item]] = {}
        self._continued: list[Item] = []

    def takes_query(self, question: Question) -> bool:
        """Whether nothing has to be done for a query before it is sent."""
        return (
            self._rows.shared
            and question.lora is None
            and not question.interventions.asked
            and self._engine.takes_plain()
            and self._rows.has_room(question.form)
        )

    def takes_turn(self, question: Question, request: KeptRequest) -> bool:
        """Whether the request waits for what the question has more than it."""
        return (
            self._rows.shared
            and request.open
            and not request.turns
            and request.steering == self._engine.steering.version
            and request.tokens < len(question.tokens)
            and not question.interventions.results
            and self._bulk.engine_id(request.request_id) is not None
            and self._rows.has_room(question.form)
        )

    def add_query(self, question: Question, request_id: str, done: Done) -> int:
        """Returns a ticket, for `abort`."""
        blocks = self._admission.enter(len(question.tokens) + 1)
        item = self._item(question, question.tokens, request_id, done, None, blocks)
        self._begun.setdefault(question.form, []).append(item)
        return item.ticket

    def add_turn(self, question: Question, request: KeptRequest, done: Done) -> int:
        """Returns a ticket."""
        engine_id = self._bulk.engine_id(request.request_id)
        assert engine_id is not None
        new = question.tokens[request.tokens :]
        self._admission.begin_turn(request, len(question.tokens))
        item = self._item(question, new, engine_id, done, request)
        request.begin_turn(len(new), partial(self._lost, item.ticket))
        self._continued.append(item)
        return item.ticket

    def _item(
        self,
        question: Question,
        tokens: Sequence[int],
        request_id: str,
        done: Done,
        request: KeptRequest | None,
        blocks: int = 0,
    ) -> Item:
        arena = self._rows.arena(question.form)
        place, ticket = arena.lease_now(), next(self._rows.tickets)
        self._sent[ticket] = _Sent(done, arena, place, request, blocks)
        options = self._rows.options(question.form, arena, place, ticket)
        return Item(ticket, request_id, tokens, {CONSUMER: options})

    def send(self) -> None:
        """Send what there is: turns in one message, the queries of each form in another."""
        continued, self._continued = self._continued, []
        begun, self._begun = self._begun, {}
        if continued:
            self._rows.in_background(self._bulk.send(self._query, (), continued))
        for items in begun.values():
            # The form alone is of use: each item brings its own place.
            asked = _PLAIN.applied_to(self._query, items[0].consumers[CONSUMER])
            try:
                params = self._engine.prepared_plain(asked)
            except Exception as error:
                for item in items:
                    self._ended(item.ticket, error)
            else:
                self._rows.in_background(self._bulk.send(params, items, ()))

    def abort(self, ticket: int) -> None:
        """Nobody waits for a query any more."""
        self._rows.in_background(self._bulk.abort(ticket))
        self._ended(ticket, RuntimeError("the query was cancelled"))

    def close(self) -> None:
        """No query will be answered any more. (Turns hear of it from their kept requests.)"""
        for ticket, sent in list(self._sent.items()):
            if sent.request is None:
                self._bulk.forget(ticket)
                del self._sent[ticket]
                sent.done(RuntimeError("the query was cancelled"))

    def _lost(self, ticket: int, error: Exception) -> None:
        """The kept request has ended."""
        self._bulk.forget(ticket)
        self._ended(ticket, error)

    def _ended(self, ticket: int, error: Exception | None) -> None:
        """A token was computed, or will not be."""
        sent = self._sent.pop(ticket)
        outcome: Answer | Exception
        if error is None:
            try:
                outcome = Answer(*sent.arena.read(sent.place, ticket))
            except RuntimeError as unwritten:
                outcome = unwritten
        else:
            outcome = error
            self._rows.give_up(sent.arena, sent.place)
        if sent.request is None:
            self._admission.leave(sent.blocks)
        else:
            sent.request.end_turn()
            self._admission.end_turn(sent.request)
        sent.done(outcome)

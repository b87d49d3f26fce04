"""Answers queries; everything here runs on the engine's own event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any
from weakref import WeakSet

import vllm
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind

from tllm.client.llm import AsyncLLM
from tllm.consumers.base import Consumer
from tllm.engine.bulk import BulkItem
from tllm.engine.processes import gone, processes_of
from tllm.engine.verdicts import check_goes_on
from tllm.logprobs.arena import Arena, arrived
from tllm.logprobs.bulk import BulkTurns, Messages, tell
from tllm.logprobs.kept import Admission, Holder, KeptRequest
from tllm.logprobs.loop import EngineLoop, Waiter
from tllm.logprobs.query import NEXT_TOKEN, NEXT_TURN, Answer, Form, Query, does_nothing, own_params
from tllm.logprobs.transport import CONSUMER, Kind, Transport


class _Key:
    """Equal for queries that have the same answer. They may be long, and are hashed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: tuple[Hashable, ...]) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._parts == other._parts


class _Flight:
    """A query that is being answered, and who waits for it.

    Attributes:
        key: of queries that have the same answer.
        task: what answers it, unless it went in bulk.
        ticket: under which it went in bulk, if it did.
        leased: where the answer of one in bulk arrives.
        blocks: what the request of one in bulk holds.
        of_lane: whether a lane waits for it.
    """

    __slots__ = ("blocks", "key", "leased", "of_lane", "task", "ticket", "waiters")

    def __init__(self, key: _Key) -> None:
        self.key = key
        self.waiters: list[Waiter] = []
        self.task: asyncio.Task[Answer] | None = None
        self.ticket: int | None = None
        self.leased: tuple[Arena, int] | None = None
        self.blocks = 0
        self.of_lane = False


class Versions:
    """What answers depend on beside what is asked: steering, weights, and consumers that write to
    the rows of every request, or steer it. Those of one version may be kept, and its lanes go
    on."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._consumers: list[Consumer] = []
        self._writing: list[Consumer] = []
        self._changes = 0

    @property
    def now(self) -> tuple[int, int]:
        """Another one after each change."""
        consumers = list(self._engine.consumers.values())
        if not _are_same(consumers, self._consumers):
            self._consumers = consumers
            writing = [each for each in consumers if not each.on_request_only and writes(each)]
            self._changes += not _are_same(writing, self._writing)
            self._writing = writing
        return self._engine.steering.version, self._changes


def writes(consumer: Consumer) -> bool:
    """Whether a consumer may change rows, in ways that are not known: by itself, or since it
    decides that requests are steered."""
    return any(
        "steer" in flow.actions or any(write.port == "residual_stream" for write in flow.writes)
        for flow in consumer.flows()
    )


def _are_same(left: Sequence[Consumer], right: Sequence[Consumer]) -> bool:
    """Whether these are the same objects, however they compare."""
    return len(left) == len(right) and all(map(is_, left, right))


class Service:
    """One for each engine.

    A query goes to the engine in bulk, with all others that came with it, when nothing else has to
    be done for it: without adapter and interventions, or as the next turn of a lane's kept request
    (`BulkTurns`). Others go one by one, as requests of vLLM's client.

    Args:
        transport: `shared` memory, or `rpc` when the workers are on other hosts.
        shared_bytes: the most memory for results on their way.
        idle_seconds: see `Admission`.

    Attributes:
        vocab_size: number of log-probabilities of a token.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        loop: EngineLoop,
        transport: Kind,
        shared_bytes: int,
        idle_seconds: float,
    ) -> None:
        self.engine = engine
        self.vocab_size: int = engine.model_config.get_vocab_size()
        self._max_tokens = int(engine.model_config.max_model_len) - 1
        self._spawn = loop.spawn
        self._transport = Transport(engine, transport, shared_bytes, loop.spawn)
        self._admission = Admission(engine, idle_seconds)
        self._versions = Versions(engine)
        # Not objects: the ledger keeps hashes, and the next object may have the hash of the last.
        self._alone = itertools.count()
        self._messages = Messages(engine, self._on_ended, loop.spawn)
        self._bulk = self._messages.bulk
        self._sent: dict[int, _Flight] = {}
        self._turns = BulkTurns(
            self._transport, self._admission, self._messages, self._keep, self.serve
        )
        self._computed = 0
        self._shared = 0
        self._flights: dict[_Key, _Flight] = {}
        self._rows: dict[Form, list[int]] = {}  # for those that are served now
        self._kept: WeakSet[KeptRequest] = WeakSet()

    def check_length(self, tokens: Sequence[int]) -> None:
        """Raise `ValueError` for more tokens than the engine takes."""
        if len(tokens) > self._max_tokens:
            raise ValueError(
                f"{len(tokens)} tokens leave no room for the next one; this engine takes up to "
                f"{self._max_tokens} (max_model_len={self._max_tokens + 1})"
            )

    # -- queries -------------------------------------------------------------------------------

    def serve(self, waiters: Iterable[Waiter]) -> None:
        """Begin to answer; what is being answered already is not computed again."""
        flights, version = self._flights, self._versions.now
        begin: list[tuple[_Flight, Waiter]] = []
        for waiter in self._turns.begin(waiters, version):
            query = waiter.query
            # Rows that come with a result are somebody's own.
            own = (object(),) if query.interventions.results else ()
            key = _Key((version, *query.key, *own))
            flight = flights.get(key)
            if flight is None:
                flight = flights[key] = _Flight(key)
                begin.append((flight, waiter))
            else:
                self._shared += 1
            if waiter.holder is not None:
                flight.of_lane = True
            flight.waiters.append(waiter)
        for form, results in Counter([waiter.query.form for _, waiter in begin]).items():
            self._rows[form] = self._transport.lease_many(form, results)
        for flight, waiter in begin:
            try:
                self._begin(flight, waiter.query, waiter.holder)
            except Exception as error:  # one query's, and not of those that came with it
                self._conclude(flight, error)
        for form, unused in self._rows.items():
            for place in unused:
                self._transport.arena(form).release(place)
        self._rows.clear()
        self._admission.make_room()
        self._messages.send()

    def _lease(self, form: Form) -> tuple[Arena, int] | None:
        """A row for the result of a query that is served now. Where there is none, whoever waits
        for a row is told why."""
        places = self._rows.get(form)
        return (self._transport.arena(form), places.pop()) if places else None

    def _begin(self, flight: _Flight, query: Query, holder: Holder | None) -> None:
        if holder is None:
            self._add_query(flight, query)
        if flight.ticket is None:
            work = self._query(query) if holder is None else self._step(query, holder)
            flight.task = asyncio.get_running_loop().create_task(work)
            # A callback, since a task that is cancelled before it begins runs nothing at all.
            flight.task.add_done_callback(lambda task: self._conclude(flight, _outcome(task)))

    def cancel(self, waiters: Iterable[Waiter]) -> None:
        """These do not wait any more. What nobody waits for is aborted, except a lane's turn."""
        leaving = set(waiters)
        for key, flight in list(self._flights.items()):
            flight.waiters = [waiter for waiter in flight.waiters if waiter not in leaving]
            if flight.waiters or flight.of_lane:
                continue
            del self._flights[key]  # an equal query may follow before this one has ended
            if flight.task is not None:
                flight.task.cancel()
            elif flight.ticket is not None:
                self._spawn(self._bulk.abort(flight.ticket))
                self._bulk.end([flight.ticket], _cancelled())

    def _conclude(self, flight: _Flight, outcome: Answer | Exception) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        tell(flight.waiters, outcome, self.serve)

    def written(self, query: Query) -> bool:
        """Whether a consumer may change the rows of this query, in ways that are not known."""
        return any(map(writes, self._serving(query)))

    def _serving(self, query: Query) -> list[Consumer]:
        """The consumers that are told of a query, but the one that answers it."""
        asked = query.interventions.asked.consumers
        return [
            consumer
            for name, consumer in self.engine.consumers.items()
            if asked.get(name, {}).get("enabled", name in asked or not consumer.on_request_only)
        ]

    # -- in bulk -------------------------------------------------------------------------------

    def _add_query(self, flight: _Flight, query: Query) -> None:
        """Send a query in bulk, if nothing has to be done for it before."""
        if not self._messages.takes(query):
            return
        leased = self._lease(query.form)
        if leased is None:
            return
        arena, place = flight.leased = leased
        ticket = flight.ticket = self._transport.ticket()
        flight.blocks = self._admission.enter(len(query.tokens) + 1)
        asked = {"ticket": ticket, "place": arena.option(place), **query.form.options()}
        self._computed += 1
        self._sent[ticket] = flight
        name = self._messages.new_request_id()
        self._messages.begin(query.form, BulkItem(ticket, name, query.tokens, {CONSUMER: asked}))

    def _on_ended(self, tickets: Sequence[int], error: Exception | None) -> None:
        """Tokens in bulk were computed, or were not."""
        self._turns.end(tickets, error)
        outcomes: list[tuple[_Flight, Answer | Exception]] = []
        for ticket in tickets:
            flight = self._sent.pop(ticket, None)
            if flight is None:  # a turn's
                continue
            assert flight.leased is not None
            outcomes.append((flight, error or arrived(*flight.leased, ticket)))
            if error is not None:
                self._transport.give_up(ticket, flight.leased)
            self._admission.leave(flight.blocks)
        self._admission.make_room()
        for flight, outcome in outcomes:
            self._conclude(flight, outcome)

    # -- one by one ----------------------------------------------------------------------------

    async def _query(self, query: Query) -> Answer:
        """A request of its own."""
        self._check_steered(query)
        reply = await self._transport.reply(query.form)
        try:
            interventions = query.interventions
            params = interventions.applied_to(NEXT_TOKEN, reply.options)
            output = await self._generate(query, params)
            answer = await reply.read()
        finally:
            reply.close()
        if not interventions.results:
            return answer
        return Answer(answer.values, answer.token_ids, output)

    def _check_steered(self, query: Query) -> None:
        """Refuse what the query alone cannot tell: modules and monitors are found by name."""
        if what := self.engine.for_generated_alone(query.interventions.asked):
            raise ValueError(does_nothing(what))

    async def _generate(self, query: Query, params: vllm.SamplingParams) -> Any:
        tokens = min(len(query.tokens) + (params.max_tokens or 1), self._max_tokens + 1)
        blocks = self._admission.enter(tokens)
        last = None
        try:
            self._computed += 1
            async for output in self.engine.generate(
                tokens_input(list(query.tokens)),
                params,
                self._messages.new_request_id(),
                lora_request=query.lora,
                results=query.interventions.results,
            ):
                last = output
        finally:
            self._admission.leave(blocks)
        if last is not None:
            check_goes_on(last)
            if last.outputs[0].finish_reason == "abort":
                raise RuntimeError("the engine aborted the request, as when it is paused")
        return last

    async def sample(self, query: Query, fields: Mapping[str, Any]) -> list[int]:
        """The tokens of a completion, without the one that ended it; `fields` are sampling
        parameters."""
        params = own_params(RequestOutputKind.FINAL_ONLY, **fields)
        params = query.interventions.applied_to(params, {"enabled": False})
        output = await self._generate(query, params)
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        # What a controller ended has a reason in words, and no token of an end.
        by_token = not isinstance(completion.stop_reason, str)
        return tokens[:-1] if completion.finish_reason == "stop" and by_token else tokens

    # -- lanes ---------------------------------------------------------------------------------

    async def close(self, holder: Holder) -> list[Any]:
        """A lane is done. Returns the outputs of its requests, if consumers speak of them."""
        request = holder.request
        self.abandon(holder)
        ending = [*holder.served, *([request] if request and not request.holders else [])]
        for each in ending:
            await each.ended.wait()
        return [request.output for request in holder.served if request.output is not None]

    def abandon(self, holder: Holder) -> None:
        """A lane was dropped without being closed."""
        holder.closed = True
        self._admission.let_go(holder)

    async def _step(self, query: Query, holder: Holder) -> Answer:
        """A turn of a lane's kept request."""
        request, tokens = holder.request, query.tokens
        # It was parked, or its tokens were steered in another way.
        if request is not None and not (request.open and request.version == self._versions.now):
            self._admission.let_go(holder)
            request = None
        if holder.closed or (request is not None and request.tokens == len(tokens)):
            return await self._query(query)
        if request is not None and request.in_bulk:  # and this turn could not go so
            self._admission.let_go(holder)
            request = None
        if request is None:
            request = self._keep(query, holder)
        holder.take_over(request)
        self._admission.begin_turn(request, len(tokens))
        self._admission.make_room()
        interventions = query.interventions
        try:
            reply = await self._transport.reply(query.form)
            try:
                # Another step of the lane may have come first while this one waited for a row.
                if new := tokens[request.tokens :]:
                    self._computed += 1
                    await request.turn(
                        new,
                        interventions.applied_to(NEXT_TURN, reply.options),
                        self._messages.new_request_id(),
                        lora_request=query.lora,
                        results=interventions.results,
                    )
                    return await reply.read()
            finally:
                reply.close()
        finally:
            self._admission.end_turn(request)
            self._admission.make_room()
        return await self._query(query)

    def _keep(self, query: Query, holder: Holder) -> KeptRequest:
        self._check_steered(query)
        if self.engine.steers_from_end(query.interventions.asked):
            raise ValueError(
                "steering, the lane's own or a global one, names tokens that count from the end of "
                "the prompt ('last_prompt', negative positions), and a lane's tokens are a prompt "
                "that grows; give other positions, or ask with next_token_logprobs()"
            )
        if query.interventions.from_end:
            raise ValueError(
                f"{query.interventions.from_end} counts from the end of the prompt ('last_prompt', "
                "negative positions), and a lane's tokens are a prompt that grows; give other "
                "positions, or ask with next_token_logprobs()"
            )
        adapter = None if query.lora is None else query.lora.lora_int_id
        # A consumer that writes makes the blocks nobody else's, and what one reads is computed for
        # each request; without a prefix cache all is.
        root: Hashable = adapter, self.engine.steering.version, query.interventions.key
        alone = query.interventions.results or self._serving(query)
        if alone or not self.engine.vllm_config.cache_config.enable_prefix_caching:
            root = "alone", next(self._alone)
        request = self._admission.keep(root, query.tokens, self._versions.now)
        self._kept.add(request)
        holder.hold(request)
        if query.interventions.results:
            holder.served.append(request)
        return request

    # -- the rest ------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Counters: requests and turns computed, those whose answer was told before vLLM had gone
        through all of the step, queries that shared one, requests parked, requests kept now, rows
        of shared memory."""
        return {
            "computed": self._computed + self._turns.computed,
            "noticed": self._bulk.noticed,
            "shared": self._shared + self._turns.shared,
            "parked": self._admission.parked,
            "kept": self._admission.idle,
            "in_flight": len(self._flights) + len(self._turns),
            "kept_blocks": self._admission.blocks,
            **self._transport.stats(),
        }

    async def shut_down(self, *, owned: bool, registered: bool) -> None:
        """Abort what runs, and give the shared memory back.

        Args:
            owned: the engine's process is ended, too.
            registered: the consumer in the workers is ours to remove.
        """
        tasks: list[asyncio.Task[Any]]
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        for each in tasks:
            each.cancel()
        tasks += [task for kept in self._kept if (task := kept.cancel()) is not None]
        self._bulk.close(_cancelled())
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=5.0)
            if owned:
                processes = processes_of(self.engine)
                self.engine.shutdown()
                await gone(processes)
            elif registered and not self.engine.errored:
                await self.engine.unregister_consumer(CONSUMER)
        finally:  # also where the loop ends meanwhile
            self._transport.close()


def _cancelled() -> RuntimeError:
    return RuntimeError("the query was cancelled")


def _outcome(task: asyncio.Task[Answer]) -> Answer | Exception:
    if task.cancelled():
        return _cancelled()
    error = task.exception()
    return error if isinstance(error, Exception) else task.result()

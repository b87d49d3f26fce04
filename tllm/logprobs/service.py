"""Answers queries; everything here runs on the engine's own event loop."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import vllm
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind

from tllm.client.llm import AsyncLLM
from tllm.engine.bulk import Bulk, BulkItem
from tllm.engine.processes import gone, processes_of
from tllm.logprobs.kept import Admission, Holder, KeptRequest, LaneClosedError
from tllm.logprobs.loop import EngineLoop, Waiter
from tllm.logprobs.query import Answer, Form, Interventions, Query
from tllm.logprobs.transport import CONSUMER, Kind, Reply, Transport
from tllm.params import SamplingParams


def _params(kind: RequestOutputKind, **fields: Any) -> SamplingParams:
    params = SamplingParams(output_kind=kind, detokenize=False, **fields)
    params.skip_clone = True  # nobody changes it
    return params


_ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
_QUERY = _params(RequestOutputKind.FINAL_ONLY, **_ONE_TOKEN)
_TURN = _params(RequestOutputKind.DELTA, **_ONE_TOKEN)
_PLAIN = Interventions()

Done = Callable[[Answer | Exception], None]


class _Flight:
    """A query that is being answered, and who waits for it.

    Attributes:
        task: what answers it, unless it went in bulk.
        ticket: under which it went in bulk, if it did.
    """

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        self.task: asyncio.Task[Answer] | None = None
        self.ticket: int | None = None
        self.of_lane = False


class Service:
    """One for each engine.

    A query goes to the engine in bulk, with all others that came with it, when nothing else has to
    be done for it: without adapter and interventions, or as the next turn of a lane's kept request.
    Others go one by one, as requests of vLLM's client.

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
        self._bulk = Bulk(engine)
        self._begun: dict[Form, list[BulkItem]] = {}
        self._continued: list[BulkItem] = []
        self._computed = 0
        self._shared = 0
        self._prefix = uuid.uuid4().hex[:8]
        self._requests = itertools.count(1)
        self._flights: dict[tuple[Any, ...], _Flight] = {}
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
        for waiter in waiters:
            query = waiter.query
            key = (self.engine.steering.version, *query.key)
            if query.interventions.results:  # rows are somebody's own
                key = (*key, object())
            flight = self._flights.get(key)
            known = flight is not None
            if flight is None:
                flight = self._flights[key] = _Flight()
            flight.of_lane = flight.of_lane or waiter.holder is not None
            flight.waiters.append(waiter)
            if known:
                self._shared += 1
                continue
            done = partial(self._conclude, key, flight)
            try:
                self._begin(flight, query, waiter.holder, done)
            except Exception as error:  # one query's, and not of those that came with it
                done(error)
        self._send()

    def _begin(self, flight: _Flight, query: Query, holder: Holder | None, done: Done) -> None:
        if holder is None:
            flight.ticket = self._add_query(query, done)
        elif not holder.closed and holder.request is not None:
            flight.ticket = self._add_turn(query, holder, holder.request, done)
        if flight.ticket is None:
            work = self._query(query) if holder is None else self._step(query, holder)
            flight.task = asyncio.get_running_loop().create_task(work)
            # A callback, since a task that is cancelled before it begins runs nothing at all.
            flight.task.add_done_callback(lambda task: done(_outcome(task)))

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

    def _conclude(self, key: tuple[Any, ...], flight: _Flight, outcome: Answer | Exception) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        waiting = flight.waiters
        if isinstance(outcome, LaneClosedError):  # that concerns nobody who asked beside the lane
            closed = [each for each in waiting if each.holder is not None and each.holder.closed]
            self.serve(each for each in waiting if each not in closed)
            waiting = closed
        for i, waiter in enumerate(waiting):
            last = i == len(waiting) - 1
            waiter.resolve(outcome if last or isinstance(outcome, Exception) else outcome.copy())

    def written(self, query: Query) -> bool:
        """Whether a consumer may change the rows of this query, in ways that are not known."""
        asked = query.interventions.asked.consumers
        return any(
            write.port == "residual_stream"
            for name, consumer in self.engine.consumers.items()
            if asked.get(name, {}).get("enabled", name in asked or not consumer.on_request_only)
            for flow in consumer.flows()
            for write in flow.writes
        )

    # -- in bulk -------------------------------------------------------------------------------

    def _add_query(self, query: Query, done: Done) -> int | None:
        """A ticket, if nothing has to be done for the query before it is sent."""
        if query.lora is not None or query.interventions.asked or not self.engine.takes_plain():
            return None
        reply = self._transport.reply_now(query.form)
        if reply is None:
            return None
        blocks = self._admission.enter(len(query.tokens) + 1)

        def left() -> None:
            self._admission.leave(blocks)

        item = self._item(reply, self._request_id(), query.tokens, left, done)
        self._begun.setdefault(query.form, []).append(item)
        return item.ticket

    def _add_turn(
        self, query: Query, holder: Holder, request: KeptRequest, done: Done
    ) -> int | None:
        """A ticket, if the request waits for what the query has more than it."""
        if (
            request.turns
            or not request.open
            or request.steering != self.engine.steering.version
            or request.tokens >= len(query.tokens)
            or query.interventions.results
        ):
            return None
        engine_id = self._bulk.engine_id(request.request_id)
        reply = None if engine_id is None else self._transport.reply_now(query.form)
        if engine_id is None or reply is None:
            return None
        self._take_over(request, holder)
        self._admission.begin_turn(request, len(query.tokens))

        def left() -> None:
            request.end_turn()
            self._admission.end_turn(request)

        new = query.tokens[request.tokens :]
        item = self._item(reply, engine_id, new, left, done)
        request.begin_turn(len(new), lambda error: self._bulk.end([item.ticket], error))
        self._continued.append(item)
        return item.ticket

    def _item(
        self,
        reply: Reply,
        request_id: str,
        tokens: Sequence[int],
        left: Callable[[], None],
        done: Done,
    ) -> BulkItem:
        """One token of one request, whose `left` and `done` are called when it was computed."""
        self._computed += 1

        def ended(error: Exception | None) -> None:
            outcome: Answer | Exception
            try:
                outcome = error or reply.read_now()
            except RuntimeError as unwritten:
                outcome = unwritten
            reply.close()
            left()
            done(outcome)

        item = BulkItem(reply.ticket, request_id, tokens, {CONSUMER: reply.options})
        self._bulk.expect(item, ended)
        return item

    def _send(self) -> None:
        """Send what there is: turns in one message, the queries of each form in another."""
        continued, self._continued = self._continued, []
        begun, self._begun = self._begun, {}
        if continued:
            self._spawn(self._bulk.send(_QUERY, (), continued))
        for items in begun.values():
            # The form alone is of use: each item brings its own row.
            asked = _PLAIN.applied_to(_QUERY, items[0].consumers[CONSUMER])
            try:
                params = self.engine.prepared_plain(asked)
            except Exception as error:
                self._bulk.end([item.ticket for item in items], error)
            else:
                self._spawn(self._bulk.send(params, items, ()))

    # -- one by one ----------------------------------------------------------------------------

    async def _query(self, query: Query) -> Answer:
        """A request of its own."""
        reply = await self._transport.reply(query.form)
        try:
            interventions = query.interventions
            params = interventions.applied_to(_QUERY, reply.options)
            output = await self._generate(query, params)
            answer = await reply.read()
        finally:
            reply.close()
        if not interventions.results:
            return answer
        return Answer(answer.values, answer.token_ids, output)

    async def _generate(self, query: Query, params: vllm.SamplingParams) -> Any:
        blocks = self._admission.enter(len(query.tokens) + (params.max_tokens or 1))
        last = None
        try:
            self._computed += 1
            async for output in self.engine.generate(
                tokens_input(list(query.tokens)),
                params,
                self._request_id(),
                lora_request=query.lora,
                results=query.interventions.results,
            ):
                last = output
        finally:
            self._admission.leave(blocks)
        return last

    async def sample(self, query: Query, fields: Mapping[str, Any]) -> list[int]:
        """The tokens of a completion, without the one that ended it; `fields` are sampling
        parameters."""
        params = _params(RequestOutputKind.FINAL_ONLY, **fields)
        params = query.interventions.applied_to(params, {"enabled": False})
        output = await self._generate(query, params)
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        return tokens[:-1] if completion.finish_reason == "stop" else tokens

    def _request_id(self) -> str:
        return f"logprobs-{self._prefix}-{next(self._requests)}"

    # -- lanes ---------------------------------------------------------------------------------

    def fork(self, parent: Holder, child: Holder) -> None:
        """Both are at the same token; whoever asks first goes on with the kept request."""
        if parent.request is not None:
            child.hold(parent.request)

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
        self._let_go(holder)

    def _let_go(self, holder: Holder) -> None:
        request, holder.request = holder.request, None
        if request is not None:
            request.holders.discard(holder)
            if not request.holders:
                self._admission.drop(request)

    def _take_over(self, request: KeptRequest, holder: Holder) -> None:
        """It goes on as one lane's; the others go other ways."""
        if len(request.holders) > 1:
            for other in request.holders - {holder}:
                self._let_go(other)

    async def _step(self, query: Query, holder: Holder) -> Answer:
        """A turn of a lane's kept request."""
        request, tokens = holder.request, query.tokens
        steering = self.engine.steering.version
        # It was parked, or its tokens were steered in another way.
        if request is not None and not (request.open and request.steering == steering):
            self._let_go(holder)
            request = None
        if holder.closed or (request is not None and request.tokens == len(tokens)):
            return await self._query(query)
        if request is None:
            request = self._keep(query, holder)
        self._take_over(request, holder)
        self._admission.begin_turn(request, len(tokens))
        interventions = query.interventions
        try:
            reply = await self._transport.reply(query.form)
            try:
                # Another step of the lane may have come first while this one waited for a row.
                if new := tokens[request.tokens :]:
                    self._computed += 1
                    await request.turn(
                        new,
                        interventions.applied_to(_TURN, reply.options),
                        self._request_id(),
                        lora_request=query.lora,
                        results=interventions.results,
                    )
                    return await reply.read()
            finally:
                reply.close()
        finally:
            self._admission.end_turn(request)
        return await self._query(query)

    def _keep(self, query: Query, holder: Holder) -> KeptRequest:
        """A new kept request for a lane."""
        adapter = None if query.lora is None else query.lora.lora_int_id
        # A consumer that writes makes the blocks nobody else's.
        root: Hashable = adapter, self.engine.steering.version, query.interventions.key
        if self.written(query):
            root = object()
        request = self._admission.keep(root, query.tokens)
        self._kept.add(request)
        holder.hold(request)
        if query.interventions.results:
            holder.served.append(request)
        return request

    # -- the rest ------------------------------------------------------------------------------

    async def stats(self) -> dict[str, int]:
        """Counters: requests and turns computed, queries that shared one, requests parked,
        requests kept now, rows of shared memory."""
        return {
            "computed": self._computed,
            "shared": self._shared,
            "parked": self._admission.parked,
            "kept": self._admission.idle,
            "in_flight": len(self._flights),
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
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)
        if owned:
            processes = processes_of(self.engine)
            self.engine.shutdown()
            await gone(processes)
        elif registered and not self.engine.errored:
            await self.engine.unregister_consumer(CONSUMER)
        self._transport.close()


def _cancelled() -> RuntimeError:
    return RuntimeError("the query was cancelled")


def _outcome(task: asyncio.Task[Answer]) -> Answer | Exception:
    if task.cancelled():
        return _cancelled()
    error = task.exception()
    return error if isinstance(error, Exception) else task.result()

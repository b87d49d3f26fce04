"""Answers questions about next tokens; everything here runs on the engine's own event loop."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import vllm
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from tllm.engine.processes import gone, processes_of
from tllm.llm import AsyncLLM
from tllm.logprobs.admission import Admission
from tllm.logprobs.kept_request import KeptRequest, LaneClosedError
from tllm.logprobs.parcels import Parcels
from tllm.logprobs.question import Answer, Question
from tllm.logprobs.rows import Rows, Transport


def _params(kind: RequestOutputKind, **fields: Any) -> vllm.SamplingParams:
    params = vllm.SamplingParams(output_kind=kind, detokenize=False, ignore_eos=True, **fields)
    params.skip_clone = True  # nobody changes it
    return params


_QUERY = _params(RequestOutputKind.FINAL_ONLY, max_tokens=1, temperature=0.0)
_TURN = _params(RequestOutputKind.DELTA, max_tokens=1, temperature=0.0)


class Asker(Protocol):
    """Who waits for an answer."""

    def resolve(self, outcome: Answer | Exception) -> None:
        """Called once, on the engine's loop."""


class Particle:
    """A lane, as the engine's loop knows it.

    Attributes:
        request: the kept request that is at the lane's last computed token, if there is one.
        served: the kept requests it had, when consumers have something to say about them.
    """

    def __init__(self) -> None:
        self.request: KeptRequest | None = None
        self.served: list[KeptRequest] = []
        self.closed = False


Asked = tuple[Question, Particle | None, Asker]
"""A question, the lane whose next step it is or None, and who waits."""


class _InFlight:
    """A question that is being answered, and who waits for it.

    Attributes:
        task: what answers it, unless it went with others.
        ticket: under which it went with others, if it did.
    """

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.task: asyncio.Task[Answer] | None = None
        self.ticket: int | None = None
        self.of_lane = False


class Service:
    """One for each engine.

    Args:
        transport: `shared` memory, or `rpc` when the workers are on other hosts.
        shared_bytes: the most memory for results on their way.
        idle_seconds: see `Admission`.
    """

    def __init__(
        self, engine: AsyncLLM, transport: Transport, shared_bytes: int, idle_seconds: float
    ) -> None:
        self.engine = engine
        self.vocab_size: int = engine.model_config.get_vocab_size()
        self.admission = Admission(engine, idle_seconds)
        self.computed = 0
        self.shared = 0
        self._rows = Rows(engine, transport, shared_bytes)
        self._parcels = Parcels(engine, self._rows, self.admission, _QUERY)
        self._prefix = uuid.uuid4().hex[:8]
        self._requests = itertools.count(1)
        self._in_flight: dict[tuple[Any, ...], _InFlight] = {}
        self._kept: WeakSet[KeptRequest] = WeakSet()

    # -- questions -----------------------------------------------------------------------------

    def serve(self, questions: Iterable[Asked]) -> None:
        """Begin to answer; what is being answered already is not computed again."""
        for asked in questions:
            question, particle, _ = asked
            key = (self.engine.steering.version, *question.key)
            if question.interventions.results:  # rows are somebody's own
                key = (*key, object())
            flight = self._in_flight.get(key)
            known = flight is not None
            if flight is None:
                flight = self._in_flight[key] = _InFlight()
            flight.of_lane = flight.of_lane or particle is not None
            flight.asked.append(asked)
            if known:
                self.shared += 1
                continue
            try:
                self._begin(key, flight, question, particle)
            except Exception as error:  # one question's, and not of those that came with it
                self._conclude(key, flight, error)
        self._parcels.send()

    def _begin(
        self,
        key: tuple[Any, ...],
        flight: _InFlight,
        question: Question,
        particle: Particle | None,
    ) -> None:
        done = partial(self._conclude, key, flight)
        request = None if particle is None or particle.closed else particle.request
        if request is not None and self._parcels.takes_turn(question, request):
            self.computed += 1
            self._take_over(request, particle)
            flight.ticket = self._parcels.add_turn(question, request, done)
        elif particle is None and self._parcels.takes_query(question):
            self.computed += 1
            flight.ticket = self._parcels.add_query(question, self._request_id(), done)
        else:
            work = self._query(question) if particle is None else self._step(question, particle)
            flight.task = asyncio.get_running_loop().create_task(work)
            # A callback, since a task that is cancelled before it begins runs nothing at all.
            flight.task.add_done_callback(lambda task: done(_outcome(task)))

    def cancel(self, askers: Iterable[Asker]) -> None:
        """These do not wait any more. What nobody waits for is aborted, except a lane's turn."""
        leaving = set(askers)
        for key, flight in list(self._in_flight.items()):
            flight.asked = [asked for asked in flight.asked if asked[2] not in leaving]
            if flight.asked or flight.of_lane:
                continue
            del self._in_flight[key]  # an equal question may follow before this one has ended
            if flight.task is not None:
                flight.task.cancel()
            elif flight.ticket is not None:
                self._parcels.abort(flight.ticket)

    def _conclude(
        self, key: tuple[Any, ...], flight: _InFlight, outcome: Answer | Exception
    ) -> None:
        if self._in_flight.get(key) is flight:
            del self._in_flight[key]
        waiting = flight.asked
        if isinstance(outcome, LaneClosedError):  # that concerns nobody who asked beside the lane
            closed = [asked for asked in waiting if asked[1] is not None and asked[1].closed]
            self.serve(asked for asked in waiting if asked not in closed)
            waiting = closed
        for i, (_, _, asker) in enumerate(waiting):
            last = i == len(waiting) - 1
            given = outcome if last or isinstance(outcome, Exception) else outcome.copy()
            asker.resolve(given)

    async def _query(self, question: Question) -> Answer:
        """A request of its own."""
        async with self._rows.one(question.form) as (options, fetch):
            interventions = question.interventions
            params = interventions.applied_to(_QUERY, options)
            output = await self._generate(question, params)
            values, ids = await fetch()
            return Answer(values, ids, output if interventions.results else None)

    def written(self, question: Question) -> bool:
        """Whether a consumer may change the rows of this question, in ways that are not known."""
        asked = question.interventions.asked.get("consumers", {})
        return any(
            write.port == "residual_stream"
            for name, consumer in self.engine.consumers.items()
            if asked.get(name, {}).get("enabled", name in asked or not consumer.on_request_only)
            for flow in consumer.flows()
            for write in flow.writes
        )

    async def _generate(self, question: Question, params: Any) -> Any:
        blocks = self.admission.enter(len(question.tokens) + (params.max_tokens or 1))
        last = None
        try:
            self.computed += 1
            async for output in self.engine.generate(
                tokens_input(list(question.tokens)),
                params,
                self._request_id(),
                lora_request=question.lora,
                results=question.interventions.results,
            ):
                last = output
        finally:
            self.admission.leave(blocks)
        return last

    async def sample(self, question: Question, fields: Mapping[str, Any]) -> list[int]:
        """The tokens of a completion; `fields` are sampling parameters."""
        params = _params(RequestOutputKind.FINAL_ONLY, **fields)
        params = question.interventions.applied_to(params, {"enabled": False})
        output = await self._generate(question, params)
        return list(output.outputs[0].token_ids)

    def _request_id(self) -> str:
        return f"logprobs-{self._prefix}-{next(self._requests)}"

    # -- lanes ---------------------------------------------------------------------------------

    def fork(self, parent: Particle, child: Particle) -> None:
        """Both are at the same token; whoever asks first goes on with the kept request."""
        if parent.request is not None:
            self._hold(child, parent.request)

    async def close(self, particle: Particle) -> list[Any]:
        """A lane is done. Returns the outputs of its requests, if consumers speak of them."""
        particle.closed = True
        request = particle.request
        self._let_go(particle)
        ending = [*particle.served, *([request] if request and not request.holders else [])]
        for each in ending:
            await each.ended.wait()
        return [request.output for request in particle.served if request.output is not None]

    def abandon(self, particle: Particle) -> None:
        """A lane was dropped without being closed."""
        particle.closed = True
        self._let_go(particle)

    @staticmethod
    def _hold(particle: Particle, request: KeptRequest) -> None:
        particle.request = request
        request.holders.add(particle)

    def _let_go(self, particle: Particle) -> None:
        request, particle.request = particle.request, None
        if request is not None:
            request.holders.discard(particle)
            if not request.holders:
                self.admission.drop(request)

    def _take_over(self, request: KeptRequest, particle: Particle | None) -> None:
        """It goes on as one lane's; the others go other ways."""
        for other in list(request.holders - {particle}):
            self._let_go(other)

    async def _step(self, question: Question, particle: Particle) -> Answer:
        """A turn of a lane's kept request."""
        request, tokens = particle.request, question.tokens
        steering = self.engine.steering.version
        # It was parked, or its tokens were steered in another way.
        if request is not None and not (request.open and request.steering == steering):
            self._let_go(particle)
            request = None
        if particle.closed or (request is not None and request.tokens == len(tokens)):
            return await self._query(question)
        interventions = question.interventions
        if request is None:
            adapter = None if question.lora is None else question.lora.lora_int_id
            # A consumer that writes makes the blocks nobody else's.
            root: Hashable = adapter, steering, interventions.key
            if self.written(question):
                root = object()
            request = self.admission.keep(self.engine, root, tokens)
            self._kept.add(request)
            self._hold(particle, request)
            if interventions.results:
                particle.served.append(request)
        self._take_over(request, particle)
        self.admission.begin_turn(request, len(tokens))
        try:
            async with self._rows.one(question.form) as (options, fetch):
                # Another step of the lane may have come first while this one waited for a row.
                if new := tokens[request.tokens :]:
                    self.computed += 1
                    await request.turn(
                        new,
                        interventions.applied_to(_TURN, options),
                        self._request_id(),
                        lora_request=question.lora,
                        results=interventions.results,
                    )
                    return Answer(*await fetch())
        finally:
            self.admission.end_turn(request)
        return await self._query(question)

    # -- the rest ------------------------------------------------------------------------------

    async def load_adapter(self, request: LoRARequest) -> None:
        """Load an adapter, so that one that cannot be is refused now."""
        await self.engine.add_lora(request)

    def stats(self) -> dict[str, int]:
        """Counters: requests and turns computed, questions that shared one, requests parked,
        requests kept now, rows of shared memory."""
        return {
            "computed": self.computed,
            "shared": self.shared,
            "parked": self.admission.parked,
            "kept": self.admission.idle,
            "in_flight": len(self._in_flight),
            "kept_blocks": self.admission.ledger.used,
            **self._rows.stats(),
        }

    async def shut_down(self) -> None:
        """Abort what runs, end the engine's process, and give the shared memory back."""
        tasks: list[asyncio.Task[Any]]
        tasks = [flight.task for flight in self._in_flight.values() if flight.task is not None]
        for each in tasks:
            each.cancel()
        self._parcels.close()
        tasks += [task for kept in self._kept if (task := kept.cancel()) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)
        processes = processes_of(self.engine)
        self.engine.shutdown()
        await gone(processes)
        self._rows.close()


def _outcome(task: asyncio.Task[Answer]) -> Answer | Exception:
    if task.cancelled():
        return RuntimeError("the query was cancelled")
    error = task.exception()
    return error if isinstance(error, Exception) else task.result()

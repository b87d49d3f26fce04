"""What an engine with interventions can do beside vLLM's own, however it is driven."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from tllm.answers import SharedFolder
from tllm.client.admission import RequestAdmission
from tllm.client.calls import AsyncCalls, Steps, SyncCalls, WorkerCall
from tllm.client.consumer_uses import ConsumerUses
from tllm.client.generation import AsyncGeneration, SyncGeneration
from tllm.client.held import HeldByWorkers, VectorUploads
from tllm.client.patching_control import PatchingControl
from tllm.client.prompt_check import PromptCheck
from tllm.client.registrations import Registrations, name_of
from tllm.client.request import Prepared
from tllm.client.result_gathering import ResultGathering
from tllm.client.results import attach_nothing
from tllm.client.steering import SteeringControl
from tllm.consumers.base import Consumer
from tllm.engine.async_front import AsyncLLMFront
from tllm.engine.front import LLMEngineFront
from tllm.engine.refusals import RefusedError
from tllm.params import asked_of
from tllm.registry import consumer_from_spec, require_consumer
from tllm.spec.request import Asked

logger = logging.getLogger(__name__)


class Client:
    """The user's half: one front end of an engine, as the parts that it has.

    These do no input or output themselves. What takes answers of the workers is written as steps,
    which `LLM`, `AsyncLLM` and what is attached to an engine of vLLM's drive (`tllm.client.calls`).

    Args:
        consumers: to be registered as soon as the workers are asked anything.
        capturing: ids of those whose results are capture results.
        front_ends: how many share the engine's workers.
        workers: of each data-parallel replica.

    Attributes:
        shared: the folder in which the workers leave answers.
        registered: what is registered with the engine.
        held: what the workers hold for requests that run.
        uploads: brings the workers what steers requests.
        uses: finds what consumers have to do with a request.
        prompts: checks requests whose prompt is processed.
        admission: makes requests ready.
        gathering: puts results on outputs.
    """

    def __init__(
        self,
        consumers: Iterable[Consumer] = (),
        capturing: Iterable[str] = (),
        *,
        front_ends: int = 1,
        workers: int | None = None,
    ) -> None:
        self.shared = SharedFolder()
        self.registered = Registrations(
            consumers, capturing, self.shared, front_ends=front_ends, workers=workers
        )
        self.held = HeldByWorkers()
        self.uploads = VectorUploads(self.registered, self.held)
        self.uses = ConsumerUses(self.registered)
        self.prompts = PromptCheck(self.registered.patches)
        self.admission = RequestAdmission(
            self.registered, self.held, self.uploads, self.uses, self.prompts
        )
        self.gathering = ResultGathering(self.registered)


class Attached:
    """Consumers, steering and patching of an engine. On an `AsyncLLM` all methods are awaited.

    Attributes:
        steering: global steering and named modules (`SteeringControl`).
        patching: runs whose rows are kept, mean rows, and sweeps (`PatchingControl`).
    """

    _tllm: Client
    _run: Callable[[Steps[Any]], Any]
    steering: SteeringControl
    patching: PatchingControl

    def _set_up(
        self,
        client: Client,
        run: Callable[[Steps[Any]], Any],
        generation: SyncGeneration | AsyncGeneration,
    ) -> None:
        self._tllm = client
        self._run = run
        self.steering = SteeringControl(client, run)
        self.patching = PatchingControl(client.registered, generation)
        client.registered.speak_for(self)

    @property
    def consumers(self) -> dict[str, Consumer]:
        """The registered consumers, by id."""
        return self._tllm.registered.consumers

    @property
    def capture_consumers(self) -> frozenset[str]:
        """Ids of those whose results are captures."""
        return frozenset(self._tllm.registered.capturing)

    def register_consumer(self, consumer: Consumer | str) -> Any:
        """Add a consumer now; it sees rows from the next forward pass on. One that writes to rows
        serves the requests that are added from then on.

        Returns:
            The consumer: its `synchronize()` and `read_stats()` reach the workers.
        """
        return self._run(self._tllm.registered.register(made(consumer)))

    def unregister_consumer(self, consumer: Consumer | str) -> Any:
        """Remove a consumer, given by instance or id, after its pending rows were handed out."""
        return self._run(self._tllm.registered.unregister(name_of(consumer)))

    def clear_consumers(self) -> Any:
        """Remove all consumers of this engine."""
        return self._run(self._tllm.registered.unregister(None))

    def synchronize(self, consumer: Consumer | str | None = None) -> Any:
        """Wait until every consumer is done with what it was given, whichever one is named.

        Raises `ValueError` where the one that is named is not registered, and `RuntimeError` where
        a consumer's `synchronize` raises: it is detached then.
        """
        return self._run(self._tllm.registered.synchronize(consumer))

    def read_stats(self, consumer: Consumer | str) -> Any:
        """A consumer's statistics, given by instance or id, over all workers of all data-parallel
        replicas."""
        return self._run(self._tllm.registered.read_stats(consumer))

    def call_consumer(self, consumer: Consumer | str, method: str, *args: Any) -> Any:
        """Call one of a consumer's `remote_methods` in every worker; their answers by rank."""
        return self._run(self._tllm.registered.call(consumer, method, *args))

    def intervention_stats(self) -> Any:
        """Counters of each worker: hook points, rows captured and dropped, consumers, how many
        sequences were to be steered and could not be."""
        return self._run(self._tllm.registered.ask(WorkerCall("stats")))


class SyncClient:
    """Decides for the requests of an `LLMEngine` (`SyncRequests`).

    Attributes:
        result_timeout_s: how long results are waited for.
        asked: what requests ask, whatever their parameters are; None: what these say.
    """

    asked: Asked | None = None

    def __init__(self, engine: Any, client: Client, result_timeout_s: float) -> None:
        self.calls = SyncCalls(engine, client.shared.token, self._pop_over)
        self.result_timeout_s = result_timeout_s
        self._client = client
        #: Prompts that were given up, whose results the workers must not keep.
        self._given_up: list[str] = []
        self.front = LLMEngineFront(engine, self, client.prompts.check)

    def _pop_over(self) -> list[str]:
        gathering = self._client.gathering
        over, gathering.over = gathering.over, []
        return over

    def admit(self, params: Any, request_id: str) -> Prepared:
        steps = self._client.admission.admit(
            params, request_id, asked=self.asked, generated=self.front.generated
        )
        return self.calls.run(steps)

    def expect(self, params: Sequence[Any]) -> None:
        if self.asked is None and len(params) > 1:
            self.calls.run(self._client.uploads.expect(params))

    def note(self, request: Prepared, output: Any) -> None:
        if not output.finished:
            attach_nothing(output)
        request.samples.add(output)

    def finish(self, outputs: list[Any]) -> None:
        for output in outputs:
            self._client.held.release(output.tllm_request.prompt_id)
        gathering = self._client.gathering
        self.calls.run(gathering.hear_who_left([each.tllm_request for each in outputs]))
        self.calls.run(gathering.gather(outputs, self.result_timeout_s, alone=True))

    def refuse(self, request: Prepared) -> None:
        self.drop([request])
        if (leave := self._client.admission.leave(request)) is not None:
            self.calls.ask(leave)

    def drop(self, requests: list[Prepared]) -> None:
        gathering = self._client.gathering
        for request in requests:
            self._client.held.release(request.prompt_id)
            given_up = gathering.has_results(request)
            (self._given_up if given_up else gathering.over).append(request.prompt_id)

    def step(self) -> None:
        """The engine begins a step, with which the workers hear of what is over."""
        self._client.gathering.over.clear()
        if self._given_up:
            given_up, self._given_up = self._given_up, []
            self.calls.ask(WorkerCall("discard_results", (given_up,)))


class AsyncClient:
    """Decides for the requests of an `AsyncLLM` (`AsyncRequests`).

    Attributes:
        result_timeout_s: how long results are waited for.
        unwanted: ids of requests about to be added whose results nobody will look at.
    """

    def __init__(self, engine: Any, client: Client, result_timeout_s: float) -> None:
        self.calls = AsyncCalls(engine, client.shared.token)
        self.result_timeout_s = result_timeout_s
        self.unwanted: set[str] = set()
        self._client = client
        self._finished: set[str] = set()
        self._telling: set[asyncio.Task[None]] = set()
        self.front = AsyncLLMFront(engine, self, client.prompts.check)

    async def admit(
        self, params: Any, request_id: str, *, streamed: bool, generated: int | None
    ) -> Prepared:
        results = request_id not in self.unwanted
        self.unwanted.discard(request_id)
        steps = self._client.admission.admit(
            params, request_id, results=results, streamed=streamed, generated=generated
        )
        return await self.calls.run(steps)

    async def inputs(
        self, stream: AsyncGenerator[Any, None], params: Any, request_id: str, request: Prepared
    ) -> AsyncGenerator[Any, None]:
        """The inputs of a streamed prompt, with what each of them asks of consumers."""
        steering = asked_of(params).steering
        async for part in stream:
            theirs = part.sampling_params
            if theirs is None:
                yield part
                continue
            if theirs.output_kind != params.output_kind:
                raise RefusedError(
                    f"output_kind: an input of a streamed prompt asks for "
                    f"{theirs.output_kind.name}, and the request for "
                    f"{params.output_kind.name}; ask the same of every input"
                )
            asked = asked_of(theirs).steering
            if asked is not None and (steering is None or asked.key != steering.key):
                raise RefusedError(
                    "steering: an input of a streamed prompt asks for steering of its own; steer "
                    "the whole request, or begin another"
                )
            steps = self._client.admission.admit(
                theirs, request_id, results=request.keeps_results, streamed=True, first=request
            )
            own = await self.calls.run(steps)
            self._client.admission.check_input(request, own)
            if own.capture_options != request.capture_options:
                raise RefusedError(
                    "capture: an input of a streamed prompt asks otherwise than the request "
                    f"({own.capture_options} and {request.capture_options}); ask the same of "
                    "every input, or begin another request"
                )
            request.take_in(own)
            yield replace(part, sampling_params=own.params)

    def note(self, request: Prepared, output: Any) -> bool:
        attach_nothing(output)
        if not request.keeps_results:
            return False
        output.tllm_request = request
        request.samples.add(output)
        if not output.finished:
            return False
        return self._client.gathering.has_results(request)

    async def finish(self, request: Prepared, output: Any) -> None:
        """Put results on the last output of a request; plain requests cost the engine nothing."""
        output.tllm_request = request
        if request.keeps_results:
            gathering = self._client.gathering
            await self.calls.run(gathering.hear_who_left([request]))
            await self.calls.run(gathering.gather([output], self.result_timeout_s, alone=False))
        self._finished.add(request.prompt_id)

    def refuse(self, request: Prepared) -> None:
        self.drop(request)
        if (leave := self._client.admission.leave(request)) is not None:
            self._tell(leave)

    def drop(self, request: Prepared) -> None:
        self._client.held.release(request.prompt_id)
        if request.prompt_id in self._finished:
            self._finished.remove(request.prompt_id)
        elif self._client.gathering.has_results(request):  # nobody will come for the results
            self._tell(WorkerCall("discard_results", ([request.prompt_id],)))

    def _tell(self, call: WorkerCall) -> None:
        """Call the workers, without waiting for them."""
        task = asyncio.ensure_future(self._told(call))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _told(self, call: WorkerCall) -> None:
        try:
            await self.calls.ask(call)
        except Exception as error:  # the engine is going down
            logger.debug("the workers did not hear of %s: %s", call.method, error)


def made(consumer: Consumer | str) -> Consumer:
    """A consumer, given by itself or by a spec string; `TypeError` for what is none."""
    if isinstance(consumer, str):
        return consumer_from_spec(consumer)
    require_consumer(consumer)
    return consumer


def pending(outputs: Iterable[Any]) -> list[Any]:
    """Outputs of which a consumer was still working on a result."""
    return [
        output
        for output in outputs
        if "tllm_request" in vars(output) and output.tllm_request.results.pending
    ]

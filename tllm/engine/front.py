"""What stands between vLLM's front ends and their callers: every override of one of their methods.

All of them are on instances, so that they can be put on an engine that exists already, whoever made
it. What happens to a request is decided by whoever is given (`tllm.client`).
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from vllm.exceptions import VLLMClientError
from vllm.outputs import STREAM_FINISHED
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine

from tllm.engine.interrupts import (
    noted_interrupts,
    raises_in_place,
    send_whole,
    uninterrupted,
)
from tllm.engine.message_types import check_request
from tllm.engine.seams import overrides, uses

uses(
    "vllm.v1.engine.input_processor.InputProcessor",
    "process_inputs",
    "positions are found and checked once a prompt is processed",
)
uses(
    "vllm.v1.engine.input_processor.InputProcessor",
    "process_inputs_async",
    "positions are found and checked once a prompt is processed",
    since="0.32",
)
uses(
    "vllm.v1.engine.output_processor.OutputProcessor",
    "parent_requests request_states",
    "what an interrupted caller leaves behind is aborted",
)
uses(
    "vllm.v1.engine.output_processor.RequestOutputCollector",
    "get get_nowait close request_id",
    "results are put on the last output of a request",
)
uses("vllm.outputs", "STREAM_FINISHED", "the last output of a streamed prompt")
uses("vllm.exceptions", "VLLMClientError", "what a request asks and cannot have is its own fault")
uses("vllm.entrypoints.llm.LLM", "pooling_task", "which scores are made of two requests")
uses(
    "vllm.entrypoints.generate.beam_search.utils.BeamSearchSequence",
    "logprobs",
    "a beam's generated tokens are told apart",
)
_ENDS_ALONE = "an engine in the user's process ends, and others beside it go on"
uses("vllm.v1.engine.core_client.InprocClient", "_finalizer engine_core", _ENDS_ALONE, since="0.32")
uses(
    "vllm.v1.engine.core.EngineCore",
    "shutdown structured_output_manager model_executor scheduler",
    _ENDS_ALONE,
    since="0.32",
)
uses("vllm.v1.engine.async_llm.AsyncLLM", "_client_count", "front ends that share the workers")
uses(
    "vllm.v1.engine.async_llm.AsyncLLM",
    "abort",
    "a request that could not be sent is forgotten",
    takes="request_id internal",
)

REFUSALS = (ValueError, VLLMClientError)
"""What is raised for a request that cannot be served as it is."""


class RefusedError(VLLMClientError, ValueError):
    """What a request asks is not possible. vLLM hands it on to the caller as it is."""


class SyncRequests(Protocol):
    """Who decides what happens to the requests of an `LLMEngine`."""

    def expect(self, params: Sequence[Any]) -> None:
        """Requests with these parameters are about to be added."""
        ...

    def admit(self, params: Any, request_id: str) -> Any:
        """Make a request ready; its `params` are vLLM's parameters, its own."""
        ...

    def note(self, request: Any, output: Any) -> None:
        """An output of a request, before the caller has it."""
        ...

    def finish(self, outputs: list[Any]) -> None:
        """Put results on the last outputs of requests, each with its request as `tllm_request`."""
        ...

    def drop(self, requests: list[Any]) -> None:
        """Requests were aborted: nobody will come for their results."""
        ...

    def refuse(self, request: Any) -> None:
        """A request did not begin."""
        ...

    def step(self) -> None:
        """The engine begins a step."""
        ...


class AsyncRequests(Protocol):
    """Who decides what happens to the requests of an `AsyncLLM`."""

    async def admit(
        self, params: Any, request_id: str, *, streamed: bool, generated: int | None
    ) -> Any:
        """Make a request ready; its `params` are vLLM's parameters, its own."""
        ...

    def inputs(
        self, stream: AsyncGenerator[Any, None], params: Any, request_id: str, request: Any
    ) -> AsyncGenerator[Any, None]:
        """The inputs of a streamed prompt, each ready for the engine."""
        ...

    def note(self, request: Any, output: Any) -> bool:
        """An output of a request, before the caller has it. Whether `finish` has to be awaited."""
        ...

    async def finish(self, request: Any, output: Any) -> None:
        """Put results on the last output of a request."""
        ...

    def drop(self, request: Any) -> None:
        """A request has ended, or the caller gave it up. May come twice."""
        ...

    def refuse(self, request: Any) -> None:
        """A request did not begin."""
        ...


class _Running(NamedTuple):
    engine_id: str
    request: Any


class LLMEngineFront:
    """Stands before an `LLMEngine`: `add_request`, `step` and `abort_request` of that instance.

    It belongs to the engine, which ends as soon as its user has it no more.

    Attributes:
        handle: gives what the user calls.
        generated: how many of the last tokens of the prompts that are added now were generated,
            where they are beams.
    """

    handle: Callable[[], Any] = staticmethod(lambda: None)
    generated: int | None = None

    def __init__(self, engine: LLMEngine, requests: SyncRequests, check: Any) -> None:
        self._engine: LLMEngine = weakref.proxy(engine)
        self._requests = requests
        self._check = check
        self._running: dict[str, _Running] = {}
        self._ended: list[Any] | None = None
        self._interrupted = False
        self._add_request = _unowned(engine, "add_request")
        self._abort_request = _unowned(engine, "abort_request")
        # A step is on the path of every token: it has no function of ours more than it needs.
        self._living: weakref.ref[LLMEngine] = weakref.ref(engine)
        step = engine.step
        self._step = step.__func__ if _is_own(step, engine) else lambda _: step()
        if isinstance(engine.engine_core, InprocClient):
            _let_others_live(engine.engine_core)
        send_whole(engine.engine_core)
        engine.add_request = self.add_request  # type: ignore[method-assign]
        engine.step = self.step  # type: ignore[method-assign]
        engine.abort_request = self.abort_request  # type: ignore[method-assign]
        check_requests(engine, check)

    @overrides(
        "vllm.v1.engine.llm_engine.LLMEngine.add_request", "requests carry what is asked of them"
    )
    def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Make a request ready, and hand it on."""
        if request_id in self._running:
            raise RefusedError(
                f"request_id={request_id!r} is the name of a request that runs; give this one "
                "another, so that their results are told apart"
            )
        request = self._requests.admit(_params_of(prompt, params), request_id)
        try:
            params = _put_into(prompt, request.params, self._check)
            with uninterrupted():
                engine_id = self._add_request(request_id, prompt, params, *args, **kwargs)
        except BaseException:
            self._requests.refuse(request)
            # vLLM keeps what it could not send to the engine, and would wait for it for ever.
            self._abort_request([request_id], False)
            raise
        self._running[request_id] = _Running(engine_id, request)
        return engine_id

    def expect(self, params: Sequence[Any]) -> None:
        self._requests.expect(params)

    @overrides("vllm.v1.engine.llm_engine.LLMEngine.step", "results are put on last outputs")
    def step(self) -> list[Any]:
        """The outputs of a step; the last one of a request has its results."""
        self._requests.step()
        outputs = self._step(self._living())
        ended = []
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is not None:
                self._requests.note(running.request, output)
                if output.finished:
                    del self._running[output.request_id]
                    output.tllm_request = running.request
                    ended.append(output)
        if self._ended is not None:
            self._ended += ended
        elif ended:
            self._requests.finish(ended)
        if self._interrupted:
            raise KeyboardInterrupt
        return outputs  # type: ignore[no-any-return]

    @overrides(
        "vllm.v1.engine.llm_engine.LLMEngine.abort_request", "what a request held is given up"
    )
    def abort_request(self, request_ids: Iterable[str], internal: bool = False) -> None:
        """Abort requests, and give up what they held."""
        names = list(request_ids)
        self._abort_request(names, internal)
        wanted = set(names)
        gone = [
            name
            for name, running in self._running.items()
            if (running.engine_id if internal else name) in wanted
        ]
        self._requests.drop([self._running.pop(name).request for name in gone])

    @contextmanager
    def added_together(self) -> Iterator[None]:
        """Requests are added of which none is left unless all are added: vLLM itself leaves those
        before an interrupt, and gives their outputs to its next caller."""
        before = self._running.copy()
        try:
            yield
        except BaseException:
            self.abort_request([name for name in self._running if name not in before])
            raise

    @contextmanager
    def together(self) -> Iterator[list[Any]]:
        """Requests that the caller waits for together: their results are fetched at the end.

        An interrupt comes between two steps of an engine in this process, which would be left in
        the middle of one otherwise. Whatever ends the wait, nothing is left for the next caller.

        Yields:
            The outputs of those that have ended. They have their results after it.
        """
        if self._ended is not None:  # the caller's caller waits for more
            yield self._ended
            return
        ended = self._ended = []
        try:
            with self._interrupts_between_steps():
                yield ended
            self._requests.finish(ended)
        except BaseException:
            processor = self._engine.output_processor
            # Samples first: vLLM aborts those of a request that has several, but not twice.
            unfinished = [*processor.request_states, *processor.parent_requests]
            self.abort_request(unfinished, internal=True)
            # Those that had ended by then, too: their outputs are lost.
            self._requests.drop([output.tllm_request for output in self._ended or ()])
            raise
        finally:
            self._ended = None

    @contextmanager
    def in_beams(self, generated: int) -> Iterator[None]:
        """Requests that are added in here are beams that have grown by as many tokens."""
        self.generated = generated
        try:
            yield
        finally:
            self.generated = None

    @contextmanager
    def _interrupts_between_steps(self) -> Iterator[None]:
        if not raises_in_place() or not isinstance(self._engine.engine_core, InprocClient):
            yield
            return

        def note() -> None:
            self._interrupted = True

        try:
            with noted_interrupts(note):
                yield
        finally:
            self._interrupted = False


class OfflineFront:
    """Mixed into `vllm.LLM`, whose engine has an `LLMEngineFront`."""

    _front: LLMEngineFront

    @overrides(
        "vllm.entrypoints.llm.LLM._render_and_add_requests",
        "what steers requests that are added together is brought to the workers at once, and an "
        "interrupt leaves none of them",
    )
    def _render_and_add_requests(self, prompts: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        self._front.expect(params)
        with self._front.added_together():
            return super()._render_and_add_requests(prompts, params, *args, **kwargs)  # type: ignore[misc]

    @overrides(
        "vllm.entrypoints.llm.LLM._run_engine", "results of all requests are fetched at once"
    )
    def _run_engine(self, *args: Any, **kwargs: Any) -> Any:
        with self._front.together():
            return super()._run_engine(*args, **kwargs)  # type: ignore[misc]

    @overrides(
        "vllm.entrypoints.llm.LLM._beam_search_step",
        "a beam's generated tokens, which are a prompt's in each of its steps, are told apart",
    )
    def _beam_search_step(self, instances_batch: Any, *args: Any, **kwargs: Any) -> Any:
        beams = [beam for instance in instances_batch for beam in instance.beams]
        # All beams of a batch have grown alike: one by one, with each step.
        with self._front.in_beams(len(beams[0].logprobs) if beams else 0):
            return super()._beam_search_step(instances_batch, *args, **kwargs)  # type: ignore[misc]

    @property
    def scores_in_one_pass(self) -> bool:
        """Whether both texts of a score are one request, as of a cross-encoder."""
        return bool(self.pooling_task == "classify")  # type: ignore[attr-defined]


GENERATED: ContextVar[int | None] = ContextVar("tllm_generated", default=None)
"""How many of the last tokens of the prompt that is added to an `AsyncLLM` were generated, as in a
step of beam search over HTTP; None for every other request."""

ADMITTED: ContextVar[Callable[[], object] | None] = ContextVar("tllm_admitted", default=None)
"""Called when an `AsyncLLM` has taken the request that is added."""


class AsyncLLMFront:
    """Stands before an `AsyncLLM`: `add_request` of that instance, and what it returns.

    `generate` and `encode` of vLLM's call `add_request` and read what it returns; so does whoever
    calls it himself.

    Attributes:
        handle: gives what the user calls.
    """

    handle: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(self, engine: AsyncLLM, requests: AsyncRequests, check: Any) -> None:
        self._engine = engine
        self._requests = requests
        self._check = check
        self._add_request, self._send = engine.add_request, engine._add_request
        engine.add_request = self.add_request  # type: ignore[method-assign]
        engine._add_request = self.send  # type: ignore[method-assign]
        check_requests(engine, check)

    @overrides(
        "vllm.v1.engine.async_llm.AsyncLLM.add_request", "requests carry what is asked of them"
    )
    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> ResultQueue:
        """Make a request ready, and hand it on."""
        streamed = isinstance(prompt, AsyncGenerator)
        try:
            request = await self._requests.admit(
                _params_of(prompt, params),
                request_id,
                streamed=streamed,
                generated=GENERATED.get(),
            )
        except ValueError as error:
            if isinstance(error, VLLMClientError):
                raise
            raise RefusedError(str(error)) from error
        try:
            if streamed:
                prompt = self._requests.inputs(prompt, params, request_id, request)
            ready = _put_into(prompt, request.params, self._check)
            queue = await self._add_request(request_id, prompt, ready, *args, **kwargs)
        except BaseException:
            self._requests.refuse(request)
            raise
        if (admitted := ADMITTED.get()) is not None:
            admitted()
        return ResultQueue(queue, self._requests, request)

    @overrides(
        "vllm.v1.engine.async_llm.AsyncLLM._add_request",
        "of a request that could not be sent nothing is left",
    )
    async def send(self, request: Any, prompt: Any, parent_req: Any, *args: Any) -> None:
        """Send a request, or one sample of it."""
        known = self._engine.output_processor.request_states
        continued = request.request_id in known  # by an input of a streamed prompt
        try:
            await self._send(request, prompt, parent_req, *args)
        except BaseException:
            if request.request_id in known and not continued:
                names = [request.request_id]
                if parent_req is not None:  # the samples that were sent before, too
                    names.append(parent_req.request_id)
                with suppress(Exception):  # a dead engine hears of nothing
                    await self._engine.abort(names, internal=True)
            raise


class ResultQueue:
    """The outputs of a request, in the place of vLLM's `RequestOutputCollector`.

    Only `get` puts results on the last output, since it may have to wait for them.
    """

    def __init__(self, queue: Any, requests: AsyncRequests, request: Any) -> None:
        self._queue = queue
        self._requests = requests
        self._request = request
        self._last: Any = None
        self._unfinished: Any = None
        self._loop = asyncio.get_running_loop()
        self._open = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def get_nowait(self) -> Any:
        """The next output, if it is there and nothing is to be waited for."""
        if self._unfinished is None:
            output = self._queue.get_nowait()
            if output is None or not self._is_last(output):
                return output
            self._unfinished = output
        return None

    async def get(self) -> Any:
        """The next output; the last one has its results."""
        output, self._unfinished = self._unfinished, None
        if output is None:
            output = await self._queue.get()
            if not self._is_last(output):
                return output
        await self._requests.finish(self._request, self._last)
        self._drop()
        return output

    def close(self) -> None:
        """The caller has enough."""
        self._drop()
        self._queue.close()

    def _is_last(self, output: Any) -> bool:
        """Whether results are to be fetched: for this output, or, when a streamed prompt is over,
        for the one before it."""
        if output is STREAM_FINISHED:
            return self._open and self._last is not None
        self._last = output
        waits = self._requests.note(self._request, output)
        if output.finished and not waits:
            self._drop()
        return bool(output.finished and waits)

    def _drop(self) -> None:
        if self._open:
            self._open = False
            self._requests.drop(self._request)

    def __del__(self) -> None:
        if self._open and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._requests.drop, self._request)


def check_requests(engine: Any, check: Any) -> None:
    """Let an engine show each request, once its prompt is processed, to a function that may
    change its parameters, or raise."""
    processor = engine.input_processor
    process = processor.process_inputs

    def checked(*args: Any, **kwargs: Any) -> Any:
        request = process(*args, **kwargs)
        _check_types(request)
        check(request)
        return request

    processor.process_inputs = checked
    if not hasattr(processor, "process_inputs_async"):  # newer vLLM tokenizes on a thread
        return
    process_async = processor.process_inputs_async

    async def checked_async(*args: Any, **kwargs: Any) -> Any:
        request = await process_async(*args, **kwargs)
        _check_types(request)
        check(request)
        return request

    processor.process_inputs_async = checked_async


def handle_of(engine: Any) -> Any:
    """What the user of an engine calls that one of ours stands before; None: none does."""
    front = getattr(engine.add_request, "__self__", None)
    return front.handle() if isinstance(front, (LLMEngineFront, AsyncLLMFront)) else None


def front_ends_of(engine: AsyncLLM) -> int:
    """How many processes of the API server share the workers of this engine."""
    return engine._client_count


_CORES: weakref.WeakSet[Any] = weakref.WeakSet()
"""The engines in this process that have not ended: they share vLLM's process groups."""


def _let_others_live(client: InprocClient) -> None:
    """Let an engine in this process end without those that are there beside it. vLLM's own end of
    one takes along the process groups of all, and may come in the middle of another's step, when
    Python collects garbage."""
    finalizer = vars(client).get("_finalizer")
    if finalizer is None:  # before 0.32 nothing ends with the client
        return
    finalizer.detach()
    core = client.engine_core
    _CORES.add(core)
    client._finalizer = weakref.finalize(client, _end, core)


def _end(core: Any) -> None:
    """As vLLM's `EngineCore.shutdown`, without the groups where others need them."""
    _CORES.discard(core)
    if not _CORES:
        core.shutdown()
        return
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()


def _unowned(engine: LLMEngine, name: str) -> Callable[..., Any]:
    """A method of an engine, for what the engine has: with a cycle of references it would stay, and
    all its memory, since vLLM takes it out of what Python collects. What somebody has put in the
    method's place is kept as it is."""
    method: Callable[..., Any] = getattr(engine, name)
    if not _is_own(method, engine):
        return method
    found = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        own = found()
        assert own is not None, "an engine that has ended calls nothing"
        return own(*args, **kwargs)

    return call


def _is_own(method: Callable[..., Any], engine: LLMEngine) -> bool:
    return inspect.ismethod(method) and method.__self__ is engine


def _params_of(prompt: Any, params: Any) -> Any:
    """vLLM may be given a request of its own in place of a prompt, whose parameters count then."""
    return prompt.params if isinstance(prompt, EngineCoreRequest) else params


def _put_into(prompt: Any, params: Any, check: Any) -> Any:
    if isinstance(prompt, EngineCoreRequest):
        name = "sampling_params" if isinstance(params, SamplingParams) else "pooling_params"
        setattr(prompt, name, params)
        _check_types(prompt)
        check(prompt)  # vLLM has processed its prompt before
    return params


def _check_types(request: Any) -> None:
    try:
        check_request(request)
    except ValueError as error:
        raise RefusedError(str(error)) from None

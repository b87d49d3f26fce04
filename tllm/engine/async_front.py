"""What stands between an `AsyncLLM` and its callers, as `front.py` does before synchronous front
ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Protocol

from vllm.exceptions import VLLMClientError
from vllm.outputs import STREAM_FINISHED
from vllm.v1.engine.async_llm import AsyncLLM, InputStreamError

from tllm.engine.processed_requests import check_requests, params_of, put_into
from tllm.engine.refusals import RefusedError
from tllm.engine.seams import overrides, uses
from tllm.engine.verdicts import given_up

_FORGOTTEN = "a request that could not be sent is forgotten"
uses(
    "vllm.v1.engine.output_processor.RequestOutputCollector",
    "get get_nowait close request_id",
    "results are put on the last output of a request",
)
uses("vllm.v1.engine.output_processor.OutputProcessor", "request_states", _FORGOTTEN)
uses("vllm.outputs", "STREAM_FINISHED", "the last output of a streamed prompt")
uses(
    "vllm.v1.engine.async_llm",
    "InputStreamError",
    "a streamed prompt ends with the input that was refused",
)
uses("vllm.v1.engine.async_llm.AsyncLLM", "_client_count", "front ends that share the workers")
uses("vllm.v1.engine.async_llm.AsyncLLM", "abort", _FORGOTTEN, takes="request_id internal")


class AsyncRequests(Protocol):
    """Who decides what happens to the requests of an `AsyncLLM`."""

    async def admit(
        self, params: Any, request_id: str, *, streamed: bool, generated: int | None
    ) -> Any:
        """Make a request ready; its `params` are vLLM's parameters, its own."""

    def inputs(
        self, stream: AsyncGenerator[Any, None], params: Any, request_id: str, request: Any
    ) -> AsyncGenerator[Any, None]:
        """The inputs of a streamed prompt, each ready for the engine."""

    def note(self, request: Any, output: Any) -> bool:
        """An output of a request, before the caller has it. Whether `finish` has to be awaited."""

    async def finish(self, request: Any, output: Any) -> None:
        """Put results on the last output of a request."""

    def drop(self, request: Any) -> None:
        """A request has ended, or the caller gave it up. May come twice."""

    def refuse(self, request: Any) -> None:
        """A request did not begin."""


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
                params_of(prompt, params),
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
            ready = put_into(prompt, request.params, self._check)
            queue = await self._add_request(request_id, prompt, ready, *args, **kwargs)
        except BaseException:
            self._requests.refuse(request)
            raise
        if (admitted := ADMITTED.get()) is not None:
            admitted()
        return ResultQueue(queue, self._requests, request, streamed=streamed)

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

    def __init__(
        self, queue: Any, requests: AsyncRequests, request: Any, *, streamed: bool
    ) -> None:
        self._queue = queue
        self._requests = requests
        self._request = request
        self._last: Any = None
        self._unfinished: Any = None
        self._streamed = streamed
        self._given_up: str | None = None
        self._loop = asyncio.get_running_loop()
        self._open = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def get_nowait(self) -> Any:
        """The next output, if it is there and nothing is to be waited for."""
        self._check_goes_on()
        if self._unfinished is None:
            output = self._queue.get_nowait()
            if output is None or not self._is_last(output):
                return output
            self._unfinished = output
        return None

    async def get(self) -> Any:
        """The next output; the last one has its results."""
        self._check_goes_on()
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

    def _check_goes_on(self) -> None:
        """Refuse to wait for what comes after the error of a streamed prompt, which vLLM before
        0.33 takes for the end of an input. It aborts the request where its inputs are at fault."""
        if self._given_up is not None:
            raise InputStreamError(RefusedError(self._given_up))

    def _is_last(self, output: Any) -> bool:
        """Whether results are to be fetched: for this output, or, when a streamed prompt is over,
        for the one before it."""
        if output is STREAM_FINISHED:
            return self._open and self._last is not None
        self._last = output
        if self._streamed:
            self._given_up = given_up(output)
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


def front_ends_of(engine: AsyncLLM) -> int:
    """How many processes of the API server share the workers of this engine."""
    return engine._client_count

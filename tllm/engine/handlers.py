"""vLLM's handlers of HTTP requests: what of them is used, and what stands between them and their
engine. What happens to a request is decided by whoever is given (`tllm.server`).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from tllm.engine.async_front import ADMITTED, GENERATED
from tllm.engine.seams import overrides, uses
from tllm.engine.verdicts import check_goes_on
from tllm.spec.request import EXTRA_ARG

_OPENAI = "vllm.entrypoints.openai"
_FOR = "fields of requests over HTTP, and results in the responses"
for _handler, _create in (
    (f"{_OPENAI}.completion.serving.OpenAIServingCompletion", "create_completion"),
    (f"{_OPENAI}.chat_completion.serving.OpenAIServingChat", "create_chat_completion"),
    (f"{_OPENAI}.responses.serving.OpenAIServingResponses", "create_responses"),
):
    uses(_handler, _create, _FOR, takes="request raw_request")
    uses(_handler, "engine_client", "outputs are noted for the response")
    uses(
        _handler,
        "_is_model_supported",
        "models that are named together with a steering module",
        takes="model_name",
    )
    uses(_handler, "models", "adapters that are named together with a module")
    uses(_handler, "_extract_prompt_components", "how many rows a prompt asks for")
    uses(_handler, "create_error_response", _FOR, takes="message err_type param")
uses(
    "vllm.entrypoints.pooling.base.serving.PoolingBaseServing",
    "engine_client",
    "pooled outputs are checked before they make a response",
)
uses(
    "vllm.renderers.inputs.preprocess.PromptComponents",
    "token_ids embeds",
    "how many rows a prompt asks for",
)
uses(
    "vllm.entrypoints.generate.beam_search.online.BeamSearchOnlineMixin",
    "beam_search",
    "each step of a beam is a request, called after the beam",
)
uses(
    "vllm.plugins.endpoint_plugins.interface.EndpointPlugin",
    "attach_router init_state",
    "routes and fields of the API server",
)
uses(
    "vllm.entrypoints.serve.engine.protocol",
    "ErrorResponse OpenAIBaseModel",
    "responses that are errors have no results",
)
for _request in (
    f"{_OPENAI}.completion.protocol.CompletionRequest",
    f"{_OPENAI}.chat_completion.protocol.ChatCompletionRequest",
    f"{_OPENAI}.responses.protocol.ResponsesRequest",
):
    uses(_request, "vllm_xargs to_sampling_params", "how fields reach the engine")
uses(
    f"{_OPENAI}.responses.protocol.ResponsesRequest",
    "background",
    "answers that are fetched later have no results",
)
uses(
    f"{_OPENAI}.models.serving.OpenAIServingModels",
    "is_base_model base_model_paths lora_requests",
    "the adapter that a sweep names, or a model's name that has a steering module's in it",
)


uses(
    f"{_OPENAI}.responses.serving.OpenAIServingResponses",
    "background_tasks retrieve_responses",
    "what came of an answer that is fetched later, and when it is done",
)


@dataclass(frozen=True)
class BeamSteps:
    """Beam search of one HTTP request: each step of each beam is an engine request, whose prompt is
    the prompt and the beam's tokens.

    Attributes:
        asked: what the HTTP request asks, as plain data.
    """

    asked: Mapping[str, Any]
    _prompt_lens: dict[str, int] = field(default_factory=dict)

    def generated(self, prompt: Mapping[str, Any], request_id: str) -> int:
        """How many of a step's tokens the beam has generated.

        Args:
            request_id: `PROMPT-STEP-beam-NUMBER`.
        """
        length = len(prompt.get("decoder_prompt", prompt)["prompt_token_ids"])
        name = request_id.rsplit("-", 3)[0]
        return length - self._prompt_lens.setdefault(name, length)


@dataclass(frozen=True)
class Watch:
    """What is to be known of the engine requests of one HTTP request.

    Attributes:
        beams: of beam search.
        admit: called with the prompt and parameters of each before the engine has it; what it
            raises, the handler's caller gets.
        outputs: the last output of each, by its id, in the order of the prompts.
        refused: the condition that refused the prompt of each sample, by id and sample; not all of
            them are in the last output.
        eager: whether the engine has each request as soon as the handler asks for it; of a handler
            that answers before it does.
    """

    admit: Callable[[Any, Any], None] | None = None
    outputs: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, dict[int, str]] = field(default_factory=dict)
    beams: BeamSteps | None = None
    eager: bool = False
    _called: asyncio.Event = field(default_factory=asyncio.Event)
    _requests: list[weakref.ref[NotedOutputs]] = field(default_factory=list)

    def noted(self, outputs: AsyncGenerator[Any, None], request_id: str) -> NotedOutputs:
        """The outputs of an engine request, which are noted here as they are read."""
        self.outputs[request_id] = None
        noted = NotedOutputs(outputs, request_id, self.outputs, self.refused)
        self._requests.append(weakref.ref(noted))  # it ends when its reader gives it up
        if self.eager:
            noted.begin()
        self._called.set()
        return noted

    async def called(self, seconds: float) -> None:
        """Wait for the handler to ask for a request, but no longer than that."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._called.wait(), seconds)

    async def begin(self) -> None:
        """Hand all requests to the engine, before anybody reads their outputs; what it refuses one
        with is raised, and nothing is left of the others."""
        requests = [request for each in self._requests if (request := each()) is not None]
        try:
            if not self.eager:
                for request in requests:
                    request.begin()
            for request in requests:
                await request.admitted()
        except BaseException:
            for request in requests:
                request.give_up()
            raise


class NotedOutputs:
    """The outputs of an engine request, which takes it when the first is asked for, or with
    `begin`.
    """

    def __init__(
        self,
        outputs: AsyncGenerator[Any, None],
        request_id: str,
        noted: dict[str, Any],
        refused: dict[str, dict[int, str]],
    ) -> None:
        self._outputs = outputs
        self._request_id = request_id
        self._noted = noted
        self._refused = refused
        self._ended: set[int] = set()
        self._admitted = asyncio.Event()
        self._first: asyncio.Task[Any] | None = None
        self._refusal: BaseException | None = None

    def begin(self) -> None:
        """Hand the request to the engine."""
        token = ADMITTED.set(self._admitted.set)
        try:
            self._first = asyncio.create_task(_next(self._outputs))
        finally:
            ADMITTED.reset(token)
        this = weakref.ref(self)  # which ends with its reader

        def over(first: asyncio.Task[Any]) -> None:
            error = None if first.cancelled() else first.exception()
            if (noted := this()) is not None:
                noted._told(error)

        self._first.add_done_callback(over)

    def _told(self, refusal: BaseException | None) -> None:
        """What came of it is known, if it was not before."""
        self._refusal = refusal
        self._admitted.set()

    async def admitted(self) -> None:
        """Wait until the engine has the request; raises what it is refused with."""
        await self._admitted.wait()
        if self._refusal is not None:
            raise self._refusal

    def give_up(self) -> None:
        """Nobody will read the outputs."""
        if self._first is not None:
            self._first.cancel()

    def __del__(self) -> None:
        if self._first is not None and not (loop := self._first.get_loop()).is_closed():
            loop.call_soon_threadsafe(self._first.cancel)

    def __aiter__(self) -> NotedOutputs:
        return self

    async def __anext__(self) -> Any:
        first, self._first = self._first, None
        output = await (anext(self._outputs) if first is None else first)
        self._noted[self._request_id] = output
        for sample in output.outputs:
            # What vLLM aborts has no reason.
            if sample.finish_reason == "abort" and sample.stop_reason is not None:
                self._refused.setdefault(self._request_id, {})[sample.index] = sample.stop_reason
        check_goes_on(output)  # of which vLLM would say "Internal server error"
        return self._without_ended(output)

    def _without_ended(self, output: Any) -> Any:
        """An output as the handler streams it: the last one has all samples again, and vLLM's
        events would end those that ended before a second time."""
        fresh = [sample for sample in output.outputs if sample.index not in self._ended]
        self._ended.update(sample.index for sample in output.outputs if sample.finished())
        if len(fresh) == len(output.outputs):
            return output
        streamed = copy(output)
        streamed.outputs = fresh
        return streamed

    async def aclose(self) -> None:
        """As a generator's."""
        first, self._first = self._first, None
        if first is not None:
            first.cancel()
            await asyncio.wait([first])
        await self._outputs.aclose()


async def _next(outputs: AsyncGenerator[Any, None]) -> Any:
    return await anext(outputs)


WATCH: ContextVar[Watch | None] = ContextVar("tllm_watch", default=None)
"""Of the HTTP request that is being handled; None: nobody wants to know anything."""


def note_outputs(handler: Any) -> None:
    """Let a handler's engine look at `WATCH`."""
    handler.engine_client = WatchedEngine(handler.engine_client)


def is_error(response: Any) -> bool:
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    return isinstance(response, ErrorResponse)


class WatchedEngine:
    """An engine client whose last outputs are noted for the request that is being handled."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @overrides(
        "vllm.v1.engine.async_llm.AsyncLLM.generate", "outputs are noted for the response over HTTP"
    )
    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> Any:
        watch = WATCH.get()
        if watch is not None and watch.beams is not None:
            return self._step(watch.beams, prompt, sampling_params, request_id, kwargs)
        if watch is not None and watch.admit is not None:
            watch.admit(prompt, sampling_params)
        outputs = self._engine.generate(prompt, sampling_params, request_id, **kwargs)
        return outputs if watch is None else watch.noted(outputs, request_id)

    async def _step(
        self, beams: BeamSteps, prompt: Any, params: Any, request_id: str, more: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        if beams.asked:
            params = params.clone()
            params.extra_args = {**(params.extra_args or {}), EXTRA_ARG: dict(beams.asked)}
        token = GENERATED.set(beams.generated(prompt, request_id))
        try:
            async for output in self._engine.generate(prompt, params, request_id, **more):
                check_goes_on(output)
                yield output
        finally:
            GENERATED.reset(token)


def check_pooled(handlers: Iterable[Any], check: Callable[[Any], None]) -> None:
    """Let each output of handlers of pooled requests, among others, be checked before it makes a
    response; what the check raises is the request's error."""
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing

    for handler in handlers:
        if isinstance(handler, PoolingBaseServing):
            handler.engine_client = CheckedEngine(handler.engine_client, check)


class CheckedEngine:
    """An engine client whose pooled outputs are checked."""

    def __init__(self, engine: Any, check: Callable[[Any], None]) -> None:
        self._engine = engine
        self._check = check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @overrides(
        "vllm.v1.engine.async_llm.AsyncLLM.encode", "a response over HTTP has no place for results"
    )
    async def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        async for output in self._engine.encode(*args, **kwargs):
            self._check(output)
            yield output


uses(
    "vllm.v1.metrics.prometheus",
    "get_prometheus_registry",
    "our metrics stand beside vLLM's",
)


def adapter_named(models: Any, name: str) -> Any:
    """The adapter that a server serves under a name, a `LoRARequest`; None for the model itself.

    Args:
        models: vLLM's `OpenAIServingModels`.

    Raises `ValueError` for a name under which nothing is served.
    """
    if models.is_base_model(name):
        return None
    if name not in models.lora_requests:
        served = [*(each.name for each in models.base_model_paths), *models.lora_requests]
        raise ValueError(f"model={name!r} is not served here; served are {', '.join(served)}")
    return models.lora_requests[name]


def is_served(handler: Any, name: str) -> bool:
    """Whether a handler answers under a name: one of the model's, or of an adapter's."""
    return bool(handler._is_model_supported(name)) or name in handler.models.lora_requests


def engine_metrics() -> bytes:
    """vLLM's metrics, and those of its API server, in Prometheus' text format."""
    from prometheus_client import generate_latest
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    return generate_latest(get_prometheus_registry())

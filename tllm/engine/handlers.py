"""vLLM's handlers of HTTP requests: what of them is used, and what stands between them and their
engine. What happens to a request is decided by whoever is given (`tllm.server`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from tllm.engine.front import GENERATED
from tllm.engine.seams import overrides, uses
from tllm.spec.request import EXTRA_ARG

_OPENAI = "vllm.entrypoints.openai"
_FOR = "fields of requests over HTTP, and results in the responses"
for _handler, _create in (
    (f"{_OPENAI}.completion.serving.OpenAIServingCompletion", "create_completion"),
    (f"{_OPENAI}.chat_completion.serving.OpenAIServingChat", "create_chat_completion"),
    (f"{_OPENAI}.responses.serving.OpenAIServingResponses", "create_responses"),
):
    uses(_handler, _create, _FOR, takes="request raw_request", since="0.32")
    uses(_handler, "engine_client", "outputs are noted for the response", since="0.32")
    uses(
        _handler,
        "_is_model_supported",
        "models that are named together with a steering module",
        takes="model_name",
        since="0.32",
    )
    uses(_handler, "_extract_prompt_components", "how many rows a prompt asks for", since="0.32")
    uses(_handler, "create_error_response", _FOR, takes="message err_type param", since="0.32")
uses(
    "vllm.entrypoints.generate.beam_search.online.BeamSearchOnlineMixin",
    "beam_search",
    "each step of a beam is a request, called after the beam",
    since="0.32",
)
uses(
    "vllm.plugins.endpoint_plugins.interface.EndpointPlugin",
    "attach_router init_state",
    "routes and fields of the API server",
    since="0.32",
)
uses(
    "vllm.entrypoints.serve.engine.protocol",
    "ErrorResponse OpenAIBaseModel",
    "responses that are errors have no results",
    since="0.32",
)
for _request in (
    f"{_OPENAI}.completion.protocol.CompletionRequest",
    f"{_OPENAI}.chat_completion.protocol.ChatCompletionRequest",
    f"{_OPENAI}.responses.protocol.ResponsesRequest",
):
    uses(_request, "vllm_xargs to_sampling_params", "how fields reach the engine", since="0.32")
uses(
    f"{_OPENAI}.responses.protocol.ResponsesRequest",
    "background",
    "answers that are fetched later have no results",
    since="0.32",
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
    """

    admit: Callable[[Any, Any], None] | None = None
    outputs: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, dict[int, str]] = field(default_factory=dict)
    beams: BeamSteps | None = None


WATCH: ContextVar[Watch | None] = ContextVar("tllm_watch", default=None)
"""Of the HTTP request that is being handled; None: nobody wants to know anything."""


def note_outputs(handler: Any) -> None:
    """Let a handler's engine look at `WATCH`."""
    handler.engine_client = WatchedEngine(handler.engine_client)


def is_error(response: Any) -> bool:
    """Whether a handler's response is an error."""
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
        """As the engine's."""
        watch = WATCH.get()
        if watch is not None and watch.beams is not None:
            return self._step(watch.beams, prompt, sampling_params, request_id, kwargs)
        if watch is not None and watch.admit is not None:
            watch.admit(prompt, sampling_params)
        outputs = self._engine.generate(prompt, sampling_params, request_id, **kwargs)
        if watch is None:
            return outputs
        watch.outputs[request_id] = None
        return _noting(outputs, request_id, watch)

    async def _step(
        self, beams: BeamSteps, prompt: Any, params: Any, request_id: str, more: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """A step of one beam."""
        if beams.asked:
            params = params.clone()
            params.extra_args = {**(params.extra_args or {}), EXTRA_ARG: dict(beams.asked)}
        token = GENERATED.set(beams.generated(prompt, request_id))
        try:
            async for output in self._engine.generate(prompt, params, request_id, **more):
                yield output
        finally:
            GENERATED.reset(token)


async def _noting(
    outputs: AsyncGenerator[Any, None], request_id: str, watch: Watch
) -> AsyncGenerator[Any, None]:
    async for output in outputs:
        watch.outputs[request_id] = output
        for sample in output.outputs:
            # What vLLM aborts has no reason.
            if sample.finish_reason == "abort" and sample.stop_reason is not None:
                watch.refused.setdefault(request_id, {})[sample.index] = sample.stop_reason
        yield output


uses(
    "vllm.v1.metrics.prometheus",
    "get_prometheus_registry",
    "our metrics stand beside vLLM's",
    since="0.32",
)


def engine_metrics() -> bytes:
    """vLLM's metrics, and those of its API server, in Prometheus' text format."""
    from prometheus_client import generate_latest
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    return generate_latest(get_prometheus_registry())

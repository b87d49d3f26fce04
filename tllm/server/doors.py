"""vLLM's handlers of completions, chats and responses, with our fields and results.

A handler of vLLM's stays as it is; a door stands before it. It reads our fields from the request,
and notes the engine's outputs on their way to the handler, which knows nothing of results.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from tllm.client.attached import Attached
from tllm.server.fields import FieldError, asked_in
from tllm.server.results import CaptureFiles, as_json
from tllm.server.settings import ServerSettings

_DONE = "data: [DONE]"
_noted: ContextVar[dict[str, Any] | None] = ContextVar("tllm_noted", default=None)


class NotingEngine:
    """An engine client whose last outputs are noted for the request that is being handled."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, prompt: Any, params: Any, request_id: str, **kwargs: Any) -> Any:
        """As the engine's."""
        outputs = self._engine.generate(prompt, params, request_id, **kwargs)
        noted = _noted.get()
        if noted is None:
            return outputs
        noted[request_id] = None  # in the order of the prompts
        return self._noting(outputs, request_id, noted)

    async def _noting(
        self, outputs: AsyncGenerator[Any, None], request_id: str, noted: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        async for output in outputs:
            noted[request_id] = output
            yield output


class Door:
    """Stands before a handler of vLLM's.

    Args:
        handler: vLLM's.
        interventions: of the engine that it uses.
    """

    def __init__(
        self,
        handler: Any,
        interventions: Attached,
        settings: ServerSettings,
        files: CaptureFiles,
    ) -> None:
        handler.engine_client = NotingEngine(handler.engine_client)
        self._handler = handler
        self._interventions = interventions
        self._settings = settings
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        """As vLLM's."""
        return await self._create(self._handler.create_completion, request, raw_request)

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        """As vLLM's."""
        return await self._create(self._handler.create_chat_completion, request, raw_request)

    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
        """As vLLM's. Results are not in the answers: captures are refused."""
        if (request.model_extra or {}).get("capture") is not None:
            message = "capture: /v1/responses has no place for results; use /v1/chat/completions"
            return self._handler.create_error_response(message, param="capture")
        return await self._create(self._handler.create_responses, request, raw_request)

    async def _create(self, create: Any, request: Any, raw_request: Any) -> Any:
        try:
            asked = asked_in(request.model_extra or {}, self._settings)
            asked |= await self._module_named_by_model(request, asked)
        except FieldError as error:
            return self._handler.create_error_response(str(error), param=error.field)
        except LookupError as error:
            return self._handler.create_error_response(
                str(error.args[0]), "NotFoundError", HTTPStatus.NOT_FOUND, "model"
            )
        wanted = sorted({*asked.get("consumers", {}), *asked.get("capture", {})})
        if asked:
            if getattr(request, "use_beam_search", False):
                return self._handler.create_error_response(
                    "use_beam_search: beam search cannot be steered or captured; leave out "
                    f"{', '.join(sorted(asked))}",
                    param=next(iter(sorted(asked))),
                )
            request.vllm_xargs = {**(request.vllm_xargs or {}), "tllm": asked}
        noted: dict[str, Any] = {}
        token = _noted.set(noted if wanted else None)
        try:
            response = await create(request, raw_request)
        finally:
            _noted.reset(token)
        if not wanted or hasattr(response, "error"):
            return response
        if isinstance(response, AsyncGenerator):
            return self._streamed(response, noted, wanted)
        for choice, results in zip(response.choices, self._samples(noted, wanted), strict=True):
            for name, value in results.items():
                setattr(choice, name, value)
        for name in ("capture_results", "consumer_results"):
            first = getattr(response.choices[0], name, None)
            if first is not None:
                setattr(response, name, first)
        return response

    async def _module_named_by_model(
        self, request: Any, asked: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`model="NAME:MODULE"` is the model with a steering module, so that any client steers."""
        model = request.model
        if not model or ":" not in model or self._handler._is_model_supported(model):
            return {}
        base, _, module = model.rpartition(":")
        if not self._handler._is_model_supported(base):
            return {}
        known = await self._interventions.steering.modules()
        if module not in known:
            raise LookupError(
                f"model={model!r}: no steering module {module!r} is registered; registered are "
                f"{', '.join(sorted(known)) or 'none'}"
            )
        if "steering_module_ref" in asked:
            raise FieldError(
                "model",
                f"model={model!r} names a steering module, and so does another field; use one",
            )
        request.model = base
        return {"steering_module_ref": module}

    def _samples(self, noted: Mapping[str, Any], wanted: list[str]) -> list[dict[str, Any]]:
        """The results of each sample of each prompt, in the order of choices."""
        found = []
        for output in noted.values():
            for sample in () if output is None else sorted(output.outputs, key=lambda s: s.index):
                results = {k: v for k, v in sample.consumer_results.items() if k in wanted}
                captures = {k: v for k, v in results.items() if k in sample.capture_results}
                others = {k: v for k, v in results.items() if k not in captures}
                named = {"capture_results": captures, "consumer_results": others}
                found.append(
                    {
                        name: as_json(each, self._files, self._settings.inline_bytes)
                        for name, each in named.items()
                        if each
                    }
                )
        return found

    async def _streamed(
        self, events: AsyncGenerator[str, None], noted: Mapping[str, Any], wanted: list[str]
    ) -> AsyncGenerator[str, None]:
        """The events, and before the last one what came of the request, as an event without
        choices."""
        first: dict[str, Any] = {}
        async for event in events:
            if not first and event.startswith("data: {"):
                first = json.loads(event.removeprefix("data: "))
            if event.startswith(_DONE) and "error" not in first:
                samples = self._samples(noted, wanted)
                last = {name: first[name] for name in ("id", "object", "created", "model")}
                last |= {"choices": [], **(samples[0] if samples else {}), "samples": samples}
                yield f"data: {json.dumps(last)}\n\n"
            yield event

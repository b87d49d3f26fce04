"""vLLM's handlers of completions, chats and responses, with our fields and results.

A handler of vLLM's stays as it is; a door stands before it. It reads our fields from the request,
and notes the engine's outputs on their way to the handler, which knows nothing of results.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from http import HTTPStatus
from typing import Any

from tllm.client.attached import Attached
from tllm.engine.handlers import NOTED, is_error, note_outputs
from tllm.server.fields import FieldError, asked_in
from tllm.server.live import LiveScores, StreamScores
from tllm.server.results import CaptureFiles, as_json
from tllm.server.settings import ServerSettings

_DONE = "data: [DONE]"
_RESULTS = ("capture_results", "consumer_results")


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
        live: LiveScores,
    ) -> None:
        note_outputs(handler)
        self._handler = handler
        self._interventions = interventions
        self._settings = settings
        self._files = files
        self._live = live

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        """As vLLM's."""
        return await self._create(self._handler.create_completion, request, raw_request)

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        """As vLLM's."""
        return await self._create(self._handler.create_chat_completion, request, raw_request)

    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
        """As vLLM's."""
        return await self._create(
            self._handler.create_responses, request, raw_request, in_turns=True
        )

    async def _create(
        self, create: Any, request: Any, raw_request: Any, *, in_turns: bool = False
    ) -> Any:
        """
        Args:
            in_turns: whether the engine's outputs are turns of one answer, and not its choices.
        """
        try:
            asked = asked_in(request.model_extra or {}, self._settings)
            asked |= await self._module_named_by_model(request, asked)
            wanted = sorted({*asked.get("consumers", {}), *asked.get("capture", {})})
            _check_form(request, asked, wanted)
        except FieldError as error:
            return self._handler.create_error_response(str(error), param=error.field)
        except LookupError as error:
            return self._handler.create_error_response(
                str(error.args[0]), "NotFoundError", HTTPStatus.NOT_FOUND, "model"
            )
        if asked:
            request.vllm_xargs = {**(request.vllm_xargs or {}), "tllm": asked}
        noted: dict[str, Any] = {}
        token = NOTED.set(noted if wanted else None)
        try:
            response = await create(request, raw_request)
        finally:
            NOTED.reset(token)
        if not wanted or is_error(response):
            return response
        if isinstance(response, AsyncGenerator):
            stream = self._streamed_turns if in_turns else self._streamed_choices
            return stream(response, noted, wanted, getattr(request, "n", None) or 1)
        samples = self._samples(noted, wanted)
        if in_turns:
            return _with_turns(response, samples)
        for choice, results in zip(response.choices, samples, strict=True):
            _put(results, choice)
        _put(samples[0], response)
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
                named = dict(zip(_RESULTS, (captures, others), strict=True))
                found.append(
                    {
                        name: as_json(each, self._files, self._settings.inline_bytes)
                        for name, each in named.items()
                        if each
                    }
                )
        return found

    async def _streamed_choices(
        self,
        events: AsyncGenerator[str, None],
        noted: dict[str, Any],
        wanted: list[str],
        num_samples: int,
    ) -> AsyncGenerator[str, None]:
        """The events, and before the last one what came of the request, as an event without
        choices. None after an error."""
        first: dict[str, Any] = {}
        failed = False
        scores = StreamScores(self._live, noted, wanted)
        async for event in events:
            if not first and event.startswith("data: {"):
                first = json.loads(event.removeprefix("data: "))
            failed = failed or event.startswith('data: {"error"')
            if event.startswith(_DONE) and first and not failed:
                samples = self._samples(noted, wanted)
                last = {name: first[name] for name in ("id", "object", "created", "model")}
                last |= {"choices": [], **(samples[0] if samples else {}), "samples": samples}
                yield f"data: {json.dumps(last)}\n\n"
            yield await scores.beside(event, num_samples)

    async def _streamed_turns(
        self, events: AsyncGenerator[Any, None], noted: dict[str, Any], wanted: list[str], _: int
    ) -> AsyncGenerator[Any, None]:
        """The events; the answer in the last one has what came of the request."""
        scores = StreamScores(self._live, noted, wanted)
        while True:
            token = NOTED.set(noted)  # vLLM asks its engine for a turn when that is reached
            try:
                event = await anext(events)
            except StopAsyncIteration:
                return
            finally:
                NOTED.reset(token)
            if event.type == "response.completed":
                _with_turns(event.response, self._samples(noted, wanted))
            elif event.type == "response.output_text.delta":
                given = await scores.of(len(noted) - 1, 0)
                if given:
                    event.consumer_results = given
            yield event


def _check_form(request: Any, asked: Mapping[str, Any], wanted: list[str]) -> None:
    """Refuse forms of requests that have no place for what is asked."""
    if "tllm" in (request.vllm_xargs or {}):
        raise FieldError(
            "vllm_xargs",
            "vllm_xargs['tllm'] was given; give what you ask as fields of the request's body",
        )
    if asked and getattr(request, "use_beam_search", False):
        raise FieldError(
            min(asked),
            "use_beam_search: beam search cannot be steered or captured; leave out "
            f"{', '.join(sorted(asked))}",
        )
    if wanted and getattr(request, "background", False):
        field = "capture" if "capture" in asked else "consumers"
        raise FieldError(
            field,
            f"{field} was given with background=true, but an answer that is fetched later has no "
            "place for results; leave one of them out",
        )


def _put(results: Mapping[str, Any], target: Any) -> None:
    for name, value in results.items():
        setattr(target, name, value)


def _with_turns(response: Any, turns: list[dict[str, Any]]) -> Any:
    """An answer with the results of its last turn, and of all where the model called tools."""
    if turns:
        _put(turns[-1], response)
    if len(turns) > 1:
        response.turns = turns
    return response

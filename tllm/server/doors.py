"""vLLM's handlers of completions, chats and responses, with our fields and results.

A handler of vLLM's stays as it is; a door stands before it. It reads our fields from the request,
and notes the engine's outputs on their way to the handler, which knows nothing of results.
"""

from __future__ import annotations

import asyncio
import json
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from tllm.client.attached import Attached
from tllm.client.consumer_calls import consumer_error
from tllm.client.registrations import BUILT_IN
from tllm.consumers.capture.capturing import Capturing
from tllm.consumers.signals import SignalsConsumer
from tllm.engine.handlers import WATCH, BeamSteps, Watch, is_error, is_served, note_outputs
from tllm.engine.keyless_logger import KeylessLogger
from tllm.engine.media import media_of_prompt
from tllm.engine.refusals import RefusedError
from tllm.server.fields import ENDING_FIELDS, FieldError, asked_in, field_error, of_caller
from tllm.server.later import LaterAnswers
from tllm.server.limits import UNKNOWN, Limits, LimitsByKey, captured_rows
from tllm.server.live import LiveScores, StreamScores
from tllm.server.refusals import RefusedChoices
from tllm.server.results import CaptureFiles, as_json
from tllm.server.settings import ServerSettings
from tllm.spec.groups import STEERING
from tllm.spec.patching import PATCHING
from tllm.spec.reading import registered_names
from tllm.spec.request import EXTRA_ARG
from tllm.spec.tiers import parse_modules

logger = logging.getLogger(__name__)

_BACKGROUND_S = 10.0
"""How long an answer that is computed in the background is waited for to begin."""
_OVER = ("completed", "incomplete", "cancelled", "failed")
"""How an answer stands that was computed in the background."""
_LAST_EVENTS = tuple(f"response.{over}" for over in _OVER)
"""Types of the event that has the whole answer: since vLLM 0.33 one that ran out of tokens is
incomplete."""
_DONE = "data: [DONE]"
_STEERING_FIELDS = ("steering_vectors", "steering_clamps")
_RESULTS = ("capture_results", "consumer_results")
_NOT_DONE = (PATCHING, STEERING)
"""Under which the engine says what of a request was not done: no consumers that one could list."""
_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
}


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
        limits: LimitsByKey,
    ) -> None:
        note_outputs(handler)
        KeylessLogger.put_before(handler)
        self._handler = handler
        self._interventions = interventions
        self._settings = settings
        self._files = files
        self._live = live
        self._limits = limits
        self._later = LaterAnswers(self._samples)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        return await self._create(self._handler.create_completion, request, raw_request)

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        return await self._create(self._handler.create_chat_completion, request, raw_request)

    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
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
        end = _nothing
        model, with_module = request.model, None
        try:
            asked = asked_in(_given(request), self._settings)
            if module := await self._module_named_by_model(request, asked):
                asked, with_module = asked | module, model
            _check_form(request, asked)
            await self._check_one_prompt(request, asked)
            beams = BeamSteps(asked) if getattr(request, "use_beam_search", False) else None
            if not asked:
                watch = None if beams is None else Watch(beams=beams)
                return await _watched(create, request, raw_request, watch)
            headers = {} if raw_request is None else raw_request.headers
            caller = self._limits.caller(headers)
            if "conversation" in asked:
                most = self._limits.of(caller).conversations
                asked["conversation"] = of_caller(asked["conversation"], headers, caller, most)
            self._limits.of(caller).check(asked)
            await self._check_kinds(asked, self._limits.of(caller))
            watch = Watch(
                await self._row_check(asked, self._limits.of(caller)),
                beams=beams,
                eager=_in_background(request),
            )
            end = self._limits.begin(caller, asked)
            if beams is None:
                request.vllm_xargs = {**(request.vllm_xargs or {}), EXTRA_ARG: asked}
            response = await self._answered(create, request, raw_request, watch, asked, in_turns)
        except (FieldError, RefusedError) as error:
            end()
            wrong = field_error(error, _given(request), with_module)
            return self._handler.create_error_response(
                str(wrong), _TYPES[wrong.status], wrong.status, wrong.field
            )
        except BaseException as error:
            end()
            fault = consumer_error(error)
            if fault is None:
                raise
            logger.exception("a request failed: %s", fault)
            status = HTTPStatus.INTERNAL_SERVER_ERROR  # for which vLLM's own answer has no words
            return self._handler.create_error_response(str(fault), _TYPES[status], status)
        running = self._running(request)
        if running is not None:  # in the background, whoever listens
            running.add_done_callback(lambda _: end())
            return response
        if isinstance(response, AsyncGenerator):
            return _ending(response, end)
        end()
        return response

    async def _check_one_prompt(self, request: Any, asked: Mapping[str, Any]) -> None:
        """Refuse options of one prompt where there are several, all of which would have them."""
        prompts = num_prompts(request)
        named = [
            (field, name) for field in ("capture", "consumers") for name in asked.get(field, {})
        ]
        if prompts == 1 or not named:
            return
        await self._interventions.steering.layers()  # all consumers are known then
        for field, name in named:
            consumer = self._interventions.consumers.get(name)
            for option in () if consumer is None else consumer.one_prompt_options:
                if asked[field][name].get(option) is not None:
                    raise FieldError(
                        field,
                        f"{field}[{name!r}][{option!r}] is for one prompt, and there are {prompts} "
                        f"prompts; give each a request of its own, or leave {option} out",
                    )

    async def _check_kinds(self, asked: Mapping[str, Any], limits: Limits) -> None:
        """Refuse captures under the name of consumers where captures are not allowed, and other
        consumers under that of captures where these are not."""
        for field, captures, by_server, by_key in (
            ("consumers", True, self._settings.allow_capture, limits.capture),
            ("capture", False, self._settings.allow_consumers, limits.consumers),
        ):
            if by_server and by_key:
                continue
            await self._interventions.steering.layers()  # all consumers are known then
            for name in _wanted_of(asked.get(field, {})):
                if self._captures(name) is captures:
                    kind = "captures" if captures else "is a consumer that captures nothing"
                    whose = " with this API key" if by_server else ""
                    raise FieldError(
                        field,
                        f"{field}[{name!r}] {kind}, and this server does not allow such{whose}",
                        HTTPStatus.FORBIDDEN if by_server else HTTPStatus.BAD_REQUEST,
                    )

    def _captures(self, name: str) -> bool:
        """Whether the results of a consumer are captures."""
        if name in self._interventions.capture_consumers:
            return True
        make = BUILT_IN.get(name)
        known = self._interventions.consumers.get(name) or (make() if make else None)
        return isinstance(known, Capturing)

    def _running(self, request: Any) -> asyncio.Task[Any] | None:
        """What computes an answer in the background; None for any other, and when it is done."""
        if not _in_background(request):
            return None
        tasks: Mapping[str, asyncio.Task[Any]] = self._handler.background_tasks
        return tasks.get(request.request_id)

    async def retrieve_responses(self, response_id: str, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; an answer that was computed in the background has what came of it."""
        response = await self._handler.retrieve_responses(response_id, *args, **kwargs)
        if response_id not in self._later:
            return response
        if isinstance(response, AsyncGenerator):
            return self._told_again(response, response_id)
        return self._with_told(response, response_id) if response.status in _OVER else response

    async def _told_again(
        self, events: AsyncGenerator[Any, None], response_id: str
    ) -> AsyncGenerator[Any, None]:
        async with aclosing(events):
            async for event in events:
                if event.type in _LAST_EVENTS:
                    self._with_told(event.response, response_id)
                yield event

    def _with_told(self, response: Any, response_id: str) -> Any:
        """An answer of the background that is over, with what came of it."""
        return _with_turns(response, self._later.results(response_id))

    async def _answered(
        self,
        create: Any,
        request: Any,
        raw_request: Any,
        watch: Watch,
        asked: Mapping[str, Any],
        in_turns: bool,
    ) -> Any:
        """The handler's response, with the results that were asked for."""
        wanted = sorted({*asked.get("consumers", {}), *asked.get("capture", {})})
        if watch.beams is None and await self._has_condition(asked):
            wanted.append(SignalsConsumer.consumer_id)
        response = await _watched(create, request, raw_request, watch)
        if is_error(response):
            return response
        outputs = watch.outputs
        if watch.eager:  # who asks later how it goes would wait for ever for what is refused
            await watch.called(_BACKGROUND_S)
            await watch.begin()
            self._later.keep(request.request_id, outputs, wanted)
        if isinstance(response, AsyncGenerator):
            # What is refused is an error of the request, and not of a stream.
            if in_turns:
                turns = self._streamed_turns(response, watch, wanted)
                return turns if watch.eager else await _begun(turns, watch)
            await watch.begin()
        if watch.beams is not None:
            return response
        if isinstance(response, AsyncGenerator):
            num_samples = getattr(request, "n", None) or 1
            refusals = RefusedChoices(watch, num_samples, request.model)
            return self._streamed_choices(response, outputs, wanted, num_samples, refusals)
        if watch.eager:
            return response
        samples = self._samples(outputs, wanted)
        if not any(samples):
            return response
        if in_turns:
            return _with_turns(response, samples)
        for choice, results in zip(response.choices, samples, strict=True):
            _put(results, choice)
        _put(samples[0], response)
        return response

    async def _has_condition(self, asked: Mapping[str, Any]) -> bool:
        """Whether a request, or the steering that it brings or names, has conditions: their signals
        are among its results."""
        if any(field in asked for field in ENDING_FIELDS):
            return True
        if any(
            _is_conditional(asked[field]) for field in asked if field.endswith(_STEERING_FIELDS)
        ):
            return True
        named = asked.get("steering_module_ref")
        if named is None:
            return False
        modules = await self._interventions.steering.modules()
        return any(
            _is_conditional(modules[name]) for name, _ in parse_modules(named) if name in modules
        )

    async def _row_check(
        self, asked: Mapping[str, Any], limits: Limits
    ) -> Callable[[Any, Any], None] | None:
        """What refuses prompts that ask for too many rows; None where there is no limit."""
        named = {**asked.get("consumers", {}), **asked.get("capture", {})}
        if not named or (limits.rows is None and limits.bytes is None):
            return None
        model = await self._interventions.steering.layers()
        known = self._interventions.consumers
        makers = {name: make for name, make in BUILT_IN.items() if name in named}
        options = {
            name: (known[name] if name in known else makers[name](), chosen)
            for name, chosen in named.items()
            if name in known or name in makers
        }
        field = "capture" if asked.get("capture") else "consumers"
        total = 0

        def admit(prompt: Any, params: Any) -> None:
            nonlocal total
            total += captured_rows(
                options,
                model["num_layers"],
                prompt_tokens(self._handler._extract_prompt_components(prompt)),
                params.max_tokens,
                params.n,
                media_of_prompt(prompt),
            )
            limits.check_rows(total, model["row_bytes"], field)

        return admit

    async def _module_named_by_model(
        self, request: Any, asked: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`model="NAME:MODULE"` is the model, or an adapter, with a steering module, so that any
        client steers. Either name may have colons of its own."""
        model = request.model
        if not model or ":" not in model or is_served(self._handler, model):
            return {}
        colons = (at for at, character in enumerate(model) if character == ":")
        bases = [model[:at] for at in colons if is_served(self._handler, model[:at])]
        if not bases:
            return {}
        known = await self._interventions.steering.modules()
        base = next((each for each in bases if model[len(each) + 1 :] in known), bases[0])
        module = model[len(base) + 1 :]
        if module not in known:
            raise FieldError(
                "model",
                f"model={model!r}: no steering module {module!r} is registered; registered are "
                f"{registered_names(known)}",
                HTTPStatus.NOT_FOUND,
            )
        if "steering_module_ref" in asked:
            raise FieldError(
                "model",
                f"model={model!r} names a steering module, and so does another field; use one",
            )
        request.model = base
        return {"steering_module_ref": module}

    def _samples(self, noted: Mapping[str, Any], wanted: list[str]) -> list[dict[str, Any]]:
        """The results of each sample of each prompt, in the order of choices: those of the
        consumers that are wanted, and what of the request was not done."""
        told = {*wanted, *_NOT_DONE}
        found = []
        referred: dict[str, int] = {}
        for output in noted.values():
            for sample in () if output is None else sorted(output.outputs, key=lambda s: s.index):
                results = {k: v for k, v in sample.consumer_results.items() if k in told}
                captures = {k: v for k, v in results.items() if k in sample.capture_results}
                others = {k: v for k, v in results.items() if k not in captures}
                named = dict(zip(_RESULTS, (captures, others), strict=True))
                found.append(
                    {
                        name: as_json(each, self._files, self._settings.inline_bytes, referred)
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
        refusals: RefusedChoices,
    ) -> AsyncGenerator[str, None]:
        """The events, and before the last one what came of the request, if anything did, as an
        event without choices. None after an error."""
        first: dict[str, Any] = {}
        failed = False
        scores = StreamScores(self._live, noted, wanted)
        async with aclosing(events):  # a client may leave while scores are waited for
            async for event in events:
                if not first and event.startswith("data: {"):
                    first = json.loads(event.removeprefix("data: "))
                failed = failed or event.startswith('data: {"error"')
                for refused in () if failed else refusals.before(event, first):
                    first = first or refused
                    yield f"data: {json.dumps(refused)}\n\n"
                if event.startswith(_DONE) and first and not failed:
                    samples = self._samples(noted, wanted)
                    if any(samples):
                        last = {name: first[name] for name in ("id", "object", "created", "model")}
                        last |= {"choices": [], **samples[0], "samples": samples}
                        yield f"data: {json.dumps(last)}\n\n"
                yield await scores.beside(event, num_samples)

    async def _streamed_turns(
        self, events: AsyncGenerator[Any, None], watch: Watch, wanted: list[str]
    ) -> AsyncGenerator[Any, None]:
        """The events; the answer in the last one has what came of the request."""
        noted = watch.outputs
        scores = StreamScores(self._live, noted, wanted)
        async with aclosing(_watching(events, watch)) as watched:
            async for event in watched:
                if event.type in _LAST_EVENTS:
                    _with_turns(event.response, self._samples(noted, wanted))
                elif event.type == "response.output_text.delta":
                    given = await scores.of(len(noted) - 1, 0)
                    if given:
                        event.consumer_results = given
                yield event


async def _watched(create: Any, request: Any, raw_request: Any, watch: Watch | None) -> Any:
    """A handler's response, of whose engine requests something is to be known."""
    token = WATCH.set(watch)
    try:
        response = await create(request, raw_request)
    finally:
        WATCH.reset(token)
    if watch is not None and watch.beams is not None and isinstance(response, AsyncGenerator):
        return _watching(response, watch)
    return response


async def _watching(events: AsyncGenerator[Any, None], watch: Watch) -> AsyncGenerator[Any, None]:
    """A stream for which vLLM asks its engine while it is read: for each turn, and for each step of
    a beam."""
    async with aclosing(events):
        while True:
            token = WATCH.set(watch)
            try:
                event = await anext(events)
            except StopAsyncIteration:
                return
            finally:
                WATCH.reset(token)
            yield event


def prompt_tokens(components: Any) -> list[int]:
    """The tokens of a prompt, as rows are counted.

    Args:
        components: vLLM's `PromptComponents`.
    """
    if components.token_ids is None:
        return [UNKNOWN] * (0 if components.embeds is None else len(components.embeds))
    return list(components.token_ids)


def num_prompts(request: Any) -> int:
    """How many prompts a request has: of completions there may be several."""
    given = (getattr(request, name, None) for name in ("prompt", "prompt_embeds"))
    return max(1, sum(map(_num_in, given)))


def _num_in(given: Any) -> int:
    """How many prompts a field has: texts, lists of tokens, or embeddings."""
    if not given:
        return 0
    return len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1


def _is_conditional(steering: Any) -> bool:
    """Whether an entry of steering has a condition."""
    if isinstance(steering, Mapping):
        return "when" in steering or any(map(_is_conditional, steering.values()))
    if not isinstance(steering, list) or not steering or not isinstance(steering[0], Mapping):
        return False  # of numbers, maybe a hundred thousand
    return any(map(_is_conditional, steering))


def _in_background(request: Any) -> bool:
    return bool(getattr(request, "background", False))


def _given(request: Any) -> dict[str, Any]:
    """What a body has that is not read by vLLM."""
    return {"vllm_xargs": request.vllm_xargs, **(request.model_extra or {})}


def _nothing() -> None:
    """A request that asks for nothing has nothing to give back."""


def _ending(
    events: AsyncGenerator[Any, None], end: Callable[[], None]
) -> AsyncGenerator[Any, None]:
    """A stream, and what is called when it is over, or given up before it began."""

    async def stream() -> AsyncGenerator[Any, None]:
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            over()

    found = stream()
    over = weakref.finalize(found, end)
    return found


async def _begun(turns: AsyncGenerator[Any, None], watch: Watch) -> AsyncGenerator[Any, None]:
    """A stream that has reached the engine, so that a request that is refused is an error."""
    first = []
    async for event in turns:
        first.append(event)
        if watch.outputs:
            break

    async def stream() -> AsyncGenerator[Any, None]:
        async with aclosing(turns):
            for event in first:
                yield event
            async for event in turns:
                yield event

    return stream()


def _check_form(request: Any, asked: Mapping[str, Any]) -> None:
    """Refuse forms of requests that have no place for what is asked."""
    names = "capture", "consumers", "patch", "conversation", *ENDING_FIELDS
    of_rows = [name for name in names if name in asked]
    if not _wanted_of(asked.get("consumers", {})):  # they are only turned off
        of_rows = [name for name in of_rows if name != "consumers"]
    if of_rows and getattr(request, "use_beam_search", False):
        raise FieldError(
            of_rows[0],
            f"{of_rows[0]} was given with use_beam_search, but a beam is computed by many "
            "requests; leave one of them out (steering may stay)",
        )
    field = next((name for name in ("capture", "consumers") if asked.get(name)), None)
    if field is not None and _in_background(request):
        raise FieldError(
            field,
            f"{field} was given with background=true, but an answer that is fetched later has no "
            "place for results; leave one of them out",
        )


def _wanted_of(consumers: Mapping[str, Any]) -> list[str]:
    """The consumers that a request does not turn off."""
    return [name for name, chosen in consumers.items() if chosen.get("enabled", True)]


def _put(results: Mapping[str, Any], target: Any) -> None:
    for name, value in results.items():
        setattr(target, name, value)


def _with_turns(response: Any, turns: list[dict[str, Any]]) -> Any:
    """An answer with the results of its last turn, and of all where the model called tools."""
    if any(turns):
        _put(turns[-1], response)
        if len(turns) > 1:
            response.turns = turns
    return response

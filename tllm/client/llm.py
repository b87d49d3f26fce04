"""`LLM`, `AsyncLLM` and `make_llm`: vLLM's classes, with interventions; `attach` to an engine."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import fields
from functools import partial, wraps
from numbers import Real
from typing import Any, ParamSpec, TypeVar, Unpack

import vllm
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams as VllmBeamSearchParams
from vllm.usage.usage_lib import UsageContext

from tllm.client.arguments import (
    RESULT_TIMEOUT_S,
    AsyncLLMArguments,
    LLMArguments,
    OurArguments,
    check_names,
    split,
)
from tllm.client.attached import AsyncClient, Attached, Client, SyncClient, made, pending
from tllm.client.calls import Steps
from tllm.client.generation import AsyncGeneration, SyncGeneration, check_alone
from tllm.client.results import check_steered, hand_on
from tllm.consumers.base import Consumer
from tllm.engine import limits
from tllm.engine.async_front import front_ends_of
from tllm.engine.executor import executor_in_place_of, executor_of
from tllm.engine.front import OfflineFront, handle_of
from tllm.engine.options import attach_to_config, check_attached, engine_arguments
from tllm.engine.refusals import RefusedError
from tllm.params import asked_of
from tllm.registry import Registry
from tllm.spec.reading import one_or_several
from tllm.spec.request import Asked

_P = ParamSpec("_P")
_R = TypeVar("_R")

_registry = Registry()


def register_consumer(consumer: Consumer | str) -> Consumer:
    """Let the engines made from now on start with this consumer.

    Args:
        consumer: an instance, or a spec such as `"esamp:beta=0.2"`.

    Returns:
        The consumer: its `synchronize()` and `read_stats()` reach the engine once one is made.
    """
    return _registry.add(consumer)


def clear_consumers() -> None:
    """Engines made from now on start without consumers. Running engines keep theirs."""
    _registry.clear()


def make_llm(model_name: str, **given: Unpack[LLMArguments]) -> LLM:
    """An `LLM` for a model, with the consumers registered so far.

    Args:
        model_name: a path or a name on the Hugging Face hub.
        **given: as `LLM` takes them.
    """
    return LLM(model=model_name, **given)


def _as(theirs: Callable[_P, _R]) -> Callable[[Callable[..., Any]], Callable[_P, _R]]:
    """Let a method that stands in the place of vLLM's be called as it is; for editors, too."""

    def decorate(ours: Callable[..., Any]) -> Callable[_P, _R]:
        return wraps(theirs, assigned=("__annotations__",))(ours)

    return decorate


class LLM(Attached, OfflineFront, vllm.LLM):
    """`vllm.LLM`, with interventions.

    Args:
        model: as in vLLM.
        **given: any other argument of `vllm.LLM`, and those of
            `tllm.client.arguments.OurArguments`.
    """

    def __init__(self, model: str, **given: Unpack[LLMArguments]) -> None:
        ours, options, theirs = split(given)
        check_names(theirs, _vllm_names())
        chosen, capturing = _chosen(**ours)
        result_timeout_s = ours.get("result_timeout_s", RESULT_TIMEOUT_S)
        client = Client(chosen, capturing)
        arguments = engine_arguments(theirs, options, chosen)
        with limits.told(arguments["additional_config"]):
            super().__init__(model, **arguments)
        self._stand_before(client, result_timeout_s)
        try:
            self._run(client.registered.current())
        except BaseException:
            self.llm_engine.engine_core.shutdown()  # as of an `AsyncLLM`
            raise

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **given: Unpack[OurArguments]) -> LLM:
        """As vLLM's, with interventions.

        Args:
            **given: those of `tllm.client.arguments.OurArguments`.
        """
        llm: LLM = _made_by(vllm.LLM.from_engine_args, cls, engine_args, **given)
        return llm

    def _stand_before(self, client: Client, result_timeout_s: float) -> None:
        """Bring what a client says to the engine that is there."""
        self._sync = SyncClient(self.llm_engine, client, result_timeout_s)
        self._front = self._sync.front
        run = self._sync.calls.run
        parts = client, run, SyncGeneration(self.llm_engine, run, self._front)
        self._set_up(*parts)
        self._front.handle = _also_without(weakref.ref(self), parts)

    @_as(vllm.LLM.encode)
    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        with self._front.together():
            return super().encode(*args, **kwargs)

    @_as(vllm.LLM.embed)
    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        with self._front.together() as pooled:
            outputs = super().embed(*args, **kwargs)
        return hand_on(pooled, outputs)

    @_as(vllm.LLM.classify)
    def classify(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        with self._front.together() as pooled:
            outputs = super().classify(*args, **kwargs)
        return hand_on(pooled, outputs)

    @_as(vllm.LLM.score)
    def score(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's. Two texts that a model embeds one by one are two requests, and their score has
        no place for the captures of both: `encode` gives them. Raises `RefusedError` where one of
        them could not be steered."""
        if not self.scores_in_one_pass:
            self._refuse_results(
                asked_of(kwargs.get("pooling_params")),
                "a score of this model is made of two requests, and has no place for the results "
                "of both; use encode(..., pooling_task=...)",
            )
        with self._front.together() as pooled:
            outputs = super().score(*args, **kwargs)
        if self.scores_in_one_pass:
            return hand_on(pooled, outputs)
        for output in pooled:
            check_steered(output)
        return outputs

    @_as(vllm.LLM.beam_search)
    def beam_search(self, prompts: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; all beams are steered as `tllm.BeamSearchParams` say, and by what is global:
        a beam's tokens are generated tokens, though each of its steps is a request."""
        asked = asked_of(params)
        if not isinstance(params, VllmBeamSearchParams):
            raise TypeError(
                f"beam_search was given {type(params).__name__}; give "
                "tllm.BeamSearchParams(beam_width=..., max_tokens=...)"
            )
        self._refuse_results(
            asked,
            "a beam is computed by many requests; ask for it with generate() of the tokens of the "
            "beams that are kept",
        )
        for field, given in (
            ("patch", asked.patch),
            ("stop_when or abort_when", asked.steering and asked.steering.endings),
            ("conversation", asked.conversation),
        ):
            if given:
                raise RefusedError(
                    f"{field} was asked, but a beam is computed by many requests; use generate()"
                )
        if guiding := self._run(self._tllm.uses.guiding(asked)):
            raise RefusedError(
                f"{guiding[0]} was asked, but it guides which token is drawn, and the tokens of "
                "beams are not drawn; use generate()"
            )
        check_alone(self.llm_engine, "beam_search")
        self._sync.asked = asked
        try:
            return super().beam_search(prompts, params, *args, **kwargs)
        finally:
            self._sync.asked = None

    def _refuse_results(self, asked: Asked, why: str) -> None:
        """Refuse what is asked for results alone where vLLM's outputs would leave them out."""
        if fields := self._run(self._tllm.uses.asked_for_results(asked)):
            raise RefusedError(f"{fields[0]} was asked, but {why}")

    def wait_for_results(self, outputs: Any, timeout_s: float | None = None) -> None:
        """Ask again for results that were `pending`, and put them on the outputs.

        Args:
            outputs: one, or several in a list.
            timeout_s: how long to wait for them; without limit by default.
        """
        late = pending(one_or_several(outputs))
        self._run(self._tllm.gathering.gather(late, timeout_s, alone=True))


class AsyncLLM(Attached, vllm.AsyncLLMEngine):
    """vLLM's async engine, with interventions; made by `create`, `from_engine_args` or
    `from_vllm_config`.

    Args:
        vllm_config: tLLM is attached in it; its `additional_config["tllm"]` may hold the fields of
            `tllm.engine.options.EngineOptions`.
        *args, **kwargs: as vLLM's class takes them, and those of
            `tllm.client.arguments.OurArguments`, which are noted in `vllm_config`.
    """

    def __init__(self, vllm_config: Any, executor_class: Any, *args: Any, **kwargs: Any) -> None:
        ours, options, theirs = split(kwargs)
        chosen, capturing = _chosen(**ours)
        result_timeout_s = ours.get("result_timeout_s", RESULT_TIMEOUT_S)
        attach_to_config(vllm_config, options, chosen)
        with limits.told(vllm_config.additional_config):
            super().__init__(vllm_config, executor_in_place_of(executor_class), *args, **theirs)
        self._client = _attached(self, self, chosen, capturing, result_timeout_s)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs, *args: Any, **kwargs: Any) -> AsyncLLM:
        """As vLLM's, with interventions.

        Args:
            *args, **kwargs: as vLLM's takes them, and those of
                `tllm.client.arguments.OurArguments`.
        """
        theirs = vllm.AsyncLLMEngine.from_engine_args
        engine: AsyncLLM = _made_by(theirs, cls, engine_args, *args, **kwargs)
        return engine

    @classmethod
    def from_vllm_config(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> AsyncLLM:
        """The same, from a `VllmConfig`."""
        theirs = vllm.AsyncLLMEngine.from_vllm_config
        engine: AsyncLLM = _made_by(theirs, cls, vllm_config, *args, **kwargs)
        return engine

    @classmethod
    async def create(cls, model: str, **given: Unpack[AsyncLLMArguments]) -> AsyncLLM:
        """An engine for a model.

        Args:
            **given: the fields of `vllm.AsyncEngineArgs`, and those of
                `tllm.client.arguments.OurArguments`.
        """
        ours, options, theirs = split(given)
        check_names(theirs, _vllm_names())
        arguments = AsyncEngineArgs(model=model, **engine_arguments(theirs, options, ()))
        config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        engine = cls(
            config,
            executor_of(config),
            log_requests=arguments.enable_log_requests,
            log_stats=not arguments.disable_log_stats,
            usage_context=UsageContext.ENGINE_CONTEXT,
            **ours,
        )
        try:
            await engine._run(engine._tllm.registered.current())
        except BaseException:
            engine.shutdown()  # who hears why, the error's traceback too, would keep it
            raise
        return engine

    def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        results: bool = True,
        **kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM's: streams outputs. The last one carries the consumers' results. If a
        consumer serves the request it has every sample, also one that ended in an output before
        (with `RequestOutputKind.DELTA`, without the text and tokens that were given out then).

        With a prompt that is itself a stream, which output is the last is known only when the
        stream has ended: it gets the results then, after it was given out. Each part of the stream
        may bring options for consumers of its own; it is steered and captured, and its outputs are
        of the kind, as the request says.

        Args:
            results: False spares the round trip for results that nobody will look at.
        """
        outputs = super().generate(prompt, sampling_params, request_id, **kwargs)
        return outputs if results else self._without_results(outputs, request_id)

    async def _without_results(
        self, outputs: AsyncGenerator[RequestOutput, None], request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        self._client.unwanted.add(request_id)
        async for output in outputs:
            yield output

    def takes_plain(self) -> bool:
        """Whether `prepared_plain` has an answer: all is known, and nothing is steered."""
        registered = self._tllm.registered
        return registered.is_current and not registered.composer.concerns(None)

    def registration_of(self, consumer_id: str) -> str:
        """Tells one registration of a consumer from others of its id, whose copies in the workers
        are others; empty where there was none yet."""
        return self._tllm.registered.ids.get(consumer_id, "")

    def steers_from_end(self, asked: Asked) -> bool:
        """Whether tokens are steered that count from the end of the prompt, by what a request asks
        or by what is global.

        Raises `ValueError` naming what is wrong in the request.
        """
        composer = self._tllm.registered.composer
        groups = composer.groups(asked.steering) if composer.concerns(asked.steering) else ()
        return any(group.positions.from_end for group in groups)

    def for_generated_alone(self, asked: Asked) -> str | None:
        """What of a request's steering does nothing to a prompt, in words, beside entries that say
        so themselves; None without any, and while somebody registers something."""
        registered = self._tllm.registered
        if asked.steering is None or not registered.is_current:
            return None
        return registered.composer.for_generated_alone(asked.steering)

    def registrations_of(self, names: Iterable[str]) -> tuple[str, ...] | None:
        """By which registration each of these consumers is there: another of its id has another.
        None where one of them is not there, and while somebody registers something."""
        registered = self._tllm.registered
        if not registered.is_current or not registered.consumers.keys() >= set(names):
            return None
        return tuple(registered.ids[name] for name in names)

    def prepared_plain(
        self, params: vllm.SamplingParams, *, streamed: bool = False
    ) -> vllm.SamplingParams:
        """Parameters as the engine takes them, of requests that nobody steers and whose results
        nobody will look at; `streamed` of those whose prompts arrive in parts.

        Raises `ValueError` naming what such requests cannot have, and `NewsError` where something
        was registered since `takes_plain`.
        """
        return self._tllm.admission.admit_now(params, streamed=streamed)

    async def wait_for_results(self, output: Any, timeout_s: float = RESULT_TIMEOUT_S) -> None:
        """Ask again for results that were `pending`, and put them on the output, or on several."""
        late = pending(one_or_several(output))
        await self._run(self._tllm.gathering.gather(late, timeout_s, alone=False))


AsyncLLMEngine = AsyncLLM


def attach(
    engine: Any,
    *,
    consumers: Iterable[Consumer | str] = (),
    capture_consumers: Iterable[Consumer | str] = (),
    result_timeout_s: float = RESULT_TIMEOUT_S,
) -> Attached:
    """Attach to an engine of vLLM's that exists: its requests carry interventions from now on.

    Args:
        engine: an `AsyncLLM` (of the API server, for example), `LLMEngine` or `LLM` whose workers
            were started with our `worker_cls` and `scheduler_cls`. An `LLM` becomes a `tllm.LLM`,
            and is returned. One that is attached already gives what it is attached to, as it is.
        consumers, capture_consumers, result_timeout_s: as `LLM` takes them. They are registered
            with the first request, unless another front end was first.

    Raises `ValueError` for an engine whose workers are not ours, and for consumers that one which
    is attached already does not have.
    """
    llm, engine = (engine, engine.llm_engine) if isinstance(engine, vllm.LLM) else (None, engine)
    found: Attached | None = handle_of(engine)
    if found is not None:
        given = *one_or_several(consumers), *one_or_several(capture_consumers)
        found._tllm.registered.check_expected(map(made, given))
        return found
    check_attached(engine.vllm_config)
    chosen, capturing = _chosen(consumers, capture_consumers, result_timeout_s)
    if llm is not None:
        return _as_ours(llm, Client(chosen, capturing), result_timeout_s)
    handle = Attached()
    if isinstance(engine, vllm.LLMEngine):
        client = Client(chosen, capturing)
        sync = SyncClient(engine, client, result_timeout_s)
        run = sync.calls.run
        handle._set_up(client, run, SyncGeneration(engine, run, sync.front))
        sync.front.handle = lambda: handle
    else:
        _attached(handle, engine, chosen, capturing, result_timeout_s)
    return handle


def _as_ours(llm: vllm.LLM, client: Client, result_timeout_s: float) -> LLM:
    """An `LLM` of vLLM's as one of ours: its beams, embeddings and scores are made by its own
    methods, which would ask the engine for requests that say nothing of what they are for."""
    theirs = type(llm)
    ours = LLM if theirs is vllm.LLM else type(theirs.__name__, (LLM, theirs), {})
    llm.__class__ = ours
    assert isinstance(llm, LLM)
    llm._stand_before(client, result_timeout_s)
    return llm


def _attached(
    handle: Attached,
    engine: vllm.AsyncLLMEngine,
    consumers: list[Consumer],
    capturing: list[str],
    result_timeout_s: float,
) -> AsyncClient:
    workers = engine.vllm_config.parallel_config.world_size
    client = Client(consumers, capturing, front_ends=front_ends_of(engine), workers=workers)
    driver = AsyncClient(engine, client, result_timeout_s)
    run = driver.calls.run
    handle._set_up(client, run, AsyncGeneration(engine, run))
    driver.front.handle = weakref.ref(handle) if handle is engine else lambda: handle
    return driver


def _also_without(
    llm: weakref.ref[LLM], parts: tuple[Client, Callable[[Steps[Any]], Any], SyncGeneration]
) -> Callable[[], Attached]:
    """Gives an `LLM`, and, when its user has let it go and kept the engine, what stands for it.

    Args:
        parts: that both are set up with.
    """
    instead: list[Attached] = []

    def handle() -> Attached:
        found = llm()
        if found is not None:
            return found
        if not instead:
            instead.append(Attached())
            instead[0]._set_up(*parts)
        return instead[0]

    return handle


def _vllm_names() -> set[str]:
    """What vLLM's engines take by keyword."""
    parameters = inspect.signature(vllm.LLM.__init__).parameters
    return {*parameters, *(field.name for field in fields(AsyncEngineArgs))} - {"self", "kwargs"}


def _made_by(theirs: Any, cls: type, *args: Any, **kwargs: Any) -> Any:
    """What a class method of vLLM's makes of one of our classes, which is handed our arguments."""
    names = OurArguments.__annotations__.keys() & kwargs.keys()
    ours = {name: kwargs.pop(name) for name in names}
    taken = inspect.signature(theirs).parameters
    check_names(kwargs, taken, theirs.__name__, "vLLM's belong into what it is given first")
    return theirs.__func__(partial(cls, **ours), *args, **kwargs)


def _chosen(
    consumers: Iterable[Consumer | str] = (),
    capture_consumers: Iterable[Consumer | str] = (),
    result_timeout_s: float | None = None,
) -> tuple[list[Consumer], list[str]]:
    """All consumers of a new engine, and the ids of those whose results are capture results;
    refuses a time that no result could be waited for."""
    if result_timeout_s is not None:
        number = isinstance(result_timeout_s, Real) and not isinstance(result_timeout_s, bool)
        if not number or not result_timeout_s >= 0:  # NaN neither
            given = f"result_timeout_s={result_timeout_s!r:.60}"
            raise ValueError(f"{given}; give a number of seconds, 0 or more")
    capturing = list(map(made, one_or_several(capture_consumers)))
    chosen = [*_registry.all(), *map(made, one_or_several(consumers)), *capturing]
    return chosen, [consumer.consumer_id for consumer in capturing]

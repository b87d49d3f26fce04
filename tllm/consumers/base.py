"""The base of every consumer, shipped or not."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch

from tllm.ports import (
    Action,
    Candidates,
    ConsumerContext,
    ConsumerFlow,
    PortBundle,
    RequestInfo,
    RowMeta,
)


class Copies:
    """Those of a consumer in the workers of engines. A copy of the consumer has none of its own.

    Args:
        engines: each has `synchronize(consumer)` and `read_stats(consumer)`. They are not kept: an
            engine ends with its user, who may keep the consumer.
    """

    def __init__(self, engines: Sequence[Any]) -> None:
        self._engines = list(map(weakref.ref, engines))

    @property
    def living(self) -> list[Any]:
        """The engines that have not ended."""
        return [engine for each in self._engines if (engine := each()) is not None]

    def ask(self, method: str, consumer: Consumer) -> Any:
        """Call a method of the engine; `RuntimeError` where it has ended, or there are several."""
        living = self.living
        if len(living) > 1:
            raise RuntimeError(
                f"consumer {consumer.consumer_id!r} is registered in {len(living)} engines, and "
                f"{method}() of the object would be of one of them; call "
                f"llm.{method}({consumer.consumer_id!r}) of each engine"
            )
        if not living:
            raise RuntimeError(
                f"the engine that consumer {consumer.consumer_id!r} was registered in has ended; "
                f"call {method}() before, or keep the engine"
            )
        return getattr(living[0], method)(consumer)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Consumer(ABC):
    """Reads, steers or learns from a model's activations while it generates.

    The object the user makes is a description: it is sent to every worker (by cloudpickle) and
    the copies there do the work. While it is registered, `synchronize()` and `read_stats()` of the
    user's object reach those copies (on an `AsyncLLM`, they are to be awaited); an object that
    several engines have refuses them, which are asked of each engine then.

    A consumer that raises is detached: the error is logged once with its traceback, counted, and
    put into the results of the requests that were using it. Generation goes on.
    """

    #: Name in results, statistics, `SamplingParams(consumers={...})` and error messages.
    consumer_id: str = ""

    #: Only requests that name it use it; else every request does that does not turn it off.
    on_request_only: bool = False

    #: Its own argument that says at which hook points the rows of requests are read; "": requests
    #: say, as `hooks`.
    place_argument: str = ""

    #: Its options that are of one prompt alone, as the name of a record is: an HTTP request with
    #: several prompts, which all have its options, may not give them.
    one_prompt_options: Sequence[str] = ()

    #: Its options that every input of a streamed prompt has to give alike: rows of one result that
    #: were asked for otherwise could not be told apart.
    lasting_options: Sequence[str] = ()

    #: Methods that `call_consumer` may call in the workers, with plain arguments and answers.
    remote_methods: Sequence[str] = ()

    #: `on_request_finished` waits until the tokens of the output are known: with stop strings, and
    #: when the caller aborts, until the result is fetched.
    needs_tokens: bool = False

    #: Whether it looks through the model's own LM head (`ctx.model.lm_head`, `Candidates.project`,
    #: `contrast`). A request whose adapter changes the LM head goes on without it, and is told.
    uses_lm_head: bool = False

    #: Whether a class has an `on_step_end` of its own: others are not called at a step's end.
    hears_step_end: bool = False

    #: Whether a class has `request_flows` of its own: other requests' flows are those of `flows`.
    has_request_flows: bool = False

    _copies: Copies | None = None
    """Of the user's object while it is registered: its copies in the workers."""

    _in_worker: bool = False
    """Whether it is one of these, and was started."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.hears_step_end = cls.on_step_end is not Consumer.on_step_end
        cls.has_request_flows = cls.request_flows is not Consumer.request_flows
        for name in _OF_THE_WORKERS:
            # Also what comes from a class that is no consumer.
            if not hasattr(own := getattr(cls, name), "reaches_the_workers"):
                setattr(cls, name, _reaching_the_workers(name, own))
        if not hasattr(cls.start, "says_where"):
            setattr(cls, "start", _saying_where(cls.start))  # noqa: B010 -- mypy

    def attach(self, engine: Any) -> None:
        """Let this object stand for its copies in an engine's workers.

        Args:
            engine: has `synchronize(consumer)` and `read_stats(consumer)`.
        """
        others = [] if self._copies is None else self._copies.living
        self._stand_for([*(each for each in others if each is not engine), engine])

    def detach(self, engine: Any) -> None:
        """It has no copies in that engine's workers any more."""
        if self.is_attached_to(engine) and self._copies is not None:
            self._stand_for([each for each in self._copies.living if each is not engine])

    def is_attached_to(self, engine: Any) -> bool:
        """Whether this object stands for its copies in that engine's workers."""
        return self._copies is not None and any(each is engine for each in self._copies.living)

    def _stand_for(self, engines: Sequence[Any]) -> None:
        # A frozen dataclass may be a consumer, too.
        object.__setattr__(self, "_copies", Copies(engines) if engines else None)

    def needs_tokens_of(self, options: Mapping[str, Any]) -> bool:
        """The same for one request, by its options; `needs_tokens` by default."""
        return self.needs_tokens

    @abstractmethod
    def flows(self) -> Sequence[ConsumerFlow]:
        """What is read and written, and when. Asked once, at registration."""

    def request_flows(self, options: Mapping[str, Any], num_layers: int) -> Sequence[ConsumerFlow]:
        """What is read of one sequence beside `flows()`, by the options of its request and the
        model's number of layers.

        Asked for every sequence that uses the consumer, in the user's process and in each worker:
        the answer may depend on nothing else. These flows write nothing. Sequences that ask for
        the same rows at different `positions` share a flow.
        """
        return ()

    def start(self, ctx: ConsumerContext) -> None:
        """Called once in the worker before anything else: allocate here. Outside of torch's
        inference mode, in which the engine's thread is otherwise: what is made here can be trained.
        """

    def on_weights_changed(self, ctx: ConsumerContext) -> None:
        """The model's weights were replaced: `ctx.model` is of the new ones, and what was taken of
        the one given to `start` is old. All rows computed with the old ones were handed out."""

    def validate_call(self, method: str, args: Sequence[Any]) -> None:
        """Check `llm.call_consumer(consumer_id, method, *args)` in the user's process.

        Raise `ValueError` to refuse it: what the method raises in the workers detaches the
        consumer, for whoever called.
        """

    def validate_options(self, options: Mapping[str, Any]) -> None:
        """Check `SamplingParams(consumers={consumer_id: options})` in the user's process.

        Raise `ValueError` naming the field to refuse the request. `enabled` is always allowed, and
        not among the options here: of a request that turns the consumer off, nothing is asked. A
        consumer that takes others overrides this.
        """
        if unknown := sorted(options):
            raise ValueError(
                f"consumers[{self.consumer_id!r}] has unknown options {unknown}; it takes only "
                "'enabled' (a consumer that takes others has a validate_options of its own)"
            )

    def on_request_started(self, request: RequestInfo, ctx: ConsumerContext) -> None:
        """A sequence was scheduled for the first time, before its first forward pass; or a later
        input of a streamed prompt is the first to ask for this, or the first again."""

    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Rows have arrived. See `ConsumerFlow.window` for when and on which stream."""

    def decide(self, rows: PortBundle, ctx: ConsumerContext) -> Iterable[Action] | None:
        """Rows have arrived of a flow that has `Actions.write`: what to do to their requests.

        What is raised here is heard by the requests of the bundle, which are decided for no more;
        the consumer stays. Under tensor parallelism the first rank decides for all.
        """
        return None

    def guide(self, candidates: Candidates, ctx: ConsumerContext) -> torch.Tensor | None:
        """Logit deltas `[rows, width]` float32 for the candidates, or None to leave them.

        Called only when a flow has `Sampler.write`, on the compute stream, after the
        `same_step` bundles of the step. -inf keeps a token from being drawn; deltas that are NaN or
        +inf, or that leave a row no candidate, are refused, and such a row stays as it is.
        """
        return None

    def on_step_end(self, ctx: ConsumerContext) -> None:
        """The step's tokens were sampled and its bundles handed out."""

    def on_export(
        self,
        channel: str,
        tensors: Mapping[str, torch.Tensor],
        meta: RowMeta | None,
        attached: Any = None,
    ) -> None:
        """Host copies sent by `ctx.export` have arrived, with what was attached to them; runs on a
        delivery thread. A consumer that attaches nothing may leave the last parameter out."""

    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> Any:
        """A sequence ended, and all of its bundles were handed out: of one that was aborted there
        may have been none.

        Returns:
            What goes to the user with the request's output (`output.consumer_results`): plain
            data, numpy arrays or CPU tensors; None for nothing. Give values that belong to
            tokens as `PerToken`: rows that the engine computed ahead of a stop are then cut off.
            A `RequestResult` says that something is missing. A `concurrent.futures.Future` of
            any of these lets the engine go on: whoever takes the result waits for it. By default
            what `decide` did, if anything.
        """
        return request.actions

    def expedite(self) -> None:
        """Somebody waits for results that are still promised: do not hold them back for others.
        Must return at once."""

    def on_error(self, error: BaseException) -> None:
        """Called once in the worker when the consumer is detached because it raised."""

    def on_result(self, output: Any, sample_index: int, result: Any) -> None:
        """Called on the user's object, in the user's process, with each of its results.

        Args:
            output: the last `RequestOutput`, with all results on it. Of kind `DELTA` it has only
                the text and tokens that were new.
            result: the `ConsumerResult`. What is raised here becomes its error.
        """

    def stop(self) -> None:
        """Called once in the worker when the consumer is removed, or the engine ends; not where
        vLLM kills the worker, as with several processes of the API server."""

    def synchronize(self) -> None:
        """Wait until all work handed to this consumer is done. Implemented for the worker; on
        the registered object of the user it reaches every worker, and raises `RuntimeError` where
        one raised there: the consumer is detached then."""

    def read_stats(self) -> Mapping[str, Any]:
        """Counters and figures, as plain data. Implemented for the worker; on the registered
        object of the user it returns `merge_stats` of what the workers say, and one that is
        registered with no engine raises `RuntimeError`."""
        return {}

    def merge_stats(self, stats: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """One mapping from those of the workers; the first worker's by default."""
        return stats[0] if stats else {}

    def merge_replicas(self, stats: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """One mapping from those of data-parallel replicas, which served different requests; by
        default they stand side by side, as `{"replicas": [...]}`."""
        return {"replicas": list(stats)}


_OF_THE_WORKERS = ("synchronize", "read_stats")
"""Methods that ask the workers where their object stands for the copies there."""


def _reaching_the_workers(name: str, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(own)
    def method(self: Consumer) -> Any:
        if self._copies is not None:
            return self._copies.ask(name, self)
        if name == "read_stats" and not self._in_worker:
            raise RuntimeError(
                f"consumer {self.consumer_id!r} is not registered with an engine, and has no "
                "statistics; use llm.register_consumer(consumer), or "
                "tllm.register_consumer(consumer) before the engine is made"
            )
        return own(self)

    vars(method)["reaches_the_workers"] = True
    return method


def _saying_where(own: Callable[..., None]) -> Callable[..., None]:
    @wraps(own)
    def start(self: Consumer, ctx: ConsumerContext) -> None:
        # A frozen dataclass may be a consumer, too.
        object.__setattr__(self, "_in_worker", True)
        own(self, ctx)

    vars(start)["says_where"] = True
    return start


Consumer.start = _saying_where(Consumer.start)  # type: ignore[method-assign]
for _name in _OF_THE_WORKERS:
    setattr(Consumer, _name, _reaching_the_workers(_name, vars(Consumer)[_name]))

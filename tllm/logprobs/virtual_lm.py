"""`AsyncVirtualLM`: next-token log-probabilities from a vLLM engine."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, Unpack

import torch

from tllm.client.llm import AsyncLLM
from tllm.consumers.base import Consumer
from tllm.consumers.next_token import NextTokenConsumer
from tllm.engine.bulk import loop_of
from tllm.logprobs.base import AsyncLM, check_prompts
from tllm.logprobs.cache import AnswerCache
from tllm.logprobs.lane import Lane
from tllm.logprobs.loop import EngineLoop, Mailbox
from tllm.logprobs.named_adapters import Adapter, NamedAdapters
from tllm.logprobs.query import (
    Answer,
    Form,
    Interventions,
    LaneOptions,
    Query,
    QueryOptions,
    TopLogprobs,
    checked_tokens,
    stacked,
)
from tllm.logprobs.service import Service
from tllm.logprobs.transport import CONSUMER, Kind
from tllm.spec.reading import allow_keys, require_one_of, scalar, whole_number

T = TypeVar("T")


@dataclass(frozen=True)
class _Options:
    """Keywords of `AsyncVirtualLM`, checked before an engine starts for them, which may take
    minutes."""

    cache_size: int = 0
    cache_opts: Mapping[str, Any] | None = None
    batch_size: int = 20
    timeout: float = 0.02
    transport: Kind = "shared"
    shared_mib: int = 1024
    idle_seconds: float = 5.0

    def __post_init__(self) -> None:
        whole_number(self.cache_size, "cache_size=", 0)
        allow_keys(self.cache_opts or {}, ("move_to_cpu",), "cache_opts", "OutputCache")
        whole_number(self.batch_size, "batch_size=", 1)
        whole_number(self.shared_mib, "shared_mib=", 1)
        for name in ("timeout", "idle_seconds"):
            if not scalar(seconds := getattr(self, name), name) >= 0:
                raise ValueError(f"{name}={seconds!r} must be 0 or more seconds")
        require_one_of("transport", self.transport, Kind)


_DEFAULTS = _Options()


class AsyncVirtualLM(AsyncLM):
    """Next-token log-probabilities, and completions, from a vLLM engine in a process of its own.

    Concurrent queries are batched, and equal ones computed once. Methods may be called from any
    thread and any event loop, in any mixture; none blocks a loop but the `_sync` forms. Results are
    float32 CPU tensors that belong to the caller.

    Made by `from_name`, or by `from_engine` around an engine that exists. Both take, as keywords:

    Args:
        cache_size: log-probabilities to remember; 0 for none.
        cache_opts: further arguments of `OutputCache`.
        batch_size, timeout: bounds for a batch, see `Collector`. The engine batches what
            arrives while it computes, so neither limits how much is computed together.
        transport: how results come from the workers: `shared` memory, or `rpc` when they are on
            other hosts.
        shared_mib: the most shared memory. A result of 64 KiB or more is a view of it, which is
            free again when nobody refers to the result.
        idle_seconds: a lane that is not used for so long gives its place in the engine back.

    Attributes:
        engine: a `tllm.AsyncLLM`; `run` awaits its coroutines.
        cache: the `OutputCache`, or None.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        loop: EngineLoop,
        options: _Options = _DEFAULTS,
        *,
        owned: bool = True,
        registered: bool = True,
    ) -> None:
        """
        Args:
            loop: the one that the engine belongs to.
            owned: whether `cleanup` ends the engine.
            registered: whether `cleanup` removes the consumer in the workers.
        """
        if engine.vllm_config.parallel_config.data_parallel_size > 1:
            raise ValueError(
                "data_parallel_size is more than 1, and vLLM may send the steps of a lane to "
                "different engines; make one AsyncVirtualLM for each, with data_parallel_size=1"
            )
        self.engine = engine
        skipped = engine.model_config.skip_tokenizer_init
        self.tokenizer = None if skipped else engine.get_tokenizer()
        self._answers = AnswerCache(options.cache_size, options.cache_opts or {})
        self.cache = self._answers.outputs
        self._loop = loop
        shared_bytes = options.shared_mib * 2**20
        self._service = Service(engine, loop, options.transport, shared_bytes, options.idle_seconds)
        self._mailbox = Mailbox(
            loop,
            self._service.serve,
            self._service.cancel,
            options.batch_size,
            options.timeout,
        )
        self.vocab_size = self._service.vocab_size
        self._adapters = NamedAdapters(engine, loop)
        self._active: str | None = None
        # Also when the last reference goes, or the interpreter ends.
        end = partial(self._service.shut_down, owned=owned, registered=registered)
        self._finalizer = weakref.finalize(self, loop.end, end)

    @classmethod
    def from_name(
        cls,
        model_name: str,
        engine_opts: Mapping[str, Any] | None = None,
        cache_size: int = 0,
        cache_opts: Mapping[str, Any] | None = None,
        batch_size: int = 20,
        timeout: float = 0.02,
        **options: Any,
    ) -> AsyncVirtualLM:
        """Start an engine, and wait until it is ready (in an event loop: `asyncio.to_thread`).

        Args:
            model_name: a path, or a name on the Hugging Face hub.
            engine_opts: arguments of `tllm.AsyncLLM.create`: vLLM's, `consumers`, `hook_points`.
            cache_size, cache_opts, batch_size, timeout, **options: as above.
        """
        taken = "transport", "shared_mib", "idle_seconds"
        if unknown := sorted(options.keys() - set(taken)):
            raise TypeError(
                f"unknown arguments {unknown}; give vLLM's in engine_opts={{...}}. from_name takes "
                f"engine_opts, cache_size, cache_opts, batch_size, timeout, {', '.join(taken)}"
            )
        chosen = _Options(cache_size, cache_opts, batch_size, timeout, **options)
        arguments = {
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            **(engine_opts or {}),
        }
        arguments["consumers"] = [*(arguments.get("consumers") or ()), NextTokenConsumer()]
        loop = EngineLoop()
        engine: AsyncLLM | None = None
        try:
            engine = loop.run(AsyncLLM.create(model_name, **arguments))
            # All that was imported and made is here to stay. The garbage collector looks through
            # it soon, for as long as fifty steps of lanes take; rather now than in one of them.
            if gc.isenabled():
                gc.collect()
            return cls(engine, loop, chosen)
        except BaseException:
            loop.end(partial(_end, engine))
            raise

    @classmethod
    async def from_engine(cls, engine: AsyncLLM, **options: Any) -> AsyncVirtualLM:
        """Ask an engine that exists, and that goes on to serve others. `cleanup` leaves it running.

        Awaited on the event loop that the engine was started on, where queries then cross no
        thread; other threads and loops may ask, too, as long as that loop runs.

        Args:
            engine: any `tllm.AsyncLLM`; with prefix caching, or lanes share nothing.
            **options: as above.

        Raises:
            TypeError: for what is no `tllm.AsyncLLM`.
            ValueError: on another event loop, or when another `AsyncVirtualLM` asks this engine.
        """
        if not isinstance(engine, AsyncLLM):
            raise TypeError(
                f"from_engine() was given {type(engine).__module__}.{type(engine).__name__}; give "
                "a tllm.AsyncLLM, or let from_name() start one"
            )
        loop = asyncio.get_running_loop()
        if loop_of(engine) not in (None, loop):
            raise ValueError(
                "the engine was started on another event loop; await from_engine() on that one"
            )
        chosen = _Options(**options)
        registered = CONSUMER not in engine.consumers
        if registered:
            await engine.register_consumer(NextTokenConsumer())
        try:
            return cls(engine, EngineLoop(loop), chosen, owned=False, registered=registered)
        except BaseException:
            if registered:
                await engine.unregister_consumer(CONSUMER)
            raise

    @property
    def underlying_model(self) -> Any:
        """There is none in this process; always an `AttributeError` that says what to do."""
        raise AttributeError(
            "underlying_model: the model lives in the engine's processes. query(..., capture=...) "
            "brings its activations, a consumer runs beside it, and load_model_by_name(name, "
            "backend='hf') has it here"
        )

    # -- next-token log-probabilities ------------------------------------------------------------

    def next_token_logprobs(
        self, token_ids: Sequence[int], **options: Unpack[QueryOptions]
    ) -> Coroutine[Any, Any, torch.Tensor | TopLogprobs]:
        """Log-probabilities of the token after a prompt.

        The adapter that is set now applies, whenever the result is awaited.

        Args:
            token_ids: the prompt, at least one token.
            **options: `QueryOptions`: `top_k`, `only`, `lora_name`, steering, `consumers`,
                `capture`.

        Returns:
            float32 `[vocab]`, normalised; `[len(only)]`, or `TopLogprobs`, when that was asked.

        Raises:
            ValueError: for an empty or too long prompt, or tokens the model does not have.
        """
        return self._result(self._query(token_ids, options))

    async def _result(self, query: Query) -> torch.Tensor | TopLogprobs:
        return (await self._answer(query)).result

    def next_token_logprobs_sync(
        self, token_ids: Sequence[int], **options: Unpack[QueryOptions]
    ) -> torch.Tensor | TopLogprobs:
        """`next_token_logprobs` for callers without an event loop."""
        return self._loop.run(self._result(self._query(token_ids, options)))

    def query(
        self, token_ids: Sequence[int], **options: Unpack[QueryOptions]
    ) -> Coroutine[Any, Any, Answer]:
        """`next_token_logprobs` with all that comes back: `values`, `token_ids`, and vLLM's
        `output` with consumers' results and captured rows when `consumers=` or `capture=` was
        given."""
        return self._answer(self._query(token_ids, options))

    def batch_next_token_logprobs(
        self, token_ids_list: Sequence[Sequence[int]], **options: Unpack[QueryOptions]
    ) -> Coroutine[Any, Any, torch.Tensor | TopLogprobs]:
        """Log-probabilities `[batch, vocab]`, or `[batch, k]`, of the tokens after some prompts.

        Arguments as those of `next_token_logprobs`; no prompts are a `ValueError`.
        """
        return self._results(self._queries(token_ids_list, options))

    async def _results(self, queries: Sequence[Query]) -> torch.Tensor | TopLogprobs:
        return stacked(await self._ask(queries))

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Sequence[Sequence[int]], **options: Unpack[QueryOptions]
    ) -> torch.Tensor | TopLogprobs:
        """`batch_next_token_logprobs` for callers without an event loop."""
        return self._loop.run(self._results(self._queries(token_ids_list, options)))

    async def batch_next(
        self,
        lanes: Sequence[Lane],
        *,
        top_k: int | None = None,
        only: Sequence[int] | None = None,
    ) -> torch.Tensor | TopLogprobs:
        """`Lane.next` of some lanes in one call, which costs less than gathering one of each.

        Args:
            lanes: of this model, one at least; one that is closed is a `RuntimeError`.
            top_k, only: as those of `next_token_logprobs`.

        Returns:
            float32 `[lanes, vocab]`, `[lanes, len(only)]`, or `TopLogprobs` of `[lanes, k]`, in the
            order given. When the step of one lane fails, its error is raised after all have ended.
        """
        return stacked(await Lane.ask_all(self._mailbox, lanes, top_k, only))

    def batch_next_sync(
        self,
        lanes: Sequence[Lane],
        *,
        top_k: int | None = None,
        only: Sequence[int] | None = None,
    ) -> torch.Tensor | TopLogprobs:
        """`batch_next` for callers without an event loop."""
        return self._loop.run(self.batch_next(lanes, top_k=top_k, only=only))

    def open(self, prompt: Sequence[int], **options: Unpack[LaneOptions]) -> Lane:
        """A lane that begins with a prompt. Nothing is computed before its `next`.

        Args:
            prompt: token ids, at least one.
            **options: `LaneOptions`, for all of the lane's steps.
        """
        _refuse_forms(options, "give it to next() of the lane")
        query = self._told_apart(self._query(prompt, options))
        return Lane(self._loop, self._mailbox, self._service, query)

    # -- completions -----------------------------------------------------------------------------

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        eos_token_ids: Sequence[int] | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        **options: Unpack[LaneOptions],
    ) -> list[int]:
        """Tokens of a completion.

        Args:
            prompt_token_ids: at least one.
            max_tokens: the most tokens; 1 or more.
            eos_token_ids: tokens that end it, and are not part of it. Nothing else ends it. By
                default those with which the model itself ends.
            temperature: 0 for the most probable tokens.
            seed: for the same tokens again; not -1.
            **options: `LaneOptions`.
        """
        max_tokens = whole_number(max_tokens, "max_tokens=", 1)
        if "memory" in (options.get("capture") or ()):
            raise ValueError(
                "capture['memory'] was given, but sample() gives tokens alone; generate with "
                "lm.engine.generate(), or query() the tokens afterwards"
            )
        _refuse_forms(options, "completions are drawn from the whole vocabulary; leave it out")
        query = self._query(prompt_token_ids, options, generates=True)
        fields: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": scalar(temperature, "temperature"),
            "seed": None if seed is None else _seed(seed),
        }
        if eos_token_ids is not None:
            given = list(eos_token_ids) if isinstance(eos_token_ids, Set) else eos_token_ids
            ends = checked_tokens(given, self.vocab_size, "eos_token_ids")
            fields |= {"stop_token_ids": list(ends), "ignore_eos": True}
        return await self._loop.wait_for(self._service.sample(query, fields))

    # -- adapters --------------------------------------------------------------------------------

    def add_new_lora(self, lora_path: str | os.PathLike[str], lora_name: str = "lora_1") -> None:
        """Load an adapter and name it. It is used by `set_lora`, or by `lora_name=` of a call.

        Another path under a known name replaces that adapter, and so does the same path whose files
        were written since. Lanes that are open go on with the one that they were opened with.

        Raises:
            ValueError: when the engine was started without `enable_lora`, or has no room.
        """
        self._adapters.add(os.fspath(lora_path), lora_name)

    def set_lora(
        self, lora_path: str | os.PathLike[str] | None = None, lora_name: str = "lora_1"
    ) -> None:
        """Use an adapter in calls from now on.

        Args:
            lora_path: None, or the path it was added with.
        """
        known = self._adapters.path(lora_name)
        path = known if lora_path is None else os.fspath(lora_path)
        if path != known:
            raise ValueError(
                f"adapter {lora_name!r} was added from {known!r}, not {path!r}; "
                "call add_new_lora() with the other path first"
            )
        self._active = lora_name

    def clear_lora(self) -> None:
        """Use no adapter in calls from now on."""
        self._active = None

    def _adapter(self, lora_name: str | None) -> Adapter | None:
        name = self._active if lora_name is None else lora_name
        return None if name is None else self._adapters.named(name)

    # -- what is asked ---------------------------------------------------------------------------

    def _query(
        self, prompt: Sequence[int], options: Mapping[str, Any], *, generates: bool = False
    ) -> Query:
        tokens = checked_tokens(prompt, self.vocab_size, "the prompt")
        if not tokens:
            raise ValueError("the prompt is empty; give at least one token")
        self._service.check_length(tokens)
        asked = dict(options)
        form = Form.of(asked.pop("top_k", None), asked.pop("only", None), self.vocab_size)
        adapter = self._adapter(asked.pop("lora_name", None))
        return Query.of(tokens, form, adapter, Interventions.of(asked, generates=generates))

    def _queries(self, prompts: Sequence[Sequence[int]], options: Mapping[str, Any]) -> list[Query]:
        check_prompts(prompts)
        return [self._query(prompt, options) for prompt in prompts]

    def _told_apart(self, query: Query) -> Query:
        """A query whose key is another one when its conditions' autoencoders are others."""
        interventions = query.interventions
        if not interventions.autoencoders:
            return query
        registrations = self.engine.registrations_of(interventions.autoencoders)
        return replace(query, interventions=interventions.with_registrations(registrations))

    def _known(self, query: Query) -> tuple[Answer | None, Callable[[Answer], None]]:
        """The answer that is remembered, and what remembers one."""
        if self.cache is None or query.interventions.results or self._service.written(query):
            return None, _forget
        key = (self.engine.steering.version, *query.key)
        found = self._answers.get(key)
        return found, partial(self._remember, key, self._answers.epoch)

    def _remember(self, key: tuple[Any, ...], epoch: int, answer: Answer) -> None:
        if key[0] == self.engine.steering.version:
            self._answers.put(key, answer, epoch)

    async def _answer(self, query: Query) -> Answer:
        return (await self._ask([query]))[0]

    async def _ask(self, queries: Sequence[Query]) -> list[Answer]:
        self._loop.check_open()
        queries = [self._told_apart(query) for query in queries]
        known = [self._known(query) for query in queries]
        missing = [q for q, (answer, _) in zip(queries, known, strict=True) if answer is None]
        found = iter(await self._mailbox.ask(missing, [None] * len(missing)) if missing else ())
        answers = []
        for answer, remember in known:
            if answer is None:
                answer = next(found)
                remember(answer)
            answers.append(answer)
        return answers

    # -- the engine ------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the engine's, such as `lm.engine.intervention_stats()`, and wait."""
        return self._loop.run(work)

    def register_consumer(self, consumer: Consumer | str) -> Consumer:
        """Add a consumer to the engine; earlier answers are forgotten. One that writes to every
        request's rows does so in open lanes, too."""
        made = self.run(self.engine.register_consumer(consumer))
        self.clear_cache()
        return made

    def unregister_consumer(self, consumer: Consumer | str) -> None:
        """Remove a consumer from the engine; earlier answers are forgotten."""
        self.run(self.engine.unregister_consumer(consumer))
        self.clear_cache()

    def stats(self) -> dict[str, int]:
        """Counters of the client's side, see `Service.stats`; from any thread and loop."""
        return self._loop.call(self._service.stats)

    def clear_cache(self) -> None:
        """Forget earlier answers; needed when something else has changed what the model says, such
        as `apply_model`. Other weights by vLLM's own ways, and steering, are known of."""
        self._answers.clear()

    def reset_async_queries(self) -> None:
        """Cancel all queries that wait for an answer, and abort what they asked of the engine.

        For when an algorithm was ended by an exception. Lanes and completions go on.
        """
        self._mailbox.reset()

    def cleanup(self) -> None:
        """End the engine's process and free its memory; an engine that was given goes on without
        us. Results stay valid."""
        if not self._loop.closed:
            self._finalizer()
            self._mailbox.fail_all()


def _refuse_forms(options: Mapping[str, Any], instead: str) -> None:
    """Refuse what says how much of a distribution is wanted where nobody gets one."""
    for name in ("top_k", "only"):
        if options.get(name) is not None:
            raise ValueError(f"{name}= was given; {instead}")


def _seed(given: Any) -> int:
    """A seed that vLLM takes for one."""
    if (seed := whole_number(given, "seed=")) == -1:
        raise ValueError(
            "seed=-1 is vLLM's word for no seed; give another number for the same tokens again, or "
            "leave it out for others"
        )
    return seed


def _forget(answer: Answer) -> None:
    """Answers that may differ the next time are not remembered."""


async def _end(engine: AsyncLLM | None) -> None:
    if engine is not None:
        engine.shutdown()

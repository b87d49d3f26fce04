"""`AsyncVirtualLM`: next-token log-probabilities from a vLLM engine."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from tllm.consumers.base import Consumer
from tllm.consumers.next_token import NextTokenConsumer
from tllm.llm import AsyncLLM
from tllm.logprobs.base import AsyncLM
from tllm.logprobs.cache import OutputCache
from tllm.logprobs.collector import Collector
from tllm.logprobs.lane import Lane
from tllm.logprobs.loop_thread import LoopThread
from tllm.logprobs.question import (
    Answer,
    Form,
    Interventions,
    Question,
    TopLogprobs,
    checked_tokens,
)
from tllm.logprobs.rows import Transport
from tllm.logprobs.service import Particle, Service

T = TypeVar("T")


class AsyncVirtualLM(AsyncLM):
    """Next-token log-probabilities, and completions, from a vLLM engine in a process of its own.

    Concurrent queries are batched, and equal ones computed once. Methods may be called from any
    thread and any event loop, in any mixture; none blocks a loop but the `_sync` forms. Results are
    float32 CPU tensors that belong to the caller.

    Made by `from_name`. Arguments of `__init__` besides the engine and its loop:

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
    """

    def __init__(
        self,
        engine: AsyncLLM,
        thread: LoopThread,
        *,
        cache_size: int = 0,
        cache_opts: Mapping[str, Any] | None = None,
        batch_size: int = 20,
        timeout: float = 0.02,
        transport: Transport = "shared",
        shared_mib: int = 1024,
        idle_seconds: float = 5.0,
    ) -> None:
        if engine.vllm_config.parallel_config.data_parallel_size > 1:
            raise ValueError(
                "data_parallel_size is more than 1, and vLLM may send the steps of a lane to "
                "different engines; make one AsyncVirtualLM for each, with data_parallel_size=1"
            )
        self.engine = engine
        skipped = engine.model_config.skip_tokenizer_init
        self.tokenizer = None if skipped else engine.get_tokenizer()
        self.cache = OutputCache(cache_size, **(cache_opts or {})) if cache_size > 0 else None
        self._cache_lock = threading.Lock()
        self._epoch = 0
        self._thread = thread
        self._service = Service(engine, transport, shared_mib * 2**20, idle_seconds)
        self.vocab_size = self._service.vocab_size
        self._max_tokens = int(engine.model_config.max_model_len) - 1
        self._batch_size = batch_size
        self._timeout = timeout
        self._adapters: dict[str, LoRARequest] = {}
        self._active: str | None = None
        self._collectors: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, Collector[_Asking]
        ] = weakref.WeakKeyDictionary()
        self._waiting: set[_Asking] = set()
        self._outbox: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self._closed = False
        # Also when the last reference goes, or the interpreter ends.
        self._finalizer = weakref.finalize(self, _clean_up, thread, self._service)

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
        if cache_size < 0 or batch_size < 1 or timeout < 0:
            raise ValueError(
                f"cache_size={cache_size!r}, batch_size={batch_size!r}, timeout={timeout!r}; give "
                "0 or more, 1 or more, and 0 or more seconds"
            )
        arguments = {
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            **(engine_opts or {}),
        }
        arguments["consumers"] = [*arguments.get("consumers", ()), NextTokenConsumer()]
        thread = LoopThread("tllm-logprobs")
        try:
            engine = thread.run(AsyncLLM.create(model_name, **arguments))
            return cls(
                engine,
                thread,
                cache_size=cache_size,
                cache_opts=cache_opts,
                batch_size=batch_size,
                timeout=timeout,
                **options,
            )
        except BaseException:
            thread.stop()
            raise

    # -- next-token log-probabilities ------------------------------------------------------------

    def next_token_logprobs(
        self,
        prompt: Sequence[int],
        /,
        *,
        top_k: int | None = None,
        token_ids: Sequence[int] | None = None,
        lora_name: str | None = None,
        **params: Any,
    ) -> Coroutine[Any, Any, torch.Tensor | TopLogprobs]:
        """Log-probabilities of the token after a prompt.

        The adapter that is set now applies, whenever the result is awaited.

        Args:
            prompt: token ids, at least one.
            top_k: only the best k, as `TopLogprobs`; the vocabulary stays on the device.
            token_ids: only those of these tokens, `[len(token_ids)]`.
            lora_name: an adapter for this query, instead of the one that is set.
            **params: what `tllm.SamplingParams` takes beside vLLM's own: steering, `consumers=`.

        Returns:
            float32 `[vocab]`, normalised.

        Raises:
            ValueError: for an empty or too long prompt, or tokens the model does not have.
        """
        question = self._question(prompt, top_k, token_ids, lora_name, params)
        return self._answered(question)

    async def _answered(self, question: Question) -> torch.Tensor | TopLogprobs:
        return (await self._ask(question)).result

    def next_token_logprobs_sync(
        self,
        prompt: Sequence[int],
        /,
        *,
        top_k: int | None = None,
        token_ids: Sequence[int] | None = None,
        lora_name: str | None = None,
        **params: Any,
    ) -> torch.Tensor | TopLogprobs:
        """`next_token_logprobs` for callers without an event loop."""
        question = self._question(prompt, top_k, token_ids, lora_name, params)
        return self._ask_sync([(question, None)])[0].result

    def query(
        self,
        prompt: Sequence[int],
        /,
        *,
        top_k: int | None = None,
        token_ids: Sequence[int] | None = None,
        lora_name: str | None = None,
        **params: Any,
    ) -> Coroutine[Any, Any, Answer]:
        """`next_token_logprobs` with all that comes back: `values`, `token_ids`, and vLLM's
        `output` with consumers' results and captured rows when `consumers=` or `capture=` was
        given."""
        return self._ask(self._question(prompt, top_k, token_ids, lora_name, params))

    def batch_next_token_logprobs(
        self,
        prompts: Sequence[Sequence[int]],
        /,
        *,
        top_k: int | None = None,
        token_ids: Sequence[int] | None = None,
        lora_name: str | None = None,
        **params: Any,
    ) -> Coroutine[Any, Any, torch.Tensor | TopLogprobs]:
        """Log-probabilities `[batch, vocab]`, or `[batch, k]`, of the tokens after some prompts.

        Arguments as those of `next_token_logprobs`; no prompts are a `ValueError`.
        """
        questions = self._questions(prompts, top_k, token_ids, lora_name, params)
        return self._all_answered(questions)

    async def _all_answered(self, questions: list[Question]) -> torch.Tensor | TopLogprobs:
        return _stacked(await asyncio.gather(*map(self._ask, questions)))

    def batch_next_token_logprobs_sync(
        self,
        prompts: Sequence[Sequence[int]],
        /,
        *,
        top_k: int | None = None,
        token_ids: Sequence[int] | None = None,
        lora_name: str | None = None,
        **params: Any,
    ) -> torch.Tensor | TopLogprobs:
        """`batch_next_token_logprobs` for callers without an event loop."""
        questions = self._questions(prompts, top_k, token_ids, lora_name, params)
        return _stacked(self._ask_sync([(question, None) for question in questions]))

    def open(
        self, prompt: Sequence[int], /, *, lora_name: str | None = None, **params: Any
    ) -> Lane:
        """A lane that begins with a prompt. Nothing is computed before its `next`.

        Args:
            prompt: token ids, at least one.
            lora_name, **params: as `next_token_logprobs` takes them, for all of the lane's steps.
        """
        question = self._question(prompt, None, None, lora_name, params)
        return Lane(self, list(question.tokens), question.lora, question.interventions)

    # -- completions -----------------------------------------------------------------------------

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        eos_token_ids: Sequence[int],
        temperature: float = 1.0,
        seed: int | None = None,
        *,
        lora_name: str | None = None,
        **params: Any,
    ) -> list[int]:
        """Tokens of a completion.

        Args:
            prompt_token_ids: at least one.
            max_tokens: the most tokens; 1 or more.
            eos_token_ids: tokens that end it, and are not part of it. Nothing else ends it.
            temperature: 0 for the most probable tokens.
            seed: for the same tokens again.
            lora_name, **params: as `next_token_logprobs` takes them.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens!r}; give 1 or more")
        question = self._question(prompt_token_ids, None, None, lora_name, params, generates=True)
        ends = checked_tokens(list(eos_token_ids), self.vocab_size, "eos_token_ids")
        fields = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "stop_token_ids": list(ends),
        }
        tokens = await self._on_engine(self._service.sample(question, fields))
        return tokens[:-1] if tokens and tokens[-1] in ends else tokens

    # -- adapters --------------------------------------------------------------------------------

    def add_new_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Load an adapter and name it. It is used by `set_lora`, or by `lora_name=` of a call.

        Another path under a known name replaces that adapter.

        Raises:
            ValueError: when the engine was started without `enable_lora`, or has no room.
        """
        config = self.engine.vllm_config.lora_config
        if config is None:
            raise ValueError(
                "the engine has no adapters; start it with engine_opts={'enable_lora': True, "
                "'max_lora_rank': ...}"
            )
        known = self._adapters.get(lora_name)
        if known is not None and known.lora_path == lora_path:
            return
        number = 1 + max((a.lora_int_id for a in self._adapters.values()), default=0)
        # vLLM's CPU kernels give requests without an adapter the last place's weights, which are
        # zero as long as no adapter is there.
        if current_platform.is_cpu() and number > config.max_loras - 1:
            raise ValueError(
                f"max_loras={config.max_loras} adapters at once leaves no room for {lora_name!r}: "
                "on a CPU one place must stay empty, or vLLM would apply an adapter to requests "
                f"without one. Start the engine with max_loras={number + 1} or more"
            )
        request = LoRARequest(lora_name, number, lora_path)
        self.run(self._service.load_adapter(request))
        self._adapters[lora_name] = request

    def set_lora(self, lora_path: str | None = None, lora_name: str = "lora_1") -> None:
        """Use an adapter in calls from now on.

        Args:
            lora_path: None, or the path it was added with.
        """
        adapter = self._adapter(lora_name)
        if adapter is not None and lora_path not in (None, adapter.lora_path):
            raise ValueError(
                f"adapter {lora_name!r} was added from {adapter.lora_path!r}, not {lora_path!r}; "
                "call add_new_lora() with the other path first"
            )
        self._active = lora_name

    def clear_lora(self) -> None:
        """Use no adapter in calls from now on."""
        self._active = None

    def _adapter(self, lora_name: str | None) -> LoRARequest | None:
        name = self._active if lora_name is None else lora_name
        if name is None:
            return None
        if name not in self._adapters:
            raise ValueError(
                f"no adapter {name!r} was added; add_new_lora(path, {name!r}) does. Added are "
                f"{', '.join(self._adapters) or 'none'}"
            )
        return self._adapters[name]

    # -- what is asked ---------------------------------------------------------------------------

    def _question(
        self,
        prompt: Sequence[int],
        top_k: int | None,
        token_ids: Sequence[int] | None,
        lora_name: str | None,
        params: Mapping[str, Any],
        *,
        generates: bool = False,
    ) -> Question:
        tokens = checked_tokens(prompt, self.vocab_size, "the prompt")
        if not tokens:
            raise ValueError("the prompt is empty; give at least one token")
        self._check_length(tokens)
        form = Form.of(top_k, token_ids, self.vocab_size)
        interventions = Interventions.of(params, generates=generates)
        return Question(tokens, form, self._adapter(lora_name), interventions)

    def _questions(
        self,
        prompts: Sequence[Sequence[int]],
        top_k: int | None,
        token_ids: Sequence[int] | None,
        lora_name: str | None,
        params: Mapping[str, Any],
    ) -> list[Question]:
        if not len(prompts):
            raise ValueError("no prompts were given; give at least one")
        return [self._question(prompt, top_k, token_ids, lora_name, params) for prompt in prompts]

    def _check_length(self, tokens: Sequence[int]) -> None:
        if len(tokens) > self._max_tokens:
            raise ValueError(
                f"{len(tokens)} tokens leave no room for the next one; this engine takes up to "
                f"{self._max_tokens} (max_model_len={self._max_tokens + 1})"
            )

    def _cacheable(self, question: Question) -> bool:
        if self.cache is None or question.interventions.results:
            return False
        return not self._service.written(question)

    def _remembered(self, question: Question) -> Answer | None:
        if self.cache is None or not self._cacheable(question):
            return None
        key = (self.engine.steering.version, *question.key)
        with self._cache_lock:
            if key not in self.cache:
                return None
            found = self.cache[key]
        if question.form.top_k is None:
            return Answer(found)
        return Answer(found[0].clone(), found[1].view(torch.int32).clone())

    def _remember(self, question: Question, answer: Answer, epoch: tuple[int, int]) -> None:
        if self.cache is None or not self._cacheable(question):
            return
        values = answer.values
        if answer.token_ids is not None:  # side by side, as one tensor
            values = torch.stack([values, answer.token_ids.view(torch.float32)])
        with self._cache_lock:
            if epoch == self._now():
                self.cache[(epoch[1], *question.key)] = values

    def _now(self) -> tuple[int, int]:
        """Answers to what was asked before this changed are not remembered."""
        return self._epoch, self.engine.steering.version

    async def _ask(self, question: Question, particle: Particle | None = None) -> Answer:
        self._check_open()
        if particle is None and (known := self._remembered(question)) is not None:
            return known
        epoch = self._now()
        loop = asyncio.get_running_loop()
        asking = _Asking(self, question, particle, loop)
        self._waiting.add(asking)
        self._collector(loop).add(asking)
        try:
            answer = await asking.future
        except asyncio.CancelledError:
            if not self._closed:
                self._post(self._service.cancel, [asking])
            raise
        finally:
            self._waiting.discard(asking)
        if particle is None:
            self._remember(question, answer, epoch)
        return answer

    def _ask_sync(self, questions: Sequence[tuple[Question, Particle | None]]) -> list[Answer]:
        self._check_open()
        epoch = self._now()
        known = [
            self._remembered(question) if particle is None else None
            for question, particle in questions
        ]
        missing = [pair for pair, answer in zip(questions, known, strict=True) if answer is None]
        found = iter(self.run(self._asked_there(missing)) if missing else ())
        answers = []
        for (question, particle), answer in zip(questions, known, strict=True):
            if answer is None:
                answer = next(found)
                if particle is None:
                    self._remember(question, answer, epoch)
            answers.append(answer)
        return answers

    async def _asked_there(
        self, questions: Sequence[tuple[Question, Particle | None]]
    ) -> list[Answer]:
        """Ask on the engine's loop."""
        loop = asyncio.get_running_loop()
        asking = [_Asking(self, question, particle, loop) for question, particle in questions]
        self._waiting.update(asking)
        self._service.serve([(each.question, each.particle, each) for each in asking])
        try:
            return await asyncio.gather(*(each.future for each in asking))
        finally:
            self._waiting.difference_update(asking)

    def _collector(self, loop: asyncio.AbstractEventLoop) -> Collector[_Asking]:
        collector = self._collectors.get(loop)
        if collector is None:
            collector = Collector(loop, self._hand_over, self._batch_size, self._timeout)
            self._collectors[loop] = collector
        return collector

    def _hand_over(self, batch: list[_Asking]) -> None:
        self._post(self._service.serve, [(each.question, each.particle, each) for each in batch])

    def _deliver(self, loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
        """Run something on a caller's loop, together with all that is ready now."""
        box = self._outbox.setdefault(loop, [])
        box.append(work)
        if len(box) == 1:
            self._thread.loop.call_soon(self._send, loop)

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        box = self._outbox.pop(loop)
        if loop is self._thread.loop:
            _run_all(box)
        elif not loop.is_closed():
            loop.call_soon_threadsafe(_run_all, box)

    # -- lanes -----------------------------------------------------------------------------------

    def _fork(self, parent: Particle, child: Particle) -> None:
        self._post(self._service.fork, parent, child)

    async def _close(self, particle: Particle) -> list[Any]:
        if self._closed:
            return []
        return await self._on_engine(self._service.close(particle))

    def _close_sync(self, particle: Particle) -> list[Any]:
        return [] if self._closed else self.run(self._service.close(particle))

    def _abandon(self, particle: Particle) -> None:
        if not self._closed and self._thread.running:
            self._post(self._service.abandon, particle)

    # -- the engine ------------------------------------------------------------------------------

    def _post(self, function: Callable[..., Any], *args: Any) -> None:
        self._check_open()
        self._thread.post(function, *args)

    async def _on_engine(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something on the engine's loop from any other."""
        if self._closed:
            work.close()
            self._check_open()
        future = asyncio.run_coroutine_threadsafe(work, self._thread.loop)
        return await asyncio.wrap_future(future)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the engine's, such as `lm.engine.intervention_stats()`, and wait."""
        if self._closed:
            work.close()
            self._check_open()
        return self._thread.run(work)

    def register_consumer(self, consumer: Consumer | str) -> Consumer:
        """Add a consumer to the engine; earlier answers are forgotten."""
        made = self.run(self.engine.register_consumer(consumer))
        self.clear_cache()
        return made

    def unregister_consumer(self, consumer: Consumer | str) -> None:
        """Remove a consumer from the engine; earlier answers are forgotten."""
        self.run(self.engine.unregister_consumer(consumer))
        self.clear_cache()

    def stats(self) -> dict[str, int]:
        """Counters of the client's side, see `Service.stats`."""

        async def read() -> dict[str, int]:
            return self._service.stats()

        return self.run(read())

    def clear_cache(self) -> None:
        """Forget earlier answers; needed when something else has changed what the model says."""
        with self._cache_lock:
            self._epoch += 1
            if self.cache is not None:
                self.cache.clear()

    def reset_async_queries(self) -> None:
        """Cancel all queries that wait for an answer, and abort what they asked of the engine.

        For when an algorithm was ended by an exception. Lanes and completions go on.
        """
        for collector in list(self._collectors.values()):
            collector.drop()
        waiting = [each for each in self._waiting if each.particle is None]
        for each in waiting:
            each.cancel()
        self._post(self._service.cancel, waiting)

    def cleanup(self) -> None:
        """End the engine's process and free its memory. Results stay valid."""
        if self._closed:
            return
        self._closed = True
        self._finalizer()
        for each in list(self._waiting):
            each.resolve_now(RuntimeError(_AFTER_CLEANUP))

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(_AFTER_CLEANUP)


_AFTER_CLEANUP = "cleanup() was called: this model has no engine any more; make another"


class _Asking:
    """A question, and the loop on which its answer is awaited."""

    def __init__(
        self,
        model: AsyncVirtualLM,
        question: Question,
        particle: Particle | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.question = question
        self.particle = particle
        self.future: asyncio.Future[Answer] = loop.create_future()
        self._model = model
        self._loop = loop

    def resolve(self, outcome: Answer | Exception) -> None:
        """On the engine's loop: send the answer to where it is awaited."""
        self._model._deliver(self._loop, lambda: self._set(outcome))

    def resolve_now(self, outcome: Exception) -> None:
        """On any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set, outcome)

    def cancel(self) -> None:
        """On any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.future.cancel)

    def _set(self, outcome: Answer | Exception) -> None:
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


def _run_all(works: Iterable[Callable[[], None]]) -> None:
    for work in works:
        work()


def _stacked(answers: Sequence[Answer]) -> torch.Tensor | TopLogprobs:
    values = torch.stack([answer.values for answer in answers])
    if answers[0].token_ids is None:
        return values
    ids = [cast(torch.Tensor, answer.token_ids) for answer in answers]
    return TopLogprobs(values, torch.stack(ids))


def _clean_up(thread: LoopThread, service: Service) -> None:
    if not thread.running:
        return
    if thread.inside:  # where the last reference was dropped; this waits for that thread
        threading.Thread(target=_clean_up, args=(thread, service)).start()
        return

    thread.run(service.shut_down())
    thread.stop()

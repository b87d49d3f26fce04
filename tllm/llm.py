"""`LLM`, `AsyncLLM` and `make_llm`: vLLM's classes, with interventions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import vllm
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM as VllmAsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError

from tllm.client import (
    Client,
    Prepared,
    RefusedError,
    collect,
    decode_answers,
    encode_call,
    engine_arguments,
    tokens_of,
)
from tllm.consumers.base import Consumer
from tllm.engine.calls import ask_workers, call_all_workers
from tllm.outputs import attach_results
from tllm.registry import Registry, consumer_from_spec
from tllm.spec.steering import Group, RequestSteering
from tllm.steering_control import AsyncSteeringControl, SteeringControl
from tllm.steering_state import Facts

logger = logging.getLogger(__name__)

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


def make_llm(model_name: str, **kwargs: Any) -> LLM:
    """An `LLM` for a model, with the consumers registered so far.

    Args:
        model_name: a path or a name on the Hugging Face hub.
        **kwargs: as `LLM` takes them.
    """
    return LLM(model=model_name, **kwargs)


class LLM(vllm.LLM):
    """`vllm.LLM`, with interventions.

    Args:
        model: as in vLLM.
        consumers: instances or spec strings, beside those of `register_consumer`.
        capture_consumers: the same; their results are also in `output.capture_results`.
        result_timeout_s: how long `generate` waits for results that consumers are still working on
            (writing to disk, for example); after that they are `pending`.
        hook_points: the hook points to install in every layer (default: `pre_attn`,
            `post_block`, `lm_head_in`, and what the consumers need), or `"all"`.
        capture_mib, max_capture_mib, overflow: size of the capture ring, and what happens when
            consumers are slower than the model (`"block"` or `"drop"`).
        max_steering_configs, max_steering_mib: how many distinct ways of steering run at once (the
            rest waits; 0 turns steering off), and the device memory for their vectors.
        fuse_norms: whether a tap and the norm after it are one kernel (default: yes, where vLLM
            compiles the model for a GPU and it is not quantized). With False a tap costs a launch
            of its own, and what is not intervened in is computed by vLLM's own kernels alone.
        **kwargs: any other argument of `vllm.LLM`.

    Attributes:
        steering: global steering and named modules (`SteeringControl`).
    """

    def __init__(
        self,
        model: str,
        *,
        consumers: Iterable[Consumer | str] = (),
        capture_consumers: Iterable[Consumer | str] = (),
        result_timeout_s: float = 600.0,
        hook_points: Iterable[str] | str | None = None,
        capture_mib: int | None = None,
        max_capture_mib: int | None = None,
        overflow: str | None = None,
        max_steering_configs: int | None = None,
        max_steering_mib: int | None = None,
        fuse_norms: bool | None = None,
        **kwargs: Any,
    ) -> None:
        capturing = list(map(_made, capture_consumers))
        chosen = [*_registry.all(), *map(_made, consumers), *capturing]
        options = _options(
            hook_points=hook_points,
            capture_mib=capture_mib,
            max_capture_mib=max_capture_mib,
            overflow=overflow,
            max_steering_configs=max_steering_configs,
            max_steering_mib=max_steering_mib,
            fuse_norms=fuse_norms,
        )
        self._tllm = Client()
        self.steering = SteeringControl(
            self._tllm.steering, self._ready_to_steer, lambda: self._send_steering(None)
        )
        self._tllm.capture_consumers = {consumer.consumer_id for consumer in capturing}
        self._result_timeout_s = result_timeout_s
        self._prepared: dict[str, Prepared] = {}
        #: Prompts without results that are over. The workers hear of them with the engine's next
        #: step, or before they are asked anything else.
        self._over: list[str] = []
        super().__init__(model, **engine_arguments(kwargs, options, chosen))
        self._add_request_of_engine = self.llm_engine.add_request
        self.llm_engine.add_request = self._add_request_with_spec
        _check_positions_of(self.llm_engine)
        for consumer in chosen:
            self.register_consumer(consumer)

    # -- consumers -----------------------------------------------------------------------------

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self._ask(method, *args)()

    def _ask(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Call the workers, and return a function that waits for their answers."""
        return self._ask_encoded(method, encode_call(*args))

    def _ask_encoded(self, method: str, payload: bytes) -> Callable[[], list[Any]]:
        if self._over:
            over, self._over = self._over, []
            self._call("take_results", over)
        answers = ask_workers(self, "tllm", (method, payload, self._tllm.shared.token))
        return lambda: decode_answers(answers())

    def register_consumer(self, consumer: Consumer | str) -> Consumer:
        """Add a consumer now; it sees rows from the next forward pass on."""
        made = _made(consumer)
        self._ask_encoded("register", self._tllm.admit(made))()
        self._tllm.consumers[made.consumer_id] = made
        # The user's object stands for its copies in the workers from now on.
        vars(made)["synchronize"] = self.synchronize
        vars(made)["read_stats"] = partial(self._read_stats, made)
        return made

    def unregister_consumer(self, consumer: Consumer | str) -> None:
        """Remove a consumer, given by instance or id, after its pending rows were handed out."""
        name = consumer if isinstance(consumer, str) else consumer.consumer_id
        self._call("unregister", name)
        _release(self._tllm.consumers.pop(name))

    def clear_consumers(self) -> None:
        """Remove all consumers of this engine."""
        self._call("unregister", None)
        for consumer in self._tllm.consumers.values():
            _release(consumer)
        self._tllm.consumers.clear()

    def synchronize(self) -> None:
        """Wait until every consumer is done with what it was given."""
        self._call("synchronize")

    def _read_stats(self, consumer: Consumer) -> Mapping[str, Any]:
        return consumer.merge_stats(self._call("consumer_stats", consumer.consumer_id))

    def call_consumer(self, consumer: Consumer | str, method: str, *args: Any) -> list[Any]:
        """Call one of a consumer's `remote_methods` in every worker; their answers by rank."""
        name = consumer if isinstance(consumer, str) else consumer.consumer_id
        return self._call("call_consumer", name, method, *args)

    def intervention_stats(self) -> list[dict[str, Any]]:
        """Counters of each worker: hook points, rows captured and dropped, consumers, how many
        sequences were to be steered and could not be."""
        return self._call("stats")

    # -- steering ------------------------------------------------------------------------------

    def _ready_to_steer(self) -> None:
        if self._tllm.steering.facts is None:
            self._tllm.steering.facts = Facts(**self._call("steering_facts")[0])

    def _send_steering(self, asked: RequestSteering | None) -> tuple[Group, ...]:
        """What is done to a request, after the workers have it."""
        state = self._tllm.steering
        if not state.concerns(asked):
            return ()
        self._ready_to_steer()
        groups = state.groups(asked)
        upload = state.upload(groups)
        if upload is not None:
            try:
                self._call("update_steering", *upload.call)
            except BaseException:
                state.undo(upload)
                raise
        return groups

    # -- requests ------------------------------------------------------------------------------

    def _add_request_with_spec(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> str:
        if isinstance(params, SamplingParams):
            for consumer in self._tllm.built_in(params):
                self.register_consumer(consumer)
            if self._tllm.consumers and not self._tllm.knows_model:
                self._tllm.learn_model(self._call("stats"))
            groups = self._send_steering(Client.asked_steering(params))
            prepared = self._tllm.prepare(params, request_id, groups)
            self._prepared[request_id] = prepared
            params = prepared.params
        return self._add_request_of_engine(request_id, prompt, params, *args, **kwargs)

    def _run_engine(self, *args: Any, **kwargs: Any) -> list[Any]:
        self._over = []
        try:
            outputs = super()._run_engine(*args, **kwargs)
            finished = [o for o in outputs if isinstance(o, RequestOutput)]
            for output in finished:
                prepared = self._prepared[output.request_id]
                prepared.samples.add(output)
                output.tllm_request = prepared  # type: ignore[attr-defined]
            self._attach(finished, self._result_timeout_s)
        finally:
            for prepared in self._prepared.values():
                self._tllm.steering.release(prepared.prompt_id)
            self._prepared.clear()
        return outputs

    def wait_for_results(self, outputs: Iterable[Any], timeout_s: float | None = None) -> None:
        """Ask again for results that were `pending`, and put them on the outputs.

        Args:
            timeout_s: how long to wait for them; without limit by default.
        """
        self._attach([output for output in outputs if _pending(output)], timeout_s)

    def _attach(self, outputs: list[Any], timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        # Steering has no result, but a worker that could not steer says so. Hardly ever: what is
        # said of the others is put on them meanwhile.
        steered = [o.tllm_request.prompt_id for o in outputs if o.tllm_request.steered]
        told = self._ask("not_steered", steered) if steered else list
        late, over = [], []
        for output in outputs:
            request = output.tllm_request
            # Of what is pending, a consumer that has left may still owe something.
            if request.results.pending or self._tllm.has_results(request):
                late.append(output)
            else:
                self._put_on(output)
                over.append(output)
        failed = set().union(*told())
        for output in over:
            prompt_id = output.tllm_request.prompt_id
            if prompt_id in failed:
                late.append(output)
            else:
                self._over.append(prompt_id)
        prepared = {output.tllm_request.prompt_id: output.tllm_request for output in late}
        tokens = {o.tllm_request.prompt_id: tokens_of(o, o.tllm_request) for o in late}
        pending, wait_s = list(prepared), 1.0 if timeout_s is None else min(1.0, timeout_s)
        while pending:
            answers = self._call("take_results", pending, tokens, wait_s)
            pending = collect(prepared, answers)
            wait_s = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
            if wait_s <= 0:
                break
        for output in late:
            self._put_on(output)

    def _put_on(self, output: Any) -> None:
        """Put what is known of a request's results on its output."""
        request = output.tllm_request
        results, lengths = request.results.joined(), request.samples.lengths
        attach_results(output, results, request.captures, lengths)
        self._tllm.hand_over(output, request)


class AsyncLLM(VllmAsyncLLM):
    """vLLM's async engine, with interventions. Made by `from_engine_args` or `create`."""

    _tllm: Client

    @classmethod
    async def create(
        cls,
        model: str,
        *,
        consumers: Iterable[Consumer | str] = (),
        capture_consumers: Iterable[Consumer | str] = (),
        result_timeout_s: float = 600.0,
        hook_points: Iterable[str] | str | None = None,
        capture_mib: int | None = None,
        max_capture_mib: int | None = None,
        overflow: str | None = None,
        max_steering_configs: int | None = None,
        max_steering_mib: int | None = None,
        fuse_norms: bool | None = None,
        **kwargs: Any,
    ) -> AsyncLLM:
        """An engine for a model; arguments as `LLM` takes them."""
        from vllm.engine.arg_utils import AsyncEngineArgs

        capturing = list(map(_made, capture_consumers))
        chosen = [*_registry.all(), *map(_made, consumers), *capturing]
        options = _options(
            hook_points=hook_points,
            capture_mib=capture_mib,
            max_capture_mib=max_capture_mib,
            overflow=overflow,
            max_steering_configs=max_steering_configs,
            max_steering_mib=max_steering_mib,
            fuse_norms=fuse_norms,
        )
        arguments = engine_arguments(kwargs, options, chosen)
        engine = cls.from_engine_args(AsyncEngineArgs(model=model, **arguments))
        engine._tllm.capture_consumers = {consumer.consumer_id for consumer in capturing}
        engine._result_timeout_s = result_timeout_s
        for consumer in chosen:
            await engine.register_consumer(consumer)
        return engine

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._tllm = Client()
        self._result_timeout_s = 600.0
        self._registering = asyncio.Lock()
        self._sending_steering = asyncio.Lock()
        self._discarding: set[asyncio.Future[None]] = set()
        self.steering = AsyncSteeringControl(
            self._tllm.steering, self._ready_to_steer, lambda: self._send_steering(None)
        )
        super().__init__(*args, **kwargs)
        _check_positions_of(self)

    async def _ready_to_steer(self) -> None:
        if self._tllm.steering.facts is None:
            self._tllm.steering.facts = Facts(**(await self._call("steering_facts"))[0])

    async def _send_steering(self, asked: RequestSteering | None) -> tuple[Group, ...]:
        """What is done to a request, after the workers have it.

        Whoever waits for this must hold what it returns before waiting for anything else.
        """
        state = self._tllm.steering
        if not state.concerns(asked):
            return ()
        await self._ready_to_steer()
        # One at a time: what is on its way is not there yet, and must not be forgotten again.
        async with self._sending_steering:
            groups = state.groups(asked)
            upload = state.upload(groups)
            if upload is not None:
                try:
                    await self._call("update_steering", *upload.call)
                except BaseException:
                    state.undo(upload)
                    raise
        return groups

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return await self._call_encoded(method, encode_call(*args), self._tllm.shared.token)

    async def _call_encoded(self, *arguments: Any) -> list[Any]:
        answers = asyncio.ensure_future(call_all_workers(self, "tllm", arguments))
        try:
            # vLLM lets these calls wait for ever when the engine's process dies.
            while not (await asyncio.wait({answers}, timeout=1.0))[0]:
                if self.errored:
                    raise self.dead_error
            try:
                encoded = answers.result()
            except Exception as error:
                # Workers answer, whatever happens: the engine is going down, or this is a fault
                # of the call's own, and vLLM says which some moments later.
                if await self._goes_down():
                    raise self.dead_error from error
                raise
            return decode_answers(encoded)
        finally:
            answers.cancel()

    async def _goes_down(self, within_s: float = 5.0) -> bool:
        """Whether the engine is dead, or is found to be within some seconds."""
        deadline = time.monotonic() + within_s
        while not self.errored and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return self.errored

    async def register_consumer(self, consumer: Consumer | str) -> Consumer:
        """Add a consumer now. Use `await engine.read_stats(consumer)` for its statistics."""
        made = _made(consumer)
        payload = self._tllm.admit(made)
        await self._call_encoded("register", payload)
        self._tllm.consumers[made.consumer_id] = made
        return made

    async def unregister_consumer(self, consumer: Consumer | str) -> None:
        """Remove a consumer, given by instance or id."""
        name = consumer if isinstance(consumer, str) else consumer.consumer_id
        await self._call("unregister", name)
        del self._tllm.consumers[name]

    async def read_stats(self, consumer: Consumer) -> Mapping[str, Any]:
        """A consumer's statistics, over all workers of all data-parallel replicas."""
        found = await self._call("consumer_stats", consumer.consumer_id)
        workers = self.vllm_config.parallel_config.world_size
        replicas = [
            consumer.merge_stats(found[first : first + workers])
            for first in range(0, len(found), workers)
        ]
        return replicas[0] if len(replicas) == 1 else consumer.merge_replicas(replicas)

    async def synchronize(self) -> None:
        """Wait until every consumer is done with what it was given."""
        await self._call("synchronize")

    async def call_consumer(self, consumer: Consumer | str, method: str, *args: Any) -> list[Any]:
        """Call one of a consumer's `remote_methods` in every worker; their answers by rank."""
        name = consumer if isinstance(consumer, str) else consumer.consumer_id
        return await self._call("call_consumer", name, method, *args)

    @property
    def consumers(self) -> Mapping[str, Consumer]:
        """The registered consumers, by id."""
        return self._tllm.consumers

    async def intervention_stats(self) -> list[dict[str, Any]]:
        """Counters of each worker, as `LLM` has them."""
        return await self._call("stats")

    def takes_plain(self) -> bool:
        """Whether `prepared_plain` has an answer: the model is known, and nothing is steered."""
        return self._tllm.knows_model and not self._tllm.steering.concerns(None)

    def prepared_plain(self, params: SamplingParams) -> SamplingParams:
        """Parameters as the engine takes them, of requests that nobody steers and whose results
        nobody will look at."""
        prepared = self._tllm.prepare(params, "", results=False)
        self._tllm.steering.release(prepared.prompt_id)
        return prepared.params

    async def generate(
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
        if self._tllm.built_in(sampling_params):
            await self._register_built_in(sampling_params)
        if self._tllm.consumers and not self._tllm.knows_model:
            self._tllm.learn_model(await self._call("stats"))
        groups = await self._send_steering(Client.asked_steering(sampling_params))
        streamed = isinstance(prompt, AsyncGenerator)
        prepared = self._tllm.prepare(
            sampling_params, request_id, groups, results=results, streamed=streamed
        )
        if streamed:
            prompt = self._prepared(prompt, sampling_params, request_id, prepared, groups, results)
        output: RequestOutput | None = None
        attached = not results
        try:
            async for output in super().generate(prompt, prepared.params, request_id, **kwargs):
                attach_results(output, None)
                if results:
                    prepared.samples.add(output)
                if output.finished and results:
                    await self._attach(output, prepared, self._result_timeout_s)
                    attached = True
                yield output
            if output is not None and not output.finished and results:
                await self._attach(output, prepared, self._result_timeout_s)
            attached = True
        except EngineGenerateError as error:
            # So vLLM calls what was raised while it took the request in.
            if isinstance(error.__cause__, RefusedError):
                raise error.__cause__ from None
            raise
        finally:
            self._tllm.steering.release(prepared.prompt_id)
            if not attached and self._tllm.has_results(prepared):
                # The caller gave up: nobody will come for the results.
                task = asyncio.ensure_future(self._discard(prepared.prompt_id))
                self._discarding.add(task)
                task.add_done_callback(self._discarding.discard)

    async def _prepared(
        self,
        stream: AsyncGenerator[Any, None],
        params: Any,
        request_id: str,
        prepared: Prepared,
        groups: tuple[Group, ...],
        results: bool,
    ) -> AsyncGenerator[Any, None]:
        """The inputs of a streamed prompt, with what each of them asks of consumers."""
        steering = Client.asked_steering(params)
        async for part in stream:
            if part.sampling_params is not None:
                if part.sampling_params.output_kind != params.output_kind:
                    raise RefusedError(
                        f"output_kind: an input of a streamed prompt asks for "
                        f"{part.sampling_params.output_kind.name}, and the request for "
                        f"{params.output_kind.name}; ask the same of every input"
                    )
                asked = Client.asked_steering(part.sampling_params)
                if asked is not None and asked is not steering:
                    raise ValueError(
                        "an input of a streamed prompt asks for steering of its own; steer the "
                        "whole request, or begin another"
                    )
                own = self._tllm.prepare(
                    part.sampling_params,
                    request_id,
                    groups,
                    prompt_id=prepared.prompt_id,
                    results=results,
                    streamed=True,
                )
                if own.capture_options != prepared.capture_options:
                    raise RefusedError(
                        "capture: an input of a streamed prompt asks otherwise than the request "
                        f"({own.capture_options} and {prepared.capture_options}); ask the same of "
                        "every input, or begin another request"
                    )
                part = replace(part, sampling_params=own.params)
            yield part

    async def _register_built_in(self, params: Any) -> None:
        async with self._registering:
            for consumer in self._tllm.built_in(params):
                await self.register_consumer(consumer)

    async def wait_for_results(self, output: Any, timeout_s: float = 600.0) -> None:
        """Ask again for results that were `pending`, and put them on the output."""
        if _pending(output):
            await self._attach(output, output.tllm_request, timeout_s)

    async def _attach(self, output: RequestOutput, prepared: Prepared, timeout_s: float) -> None:
        output.tllm_request = prepared  # type: ignore[attr-defined]
        if not self._tllm.has_results(prepared):  # plain requests cost the engine nothing
            return
        prepared.samples.gather(output)
        deadline, pause = time.monotonic() + timeout_s, 0.001
        asked = {prepared.prompt_id: prepared}
        tokens = {prepared.prompt_id: tokens_of(output, prepared)}
        # Asked without waiting: other requests use the engine's thread meanwhile.
        while collect(asked, await self._call("take_results", list(asked), tokens)):
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.1)
        lengths = prepared.samples.lengths
        attach_results(output, prepared.results.joined(), prepared.captures, lengths)
        self._tllm.hand_over(output, prepared)

    async def _discard(self, prompt_id: str) -> None:
        try:
            await self._call("take_results", [prompt_id])
        except Exception as error:  # the engine is going down
            logger.debug("results of an aborted request were not discarded: %s", error)


AsyncLLMEngine = AsyncLLM


def _made(consumer: Consumer | str) -> Consumer:
    return consumer_from_spec(consumer) if isinstance(consumer, str) else consumer


def _check_positions_of(engine: Any) -> None:
    """Let an engine refuse positions that a prompt does not have, once it has tokenized it."""
    processor = engine.input_processor
    process = processor.process_inputs

    def checked(*args: Any, **kwargs: Any) -> Any:
        request = process(*args, **kwargs)
        Client.check_positions(request)
        return request

    processor.process_inputs = checked
    if not hasattr(processor, "process_inputs_async"):  # newer vLLM tokenizes on a thread
        return
    process_async = processor.process_inputs_async

    async def checked_async(*args: Any, **kwargs: Any) -> Any:
        request = await process_async(*args, **kwargs)
        Client.check_positions(request)
        return request

    processor.process_inputs_async = checked_async


def _pending(output: Any) -> bool:
    """Whether a consumer was still working on a result of this output."""
    return isinstance(output, RequestOutput) and any(
        result.status == "pending"
        for completion in output.outputs
        for result in completion.consumer_results.values()  # type: ignore[attr-defined]
    )


def _release(consumer: Consumer) -> None:
    """A consumer that is no longer registered answers for itself again."""
    for name in ("synchronize", "read_stats"):
        vars(consumer).pop(name, None)


def _options(hook_points: Iterable[str] | str | None = None, **options: Any) -> dict[str, Any]:
    """The engine options that were given."""
    if hook_points is not None and hook_points != "all":
        hook_points = (hook_points,) if isinstance(hook_points, str) else tuple(hook_points)
    given = {"hook_points": hook_points, **options}
    return {name: value for name, value in given.items() if value is not None}

"""`LLM`, `AsyncLLM` and `make_llm`: vLLM's classes, with interventions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from functools import partial
from typing import Any

import vllm
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM as VllmAsyncLLM

from tllm.client import Client, decode_answers, encode_call, engine_arguments
from tllm.consumers.base import Consumer
from tllm.outputs import attach_results
from tllm.registry import Registry, consumer_from_spec

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
        hook_points: the hook points to install in every layer (default: `pre_attn`,
            `post_block`, `lm_head_in`, and what the consumers need), or `"all"`.
        capture_mib, max_capture_mib, overflow: size of the capture ring, and what happens when
            consumers are slower than the model (`"block"` or `"drop"`).
        **kwargs: any other argument of `vllm.LLM`.
    """

    def __init__(
        self,
        model: str,
        *,
        consumers: Iterable[Consumer | str] = (),
        hook_points: Iterable[str] | str | None = None,
        capture_mib: int | None = None,
        max_capture_mib: int | None = None,
        overflow: str | None = None,
        **kwargs: Any,
    ) -> None:
        chosen = [*_registry.all(), *map(_made, consumers)]
        options = _options(hook_points, capture_mib, max_capture_mib, overflow)
        self._tllm = Client()
        self._prompt_ids: dict[str, str] = {}
        super().__init__(model, **engine_arguments(kwargs, options, chosen))
        self._add_request_of_engine = self.llm_engine.add_request
        self.llm_engine.add_request = self._add_request_with_spec
        for consumer in chosen:
            self.register_consumer(consumer)

    # -- consumers -----------------------------------------------------------------------------

    def _call(self, method: str, *args: Any) -> list[Any]:
        return decode_answers(self.collective_rpc("tllm", args=(method, encode_call(*args))))

    def register_consumer(self, consumer: Consumer | str) -> Consumer:
        """Add a consumer now; it sees rows from the next forward pass on."""
        made = _made(consumer)
        payload = self._tllm.admit(made)
        decode_answers(self.collective_rpc("tllm", args=("register", payload)))
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

    def intervention_stats(self) -> list[dict[str, Any]]:
        """Counters of each worker: hook points, rows captured and dropped, consumers."""
        return self._call("stats")

    # -- requests ------------------------------------------------------------------------------

    def _add_request_with_spec(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> str:
        if isinstance(params, vllm.SamplingParams):
            params, self._prompt_ids[request_id] = self._tllm.prepare(params, request_id)
        return self._add_request_of_engine(request_id, prompt, params, *args, **kwargs)

    def _run_engine(self, *args: Any, **kwargs: Any) -> list[Any]:
        try:
            outputs = super()._run_engine(*args, **kwargs)
            self._attach(outputs)
        finally:
            self._prompt_ids.clear()
        return outputs

    def _attach(self, outputs: list[Any]) -> None:
        finished = [o for o in outputs if isinstance(o, RequestOutput)]
        if not finished:
            return
        keys = [self._prompt_ids[o.request_id] for o in finished]
        # Without consumers too: workers then know at once that these sequences are over.
        results = self._tllm.merge_results(self._call("take_results", keys))
        for output, key in zip(finished, keys, strict=True):
            attach_results(output, results.get(key))


class AsyncLLM(VllmAsyncLLM):
    """vLLM's async engine, with interventions. Made by `from_engine_args` or `create`."""

    _tllm: Client

    @classmethod
    async def create(
        cls,
        model: str,
        *,
        consumers: Iterable[Consumer | str] = (),
        hook_points: Iterable[str] | str | None = None,
        capture_mib: int | None = None,
        max_capture_mib: int | None = None,
        overflow: str | None = None,
        **kwargs: Any,
    ) -> AsyncLLM:
        """An engine for a model; arguments as `LLM` takes them."""
        from vllm.engine.arg_utils import AsyncEngineArgs

        chosen = [*_registry.all(), *map(_made, consumers)]
        options = _options(hook_points, capture_mib, max_capture_mib, overflow)
        arguments = engine_arguments(kwargs, options, chosen)
        engine = cls.from_engine_args(AsyncEngineArgs(model=model, **arguments))
        for consumer in chosen:
            await engine.register_consumer(consumer)
        return engine

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._tllm = Client()
        super().__init__(*args, **kwargs)

    async def _call(self, method: str, *args: Any) -> list[Any]:
        answers = await self.collective_rpc("tllm", args=(method, encode_call(*args)))
        return decode_answers(answers)

    async def register_consumer(self, consumer: Consumer | str) -> Consumer:
        """Add a consumer now. Use `await engine.read_stats(consumer)` for its statistics."""
        made = _made(consumer)
        payload = self._tllm.admit(made)
        decode_answers(await self.collective_rpc("tllm", args=("register", payload)))
        self._tllm.consumers[made.consumer_id] = made
        return made

    async def unregister_consumer(self, consumer: Consumer | str) -> None:
        """Remove a consumer, given by instance or id."""
        name = consumer if isinstance(consumer, str) else consumer.consumer_id
        await self._call("unregister", name)
        del self._tllm.consumers[name]

    async def read_stats(self, consumer: Consumer) -> Mapping[str, Any]:
        """A consumer's statistics."""
        return consumer.merge_stats(await self._call("consumer_stats", consumer.consumer_id))

    async def synchronize(self) -> None:
        """Wait until every consumer is done with what it was given."""
        await self._call("synchronize")

    async def intervention_stats(self) -> list[dict[str, Any]]:
        """Counters of each worker."""
        return await self._call("stats")

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM's: streams outputs. The last one carries the consumers' results.

        With a prompt that is itself a stream, which output is the last is known only when the
        stream has ended: it gets the results then, after it was given out.
        """
        params, prompt_id = self._tllm.prepare(sampling_params, request_id)
        output: RequestOutput | None = None
        async for output in super().generate(prompt, params, request_id, **kwargs):
            attach_results(output, None)
            if output.finished:
                await self._attach(output, prompt_id)
            yield output
        if output is not None and not output.finished:
            await self._attach(output, prompt_id)

    async def _attach(self, output: RequestOutput, prompt_id: str) -> None:
        if self._tllm.consumers:
            taken = self._tllm.merge_results(await self._call("take_results", [prompt_id]))
            attach_results(output, taken.get(prompt_id))


AsyncLLMEngine = AsyncLLM


def _made(consumer: Consumer | str) -> Consumer:
    return consumer_from_spec(consumer) if isinstance(consumer, str) else consumer


def _release(consumer: Consumer) -> None:
    """A consumer that is no longer registered answers for itself again."""
    for name in ("synchronize", "read_stats"):
        vars(consumer).pop(name, None)


def _options(
    hook_points: Iterable[str] | str | None,
    capture_mib: int | None,
    max_capture_mib: int | None,
    overflow: str | None,
) -> dict[str, Any]:
    """The engine options that were given."""
    if hook_points is not None and hook_points != "all":
        hook_points = (hook_points,) if isinstance(hook_points, str) else tuple(hook_points)
    given = {
        "hook_points": hook_points,
        "capture_mib": capture_mib,
        "max_capture_mib": max_capture_mib,
        "overflow": overflow,
    }
    return {name: value for name, value in given.items() if value is not None}

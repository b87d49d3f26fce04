"""Requests that a front end makes itself, beside those of its user."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from vllm import AsyncLLMEngine, LLMEngine

from tllm.client.calls import Steps, drive, drive_async, living
from tllm.engine.adapters import check_adapter, refusal_of
from tllm.engine.front import LLMEngineFront
from tllm.engine.refusals import RefusedError
from tllm.params import SamplingParams

_T = TypeVar("_T")


class Generation(NamedTuple):
    """Compute requests; sent their last outputs, in order.

    Attributes:
        adapter: of all of them, a `LoRARequest`; None: the model's own weights.
    """

    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    adapter: Any = None


class AdapterLoading(NamedTuple):
    """Let an engine load the adapter of requests to come: one that it cannot load in the middle of
    a step would end it. `ValueError` where it cannot."""

    adapter: Any


def check_alone(engine: LLMEngine, call: str) -> None:
    """Refuse a call that waits for its own requests while others of the engine are unfinished: they
    would end in it, and nobody would have their outputs."""
    if engine.has_unfinished_requests():
        raise RefusedError(
            f"requests of this engine are unfinished, and their outputs would be lost in {call}; "
            "wait for them first (wait_for_completion() of those that were queued, or step() until "
            "they have ended)"
        )


Work: TypeAlias = "Generator[Generation | AdapterLoading | Steps[Any], Any, _T]"
"""What takes requests and steps of the client, one after the other."""


class SyncGeneration:
    """Does work on an engine whose caller waits.

    Args:
        run: takes steps of the client to their end.
        front: stands before the engine, which has it.
    """

    def __init__(
        self, engine: LLMEngine, run: Callable[[Steps[Any]], Any], front: LLMEngineFront
    ) -> None:
        self._engine = weakref.ref(engine)  # which may have us
        self._front: LLMEngineFront = weakref.proxy(front)
        self._run = run

    @property
    def tokenizer(self) -> Any:
        return living(self._engine).get_tokenizer()

    def do(self, work: Work[_T]) -> _T:
        return drive(work, self._done)

    def _done(self, item: Any) -> Any:
        if isinstance(item, Generation):
            return self._computed(item)
        return self._load(item.adapter) if isinstance(item, AdapterLoading) else self._run(item)

    def _load(self, adapter: Any) -> None:
        engine = living(self._engine)
        check_adapter(adapter, engine.vllm_config)
        try:
            engine.add_lora(adapter)
        except Exception as error:
            raise refusal_of(adapter, error) from error

    def _computed(self, asked: Generation) -> list[Any]:
        """The outputs of requests, while nobody else's run. An interrupt comes between two steps,
        and nothing is left of it, as in `generate`."""
        engine = living(self._engine)
        check_alone(engine, "llm.patching")
        names = [f"tllm-{uuid.uuid4().hex}" for _ in asked.prompts]
        outputs: dict[str, Any] = {}
        with self._front.together():
            for name, prompt, params in zip(names, asked.prompts, asked.params, strict=True):
                tokens = {"prompt_token_ids": list(prompt)}
                engine.add_request(name, tokens, params, lora_request=asked.adapter)
            while engine.has_unfinished_requests():
                outputs |= {o.request_id: o for o in engine.step() if o.finished}
        return [outputs[name] for name in names]


class AsyncGeneration:
    """Does work on an engine's event loop.

    Args:
        run: takes steps of the client to their end.
    """

    def __init__(self, engine: AsyncLLMEngine, run: Callable[[Steps[Any]], Any]) -> None:
        self._engine = engine
        self._run = run

    @property
    def tokenizer(self) -> Any:
        return self._engine.get_tokenizer()

    async def do(self, work: Work[_T]) -> _T:
        return await drive_async(work, self._done)

    async def _done(self, item: Any) -> Any:
        if isinstance(item, Generation):
            return await self._computed(item)
        if isinstance(item, AdapterLoading):
            return await self._load(item.adapter)
        return await self._run(item)

    async def _load(self, adapter: Any) -> None:
        check_adapter(adapter, self._engine.vllm_config)
        try:
            await self._engine.add_lora(adapter)
        except Exception as error:
            raise refusal_of(adapter, error) from error

    async def _computed(self, asked: Generation) -> list[Any]:
        """The outputs of requests, beside all others'."""
        pairs = zip(asked.prompts, asked.params, strict=True)
        tasks = [asyncio.ensure_future(self._last(*pair, asked.adapter)) for pair in pairs]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _last(self, prompt: Sequence[int], params: SamplingParams, adapter: Any) -> Any:
        last = None
        name = f"tllm-{uuid.uuid4().hex}"
        async for output in self._engine.generate(
            {"prompt_token_ids": list(prompt)}, params, request_id=name, lora_request=adapter
        ):
            last = output
        return last

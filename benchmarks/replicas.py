"""Data-parallel replicas, used as one `LLM`."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Coroutine, Sequence
from itertools import count
from typing import Any

from benchmarks.step_times import StepTimes, middle_of


class Replicas:
    """An `AsyncLLM`, vLLM's or tLLM's, whose calls wait for what they asked, as an `LLM`'s do.

    Only an `AsyncLLM` has several replicas, and deals its requests out to them. Its event loop runs
    on a thread of its own.

    Args:
        engine: `"vllm"` or `"tllm"`.
    """

    def __init__(self, engine: str, model: str, arguments: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="replicas", daemon=True).start()
        self._numbers = count()
        #: When something came of each replica.
        self._came: dict[int, list[float]] = {}
        #: When each request had ended.
        self._ended: dict[str, float] = {}
        self._engine: Any = self._wait(self._start(engine, model, arguments))

    async def _start(self, engine: str, model: str, arguments: dict[str, Any]) -> Any:
        from vllm import AsyncEngineArgs

        if engine == "vllm":
            from vllm.v1.engine.async_llm import AsyncLLM
        else:
            from tllm import AsyncLLM  # type: ignore[assignment]
        started: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(model, **arguments))
        get = started.engine_core.get_output_async

        async def timed() -> Any:
            outputs = await get()
            if outputs.outputs:
                self._came.setdefault(outputs.engine_index, []).append(time.perf_counter())
            return outputs

        started.engine_core.get_output_async = timed
        return started

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def vllm_config(self) -> Any:
        """The engine's."""
        return self._engine.vllm_config

    def generate(
        self, prompts: Sequence[Any], params: Sequence[Any], use_tqdm: bool = False
    ) -> list[Any]:
        """The last output of each prompt, in the order of the prompts. Parameters ask for
        `FINAL_ONLY`."""
        return list(self._wait(self._generate(prompts, params)))

    async def _generate(self, prompts: Sequence[Any], params: Sequence[Any]) -> list[Any]:
        pairs = zip(prompts, params, strict=True)
        return await asyncio.gather(*(self._last(prompt, asked) for prompt, asked in pairs))

    async def _last(self, prompt: Any, params: Any) -> Any:
        async for output in self._engine.generate(prompt, params, f"of-{next(self._numbers)}"):
            last = output
        self._ended[last.request_id] = time.perf_counter()
        return last

    def collective_rpc(self, method: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call something in the workers of every replica; what those of the first answer."""
        return list(self._wait(self._engine.collective_rpc(method, args=args)))

    def apply_model(self, work: Any) -> None:
        """Do something to every model."""
        self.collective_rpc("apply_model", args=(work,))

    def register_consumer(self, consumer: Any) -> Any:
        """As an `LLM` does."""
        return self._wait(self._engine.register_consumer(consumer))

    def clear_consumers(self) -> None:
        """As an `LLM` does."""
        self._wait(self._engine.clear_consumers())

    def read_stats(self, consumer: Any) -> dict[str, Any]:
        """A consumer's, with its numbers summed over all replicas."""
        stats = self._wait(self._engine.read_stats(consumer))
        return _summed(stats["replicas"]) if "replicas" in stats else dict(stats)

    def intervention_stats(self) -> list[dict[str, Any]]:
        """Of one worker, with its counters summed over the first workers of all replicas."""
        workers = self._wait(self._engine.intervention_stats())
        first = workers[:: len(workers) // self.vllm_config.parallel_config.data_parallel_size]
        return [_summed(first)]

    def close(self) -> None:
        """End the engine."""
        self._loop.call_soon_threadsafe(self._engine.shutdown)

    def step_times(self) -> ReplicaTimes:
        """When something came of the replicas, from when it is entered on."""
        return ReplicaTimes(self._came, self._ended)


def _summed(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of several mappings summed, and whatever else the first has."""
    numbers = [name for name, value in each[0].items() if type(value) in (int, float)]
    return each[0] | {name: sum(stats[name] for stats in each) for name in numbers}


class ReplicaTimes(StepTimes):
    """When steps of replicas gave something out, which each of them takes on its own.

    Args:
        came: the times, by replica, as they come.
        ended: when each request had ended, likewise.
    """

    def __init__(self, came: dict[int, list[float]], ended: dict[str, float]) -> None:
        super().__init__()
        self._came = came
        self._ended = ended
        self._each: list[list[float]] = []

    def __enter__(self) -> StepTimes:
        self._came.clear()
        self._ended.clear()
        return self

    def __exit__(self, *exception: object) -> None:
        self._each = [[*times] for times in self._came.values()]
        self.steps = sorted(time for times in self._each for time in times)
        self.finished = dict(self._ended)

    @property
    def middle(self) -> float:
        """Mean over replicas of that of each."""
        return statistics.mean(middle_of(times) for times in self._each)

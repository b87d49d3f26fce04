"""`python served.py MODEL FOLDER SEED ROUNDS SECONDS OPTIONS`: attacks an `AsyncLLM`, whose engine
is a process, ROUNDS times and for SECONDS at least. OPTIONS are arguments of the engine, as JSON.

Requests stream their outputs in every kind, some stream their prompts, and some are cancelled: by
`abort`, by leaving the stream, and by cancelling the task that reads it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
from capture.truth import POINTS
from tiny_engines import TINY_ENGINE
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind

from fuzz.asks import Ask
from fuzz.features import MODULES, draw_together
from fuzz.gates import MONITORS
from fuzz.leaks import Footprint, Rest, more_than, of_process
from fuzz.oracle import Oracle, WrongError
from fuzz.patches import MEAN, MEANS, RUN, RUN_PROMPT
from fuzz.rounds import AGAIN, PROBE, consumers
from tllm import AsyncLLM

ALLOWED = frozenset({"served", "priority", "text", "structured"})
UNDRAFTED, DRAFTED = frozenset({"seeded", "undrafted"}), frozenset({"drafted"})

_Answered = tuple[int, tuple[int, ...]]
"""The place of a request, and how many tokens its samples have."""


class Served:
    """Attacks one `AsyncLLM`, round after round.

    Args:
        engine: what is attacked.
        alone: what computes each request alone: the same, or one that drafts no tokens.
        root: folder of the store.
        points: the hook points that both have.
    """

    def __init__(
        self, engine: AsyncLLM, alone: AsyncLLM, root: Path, points: Sequence[str]
    ) -> None:
        self._engine = engine
        self._alone = alone
        self._points = points
        self._allowed = ALLOWED | (UNDRAFTED if alone is engine else DRAFTED)
        self._oracle = Oracle(PROBE, root, apart=True)
        self._number = 0

    async def run(self, seed: int, requests: int) -> int:
        """One round; how many requests were compared.

        Who is slow to cancel, or draws without a seed, may get other tokens each time, and what is
        compared then is asked for the first time: a cache may know more after it.
        """
        pick = Random(seed)
        asks = draw_together(pick, self._allowed, requests, self._points)
        before, known, checked, grew = None, set[_Answered](), 0, 0
        for _ in range(1 + 2 * AGAIN):
            answered = await self._together(seed, asks)
            checked += len(answered)
            if before is not None:
                if not (more := await self._more_than(before)):
                    return checked
                grew += answered <= known
                if grew == AGAIN:
                    told = "\n  ".join([*more, "and they were", *(" ".join(a.drawn) for a in asks)])
                    raise WrongError(
                        f"seed {seed}: each time the same requests run there is more of\n  {told}"
                    )
            known |= answered
            before = await self._footprint()
        return checked

    async def _together(self, seed: int, asks: Sequence[Ask]) -> set[_Answered]:
        """Run requests together and compare each; which were answered. Nothing of them is kept."""
        outputs = await asyncio.gather(*map(self._generate, asks))
        answered = set()
        for place, (ask, output) in enumerate(zip(asks, outputs, strict=True)):
            if output is not None:
                await self._compare(seed, ask, output)
                answered.add((place, tuple(len(sample.token_ids) for sample in output.outputs)))
        return answered

    def check_power(self) -> None:
        """Raises `WrongError` where little could be compared."""
        self._oracle.check_power()

    async def _compare(self, seed: int, ask: Ask, output: Any) -> None:
        try:
            prompts, params = self._oracle.alone(ask, output)
            params.output_kind = RequestOutputKind.FINAL_ONLY
            found = []
            for prompt in prompts:
                await self._alone.reset_prefix_cache()
                async for each in self._alone.generate(_tokens(prompt), params, self._name()):
                    last = each
                found.append(last)
            self._oracle.check(ask, output, self._oracle.truth(ask, output, found))
        except Exception as error:
            raise WrongError(f"seed {seed}: {error!r}\n  {ask}") from error

    async def _generate(self, ask: Ask) -> Any:
        """The last output, with all samples (vLLM's last delta lacks those that ended before it)
        and all tokens of each; None where it was cancelled."""
        name, samples, tokens, last, seen = self._name(), {}, {}, None, 0
        inputs = _parts(ask) if ask.parts else _tokens(ask.prompt)
        stream = self._engine.generate(inputs, ask.same, name, priority=ask.priority)
        if ask.cancel == "task" and ask.abort_after:
            reading = asyncio.ensure_future(_read(stream))
            await asyncio.sleep(0.02 * ask.abort_after)
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
            return None
        async for last in stream:
            seen += 1
            for sample in last.outputs:
                delta = ask.same.output_kind == RequestOutputKind.DELTA
                before = tokens.get(sample.index, []) if delta else []
                tokens[sample.index] = [*before, *sample.token_ids]
                samples[sample.index] = sample
            if seen == ask.abort_after:
                if ask.cancel == "leave":
                    await stream.aclose()
                    return None
                await self._engine.abort(name)
        if ask.abort_after and seen >= ask.abort_after:
            return None
        for index, sample in samples.items():
            sample.token_ids = tokens[index][_dropped(ask) :]
        last.outputs = [samples[index] for index in sorted(samples)]
        return last

    def _name(self) -> str:
        self._number += 1
        return f"request-{self._number}"

    async def _more_than(self, before: Footprint) -> list[str]:
        rest = Rest()
        while (more := more_than(before, await self._footprint())) and not rest.reached(more):
            await asyncio.sleep(0.1)
        return more

    async def _footprint(self) -> Footprint:
        """What this process, the engine's, and the workers hold."""
        found = of_process()
        found["requests that are steered"] = (await self._engine.steering.status())["requests"]
        for worker in await self._engine.intervention_stats():
            for name in ("running_sequences", "steering_configurations", "rows_dropped"):
                found[name] += worker[name]
        for process in psutil.Process().children(recursive=True):
            found["threads of the engine"] += process.num_threads()
            found["descriptors of the engine"] += process.num_fds()
        return found


async def _read(stream: AsyncGenerator[Any, None]) -> None:
    async for _ in stream:
        pass


def _tokens(prompt: list[int]) -> Mapping[str, Any]:
    return {"prompt_token_ids": list(prompt)}


def _dropped(ask: Ask) -> int:
    """Tokens that answered the parts of a prompt before the last."""
    return len(_split(ask)) - 1 if ask.parts else 0


def _split(ask: Ask) -> list[list[int]]:
    size = -(-len(ask.prompt) // ask.parts)
    return [ask.prompt[start : start + size] for start in range(0, len(ask.prompt), size)]


async def _parts(ask: Ask) -> AsyncGenerator[StreamingInput, None]:
    """A prompt that arrives in parts, each after the answer to the one before."""
    *before, last = _split(ask)
    one = ask.params(max_tokens=1, min_tokens=None)
    for part in before:
        yield StreamingInput(prompt=_tokens(part), sampling_params=one)
        await asyncio.sleep(0.5)
    yield StreamingInput(prompt=_tokens(last), sampling_params=ask.same)


async def _prepared(
    model: str, root: Path, points: Sequence[str], options: dict[str, Any]
) -> AsyncLLM:
    """An engine that has what requests may name."""
    engine = await AsyncLLM.create(
        model, consumers=consumers(root), **options, scheduling_policy="priority"
    )
    for name, condition in MONITORS.items():
        await engine.steering.register_monitor(name, condition)
    await engine.patching.register_mean(MEAN, {point: MEANS[point] for point in points})
    await engine.patching.run(RUN_PROMPT, hooks=points, name=RUN)
    for name, spec in MODULES.items():
        await engine.steering.register_module(name, spec)
    return engine


async def main(
    model: str, folder: str, seed: int, rounds: int, seconds: float, more: dict[str, Any]
) -> None:
    root = Path(folder) / "store"
    options = TINY_ENGINE | {"skip_tokenizer_init": False, "enable_chunked_prefill": False}
    options |= more
    # Each rank of two holds a part of the heads.
    points = [p for p in POINTS if p != "attn_heads" or "tensor_parallel_size" not in more]
    drafted = "speculative_config" in more
    engine = alone = await _prepared(model, root, points, options)
    if drafted:
        without = {name: each for name, each in options.items() if name != "speculative_config"}
        alone = await _prepared(model, root.with_name("alone"), points, without)
    served = Served(engine, alone, root, points)
    checked, number, started = 0, 0, time.monotonic()
    try:
        while number < rounds or time.monotonic() - started < seconds:
            checked += await served.run(seed + number, requests=6)
            print(f"seed {seed + number}: {checked}", flush=True)
            number += 1
        served.check_power()
        if drafted and number > 3:  # of a few requests perhaps none draws what was drafted
            [stats] = await engine.intervention_stats()
            if not 0 < stats["tokens_accepted"] < stats["tokens_drafted"]:
                raise WrongError(f"none or all of the drafted tokens were accepted: {stats}")
    finally:
        for each in {engine, alone}:
            each.shutdown()
    print(f"{checked} requests of {number} rounds were compared")


if __name__ == "__main__":
    model, folder, seed, rounds, seconds, options = sys.argv[1:]
    asyncio.run(main(model, folder, int(seed), int(rounds), float(seconds), json.loads(options)))

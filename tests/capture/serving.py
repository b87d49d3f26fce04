"""Captures of an `AsyncLLM` whose engine has two tensor-parallel ranks; in the end, one is killed.

The engine and the ranks are processes of their own: one engine for all that needs them.
"""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import torch
import vllm
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from capture import ranks
from tllm import AsyncLLM, SamplingParams
from tllm.consumers.base import Consumer
from tllm.ports import ConsumerContext, ConsumerFlow, PortBundle, ResidualStream

MEMORY = {"hooks": {"post_block": [1]}}
DISK = {"hooks": {"post_block": [1]}, "tag": "t"}
PROMPTS = [[10, 11, 12], list(range(40, 60)), list(range(100, 140))]


VECTOR, PROBE = 5 * torch.randn(2, 128, generator=torch.Generator().manual_seed(31))
SAD = {"probe": {"hook": "pre_attn", "layer": 1, "vector": PROBE}, "above": 0.5}
"""A condition that is registered under the name "sad"."""
GATED = {
    "steering_vectors": {"post_block": {2: {"vector": VECTOR, "when": "sad"}}},
    "decode_steering_clamps": {"mlp_out": {3: {"vector": PROBE, "max": 0.0, "when": "sad"}}},
}


def params(max_tokens: int, capture, **options) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, **options},
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
        capture=capture,
    )


class OfTheFirstRank(Consumer):
    """Cannot begin on the second rank."""

    consumer_id = "of the first"

    def flows(self) -> list[ConsumerFlow]:
        return [ConsumerFlow(reads=[ResidualStream.read(layer=1)])]

    def start(self, ctx: ConsumerContext) -> None:
        if not ctx.model.first_rank:
            raise RuntimeError("no room here")

    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        raise RuntimeError("it was never registered")


async def last(engine, prompt, asked, request_id):
    """The last output of a request."""
    async for output in engine.generate({"prompt_token_ids": prompt}, asked, request_id):
        found = output
    return found


def saved_output(output):
    return {
        "prompt": list(output.prompt_token_ids),
        "samples": [
            {
                "tokens": list(sample.token_ids),
                "results": {
                    name: (result.status, result.error)
                    for name, result in sample.capture_results.items()
                },
                "rows": sample.activations["post_block"][1].tensor,
                "positions": sample.activations["post_block"][1].positions.tolist(),
            }
            for sample in output.outputs
        ],
    }


async def serve(model: str, root: str) -> dict:
    """What the user saw."""
    before = {*psutil.Process().children(recursive=True)}
    engine = await AsyncLLM.create(
        model,
        capture_consumers=[f"filesystem:root={root},publish_interval=0.1"],
        tensor_parallel_size=2,
        enforce_eager=True,
        **ranks.ENGINE,
    )
    saved: dict = {}
    both = {"memory": MEMORY, "filesystem": DISK}
    outputs = await asyncio.gather(
        *(last(engine, p, params(6, both), f"r{i}") for i, p in enumerate(PROMPTS)),
        last(engine, PROMPTS[1], params(4, both, n=2, temperature=1), "two"),
    )
    saved["outputs"] = [saved_output(output) for output in outputs]
    saved["ranks"] = ranks.saved(
        await asyncio.gather(
            *(
                last(engine, prompt, params(5, capture), f"rank{i}")
                for i, (prompt, capture) in enumerate(ranks.captures())
            )
        )
    )

    await engine.steering.register_monitor("sad", SAD)
    saved["gated"] = [
        (list(output.prompt_token_ids), list(sample.token_ids), sample.signals)
        for output in await asyncio.gather(
            last(engine, PROMPTS[2], params(6, None, **GATED), "gated"),
            last(engine, PROMPTS[2], params(6, None), "beside it"),
        )
        for sample in output.outputs
    ]

    aborted = None
    async for output in engine.generate({"prompt_token_ids": [1, 2]}, params(100, both), "aborted"):
        aborted = output
        if len(output.outputs[0].token_ids) == 3:
            await engine.abort("aborted")
    saved["aborted"] = saved_output(aborted)
    slept = None
    async for output in engine.generate({"prompt_token_ids": [4, 2]}, params(100, both), "slept"):
        slept = output
        if len(output.outputs[0].token_ids) == 3:
            await engine.sleep()
            await engine.wake_up()
    saved["slept"] = saved_output(slept)
    seen = 0
    by_token = {"filesystem": DISK | {"positions": {"token_ids": [3]}}}
    async for _ in engine.generate({"prompt_token_ids": [3]}, params(100, by_token), "left"):
        seen += 1
        if seen == 3:
            break
    saved["refused"] = []
    for wrong in (
        params(2, {"memory": MEMORY | {"positions": [99]}}),
        params(2, {"memory": {"hooks": {"post_block": [9]}}}),
        params(2, {"disc": {}}),
        vllm.SamplingParams(extra_args={"capture": {"memory": MEMORY}}),
        params(2, MEMORY),
        {"max_tokens": 2},
    ):
        try:
            await last(engine, [5, 6], wrong, "wrong")
        except ValueError as error:
            saved["refused"].append(str(error))
    try:
        await engine.register_consumer(OfTheFirstRank())
    except RuntimeError as error:
        saved["of the first rank"] = str(error)
    await last(engine, [7], params(2, both), "after")
    saved["calls_for_plain"] = await calls_for_plain(engine)
    for _ in range(100):
        stats = await engine.intervention_stats()
        if not any(worker["running_sequences"] for worker in stats):
            break
        await asyncio.sleep(0.1)
    saved["stats"] = stats
    saved["killed"] = await killed(engine, before)
    engine.shutdown()
    return saved


async def calls_for_plain(engine: AsyncLLM) -> list[str]:
    """What the workers are asked because of a request that captures nothing."""
    driver = engine._client.calls
    calls, ask = [], driver.ask

    async def counted(call):
        calls.append(call.method)
        return await ask(call)

    driver.ask = counted  # type: ignore[method-assign]
    output = await last(engine, [9], params(2, None), "plain")
    assert output.capture_results == {}
    driver.ask = ask  # type: ignore[method-assign]
    return calls


async def killed(engine: AsyncLLM, before: set[psutil.Process]) -> str:
    """Kill one rank while requests are captured and workers are asked; what these raise.

    Args:
        before: the processes that there were without the engine, whose ranks are its last.
    """
    ours = {*psutil.Process().children(recursive=True)} - before
    ranks = [process for process in ours if process.memory_info().rss > 2**27]
    worker = max(ranks, key=lambda process: process.pid)

    async def capture(number: int) -> str:
        for turn in range(1000):
            asked = {"filesystem": {**DISK, "request_id": f"killed-{turn}-{number}"}}
            try:
                await last(engine, PROMPTS[1], params(60, asked), f"killed-{turn}-{number}")
            except EngineDeadError as dead:
                return type(dead).__name__
        return "none"

    async def watch() -> str:
        try:
            while True:
                await engine.intervention_stats()
        except EngineDeadError as dead:
            return type(dead).__name__

    running = [asyncio.ensure_future(capture(number)) for number in range(4)]
    running.append(asyncio.ensure_future(watch()))
    await asyncio.sleep(1)
    os.kill(worker.pid, signal.SIGKILL)
    return " ".join({await each for each in running})

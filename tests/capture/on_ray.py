"""`python on_ray.py MODEL ROOT OUTPUT OPTIONS`: an `AsyncLLM` whose workers are Ray's.

A process of its own, since it starts a cluster: two CPUs and what passes for two devices, on this
machine. OPTIONS is JSON: arguments of the engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import ray
import torch
from engine.modes import Reader, Steering

from capture import ranks
from capture.serving import last, params
from tllm import AsyncLLM
from tllm.ports import ResidualStream

VECTOR = torch.linspace(-3, 3, 128)
LAYOUTS = ("sharded", "per_file")
UNATTENDED = 3
"""Requests whose results nobody takes before the engine is shut down."""


def requests() -> Iterator[tuple[list[int], dict[str, Any], dict[str, Any]]]:
    """Prompts, what is captured of them, and what is done to them."""
    plain = {"consumers": {"steering": {"enabled": False}}}
    for layout in LAYOUTS:
        for prompt, capture in ranks.captures():
            disk = capture["filesystem"]
            name = f"{layout}-{disk['request_id']}"
            yield (
                prompt,
                {**capture, "filesystem": {**disk, "layout": layout, "request_id": name}},
                plain,
            )
    spec = {"hooks": ranks.HOOKS}
    for name, steering in (
        ("consumer", {"consumers": {"steering": {"enabled": True}}}),
        ("vector", {**plain, "steering_vectors": {"post_block": {0: VECTOR}}}),
    ):
        capture = {"memory": spec, "filesystem": {**spec, "request_id": name}}
        yield ranks.PROMPTS[0], capture, steering


async def serve(model: str, root: str, options: dict[str, Any]) -> dict[str, Any]:
    engine = await AsyncLLM.create(
        model,
        consumers=[Steering()],
        capture_consumers=[f"filesystem:root={root},publish_interval=3"],
        enforce_eager=True,
        **{**ranks.ENGINE, "distributed_executor_backend": None, **options},
    )
    read = ResidualStream.read(site="lm_head_in")
    await engine.register_consumer(Reader("late", read))
    outputs = await asyncio.gather(
        *(
            last(engine, prompt, params(5, capture, **done), f"r{i}")
            for i, (prompt, capture, done) in enumerate(requests())
        )
    )
    saved = {
        "outputs": ranks.saved(outputs),
        "late": [output.consumer_results["late"].payload for output in outputs],
        "stats": await engine.intervention_stats(),
    }

    async def leave(number: int) -> None:
        asked = params(2, {"filesystem": {"hooks": {"post_block": [1]}}})
        async for _ in engine.generate(
            {"prompt_token_ids": [7]}, asked, f"left{number}", results=False
        ):
            pass

    await asyncio.gather(*map(leave, range(UNATTENDED)))
    engine.shutdown()
    return saved


def main(model: str, root: str, output: str, options: str) -> None:
    cluster = ray.init(
        num_cpus=4, num_gpus=2, include_dashboard=False, object_store_memory=100 << 20
    )
    os.environ["RAY_ADDRESS"] = cluster.address_info["address"]
    try:
        torch.save(asyncio.run(serve(model, root, json.loads(options))), output)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

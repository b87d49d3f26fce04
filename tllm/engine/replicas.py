"""Calls that reach the workers of every data-parallel replica.

vLLM's `AsyncLLM.collective_rpc` reaches them too, but returns what the first replica's say.
Checked against vLLM 0.32.
"""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM


async def call_workers(engine: AsyncLLM, method: str, args: tuple[Any, ...]) -> list[Any]:
    """What every worker answers, replica by replica."""
    client = engine.engine_core
    replicas = getattr(client, "core_engines", ())
    if len(replicas) < 2:
        return list(await engine.collective_rpc(method, args=args))
    call = client._call_utility_async
    answers = await asyncio.gather(
        *(call("collective_rpc", method, None, args, None, engine=each) for each in replicas)
    )
    return [answer for replica in answers for answer in replica]

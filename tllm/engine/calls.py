"""Calls to the workers, where vLLM's `collective_rpc` is not enough.

`LLM.collective_rpc` waits for ever when the engine's process dies meanwhile, and
`AsyncLLM.collective_rpc` returns what the first data-parallel replica says, of all that it asked.
Run on vLLM 0.32; the sources of 0.30 and 0.33 were read.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from vllm import LLM
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import SyncMPClient

_LOOK_EVERY_S = 1.0


def ask_workers(llm: LLM, method: str, args: tuple[Any, ...]) -> Callable[[], list[Any]]:
    """Ask every worker, and return a function that waits for what they answer.

    It raises vLLM's `EngineDeadError` when the engine's process is dead, or dies meanwhile.
    """
    client = llm.llm_engine.engine_core
    if not isinstance(client, SyncMPClient):  # the engine is in this process
        answered = list(llm.collective_rpc(method, args=args))
        return lambda: answered
    call_id = uuid.uuid1().int >> 64
    answers: Future[list[Any]] = Future()
    client.utility_results[call_id] = answers
    arguments = ("collective_rpc", (method, None, args, None))
    client._send_input(EngineCoreRequestType.UTILITY, (0, call_id, *arguments))

    def wait() -> list[Any]:
        while True:
            try:
                return list(answers.result(_LOOK_EVERY_S))
            except NotYet:
                client.ensure_alive()

    return wait


async def call_all_workers(engine: AsyncLLM, method: str, args: tuple[Any, ...]) -> list[Any]:
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

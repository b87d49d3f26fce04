"""Calls to the workers, where vLLM's `collective_rpc` is not enough.

`LLM.collective_rpc` waits for ever when the engine's process dies meanwhile, and
`AsyncLLM.collective_rpc` returns what the first data-parallel replica says, of all that it asked.
Run on vLLM 0.32; the sources of 0.30 and 0.33 were read.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import BackgroundResources, SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.utils import CoreEngineProcManager

from tllm.engine.seams import uses

_METHOD = "tllm"
"""Of our worker."""

_LOOK_EVERY_S = 1.0
_GOES_DOWN_S = 5.0

_OUTLIVED = "a call of the workers ends when the engine's process does, if workers outlive it"
uses(
    "vllm.v1.engine.core_client.SyncMPClient",
    "utility_results ensure_alive",
    "a call of the workers ends when the engine's process does",
)
uses(
    "vllm.v1.engine.core_client.SyncMPClient",
    "_send_input",
    "a call of the workers is sent without waiting for its answer",
    takes="request_type request",
)
uses("vllm.v1.engine.core_client", "BackgroundResources", _OUTLIVED)
uses("vllm.v1.engine.utils", "CoreEngineProcManager", _OUTLIVED)
uses("vllm.v1.engine.core_client.DPAsyncMPClient", "core_engines", "calls reach every replica")
uses(
    "vllm.v1.engine.core_client.AsyncMPClient",
    "_call_utility_async",
    "calls reach every replica",
    takes="method engine",
)
uses("vllm.v1.engine", "EngineCoreRequestType", "calls of the workers")


def ask_workers(engine: LLMEngine, args: tuple[Any, ...]) -> Callable[[], list[Any]]:
    """Ask every worker (`InterventionWorker.tllm`), and return a function that waits for what they
    answer.

    It raises vLLM's `EngineDeadError` when the engine's process is dead, or dies meanwhile.
    """
    client = engine.engine_core
    if not isinstance(client, SyncMPClient):  # the engine is in this process
        answered = list(engine.collective_rpc(_METHOD, args=args))
        return lambda: answered
    call_id = uuid.uuid1().int >> 64
    answers: Future[list[Any]] = Future()
    client.utility_results[call_id] = answers
    arguments = ("collective_rpc", (_METHOD, None, args, None))
    client._send_input(EngineCoreRequestType.UTILITY, (0, call_id, *arguments))

    def wait() -> list[Any]:
        while True:
            try:
                return list(answers.result(_LOOK_EVERY_S))
            except NotYet:
                client.ensure_alive()
                if has_ended(client.resources):
                    raise EngineDeadError from None

    return wait


async def ask_all_workers(engine: AsyncLLM, args: tuple[Any, ...]) -> list[Any]:
    """What every worker answers, replica by replica.

    Raises vLLM's `EngineDeadError` when the engine's process is dead, or dies meanwhile.
    """
    answers = asyncio.ensure_future(_of_all_replicas(engine, args))
    try:
        # vLLM lets these calls wait for ever when the engine's process dies.
        while not (await asyncio.wait({answers}, timeout=_LOOK_EVERY_S))[0]:
            if engine.errored or has_ended(engine.engine_core.resources):
                raise engine.dead_error
        try:
            return answers.result()
        except Exception as error:
            # Workers answer, whatever happens: the engine is going down, or this is a fault
            # of the call's own, and vLLM says which some moments later.
            if await _goes_down(engine):
                raise engine.dead_error from error
            raise
    finally:
        answers.cancel()


async def _of_all_replicas(engine: AsyncLLM, args: tuple[Any, ...]) -> list[Any]:
    client = engine.engine_core
    replicas = getattr(client, "core_engines", ())
    if len(replicas) < 2:
        return list(await engine.collective_rpc(_METHOD, args=args))
    call = client._call_utility_async
    answers = await asyncio.gather(
        *(call("collective_rpc", _METHOD, None, args, None, engine=each) for each in replicas)
    )
    return [answer for replica in answers for answer in replica]


async def _goes_down(engine: AsyncLLM) -> bool:
    """Whether the engine is dead, or is found to be within some seconds."""
    deadline = time.monotonic() + _GOES_DOWN_S
    while not engine.errored and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return bool(engine.errored)


def has_ended(resources: BackgroundResources) -> bool:
    """Whether a process of the engine has ended.

    vLLM waits for the end of a pipe that workers which are forked hold open too, until they end
    themselves. After a pipeline stage on a GPU lost the other, NCCL kept them from it.
    """
    manager = resources.engine_manager
    return isinstance(manager, CoreEngineProcManager) and not all(
        process.is_alive() for process in manager.processes
    )

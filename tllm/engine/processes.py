"""The processes that vLLM starts for an async engine.

vLLM kills those that have not ended after five seconds, and does not wait for them to be gone.
Checked against vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

import psutil
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.utils import CoreEngineProcManager

from tllm.engine.seams import uses

logger = logging.getLogger(__name__)

_PROCESSES = "which processes an async engine has, to wait for their end"
uses("vllm.v1.engine.core_client.MPClient", "resources", _PROCESSES)
uses("vllm.v1.engine.core_client.BackgroundResources", "engine_manager", _PROCESSES)
uses("vllm.v1.engine.utils.CoreEngineProcManager", "processes", _PROCESSES)


def processes_of(engine: AsyncLLM) -> list[psutil.Process]:
    """The engine's process and those of its workers, as far as they run on this host."""
    manager = engine.engine_core.resources.engine_manager
    if not isinstance(manager, CoreEngineProcManager):
        return []
    found = []
    for each in manager.processes:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(each.pid)
            found += [process, *process.children(recursive=True)]
    return found


async def gone(processes: Sequence[psutil.Process], seconds: float = 60.0) -> None:
    """Wait until processes that were told to end have ended; a warning names those that do not."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while running := [process for process in processes if _runs(process)]:
        if loop.time() > deadline:
            pids = ", ".join(str(process.pid) for process in running)
            logger.warning("after %.0f s, processes of the engine still run: %s", seconds, pids)
            return
        await asyncio.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

"""The end of a served engine, which vLLM kills as soon as its server is told to end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from tllm.engine.seams import overrides

logger = logging.getLogger(__name__)

_GRACE_S = 5.0
"""As long as vLLM lets processes end for which nobody says how long."""


class Shutdown:
    """Stands before `shutdown` of a server's engine, so that consumers stop.

    Where requests may end first (`--shutdown-timeout`), the engine's processes do that themselves.

    Args:
        stop: what consumers stop with; for the event loop in which this is made.
    """

    def __init__(self, engine: AsyncLLM, stop: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._shutdown, self._stop = engine.shutdown, stop
        self._loop = asyncio.get_running_loop()
        engine.shutdown = self.shutdown  # type: ignore[method-assign]

    @overrides(
        "vllm.v1.engine.async_llm.AsyncLLM.shutdown", "consumers stop before their engine is killed"
    )
    def shutdown(self, timeout: float | None = None) -> None:
        """vLLM's; a server calls it in a thread of its own."""
        if timeout == 0 and not _has_loop():
            try:
                asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_GRACE_S)
            except Exception as error:
                logger.warning(
                    "consumers had not stopped when their engine was killed, and what they still "
                    "had to do is lost (%s); with --shutdown-timeout SECONDS, "
                    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS says how long they may take",
                    str(error) or f"{_GRACE_S:g} s were over",
                )
        self._shutdown(timeout=timeout)


def _has_loop() -> bool:
    """Whether this thread runs an event loop, which would do nothing while it is waited for."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True

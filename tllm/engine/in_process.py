"""Engines in the user's process, which share vLLM's process groups."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from vllm.v1.engine.core_client import InprocClient

from tllm.engine.seams import uses

_ENDS_ALONE = "an engine in the user's process ends, and others beside it go on"
uses("vllm.v1.engine.core_client.InprocClient", "engine_core", _ENDS_ALONE)
uses("vllm.v1.engine.core_client.InprocClient", "_finalizer", _ENDS_ALONE, since="0.31")
uses(
    "vllm.v1.engine.core.EngineCore",
    "shutdown structured_output_manager model_executor scheduler",
    _ENDS_ALONE,
)

_CORES: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those that have not ended."""


def let_others_live(client: InprocClient) -> None:
    """Let an engine in this process end without those that are there beside it. vLLM's own end of
    one takes along the process groups of all, and may come in the middle of another's step, when
    Python collects garbage."""
    finalizer = vars(client).get("_finalizer")
    if finalizer is None:  # before 0.31 nothing ends with the client
        return
    finalizer.detach()
    core = client.engine_core
    _CORES.add(core)
    client._finalizer = weakref.finalize(client, _end, core)


def _end(core: Any) -> None:
    """As vLLM's `EngineCore.shutdown`, without the groups where others need them."""
    _CORES.discard(core)
    if not _CORES:
        core.shutdown()
        return
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()

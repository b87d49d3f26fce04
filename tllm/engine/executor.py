"""Which executor runs the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.executor import Executor

from tllm.engine import versions
from tllm.engine.seams import uses

uses("vllm.v1.executor.Executor", "get_class", "which executor runs the workers")


def executor_for(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The engine argument that puts our executor in the place of vLLM's on Ray.

    Not in the place of the older one, nor where Ray is missing: the worker, and vLLM, refuse these.

    Args:
        kwargs: the user's engine arguments.
    """
    asked = kwargs.get("distributed_executor_backend")
    replicas = kwargs.get("data_parallel_size", 1)
    if asked is None and replicas > 1 and kwargs.get("data_parallel_backend") == "ray":
        asked = "ray"
    if asked != "ray" or not versions.runs_workers_on_ray():
        return {}
    from tllm.engine.executor_ray import InterventionRayExecutor

    return {"distributed_executor_backend": InterventionRayExecutor}


def executor_of(vllm_config: Any) -> type:
    """The executor that vLLM takes for a config."""
    found: type = Executor.get_class(vllm_config)
    return found


def executor_in_place_of(executor: type) -> type:
    """Our executor for vLLM's on Ray, and every other for itself."""
    if executor.__name__ != "RayExecutorV2":
        return executor
    from tllm.engine.executor_ray import InterventionRayExecutor

    return InterventionRayExecutor

"""Which executor runs the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
    if asked != "ray":
        return {}
    from vllm import envs
    from vllm.v1.executor.ray_utils import ray_is_available

    if not ray_is_available() or not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        return {}
    from tllm.engine.executor_ray import InterventionRayExecutor

    return {"distributed_executor_backend": InterventionRayExecutor}

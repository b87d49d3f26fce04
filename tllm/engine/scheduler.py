"""The scheduler: vLLM's own, with prefix-cache rules for rows that are read or changed."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tllm.spec.request import RequestSpec

if TYPE_CHECKING:
    from vllm.v1.request import Request


class _Rules:
    """Mixed into vLLM's schedulers."""

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        spec = RequestSpec.from_extra_args(params.extra_args if params else None)
        if spec.rows_from is not None:
            # A cached block's rows would never pass the model. Blocks are still written, under
            # the plain key: reading changes nothing in them.
            request.skip_reading_prefix_cache = True
        if spec.isolated:
            # Changed rows change the cache: nobody else may read these blocks, nor this request
            # those of others.
            request.cache_salt = f"{request.cache_salt or ''}tllm-{uuid.uuid4().hex}"
            request.block_hashes.clear()
            request.update_block_hashes()
        super().add_request(request)  # type: ignore[misc]


class _Sync(_Rules, Scheduler):
    pass


class _Async(_Rules, AsyncScheduler):
    pass


def create_scheduler(*args: Any, **kwargs: Any) -> Scheduler:
    """`scheduler_cls`: which class is right is known only once vLLM has settled its config."""
    vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    chosen = _Async if vllm_config.scheduler_config.async_scheduling else _Sync
    return chosen(*args, **kwargs)

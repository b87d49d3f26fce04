"""The executor on Ray: vLLM's own, which kills its workers, after they have closed.

Needs Ray. Run with Ray 2.60 on vLLM 0.32; the source of 0.30 was read.
"""

from __future__ import annotations

import logging
import signal
import threading

from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from tllm.engine.seams import overrides, uses

logger = logging.getLogger(__name__)

_CLOSE_S = 4.0
"""vLLM kills the engine's process, which waits here, after five seconds."""

uses(
    "vllm.v1.executor.ray_executor_v2.RayExecutorV2",
    "response_mqs is_failed shutting_down collective_rpc parallel_config",
    "workers on Ray close before they are killed",
)
uses(
    "vllm.config.ParallelConfig",
    "distributed_executor_backend",
    "workers leave the choice of devices to Ray",
)


class InterventionRayExecutor(RayExecutorV2):
    """`distributed_executor_backend` on Ray.

    A killed worker takes along what no one waits for and is not on disk yet, and leaves files in
    shared memory behind. Workers that are processes of the engine's get to their `shutdown`; these
    would not.
    """

    @overrides(
        "vllm.v1.executor.ray_executor_v2.RayExecutorV2._init_executor",
        "workers leave the choice of devices to Ray, and Ray the end of the engine to vLLM",
    )
    def _init_executor(self) -> None:
        # vLLM's workers look for this word, to leave the choice of devices to Ray.
        self.parallel_config.distributed_executor_backend = "ray"
        handler = signal.getsignal(signal.SIGTERM)
        super()._init_executor()
        if handler is not None and threading.current_thread() is threading.main_thread():
            # Ray has put one in its place that ends the engine at once: workers would not hear
            # of the requests that have just finished, whose captures would be lost.
            signal.signal(signal.SIGTERM, handler)

    @overrides(
        "vllm.v1.executor.ray_executor_v2.RayExecutorV2.shutdown",
        "workers on Ray close before they are killed",
    )
    def shutdown(self) -> None:
        started = bool(vars(self).get("response_mqs"))
        if started and not self.is_failed and not self.shutting_down:
            try:
                self.collective_rpc("shutdown", timeout=_CLOSE_S)
            except Exception as error:
                logger.warning("workers are killed before they have closed: %s", error)
        super().shutdown()

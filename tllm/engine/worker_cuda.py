"""The worker class for vLLM on CUDA."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from tllm.engine.worker import InterventionWorker


class InterventionCUDAWorker(InterventionWorker, Worker):
    """`worker_cls` on CUDA."""

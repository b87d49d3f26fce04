"""The worker class for vLLM on a CPU."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from tllm.engine.worker import InterventionWorker


class InterventionCPUWorker(InterventionWorker, CPUWorker):
    """`worker_cls` on a CPU."""

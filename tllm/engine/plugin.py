"""`vllm.general_plugins` entry point: loaded by vLLM in every one of its processes."""

from __future__ import annotations


def register() -> None:
    """Define `torch.ops.tllm.tap`, so that a compiled model from the cache finds it.

    Changes nothing of vLLM: without our worker class, no model has a tap.
    """
    import tllm.runtime.ops  # noqa: F401

"""What every engine does when it starts, done once in a process and in those that fork from it."""

from __future__ import annotations

import gc
import logging
import sys
import types
from functools import cache


def prepare() -> None:
    """Import what engines on a CPU need, and have nothing done again that was done.

    Every engine looks through all modules for Triton's kernels, to put others in their place: 0.3 s
    of its start. vLLM looks at every model class that it meets for the first time on a machine in a
    process of its own, to keep CUDA out of this one: 8 s for each. And a full collection of garbage
    takes 0.4 s with all that is imported, and vLLM asks for four with every engine, to have a GPU's
    memory back: Python may collect in its own time what an engine leaves.
    """
    import compressed_tensors  # noqa: F401 - vLLM does with its first model
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    from tllm import LLM  # noqa: F401
    from tllm.engine import seams, versions

    level = logging.root.level
    seams.lacking(versions.NEWEST)  # imports all of vLLM that ours is attached to
    logging.root.setLevel(level)  # a library of its server has set it to ERROR
    registry._run_in_subprocess = lambda look: look()
    platform = type(current_platform)
    if register := getattr(platform, "register_triton_kernel_overrides", None):  # not in vLLM 0.30
        platform.register_triton_kernel_overrides = staticmethod(cache(register))
        platform.register_triton_kernel_overrides()
    of_vllm = types.SimpleNamespace(**{**vars(gc), "collect": lambda *generation: 0})
    for name, module in [*sys.modules.items()]:
        if name.startswith("vllm.") and vars(module).get("gc") is gc:
            vars(module)["gc"] = of_vllm

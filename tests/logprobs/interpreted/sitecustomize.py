"""For engine processes of the v2 pass: what `tests/conftest.py` does in its own.

An engine process is a fresh interpreter, which imports this first when its folder is on PYTHONPATH.
"""

import os
import types
from importlib import metadata

os.environ["TORCH_COMPILE_DISABLE"] = "1"  # Inductor takes the driver for one it can compile with

import triton.backends
from triton import language
from triton.language.extra import libdevice


class InterpretedDriver:
    """What vLLM asks of a Triton driver: whether there is one."""

    @staticmethod
    def is_active() -> bool:
        return True


def version(name: str) -> str:
    """vLLM 0.30 gives Triton up when no distribution is called "vllm"."""
    return "cpu" if name == "vllm" else own_version(name)


own_version, metadata.version = metadata.version, version
libdevice.log1p = lambda x: language.log(1 + x)
triton.backends.backends["cpu"] = types.SimpleNamespace(driver=InterpretedDriver, compiler=None)

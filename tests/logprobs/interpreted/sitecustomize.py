"""For engine processes of the v2 pass: the Triton driver that `tests/conftest.py` makes.

An engine process is a fresh interpreter, which imports this first when its folder is on PYTHONPATH.
"""

import types

import triton.backends


class InterpretedDriver:
    """What vLLM asks of a Triton driver: whether there is one."""

    @staticmethod
    def is_active() -> bool:
        return True


triton.backends.backends["cpu"] = types.SimpleNamespace(driver=InterpretedDriver, compiler=None)

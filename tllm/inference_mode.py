"""`torch.inference_mode()` as a decorator for calls of every step."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def in_inference_mode(call: Callable[P, R]) -> Callable[P, R]:
    """A function that runs in inference mode, which is entered only where it is not on yet.

    torch's decorator makes three objects in each call, also when the caller is in that mode
    already, as a worker is for most of a step.
    """

    @wraps(call)
    def within(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            return call(*args, **kwargs)
        with torch.inference_mode():
            return call(*args, **kwargs)

    return within

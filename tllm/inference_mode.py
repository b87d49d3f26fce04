"""`torch.inference_mode()` as a decorator for calls of every step, and advice for who would
learn in it."""

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


def advice_on(error: BaseException) -> str:
    """What to add to the message of an error that torch raises where something is to be learned in
    inference mode, or of rows that were made in it; empty for any other."""
    text = str(error) if type(error) is RuntimeError else ""
    if "nference tensor" not in text and "does not require grad" not in text:
        return ""
    return (
        "; rows come in torch's inference mode, in which nothing is learned: use `with "
        "torch.inference_mode(False), torch.enable_grad():`, clone() the rows in it, and make in "
        "it, or in start(), what is trained"
    )

"""A process in which nothing of ours has touched vLLM or `transformers`.

vLLM's Transformers backend changes classes of `transformers` in place when an engine starts, so a
process that has had an engine can no longer say what plain `transformers` does.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from io import BytesIO
from multiprocessing import get_context
from typing import Any

import torch


class PlainProcess:
    """Calls functions in a new process, one at a time.

    Args:
        threads: that torch computes with there; its own choice by default.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._pool = ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=partial(_set_up, threads)
        )

    def ask(self, question: Callable[..., Any], *args: Any) -> Any:
        """What `question(*args)` gives there; both it and its arguments are pickled."""
        # Bytes, because tensors would be handed over through shared memory, one file each.
        answer = self._pool.submit(_answered, _pickled((question, args)))
        return pickle.loads(answer.result())

    def close(self) -> None:
        self._pool.shutdown()


def _set_up(threads: int | None) -> None:
    # By a name of ours: vLLM's CPU worker puts a local function in place of torch's.
    if threads is not None:
        torch.set_num_threads(threads)


def _answered(asked: bytes) -> bytes:
    question, args = pickle.loads(asked)
    return _pickled(question(*args))


def _pickled(value: Any) -> bytes:
    file = BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Tensors as numpy's arrays: torch's own way takes twenty times as long for small ones."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is torch.Tensor and value.is_cpu and not value.requires_grad
        if plain and value.dtype in _NUMPYS:
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


_NUMPYS = (torch.float32, torch.int64, torch.bool)
"""Dtypes that rows, tokens and masks have, and numpy has too."""

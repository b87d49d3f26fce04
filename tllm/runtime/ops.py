"""The ops that tLLM puts into a model's graph: a tap, a tap with the norm that reads it, and with
the FP8 numbers that are made of what it normed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from tllm.runtime.kernels import tap as tap_kernel
from tllm.runtime.kernels import tap_norm as tap_norm_kernel
from tllm.runtime.kernels.backend import INTERPRETED

#: Interpreted, a row costs milliseconds, and all rows are worked on alike: passes with more rows
#: than this take the reference.
_INTERPRETED_ROWS = 3


def _on_cpu(kernel: ModuleType, descriptor: int, form: str = "") -> Callable[..., Any]:
    """A kernel's reference; the kernel itself where it is interpreted and that is fast enough.

    Args:
        descriptor: its place among the arguments behind the first.
        form: how the names of both end, of a kernel that has several forms.
    """
    launch, reference = f"launch{form}", f"reference{form}"

    def run(stream: torch.Tensor, *others: Any) -> Any:
        desc = others[descriptor]
        rows = stream.numel() // stream.shape[-1]
        # Launching an interpreted kernel is slow even when there is nothing to do.
        interpreted = INTERPRETED and rows <= _INTERPRETED_ROWS and int(desc[0])
        return getattr(kernel, launch if interpreted else reference)(stream, *others)

    return run


def _tap_meta(stream: torch.Tensor, *others: Any) -> None:
    pass


def _tap_norm_meta(stream: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return stream.new_empty(stream.shape), stream.new_empty(stream.shape)


def _tap_norm_fp8_meta(
    stream: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    given = len(others) > _SCALE and others[_SCALE] is not None
    scales = (0,) if given else (*stream.shape[:-1], 1)
    return (
        stream.new_empty(stream.shape, dtype=tap_norm_kernel.FP8),
        stream.new_empty(stream.shape),
        stream.new_empty(scales, dtype=torch.float32),
    )


def _tap_norm_fp8_groups_meta(
    stream: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    numbers, residual, _ = _tap_norm_fp8_meta(stream)
    return numbers, residual


_SCALE = 6  # its place among the arguments behind the first

_library = torch.library.Library("tllm", "FRAGMENT")
_NORM = "Tensor stream, Tensor residual, Tensor weight, float eps, Tensor desc, Tensor plan"
"""What every op of a norm takes first."""


def _define(
    schema: str, kernel: ModuleType, descriptor: int, meta: Callable[..., Any], form: str = ""
) -> None:
    """Define an op.

    Args:
        kernel, descriptor, form: as of `_on_cpu`.
        meta: shapes and dtypes of what it returns.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(name, getattr(kernel, f"launch{form}"), "CUDA")
    _library.impl(name, _on_cpu(kernel, descriptor, form), "CPU")
    _library.impl(name, meta, "Meta")


_define(
    "tap(Tensor(a!) stream, Tensor(b!)? residual, Tensor desc, Tensor plan,"
    " bool check=False) -> ()",
    tap_kernel,
    1,
    _tap_meta,
)
_define(
    f"tap_norm({_NORM}, bool check=False, bool plus_one=False) -> (Tensor normed, Tensor residual)",
    tap_norm_kernel,
    3,
    _tap_norm_meta,
)
_define(
    f"tap_norm_fp8({_NORM}, bool check=False, Tensor? scale=None, bool plus_one=False)"
    " -> (Tensor numbers, Tensor residual, Tensor scale)",
    tap_norm_kernel,
    3,
    _tap_norm_fp8_meta,
    "_fp8",
)
_define(
    f"tap_norm_fp8_groups({_NORM}, Tensor(a!) scales, bool check=False, bool plus_one=False)"
    " -> (Tensor numbers, Tensor residual)",
    tap_norm_kernel,
    3,
    _tap_norm_fp8_groups_meta,
    "_fp8_groups",
)

tap = torch.ops.tllm.tap
tap_norm = torch.ops.tllm.tap_norm
tap_norm_fp8 = torch.ops.tllm.tap_norm_fp8
tap_norm_fp8_groups = torch.ops.tllm.tap_norm_fp8_groups
ALL = tap, tap_norm, tap_norm_fp8, tap_norm_fp8_groups

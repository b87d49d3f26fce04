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
_library.define(
    "tap(Tensor(a!) stream, Tensor(b!)? residual, Tensor desc, Tensor plan,"
    " bool check=False) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl("tap", tap_kernel.launch, "CUDA")
_library.impl("tap", _on_cpu(tap_kernel, 1), "CPU")
_library.impl("tap", _tap_meta, "Meta")

_library.define(
    "tap_norm(Tensor stream, Tensor residual, Tensor weight, float eps, Tensor desc, Tensor plan,"
    " bool check=False, bool plus_one=False) -> (Tensor normed, Tensor residual)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl("tap_norm", tap_norm_kernel.launch, "CUDA")
_library.impl("tap_norm", _on_cpu(tap_norm_kernel, 3), "CPU")
_library.impl("tap_norm", _tap_norm_meta, "Meta")

_library.define(
    "tap_norm_fp8(Tensor stream, Tensor residual, Tensor weight, float eps, Tensor desc,"
    " Tensor plan, bool check=False, Tensor? scale=None, bool plus_one=False)"
    " -> (Tensor numbers, Tensor residual, Tensor scale)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl("tap_norm_fp8", tap_norm_kernel.launch_fp8, "CUDA")
_library.impl("tap_norm_fp8", _on_cpu(tap_norm_kernel, 3, "_fp8"), "CPU")
_library.impl("tap_norm_fp8", _tap_norm_fp8_meta, "Meta")

_library.define(
    "tap_norm_fp8_groups(Tensor stream, Tensor residual, Tensor weight, float eps, Tensor desc,"
    " Tensor plan, Tensor(a!) scales, bool check=False, bool plus_one=False)"
    " -> (Tensor numbers, Tensor residual)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl("tap_norm_fp8_groups", tap_norm_kernel.launch_fp8_groups, "CUDA")
_library.impl("tap_norm_fp8_groups", _on_cpu(tap_norm_kernel, 3, "_fp8_groups"), "CPU")
_library.impl("tap_norm_fp8_groups", _tap_norm_fp8_groups_meta, "Meta")

tap = torch.ops.tllm.tap
tap_norm = torch.ops.tllm.tap_norm
tap_norm_fp8 = torch.ops.tllm.tap_norm_fp8
tap_norm_fp8_groups = torch.ops.tllm.tap_norm_fp8_groups
ALL = tap, tap_norm, tap_norm_fp8, tap_norm_fp8_groups

"""The ops that tLLM puts into a model's graph: a tap, and a tap with the norm that reads it."""

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


def _on_cpu(kernel: ModuleType, descriptor: int) -> Callable[..., Any]:
    """A kernel's reference; the kernel itself where it is interpreted and that is fast enough.

    Args:
        descriptor: its place among the arguments behind the first.
    """

    def run(stream: torch.Tensor, *others: Any) -> Any:
        desc = others[descriptor]
        rows = stream.numel() // stream.shape[-1]
        # Launching an interpreted kernel is slow even when there is nothing to do.
        interpreted = INTERPRETED and rows <= _INTERPRETED_ROWS and int(desc[0])
        return (kernel.launch if interpreted else kernel.reference)(stream, *others)

    return run


def _tap_meta(stream: torch.Tensor, *others: Any) -> None:
    pass


def _tap_norm_meta(stream: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return stream.new_empty(stream.shape), stream.new_empty(stream.shape)


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
    " bool check=False) -> (Tensor normed, Tensor residual)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl("tap_norm", tap_norm_kernel.launch, "CUDA")
_library.impl("tap_norm", _on_cpu(tap_norm_kernel, 3), "CPU")
_library.impl("tap_norm", _tap_norm_meta, "Meta")

tap = torch.ops.tllm.tap
tap_norm = torch.ops.tllm.tap_norm

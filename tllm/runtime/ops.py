"""`torch.ops.tllm.tap`: the one op that tLLM puts into a model's graph."""

from __future__ import annotations

import torch

from tllm.runtime.kernels import tap as tap_kernel
from tllm.runtime.kernels.backend import INTERPRETED

#: Interpreted, a row costs milliseconds, and all rows are worked on alike: passes with more rows
#: than this take the reference.
_INTERPRETED_ROWS = 3


def _tap_cuda(
    stream: torch.Tensor, residual: torch.Tensor | None, desc: torch.Tensor, plan: torch.Tensor
) -> None:
    tap_kernel.launch(stream, residual, desc, plan)


def _tap_cpu(
    stream: torch.Tensor, residual: torch.Tensor | None, desc: torch.Tensor, plan: torch.Tensor
) -> None:
    rows = stream.numel() // stream.shape[-1]
    if INTERPRETED and rows <= _INTERPRETED_ROWS:
        if int(desc[0]):  # launching an interpreted kernel is slow even when it returns at once
            tap_kernel.launch(stream, residual, desc, plan)
    else:
        tap_kernel.reference(stream, residual, desc, plan)


def _tap_meta(
    stream: torch.Tensor, residual: torch.Tensor | None, desc: torch.Tensor, plan: torch.Tensor
) -> None:
    pass


_library = torch.library.Library("tllm", "FRAGMENT")
_library.define(
    "tap(Tensor(a!) stream, Tensor(b!)? residual, Tensor desc, Tensor plan) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl("tap", _tap_cuda, "CUDA")
_library.impl("tap", _tap_cpu, "CPU")
_library.impl("tap", _tap_meta, "Meta")

tap = torch.ops.tllm.tap

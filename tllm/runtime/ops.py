"""The ops that tLLM puts into a model's graph: a tap, and a tap with the norm that reads it."""

from __future__ import annotations

import torch

from tllm.runtime.kernels import tap as tap_kernel
from tllm.runtime.kernels import tap_norm as tap_norm_kernel
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


def _tap_norm_cuda(
    stream: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    desc: torch.Tensor,
    plan: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return tap_norm_kernel.launch(stream, residual, weight, eps, desc, plan)


def _tap_norm_cpu(
    stream: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    desc: torch.Tensor,
    plan: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = stream.numel() // stream.shape[-1]
    interpreted = INTERPRETED and rows <= _INTERPRETED_ROWS and int(desc[0])
    run = tap_norm_kernel.launch if interpreted else tap_norm_kernel.reference
    return run(stream, residual, weight, eps, desc, plan)


def _tap_norm_meta(
    stream: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    desc: torch.Tensor,
    plan: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = stream.shape
    return stream.new_empty(shape), stream.new_empty(shape)


_library = torch.library.Library("tllm", "FRAGMENT")
_library.define(
    "tap(Tensor(a!) stream, Tensor(b!)? residual, Tensor desc, Tensor plan) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl("tap", _tap_cuda, "CUDA")
_library.impl("tap", _tap_cpu, "CPU")
_library.impl("tap", _tap_meta, "Meta")

_library.define(
    "tap_norm(Tensor stream, Tensor residual, Tensor weight, float eps, Tensor desc, Tensor plan)"
    " -> (Tensor normed, Tensor residual)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl("tap_norm", _tap_norm_cuda, "CUDA")
_library.impl("tap_norm", _tap_norm_cpu, "CPU")
_library.impl("tap_norm", _tap_norm_meta, "Meta")

tap = torch.ops.tllm.tap
tap_norm = torch.ops.tllm.tap_norm

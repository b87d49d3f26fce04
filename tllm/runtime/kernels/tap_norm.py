"""A tap and the norm that reads it next, as one kernel: the tap costs no launch of its own.

    x = stream + residual, changed as the tap says
    normed = weight * x / sqrt(mean(x^2) + eps)

in float32, and rounded to the model's dtype at the end, as torch.compile computes the formula of
vLLM's `fused_add_rms_norm`. Only the order in which the squares are summed is our own; it is the
same in every batch.
"""

from __future__ import annotations

import torch

from tllm.runtime.kernels import tap
from tllm.runtime.kernels.backend import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    from tllm.runtime.kernels.tap import (
        _begin,
        _first_vector,
        _look_ahead,
        _work,
        checked,
        sequence_of,
    )

    @triton.jit
    def _finish(x, weight, row, normed_ptr, sum_ptr, offsets, inside, eps, HIDDEN: tl.constexpr):
        """Norm a sum, and store both."""
        dtype: tl.constexpr = sum_ptr.dtype.element_ty
        at = row * HIDDEN + offsets
        tl.store(sum_ptr + at, x.to(dtype), mask=inside)
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
        tl.store(normed_ptr + at, (x * weight.to(tl.float32)).to(dtype), mask=inside)

    @triton.jit(do_not_specialize=["plan_stride", "eps"])
    def _tap_norm_kernel(
        stream_ptr,
        residual_ptr,
        weight_ptr,
        normed_ptr,
        sum_ptr,
        desc_ptr,
        plan_ptr,
        plan_stride,
        stream_stride,
        residual_stride,
        eps,
        HIDDEN: tl.constexpr,
        BLOCK: tl.constexpr,
        CHECK: tl.constexpr,
        AHEAD: tl.constexpr,
        EARLY: tl.constexpr,
    ):
        offsets = tl.arange(0, BLOCK)
        inside = offsets < HIDDEN
        dtype: tl.constexpr = stream_ptr.dtype.element_ty
        flags, tables, addresses, planned, wanted = _begin(
            desc_ptr, plan_ptr, plan_stride, AHEAD, dtype
        )
        sequence = -1
        if CHECK:
            sequence = sequence_of(flags, plan_ptr, plan_stride)
            wanted = tl.maximum(wanted, sequence)
        row = tl.program_id(0).to(tl.int64)
        at = stream_ptr + row * stream_stride + offsets
        residual_at = residual_ptr + row * residual_stride + offsets
        ahead = (0, 0)
        if AHEAD:
            weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0)
        # As in a tap: with EARLY, nothing that the kernel before may write is read before the wait.
        # The row is asked for before anything that came before the wait is used: a kernel this
        # short waits for memory, and so it waits for both at once.
        if EARLY:
            tl.extra.cuda.gdc_wait()
        x = tl.load(at, mask=inside, other=0.0)
        residual = tl.load(residual_at, mask=inside, other=0.0)
        if AHEAD:
            if wanted < 0:
                # It waits for its own instructions, too: these lie side by side.
                plain = x.to(tl.float32) + residual.to(tl.float32)
                _finish(plain, weight, row, normed_ptr, sum_ptr, offsets, inside, eps, HIDDEN)
                return
            found = _look_ahead(addresses, flags, planned, offsets, inside, HIDDEN, dtype)
            ahead = (found, _first_vector(tables[1], found, offsets, inside, HIDDEN))
        x = x.to(tl.float32) + residual.to(tl.float32)
        if wanted >= 0:
            x, changed = _work(
                x.to(dtype).to(tl.float32),
                desc_ptr,
                flags,
                plan_ptr,
                plan_stride,
                planned,
                tables,
                ahead,
                offsets,
                inside,
                HIDDEN,
                AHEAD,
            )
            if changed == 0:
                # Read again: to keep the sum as it was, unrounded, would take registers.
                x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                x += tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
            if sequence >= 0:
                x, changed = checked(x, changed, desc_ptr, sequence)
        if not AHEAD:
            weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0)
        _finish(x, weight, row, normed_ptr, sum_ptr, offsets, inside, eps, HIDDEN)


_WIDEST = 8192
"""Beyond, a thread has more of a row than fits in the registers below."""
_REGISTERS = 80
"""Of a thread, where there are many rows: three blocks of a row of 7B each fit a multiprocessor,
and memory is kept busy (H200; `benchmarks/HISTORY.md`)."""
_AHEAD_REGISTERS = 128
"""Where a few rows are looked ahead: two such blocks fit. If only one did, of 256 rows half would
wait for the others."""


def warps(block: int) -> int:
    """Warps for a row of so many elements. Not by the number of rows: it decides the order of the
    sum."""
    return max(1, min(16, block // 512))


def launch(
    stream: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    desc: torch.Tensor,
    plan: torch.Tensor,
    check: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel over the rows of `stream` and `residual` (`[..., hidden]`).

    Args:
        check: as of a tap.

    Returns the normed rows and the sum, which is the next residual.
    """
    hidden = stream.shape[-1]
    num_rows = stream.numel() // hidden
    normed = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
    added = torch.empty_like(normed)
    if num_rows == 0:
        return normed, added
    block = triton.next_power_of_2(hidden)
    chosen = tap.options(num_rows, stream.device)
    if block <= _WIDEST and torch.version.cuda is not None:
        chosen["maxnreg"] = _AHEAD_REGISTERS if chosen["AHEAD"] else _REGISTERS
    _tap_norm_kernel[(num_rows,)](
        stream,
        residual,
        weight,
        normed,
        added,
        desc,
        plan,
        plan.stride(0),
        stream.stride(-2),
        residual.stride(-2),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        CHECK=check,
        num_warps=warps(block),
        **chosen,
    )
    return normed, added


def reference(
    stream: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    desc: torch.Tensor,
    plan: torch.Tensor,
    check: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel in PyTorch, for host tensors."""
    stream, residual = stream.clone(), residual.clone()
    tap.reference(stream, residual, desc, plan, check)
    x = stream.float() + residual.float()
    added = x.to(stream.dtype)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x * weight.float()).to(stream.dtype), added

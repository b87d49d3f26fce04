"""A tap and the norm that reads it next, as one kernel: the tap costs no launch of its own.

    x = stream + residual, changed as the tap says
    normed = weight * x / sqrt(mean(x^2) + eps), with Gemma's norms (1 + weight) in its place

in float32, and rounded to the model's dtype at the end, as torch.compile computes the formula of
vLLM's `fused_add_rms_norm`. Only the order in which the squares are summed is our own; it is the
same in every batch.

Where linear layers multiply FP8 numbers, those of a normed row are made here, too:

    scale = max(max |normed| / 448, 1 / (448 * 512)), of each row; or one that the model brings
    numbers = normed / scale, between -448 and 448, rounded to e4m3

from what is normed in float32, as torch.compile computes the formula of vLLM's `QuantFP8`. Where
each group of a row's numbers has a scale, both are made from normed rows in the model's dtype, with
1e-10 for the least maximum, as vLLM's kernel for such groups does.
"""

from __future__ import annotations

import torch

from tllm.runtime.kernels import tap
from tllm.runtime.kernels.backend import HAS_TRITON

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
"""That numbers of FP8 have."""
LEAST_SCALE = 1 / (LARGEST * 512)
"""Of a row of small numbers."""
LEAST_OF_GROUP = 1e-10
"""The least that the largest number of a group is taken for."""

_PLAIN, _ROW, _GIVEN, _GROUPS = range(4)
"""Of the kernel: normed rows in the model's dtype, or FP8 numbers with a scale of each row's own,
one that is given, or one of each group of a row's numbers."""

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

    _LARGEST_NUMBER = tl.constexpr(LARGEST)
    _LEAST = tl.constexpr(LEAST_SCALE)
    _NO_SCALE = tl.constexpr(_PLAIN)
    _OWN_SCALE = tl.constexpr(_ROW)
    _GROUP_SCALES = tl.constexpr(_GROUPS)
    _LEAST_LARGEST = tl.constexpr(LEAST_OF_GROUP)

    @triton.jit
    def _in_groups(x, scale_ptr, stride, HIDDEN: tl.constexpr, GROUP: tl.constexpr):
        """A row over the scales of its groups, which are stored."""
        COUNT: tl.constexpr = x.shape[0] // GROUP
        groups = tl.reshape(x, (COUNT, GROUP))
        largest = tl.maximum(tl.max(tl.abs(groups), axis=1), _LEAST_LARGEST)
        scales = tl.div_rn(largest, tl.full((COUNT,), _LARGEST_NUMBER, tl.float32))
        number = tl.arange(0, COUNT)
        tl.store(scale_ptr + number * stride, scales, mask=number < HIDDEN // GROUP)
        # One division for a group, and of each quotient what is left of the number, gives what a
        # division of each would: those took as long as all the rest.
        inverses = tl.div_rn(tl.full((COUNT,), 1.0, tl.float32), scales)
        scale = tl.broadcast_to(scales[:, None], groups.shape)
        inverse = tl.broadcast_to(inverses[:, None], groups.shape)
        quotients = groups * inverse
        left = tl.fma(-quotients, scale, groups)
        return tl.reshape(tl.fma(left, inverse, quotients), x.shape)

    @triton.jit
    def _finish(
        x,
        weight,
        row,
        stored,
        offsets,
        inside,
        eps,
        HIDDEN: tl.constexpr,
        FORM: tl.constexpr,
        GROUP: tl.constexpr,
        PLUS_ONE: tl.constexpr,
    ):
        """Norm a sum, and store both.

        Args:
            stored: where normed rows, sums and scales go, and the strides of the last.
        """
        normed_ptr, sum_ptr, scale_ptr, scale_row_stride, scale_stride = stored
        at = row * HIDDEN + offsets
        tl.store(sum_ptr + at, x.to(sum_ptr.dtype.element_ty), mask=inside)
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
        x *= weight.to(tl.float32) + 1.0 if PLUS_ONE else weight.to(tl.float32)
        if FORM != _NO_SCALE:
            if FORM == _GROUP_SCALES:
                x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
                x = _in_groups(x, scale_ptr + row * scale_row_stride, scale_stride, HIDDEN, GROUP)
            else:
                if FORM == _OWN_SCALE:
                    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / _LARGEST_NUMBER, _LEAST)
                    tl.store(scale_ptr + row, scale)
                else:
                    scale = tl.load(scale_ptr)
                x *= 1.0 / scale
            x = tl.minimum(tl.maximum(x, -_LARGEST_NUMBER), _LARGEST_NUMBER)
        tl.store(normed_ptr + at, x.to(normed_ptr.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["plan_stride", "scale_row_stride", "scale_stride", "eps"])
    def _tap_norm_kernel(
        stream_ptr,
        residual_ptr,
        weight_ptr,
        normed_ptr,
        sum_ptr,
        scale_ptr,
        desc_ptr,
        plan_ptr,
        plan_stride,
        stream_stride,
        residual_stride,
        scale_row_stride,
        scale_stride,
        eps,
        HIDDEN: tl.constexpr,
        BLOCK: tl.constexpr,
        FORM: tl.constexpr,
        GROUP: tl.constexpr,
        PLUS_ONE: tl.constexpr,
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
        stored = (normed_ptr, sum_ptr, scale_ptr, scale_row_stride, scale_stride)
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
                _finish(
                    plain,
                    weight,
                    row,
                    stored,
                    offsets,
                    inside,
                    eps,
                    HIDDEN,
                    FORM,
                    GROUP,
                    PLUS_ONE,
                )
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
        _finish(
            x,
            weight,
            row,
            stored,
            offsets,
            inside,
            eps,
            HIDDEN,
            FORM,
            GROUP,
            PLUS_ONE,
        )


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
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel over the rows of `stream` and `residual` (`[..., hidden]`).

    Args:
        check: as of a tap.
        plus_one: rows are multiplied with one more than `weight`.

    Returns the normed rows and the sum, which is the next residual.
    """
    normed = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
    added = torch.empty_like(normed)
    _run(stream, residual, weight, eps, desc, plan, check, plus_one, normed, added, None, _PLAIN)
    return normed, added


def launch_fp8(
    stream: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    desc: torch.Tensor,
    plan: torch.Tensor,
    check: bool = False,
    scale: torch.Tensor | None = None,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same, and the FP8 numbers of the normed rows in their place.

    Args:
        scale: float32, one number for all rows; None: each row has its own.

    Returns the numbers (e4m3), the sum, and the scales, float32 `[..., 1]`, or an empty tensor
    where one was given.
    """
    numbers = torch.empty(stream.shape, dtype=FP8, device=stream.device)
    added = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
    found = stream.new_empty(_scales(stream, scale), dtype=torch.float32)
    form, scales = (_ROW, found) if scale is None else (_GIVEN, scale)
    _run(stream, residual, weight, eps, desc, plan, check, plus_one, numbers, added, scales, form)
    return numbers, added, found


def launch_fp8_groups(
    stream: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    desc: torch.Tensor,
    plan: torch.Tensor,
    scales: torch.Tensor,
    check: bool = False,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, with a scale for each group of a row's numbers.

    Args:
        scales: takes the scales, float32 `[rows, groups]` with any strides; the groups of a row
            have `hidden // groups` numbers each, a power of two.

    Returns the numbers (e4m3) and the sum.
    """
    numbers = torch.empty(stream.shape, dtype=FP8, device=stream.device)
    added = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
    rows = stream, residual, weight
    _run(*rows, eps, desc, plan, check, plus_one, numbers, added, scales, _GROUPS)
    return numbers, added


def _scales(stream: torch.Tensor, scale: torch.Tensor | None) -> tuple[int, ...]:
    """The shape of what is found of scales."""
    return (*stream.shape[:-1], 1) if scale is None else (0,)


def _run(
    stream: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    desc: torch.Tensor,
    plan: torch.Tensor,
    check: bool,
    plus_one: bool,
    normed: torch.Tensor,
    added: torch.Tensor,
    scales: torch.Tensor | None,
    form: int,
) -> None:
    hidden = stream.shape[-1]
    num_rows = stream.numel() // hidden
    if num_rows == 0:
        return
    block = triton.next_power_of_2(hidden)
    chosen = tap.options(num_rows, stream.device)
    groups, strides = 0, (0, 0)
    if scales is not None and form == _GROUPS:
        groups, strides = scales.shape[-1], scales.stride()[-2:]
    if block <= _WIDEST and torch.version.cuda is not None:
        chosen["maxnreg"] = _AHEAD_REGISTERS if chosen["AHEAD"] else _REGISTERS
    _tap_norm_kernel[(num_rows,)](
        stream,
        residual,
        weight,
        normed,
        added,
        scales,
        desc,
        plan,
        plan.stride(0),
        stream.stride(-2),
        residual.stride(-2),
        *strides,
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        FORM=form,
        GROUP=hidden // groups if groups else 0,
        PLUS_ONE=plus_one,
        CHECK=check,
        num_warps=warps(block),
        **chosen,
    )


def reference(
    stream: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    desc: torch.Tensor,
    plan: torch.Tensor,
    check: bool = False,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel in PyTorch, for host tensors."""
    normed, added = _normed(stream, residual, weight, eps, desc, plan, check, plus_one)
    return normed.to(stream.dtype), added


def reference_fp8(
    stream: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    desc: torch.Tensor,
    plan: torch.Tensor,
    check: bool = False,
    scale: torch.Tensor | None = None,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of `launch_fp8`."""
    normed, added = _normed(stream, residual, weight, eps, desc, plan, check, plus_one)
    found = stream.new_empty(_scales(stream, scale), dtype=torch.float32)
    if scale is None:
        scale = found.copy_((normed.abs().amax(-1, keepdim=True) / LARGEST).clamp(LEAST_SCALE))
    numbers = (normed * scale.reciprocal()).clamp(-LARGEST, LARGEST).to(FP8)
    return numbers, added, found


def reference_fp8_groups(
    stream: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    desc: torch.Tensor,
    plan: torch.Tensor,
    scales: torch.Tensor,
    check: bool = False,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of `launch_fp8_groups`."""
    normed, added = reference(stream, residual, weight, eps, desc, plan, check, plus_one)
    groups = normed.float().unflatten(-1, (scales.shape[-1], -1))
    scales.copy_((groups.abs().amax(-1).clamp(LEAST_OF_GROUP) / LARGEST).view(scales.shape))
    numbers = (groups / scales.view(groups.shape[:-1])[..., None]).clamp(-LARGEST, LARGEST)
    return numbers.flatten(-2).to(FP8), added


def _normed(
    stream: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    desc: torch.Tensor,
    plan: torch.Tensor,
    check: bool,
    plus_one: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normed rows in float32, and the sum."""
    stream, residual = stream.clone(), residual.clone()
    tap.reference(stream, residual, desc, plan, check)
    x = stream.float() + residual.float()
    added = x.to(stream.dtype)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x * (weight.float() + 1.0 if plus_one else weight.float()), added

"""The tap: read and change the rows of one hook point, as its descriptor and the row plan say."""

from __future__ import annotations

import ctypes

import torch

from tllm.runtime.descriptor import Descriptor, Flag, PlanRow
from tllm.runtime.kernels.backend import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    FLAGS = tl.constexpr(int(Descriptor.FLAGS))
    PLAN = tl.constexpr(int(Descriptor.PLAN))
    PLAN_STRIDE = tl.constexpr(int(Descriptor.PLAN_STRIDE))
    ARENA = tl.constexpr(int(Descriptor.ARENA))
    COLUMNS = tl.constexpr(int(Descriptor.COLUMNS))
    ADD_INDEX = tl.constexpr(int(Descriptor.ADD_INDEX))
    ADD_TABLE = tl.constexpr(int(Descriptor.ADD_TABLE))
    CAPTURE = tl.constexpr(int(Flag.CAPTURE))
    ADD = tl.constexpr(int(Flag.ADD))

    @triton.jit(do_not_specialize=["num_rows"])
    def _tap_kernel(
        stream_ptr,
        residual_ptr,
        desc_ptr,
        num_rows,
        stream_stride,
        residual_stride,
        HIDDEN: tl.constexpr,
        BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
        HAS_RESIDUAL: tl.constexpr,
    ):
        flags = tl.load(desc_ptr + FLAGS)
        if flags == 0:
            return
        # Independent loads first: an active tap is a chain of latencies, so keep it short.
        plan_address = tl.load(desc_ptr + PLAN)
        plan_stride = tl.load(desc_ptr + PLAN_STRIDE)
        arena_address = tl.load(desc_ptr + ARENA)
        columns_address = tl.load(desc_ptr + COLUMNS)
        add_index_address = tl.load(desc_ptr + ADD_INDEX)
        add_table_address = tl.load(desc_ptr + ADD_TABLE)
        dtype = stream_ptr.dtype.element_ty
        int_ptr = tl.pointer_type(tl.int32)
        row_ptr = tl.pointer_type(dtype)
        plan = plan_address.to(int_ptr)
        captures = (flags & CAPTURE) != 0
        adds = (flags & ADD) != 0
        offsets = tl.arange(0, BLOCK)[None, :]
        inside = offsets < HIDDEN
        step = tl.num_programs(0) * ROWS
        for first in range(tl.program_id(0) * ROWS, num_rows, step):
            row = (first + tl.arange(0, ROWS)).to(tl.int64)
            exists = row < num_rows
            destination = tl.load(plan + row, mask=exists, other=-1)
            program = tl.load(plan + plan_stride + row, mask=exists, other=0)
            intervention = tl.load(plan + 2 * plan_stride + row, mask=exists, other=-1)
            column = tl.load(
                columns_address.to(int_ptr) + program,
                mask=tl.where(captures, destination, -1) >= 0,
                other=-1,
            )
            add_row = tl.load(
                add_index_address.to(int_ptr) + intervention,
                mask=tl.where(adds, intervention, -1) >= 0,
                other=-1,
            )
            if tl.max(tl.maximum(column, add_row), axis=0) >= 0:
                touched = ((column >= 0) | (add_row >= 0))[:, None] & inside
                at = stream_ptr + row[:, None] * stream_stride + offsets
                value = tl.load(at, mask=touched, other=0.0).to(tl.float32)
                residual_at = residual_ptr + row[:, None] * residual_stride + offsets
                if HAS_RESIDUAL:
                    value += tl.load(residual_at, mask=touched, other=0.0).to(tl.float32)
                # The stream as the model's dtype holds it, as a forward hook would see it.
                seen = value.to(dtype)
                ring_row = (destination.to(tl.int64) + column) * HIDDEN
                arena = arena_address.to(row_ptr) + ring_row[:, None]
                tl.store(arena + offsets, seen, mask=(column >= 0)[:, None] & inside)
                if tl.max(add_row, axis=0) >= 0:
                    written_to = (add_row >= 0)[:, None] & inside
                    table = add_table_address.to(row_ptr) + add_row.to(tl.int64)[:, None] * HIDDEN
                    delta = tl.load(table + offsets, mask=written_to, other=0.0)
                    written = (seen.to(tl.float32) + delta.to(tl.float32)).to(dtype)
                    if HAS_RESIDUAL:
                        tl.store(residual_at, written, mask=written_to)
                        tl.store(at, tl.zeros_like(written), mask=written_to)
                    else:
                        tl.store(at, written, mask=written_to)


#: Measured on an H200 (`benchmarks/RESULTS.md`): more rows a program only made active taps slower.
_ROWS = 1
_WARPS = 4


def launch(
    stream: torch.Tensor, residual: torch.Tensor | None, desc: torch.Tensor, programs: int
) -> None:
    """Run the kernel over the rows of `stream` (`[..., hidden]`), at most `programs` at a time."""
    hidden = stream.shape[-1]
    num_rows = stream.numel() // hidden
    if num_rows == 0:
        return
    _tap_kernel[(min(triton.cdiv(num_rows, _ROWS), programs),)](
        stream,
        residual if residual is not None else stream,
        desc,
        num_rows,
        stream.stride(-2),
        residual.stride(-2) if residual is not None else 0,
        HIDDEN=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        ROWS=_ROWS,
        HAS_RESIDUAL=residual is not None,
        num_warps=_WARPS,
    )


def _at(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A view of host memory, as the kernel sees device memory."""
    count = 1
    for size in shape:
        count *= size
    buffer = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)


def reference(stream: torch.Tensor, residual: torch.Tensor | None, desc: torch.Tensor) -> None:
    """The kernel in PyTorch, for host tensors: the same descriptor, the same result."""
    fields = desc.tolist()
    flags = Flag(fields[Descriptor.FLAGS])
    if not flags:
        return
    hidden = stream.shape[-1]
    rows = stream.view(-1, hidden)
    fused = residual.view(-1, hidden) if residual is not None else None
    stride = fields[Descriptor.PLAN_STRIDE]
    plan = _at(fields[Descriptor.PLAN], torch.int32, len(PlanRow), stride)[:, : len(rows)]

    def seen(at: torch.Tensor) -> torch.Tensor:
        value = rows[at].float()
        if fused is not None:
            value = value + fused[at].float()
        return value.to(stream.dtype)

    if Flag.CAPTURE in flags:
        at = (plan[PlanRow.DESTINATION] >= 0).nonzero().squeeze(1)
        if len(at):
            program = plan[PlanRow.PROGRAM, at].long()
            columns = _at(fields[Descriptor.COLUMNS], torch.int32, int(program.max()) + 1)
            column = columns[program]
            at, column = at[column >= 0], column[column >= 0]
        if len(at):
            target = (plan[PlanRow.DESTINATION, at] + column).long()
            arena = _at(fields[Descriptor.ARENA], stream.dtype, int(target.max()) + 1, hidden)
            arena[target] = seen(at)
    if Flag.ADD in flags:
        at = (plan[PlanRow.ADD] >= 0).nonzero().squeeze(1)
        if len(at):
            intervention = plan[PlanRow.ADD, at].long()
            index = _at(fields[Descriptor.ADD_INDEX], torch.int32, int(intervention.max()) + 1)
            row = index[intervention].long()
            at, row = at[row >= 0], row[row >= 0]
        if len(at):
            table = _at(fields[Descriptor.ADD_TABLE], stream.dtype, int(row.max()) + 1, hidden)
            written = (seen(at).float() + table[row].float()).to(stream.dtype)
            if fused is not None:
                fused[at] = written
                rows[at] = torch.zeros_like(written)
            else:
                rows[at] = written

"""The tap: read and change the rows of a hook point, as its descriptor and the row plan say."""

from __future__ import annotations

import ctypes

import torch

from tllm.runtime.descriptor import (
    CHAIN_UNIT,
    FLAG_BITS,
    STAGES,
    Descriptor,
    Flag,
    Operation,
    PlanRow,
    Stage,
)
from tllm.runtime.kernels.backend import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    FLAGS = tl.constexpr(int(Descriptor.FLAGS))
    ARENA = tl.constexpr(int(Descriptor.ARENA))
    VECTORS = tl.constexpr(int(Descriptor.VECTORS))
    OPERATIONS = tl.constexpr(int(Descriptor.OPERATIONS))
    STAGE = tl.constexpr(int(Descriptor.STAGE))
    STAGE_FIELDS = tl.constexpr(int(Stage.SIZE))
    STAGE_COUNT = tl.constexpr(STAGES)
    COLUMNS = tl.constexpr(int(Stage.COLUMNS))
    ADD_INDEX = tl.constexpr(int(Stage.ADD_INDEX))
    ADD_TABLE = tl.constexpr(int(Stage.ADD_TABLE))
    STEERING = tl.constexpr(int(Stage.STEERING))
    CAPTURE_FLAG = tl.constexpr(int(Flag.CAPTURE))
    ADD_FLAG = tl.constexpr(int(Flag.ADD))
    STEER_FLAG = tl.constexpr(int(Flag.STEER))
    BITS = tl.constexpr(FLAG_BITS)
    FLAG_MASK = tl.constexpr(2**FLAG_BITS - 1)
    UNIT = tl.constexpr(CHAIN_UNIT)
    WORDS = tl.constexpr(int(Operation.SIZE))
    CHAIN = tl.constexpr(int(Operation.CHAIN))
    VECTOR = tl.constexpr(int(Operation.VECTOR))
    ADD = tl.constexpr(int(Operation.ADD))
    NORM = tl.constexpr(int(Operation.NORM))
    COMPONENT = tl.constexpr(int(Operation.COMPONENT))
    STRENGTH = tl.constexpr(int(Operation.STRENGTH))
    LOW = tl.constexpr(int(Operation.LOW))
    HIGH = tl.constexpr(int(Operation.HIGH))
    PLAN_DESTINATION = tl.constexpr(int(PlanRow.DESTINATION))
    PLAN_PROGRAM = tl.constexpr(int(PlanRow.PROGRAM))
    PLAN_ADD = tl.constexpr(int(PlanRow.ADD))
    PLAN_STEER = tl.constexpr(int(PlanRow.STEER))

    @triton.jit
    def _operate(value, operation, vectors, offsets, inside, HIDDEN: tl.constexpr):
        """One steering operation on a row `[BLOCK]`; padding stays 0."""
        coefficients = operation.to(tl.pointer_type(tl.float32))
        index = tl.load(operation + VECTOR).to(tl.int64)
        add = tl.load(coefficients + ADD)
        norm = tl.load(coefficients + NORM)
        component = tl.load(coefficients + COMPONENT)
        strength = tl.load(coefficients + STRENGTH)
        low = tl.load(coefficients + LOW)
        high = tl.load(coefficients + HIGH)
        vector = tl.load(vectors + index * HIDDEN + offsets, mask=inside, other=0.0)
        vector = vector.to(tl.float32)
        scale = add
        if norm != 0.0:
            scale += norm * tl.sqrt(tl.sum(value * value, axis=0))
        if tl.abs(component) + tl.abs(strength) != 0.0:
            along = tl.sum(value * vector, axis=0)
            clipped = tl.minimum(tl.maximum(along, low), high)
            scale += component * along + strength * (clipped - along)
        return value + scale * vector

    @triton.jit(do_not_specialize=["num_rows", "plan_stride"])
    def _tap_kernel(
        stream_ptr,
        residual_ptr,
        desc_ptr,
        plan_ptr,
        num_rows,
        plan_stride,
        stream_stride,
        residual_stride,
        HIDDEN: tl.constexpr,
        BLOCK: tl.constexpr,
        HAS_RESIDUAL: tl.constexpr,
    ):
        all_flags = tl.load(desc_ptr + FLAGS)
        if all_flags == 0:
            return
        # An active tap is a chain of latencies, so independent loads stand side by side:
        # addresses and plan; then the stream and the tables; then vectors.
        dtype = stream_ptr.dtype.element_ty
        row_ptr = tl.pointer_type(dtype)
        int_ptr = tl.pointer_type(tl.int32)
        arena = tl.load(desc_ptr + ARENA).to(row_ptr)
        vectors = tl.load(desc_ptr + VECTORS).to(row_ptr)
        operations = tl.load(desc_ptr + OPERATIONS).to(int_ptr)
        either = all_flags | (all_flags >> BITS)
        captures = (either & CAPTURE_FLAG) != 0
        adds = (either & ADD_FLAG) != 0
        steers = (either & STEER_FLAG) != 0
        offsets = tl.arange(0, BLOCK)
        inside = offsets < HIDDEN
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            planned = plan_ptr + row
            destination = tl.load(planned + PLAN_DESTINATION * plan_stride)
            program = tl.load(planned + PLAN_PROGRAM * plan_stride)
            add_row = tl.load(planned + PLAN_ADD * plan_stride)
            steering_row = tl.load(planned + PLAN_STEER * plan_stride)
            destination = tl.where(captures, destination, -1)
            add_row = tl.where(adds, add_row, -1)
            steering_row = tl.where(steers, steering_row, -1)
            if tl.maximum(tl.maximum(destination, add_row), steering_row) >= 0:
                far = tl.full((), 0, tl.int64) + row
                at = stream_ptr + far * stream_stride + offsets
                value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                residual_at = residual_ptr + far * residual_stride + offsets
                if HAS_RESIDUAL:
                    value += tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
                    # As the model's dtype holds it, as a forward hook would see it.
                    value = value.to(dtype).to(tl.float32)
                changed = 0
                for stage in tl.static_range(STAGE_COUNT):
                    flags = (all_flags >> (BITS * stage)) & FLAG_MASK
                    if flags != 0:
                        fields = desc_ptr + STAGE + STAGE_FIELDS * stage
                        if ((flags & CAPTURE_FLAG) != 0) & (destination >= 0):
                            column = tl.load(tl.load(fields + COLUMNS).to(int_ptr) + program)
                            if column >= 0:
                                place = arena + (destination + column).to(tl.int64) * HIDDEN
                                tl.store(place + offsets, value.to(dtype), mask=inside)
                        if ((flags & ADD_FLAG) != 0) & (add_row >= 0):
                            index = tl.load(tl.load(fields + ADD_INDEX).to(int_ptr) + add_row)
                            if index >= 0:
                                table = tl.load(fields + ADD_TABLE).to(row_ptr)
                                table += index.to(tl.int64) * HIDDEN
                                delta = tl.load(table + offsets, mask=inside, other=0.0)
                                value += delta.to(tl.float32)
                                changed = 1
                        if ((flags & STEER_FLAG) != 0) & (steering_row >= 0):
                            first = tl.load(fields + STEERING).to(int_ptr) + steering_row * WORDS
                            chain = tl.load(first + CHAIN)
                            count = chain % UNIT
                            if count > 0:
                                value = _operate(value, first, vectors, offsets, inside, HIDDEN)
                                following = operations + (chain // UNIT) * WORDS
                                for i in range(count - 1):
                                    value = _operate(
                                        value,
                                        following + i * WORDS,
                                        vectors,
                                        offsets,
                                        inside,
                                        HIDDEN,
                                    )
                                changed = 1
                        value = value.to(dtype).to(tl.float32)
                if changed > 0:
                    written = value.to(dtype)
                    if HAS_RESIDUAL:
                        tl.store(residual_at, written, mask=inside)
                        tl.store(at, tl.zeros_like(written), mask=inside)
                    else:
                        tl.store(at, written, mask=inside)


def launch(
    stream: torch.Tensor,
    residual: torch.Tensor | None,
    desc: torch.Tensor,
    plan: torch.Tensor,
    programs: int,
) -> None:
    """Run the kernel over the rows of `stream` (`[..., hidden]`), at most `programs` at a time."""
    hidden = stream.shape[-1]
    num_rows = stream.numel() // hidden
    if num_rows == 0:
        return
    block = triton.next_power_of_2(hidden)
    _tap_kernel[(min(num_rows, programs),)](
        stream,
        residual if residual is not None else stream,
        desc,
        plan,
        num_rows,
        plan.stride(0),
        stream.stride(-2),
        residual.stride(-2) if residual is not None else 0,
        HIDDEN=hidden,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=max(4, min(16, block // 1024)),
    )


def _at(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A view of host memory, as the kernel sees device memory."""
    count = 1
    for size in shape:
        count *= size
    buffer = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)


def _operate_reference(
    rows: torch.Tensor, operation: torch.Tensor, vectors_at: int, dtype: torch.dtype
) -> torch.Tensor:
    """One steering operation on float32 rows `[rows, hidden]`; see `Operation`."""
    hidden = rows.shape[1]
    index = int(operation[Operation.VECTOR])
    vector = _at(vectors_at + index * hidden * dtype.itemsize, dtype, hidden).float()
    add, norm, component, strength, low, high = (
        operation[Operation.ADD :].view(torch.float32).tolist()
    )
    along = rows @ vector
    scale = add + component * along + strength * (along.clamp(low, high) - along)
    scale = scale + norm * rows.norm(dim=1)
    return rows + scale[:, None] * vector


def reference(
    stream: torch.Tensor, residual: torch.Tensor | None, desc: torch.Tensor, plan: torch.Tensor
) -> None:
    """The kernel in PyTorch, for host tensors: the same descriptor, the same result."""
    fields = desc.tolist()
    if not fields[Descriptor.FLAGS]:
        return
    hidden, dtype = stream.shape[-1], stream.dtype
    rows = stream.view(-1, hidden)
    fused = residual.view(-1, hidden) if residual is not None else None
    plan = plan[:, : len(rows)].long()
    touched = (plan[[PlanRow.DESTINATION, PlanRow.ADD, PlanRow.STEER]] >= 0).any(0)
    at = touched.nonzero().squeeze(1)
    if not len(at):
        return
    plan = plan[:, at]
    value = rows[at].float()
    if fused is not None:
        value = (value + fused[at].float()).to(dtype).float()
    changed = torch.zeros(len(at), dtype=torch.bool)
    for stage in range(STAGES):
        flags = Flag((fields[Descriptor.FLAGS] >> (FLAG_BITS * stage)) & (2**FLAG_BITS - 1))
        base = Descriptor.STAGE + Stage.SIZE * stage
        if Flag.CAPTURE in flags:
            _capture(value.to(dtype), plan, fields[base + Stage.COLUMNS], fields[Descriptor.ARENA])
        if Flag.ADD in flags:
            adding = (plan[PlanRow.ADD] >= 0).nonzero().squeeze(1)
            if len(adding):
                of = plan[PlanRow.ADD, adding]
                table = _at(fields[base + Stage.ADD_INDEX], torch.int32, int(of.max()) + 1)
                row = table[of].long()
                adding, row = adding[row >= 0], row[row >= 0]
            if len(adding):
                deltas = _at(fields[base + Stage.ADD_TABLE], dtype, int(row.max()) + 1, hidden)
                value[adding] += deltas[row].float()
                changed[adding] = True
        if Flag.STEER in flags:
            for row in plan[PlanRow.STEER].unique().tolist():
                if row >= 0:
                    steered = (plan[PlanRow.STEER] == row).nonzero().squeeze(1)
                    if _steer(value, steered, row, fields, base, dtype):
                        changed[steered] = True
        value = value.to(dtype).float()
    at, written = at[changed], value[changed].to(dtype)
    if fused is not None:
        fused[at] = written
        rows[at] = torch.zeros_like(written)
    else:
        rows[at] = written


def _capture(seen: torch.Tensor, plan: torch.Tensor, columns_at: int, arena_at: int) -> None:
    at = (plan[PlanRow.DESTINATION] >= 0).nonzero().squeeze(1)
    if len(at):
        program = plan[PlanRow.PROGRAM, at]
        column = _at(columns_at, torch.int32, int(program.max()) + 1)[program].long()
        at, column = at[column >= 0], column[column >= 0]
    if len(at):
        target = plan[PlanRow.DESTINATION, at] + column
        arena = _at(arena_at, seen.dtype, int(target.max()) + 1, seen.shape[1])
        arena[target] = seen[at]


def _steer(
    value: torch.Tensor,
    steered: torch.Tensor,
    row: int,
    fields: list[int],
    base: int,
    dtype: torch.dtype,
) -> bool:
    """Apply the operations of a steering row; False when it has none at this point."""
    size = int(Operation.SIZE)
    first = _at(fields[base + Stage.STEERING] + 4 * size * row, torch.int32, size)
    count, following = int(first[0]) % CHAIN_UNIT, int(first[0]) // CHAIN_UNIT
    chain = [first] if count else []
    if count > 1:
        rest = fields[Descriptor.OPERATIONS] + 4 * size * following
        chain += list(_at(rest, torch.int32, count - 1, size))
    for operation in chain:
        value[steered] = _operate_reference(
            value[steered], operation, fields[Descriptor.VECTORS], dtype
        )
    return bool(chain)

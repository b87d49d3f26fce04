"""The tap: read and change the rows of a hook point, as its descriptor and the row plan say."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tllm.runtime import columns
from tllm.runtime.columns import FLAG_BITS, STAGES, Column, IntArray
from tllm.runtime.descriptor import (
    CHAIN_UNIT,
    HAS_SUM,
    KIND_UNIT,
    STAGE_FIELDS,
    Descriptor,
    Operation,
    stage_field,
)
from tllm.runtime.kernels.addresses import view_at, words_at
from tllm.runtime.kernels.backend import HAS_TRITON, starts_early
from tllm.runtime.kernels.judging import judge_reference, shares
from tllm.runtime.kernels.operations import operate_reference
from tllm.runtime.kernels.replacements import put_reference

if HAS_TRITON:
    import triton
    import triton.language as tl

    from tllm.runtime.kernels.addresses import row_at
    from tllm.runtime.kernels.judging import judge, share_of
    from tllm.runtime.kernels.operations import operate, operate_with_several, operation_at
    from tllm.runtime.kernels.replacements import patch

    FLAGS = tl.constexpr(int(Descriptor.FLAGS))
    ARENA = tl.constexpr(int(Descriptor.ARENA))
    VECTORS = tl.constexpr(int(Descriptor.VECTORS))
    OPERATIONS = tl.constexpr(int(Descriptor.OPERATIONS))
    RING_OFFSETS = tl.constexpr(stage_field("RING_OFFSETS"))
    ADD_INDEX = tl.constexpr(stage_field("ADD_INDEX"))
    ADD_TABLE = tl.constexpr(stage_field("ADD_TABLE"))
    STEERING = tl.constexpr(stage_field("STEERING"))
    SUMS = tl.constexpr(stage_field("SUMS"))
    NOT_FINITE = tl.constexpr(stage_field("NOT_FINITE"))
    LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
    CAPTURE_FLAG = tl.constexpr(Column.PROGRAM.flag)
    ADD_FLAG = tl.constexpr(Column.ADD.flag)
    STEER_FLAG = tl.constexpr(Column.STEER.flag)
    PATCH_FLAG = tl.constexpr(Column.PATCH.flag)
    GATE_FLAG = tl.constexpr(Column.GATE.flag)
    SEQUENCE_FLAG = tl.constexpr(Column.SEQUENCE.flag)
    BITS = tl.constexpr(FLAG_BITS)
    MASK = tl.constexpr(2**FLAG_BITS - 1)
    UNIT = tl.constexpr(CHAIN_UNIT)
    SUM = tl.constexpr(HAS_SUM)
    WORDS = tl.constexpr(int(Operation.SIZE))
    CHAIN = tl.constexpr(int(Operation.CHAIN))
    KIND = tl.constexpr(KIND_UNIT)
    PLAN_DESTINATION = tl.constexpr(columns.DESTINATION)
    PLAN_PROGRAM = tl.constexpr(Column.PROGRAM.plan_row)
    PLAN_ADD = tl.constexpr(Column.ADD.plan_row)
    PLAN_STEER = tl.constexpr(Column.STEER.plan_row)
    PLAN_PATCH = tl.constexpr(Column.PATCH.plan_row)
    PLAN_SEQUENCE = tl.constexpr(Column.SEQUENCE.plan_row)

    @triton.jit
    def _stage(fields):
        """The addresses of one stage; `fields` is the descriptor, one word on for the second."""
        return (
            tl.load(fields + RING_OFFSETS, eviction_policy="evict_last"),
            tl.load(fields + ADD_INDEX, eviction_policy="evict_last"),
            tl.load(fields + ADD_TABLE, eviction_policy="evict_last"),
            tl.load(fields + STEERING, eviction_policy="evict_last"),
            tl.load(fields + SUMS, eviction_policy="evict_last"),
        )

    @triton.jit
    def _look_up(stage, flags, planned, offsets, inside, HIDDEN: tl.constexpr, dtype: tl.constexpr):
        """What a stage does to a row: which of its ring rows, row of the add table, that table,
        chain, first operation, sum."""
        ring_offsets, add_index, add_table, steering, sums = stage
        destination, program, add_row, steering_row, _ = planned
        int_ptr = tl.pointer_type(tl.int32)
        captures = tl.where((flags & CAPTURE_FLAG) != 0, destination, -1) >= 0
        adds = tl.where((flags & ADD_FLAG) != 0, add_row, -1) >= 0
        steers = tl.where((flags & STEER_FLAG) != 0, steering_row, -1) >= 0
        known_row = tl.where(steers, steering_row, 0)
        entry = steering.to(int_ptr) + known_row * WORDS
        summed = row_at(sums.to(tl.pointer_type(dtype)), known_row, offsets, HIDDEN)
        has_sums = tl.where(steers, sums, 0) != 0
        return (
            tl.load(ring_offsets.to(int_ptr) + program, mask=captures, other=-1),
            tl.load(add_index.to(int_ptr) + add_row, mask=adds, other=-1),
            add_table,
            tl.load(entry + CHAIN, mask=steers, other=0, eviction_policy="evict_last"),
            operation_at(entry, steers),
            tl.load(
                summed,
                mask=tl.where(has_sums, inside, False),
                other=0.0,
                eviction_policy="evict_last",
            ),
        )

    @triton.jit
    def _begin(desc_ptr, plan_ptr, plan_stride, AHEAD: tl.constexpr, dtype: tl.constexpr):
        """What is known of a row before it is read.

        Returns the flags, the addresses of arena, vectors and operations, those of both stages (if
        AHEAD), what the plan says (destination, program, add row, steering row, patch row), and
        whether there is anything to do: `wanted >= 0`. A tap is a chain of latencies, and in a
        forward pass of cold ones: weights have swept the cache since the last pass. So loads that
        do not need each other stand side by side, and the small tables ask to be evicted last.
        """
        flags = tl.load(desc_ptr + FLAGS, eviction_policy="evict_last")
        row_ptr = tl.pointer_type(dtype)
        arena = tl.load(desc_ptr + ARENA, eviction_policy="evict_last").to(row_ptr)
        vectors = tl.load(desc_ptr + VECTORS, eviction_policy="evict_last").to(row_ptr)
        operations = tl.load(desc_ptr + OPERATIONS, eviction_policy="evict_last").to(
            tl.pointer_type(tl.int32)
        )
        addresses = (0, 0)
        if AHEAD:
            addresses = (_stage(desc_ptr), _stage(desc_ptr + 1))
        at = plan_ptr + tl.program_id(0)
        destination = tl.load(at + PLAN_DESTINATION * plan_stride, eviction_policy="evict_last")
        program = tl.load(at + PLAN_PROGRAM * plan_stride, eviction_policy="evict_last")
        add_row = tl.load(at + PLAN_ADD * plan_stride, eviction_policy="evict_last")
        steering_row = tl.load(at + PLAN_STEER * plan_stride, eviction_policy="evict_last")
        either = flags | (flags >> BITS)
        # The only one that waits for the flags: it is read where anybody patches, and else nothing.
        patching = (either & PATCH_FLAG) != 0
        patch_row = tl.load(
            at + PLAN_PATCH * plan_stride, mask=patching, other=-1, eviction_policy="evict_last"
        )
        wanted = tl.where((either & CAPTURE_FLAG) != 0, destination, -1)
        wanted = tl.maximum(wanted, tl.where((either & ADD_FLAG) != 0, add_row, -1))
        steers = (either & (STEER_FLAG | GATE_FLAG)) != 0
        wanted = tl.maximum(wanted, tl.where(steers, steering_row, -1))
        wanted = tl.maximum(wanted, patch_row)
        planned = (destination, program, add_row, steering_row, patch_row)
        return flags, (arena, vectors, operations), addresses, planned, wanted

    @triton.jit
    def _first(flags):
        """The first stage that does anything."""
        return tl.where((flags & MASK) != 0, 0, 1)

    @triton.jit
    def _look_ahead(
        addresses, flags, planned, offsets, inside, HIDDEN: tl.constexpr, dtype: tl.constexpr
    ):
        """What the first stage that does anything does to a row."""
        stage = _first(flags)
        first, second = addresses
        fields = (
            tl.where(stage == 0, first[0], second[0]),
            tl.where(stage == 0, first[1], second[1]),
            tl.where(stage == 0, first[2], second[2]),
            tl.where(stage == 0, first[3], second[3]),
            tl.where(stage == 0, first[4], second[4]),
        )
        return _look_up(fields, flags >> (BITS * stage), planned, offsets, inside, HIDDEN, dtype)

    @triton.jit
    def _vector(vectors, operation, wanted, offsets, inside, HIDDEN: tl.constexpr):
        """The vector of an operation, if wanted."""
        at = row_at(vectors, operation[0], offsets, HIDDEN)
        return tl.load(at, mask=tl.where(wanted, inside, False), other=0.0)

    @triton.jit
    def _first_vector(vectors, found, offsets, inside, HIDDEN: tl.constexpr):
        """The vector of the first operation of a stage."""
        return _vector(vectors, found[4], (found[3] & (SUM - 1)) > 0, offsets, inside, HIDDEN)

    @triton.jit
    def _work(
        value,
        desc_ptr,
        flags,
        plan_ptr,
        plan_stride,
        planned,
        tables,
        ahead,
        offsets,
        inside,
        HIDDEN: tl.constexpr,
        AHEAD: tl.constexpr,
    ):
        """The stages of a tap on a row `[BLOCK]`, in turn: capture, gate, patch, add, steer.

        Returns the row, and whether it changed. If AHEAD, `ahead` is what the first stage does and
        the vector of its first operation. Stages and operations are loops: a kernel this short
        waits for its own instructions, and copies of them would be more to wait for.
        """
        arena, vectors, operations = tables
        dtype = arena.dtype.element_ty
        changed = 0
        begin = _first(flags)
        end = tl.where((flags >> BITS) != 0, 2, 1)
        for stage in range(begin, end):
            own = flags >> (BITS * stage)
            if AHEAD and stage == begin:
                found, vector = ahead
            else:
                fields = _stage(desc_ptr + stage)
                found = _look_up(fields, own, planned, offsets, inside, HIDDEN, dtype)
                vector = _first_vector(vectors, found, offsets, inside, HIDDEN)
            ring_offset, add, add_table, chain, operation, summed = found
            if ring_offset >= 0:
                place = row_at(arena, planned[0] + ring_offset, offsets, HIDDEN)
                tl.store(place, value.to(dtype), mask=inside)
            if tl.where((own & GATE_FLAG) != 0, planned[3], -1) >= 0:
                judge(
                    value,
                    desc_ptr + stage,
                    planned[3],
                    plan_ptr,
                    plan_stride,
                    offsets,
                    inside,
                    HIDDEN,
                )
                # Looked up again: what a score takes in registers would push it into memory.
                fields = _stage(desc_ptr + stage)
                found = _look_up(fields, own, planned, offsets, inside, HIDDEN, dtype)
                vector = _first_vector(vectors, found, offsets, inside, HIDDEN)
                ring_offset, add, add_table, chain, operation, summed = found
            if tl.where((own & PATCH_FLAG) != 0, planned[4], -1) >= 0:
                value, patched = patch(
                    value, desc_ptr + stage, planned[4], offsets, inside, HIDDEN, dtype
                )
                changed = tl.maximum(changed, patched)
            if add >= 0:
                row = row_at(add_table.to(tl.pointer_type(dtype)), add, offsets, HIDDEN)
                value += tl.load(row, mask=inside, other=0.0).to(tl.float32)
                changed = 1
            if chain > 0:
                if (chain & SUM) != 0:
                    value += summed.to(tl.float32)
                    changed = 1
                count = chain & (SUM - 1)
                following = operations + (chain // UNIT) * WORDS
                for i in range(count):
                    share = share_of(desc_ptr + stage, operation, plan_ptr, plan_stride)
                    changed = tl.where(share != 0.0, 1, changed)
                    if operation[7] < KIND:
                        value = operate(value, vector, operation, share)
                    else:
                        value = operate_with_several(
                            value, vector, operation, share, tables, offsets, inside, HIDDEN
                        )
                    operation = operation_at(following + i * WORDS, i + 1 < count)
                    vector = _vector(vectors, operation, i + 1 < count, offsets, inside, HIDDEN)
            # As the model's dtype holds it, as the next forward hook would see it.
            value = value.to(dtype).to(tl.float32)
        return value, changed

    @triton.jit
    def sequence_of(flags, plan_ptr, plan_stride):
        """Which sequence a row is of, where it is to be checked; else -1."""
        at = plan_ptr + PLAN_SEQUENCE * plan_stride + tl.program_id(0)
        return tl.load(at, mask=(flags & SEQUENCE_FLAG) != 0, other=-1)

    @triton.jit
    def checked(value, changed, desc_ptr, sequence):
        """A row as it is if its square is finite, else zeros, of which the host is told."""
        if tl.where(tl.sum(value * value, axis=0) <= LARGEST, 0, 1) != 0:  # of NaN nothing holds
            value = tl.zeros_like(value)
            changed = 1
            told = tl.load(desc_ptr + NOT_FINITE).to(tl.pointer_type(tl.int32))
            tl.store(told + 1 + tl.program_id(0), sequence)
            tl.store(told, 1)
        return value, changed

    @triton.jit(do_not_specialize=["plan_stride"])
    def _tap_kernel(
        stream_ptr,
        residual_ptr,
        desc_ptr,
        plan_ptr,
        plan_stride,
        stream_stride,
        residual_stride,
        HIDDEN: tl.constexpr,
        BLOCK: tl.constexpr,
        HAS_RESIDUAL: tl.constexpr,
        CHECK: tl.constexpr,
        AHEAD: tl.constexpr,
        EARLY: tl.constexpr,
    ):
        # With EARLY this grid may begin while the kernel before it ends: whatever that one does
        # not write is looked up before `gdc_wait`. Descriptors, plan and tables are written before
        # the pass, and never by the kernel just before (`Taps.separate`).
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
        if wanted < 0:
            if EARLY:
                tl.extra.cuda.gdc_wait()
            return
        ahead = (0, 0)
        if AHEAD:
            found = _look_ahead(addresses, flags, planned, offsets, inside, HIDDEN, dtype)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        number = tl.program_id(0).to(tl.int64)
        at = stream_ptr + number * stream_stride + offsets
        residual_at = residual_ptr + number * residual_stride + offsets
        row = tl.load(at, mask=inside, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_at, mask=inside, other=0.0)
        if AHEAD:
            ahead = (found, _first_vector(tables[1], found, offsets, inside, HIDDEN))
        value = row.to(tl.float32)
        if HAS_RESIDUAL:
            value += residual.to(tl.float32)
            value = value.to(dtype).to(tl.float32)
        value, changed = _work(
            value,
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
        if sequence >= 0:
            value, changed = checked(value, changed, desc_ptr, sequence)
        if changed > 0:
            written = value.to(dtype)
            if HAS_RESIDUAL:
                tl.store(residual_at, written, mask=inside)
                tl.store(at, tl.zeros_like(written), mask=inside)
            else:
                tl.store(at, written, mask=inside)


_FEW_ROWS = 512


def options(num_rows: int, device: torch.device) -> dict[str, Any]:
    """How kernels of taps are launched.

    A few rows leave most of the card idle: what is done to them is looked up ahead, while the
    kernel before still runs. With many rows that would only cost registers.
    """
    if num_rows > _FEW_ROWS:
        return {"AHEAD": False, "EARLY": False}
    if not starts_early(device):
        return {"AHEAD": True, "EARLY": False}
    return {"AHEAD": True, "EARLY": True, "launch_pdl": True}


def launch(
    stream: torch.Tensor,
    residual: torch.Tensor | None,
    desc: torch.Tensor,
    plan: torch.Tensor,
    check: bool = False,
) -> None:
    """Run the kernel over the rows of `stream` (`[..., hidden]`).

    Args:
        check: whether rows may have to be finite here (`Column.SEQUENCE`).
    """
    hidden = stream.shape[-1]
    num_rows = stream.numel() // hidden
    if num_rows == 0:
        return
    block = triton.next_power_of_2(hidden)
    # Many warps for few rows, few for many. Measured on an H200 (`benchmarks/HISTORY.md`).
    chosen = options(num_rows, stream.device)
    elements = 16 if chosen["AHEAD"] else 32
    _tap_kernel[(num_rows,)](
        stream,
        residual if residual is not None else stream,
        desc,
        plan,
        plan.stride(0),
        stream.stride(-2),
        residual.stride(-2) if residual is not None else 0,
        HIDDEN=hidden,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        CHECK=check,
        num_warps=max(4, min(16, block // (32 * elements))),
        **chosen,
    )


_FIRST_STAGE = [(name, stage_field(name)) for name in STAGE_FIELDS]
_ALL_FLAGS = (1 << FLAG_BITS) - 1
_LOOKED_AT = [
    columns.DESTINATION,
    *(column.plan_row for column in (Column.ADD, Column.STEER, Column.PATCH)),
]


def reference(
    stream: torch.Tensor,
    residual: torch.Tensor | None,
    desc: torch.Tensor,
    plan: torch.Tensor,
    check: bool = False,
) -> None:
    """The kernel in PyTorch, for host tensors: the same descriptor, the same result."""
    fields = desc.tolist()
    if not fields[Descriptor.FLAGS]:
        return
    hidden = stream.shape[-1]
    rows = stream.view(-1, hidden)
    fused = residual.view(-1, hidden) if residual is not None else None
    _work_reference(rows, fused, fields, plan)
    if check and fields[Descriptor.FLAGS] & Column.SEQUENCE.flag:
        _check(rows, fused, fields, plan)


def _work_reference(
    rows: torch.Tensor, fused: torch.Tensor | None, fields: list[int], plan: torch.Tensor
) -> None:
    """The stages of a tap, on rows `[tokens, hidden]` or their sum with `fused`."""
    dtype = rows.dtype
    # What is looked up is looked up with NumPy: of so few numbers an operator of torch costs more.
    planned = plan.numpy()[:, : len(rows)]
    at = (planned[_LOOKED_AT] >= 0).any(0).nonzero()[0]
    if not len(at):
        return
    whole = len(at) == len(rows)
    planned, index = (planned, None) if whole else (planned[:, at], torch.from_numpy(at))
    value = (rows if index is None else rows[index]).float()
    if fused is not None:
        value = (value + (fused if index is None else fused[index]).float()).to(dtype).float()
    elif whole and dtype == torch.float32:
        value = value.clone()
    changed = np.zeros(len(at), bool)
    for stage in range(STAGES):
        flags = fields[Descriptor.FLAGS] >> (FLAG_BITS * stage)
        if not flags & _ALL_FLAGS:
            continue
        at_stage = {name: fields[word + stage] for name, word in _FIRST_STAGE}
        if flags & Column.PROGRAM.flag:
            _capture(value.to(dtype), planned, at_stage["RING_OFFSETS"], fields[Descriptor.ARENA])
        if flags & Column.GATE.flag:
            judge_reference(value, planned, at, at_stage)
        if flags & Column.PATCH.flag:
            changed[put_reference(value, planned, at_stage, dtype)] = True
        if flags & Column.ADD.flag:
            changed[_add(value, planned, at_stage, dtype)] = True
        if flags & Column.STEER.flag:
            changed |= _steer(value, planned, at, fields, at_stage, dtype)
        value = value.to(dtype).float()
    if whole and changed.all():
        (rows if fused is None else fused).copy_(value)
        if fused is not None:
            rows.zero_()
        return
    if not changed.any():  # as where rows are only captured
        return
    written_at, written = torch.from_numpy(at[changed]), value[torch.from_numpy(changed)].to(dtype)
    if fused is not None:
        fused[written_at] = written
        rows[written_at] = torch.zeros_like(written)
    else:
        rows[written_at] = written


def _check(
    rows: torch.Tensor, fused: torch.Tensor | None, fields: list[int], plan: torch.Tensor
) -> None:
    """Make zeros of rows whose square is not finite, and tell of what sequences they are."""
    found = rows.float() if fused is None else rows.float() + fused.float()
    wrong = ~found.square().sum(1).isfinite().numpy()
    if not wrong.any():
        return
    sequences = plan.numpy()[Column.SEQUENCE.plan_row, : len(rows)]
    at = np.flatnonzero(wrong & (sequences >= 0))
    if not len(at):
        return
    told = words_at(fields[stage_field("NOT_FINITE")], 1 + len(rows))
    told[1 + at] = sequences[at]
    told[0] = 1
    index = torch.from_numpy(at)
    rows[index] = 0.0
    if fused is not None:
        fused[index] = 0.0


def _capture(seen: torch.Tensor, planned: IntArray, offsets_at: int, arena_at: int) -> None:
    destination = planned[columns.DESTINATION]
    at = (destination >= 0).nonzero()[0]
    if len(at):
        program = planned[Column.PROGRAM.plan_row, at]
        offset = words_at(offsets_at, int(program.max()) + 1)[program]
        at, offset = at[offset >= 0], offset[offset >= 0]
    if len(at):
        target = destination[at].astype(np.int64) + offset
        arena = view_at(arena_at, seen.dtype, int(target.max()) + 1, seen.shape[1])
        captured = seen if len(at) == len(seen) else seen[torch.from_numpy(at)]
        arena.index_copy_(0, torch.from_numpy(target), captured)


def _add(
    value: torch.Tensor, planned: IntArray, at_stage: dict[str, int], dtype: torch.dtype
) -> npt.NDArray[np.int64]:
    """Add what consumers write; returns which rows have changed."""
    of = planned[Column.ADD.plan_row]
    adding = (of >= 0).nonzero()[0]
    if len(adding):
        of = of[adding]
        row = words_at(at_stage["ADD_INDEX"], int(of.max()) + 1)[of]
        adding, row = adding[row >= 0], row[row >= 0]
    if len(adding):
        deltas = view_at(at_stage["ADD_TABLE"], dtype, int(row.max()) + 1, value.shape[1])
        value.index_add_(0, torch.from_numpy(adding), deltas[torch.from_numpy(row)].float())
    return adding


def _steer(
    value: torch.Tensor,
    planned: IntArray,
    tokens: npt.NDArray[np.int64],
    fields: list[int],
    at_stage: dict[str, int],
    dtype: torch.dtype,
) -> npt.NDArray[np.bool_]:
    """Do what the steering rows say; returns `[rows]`, which have changed.

    All rows at once: those of a batch may each have a steering row of its own.

    Args:
        planned: of the rows of `value`.
        tokens: which of the batch they are.
    """
    size, hidden = int(Operation.SIZE), value.shape[1]
    changed = np.zeros(len(value), bool)
    row = planned[Column.STEER.plan_row]
    steered = (row >= 0).nonzero()[0]
    if not len(steered):
        return changed
    row = row[steered]
    entries = words_at(at_stage["STEERING"], int(row.max()) + 1, size)[row]
    chain = entries[:, Operation.CHAIN]
    summed = (chain & HAS_SUM) != 0
    if summed.any():
        with_sum, of = steered[summed], row[summed]
        sums = view_at(at_stage["SUMS"], dtype, int(of.max()) + 1, hidden)[torch.from_numpy(of)]
        if len(with_sum) == len(value):
            value += sums.float()
        else:
            value.index_add_(0, torch.from_numpy(with_sum), sums.float())
        changed[with_sum] = True
    count = chain & (HAS_SUM - 1)
    for number in range(int(count.max())):
        left = (count > number).nonzero()[0]
        operations = entries[left]
        if number:  # the first stands in the entry
            following = chain[left] // CHAIN_UNIT + (number - 1)
            end = int(following.max()) + 1
            operations = words_at(fields[Descriptor.OPERATIONS], end, size)[following]
        at = steered[left]
        share = shares(operations[:, Operation.GATE], planned, at, tokens, at_stage)
        changed[at] |= (share != 0).numpy()
        index = torch.from_numpy(at)
        value[index] = operate_reference(
            value[index], torch.from_numpy(operations), fields, dtype, share
        )
    return changed

"""What a sequence remembers of its conditions, as taps write and read it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tllm.runtime.columns import Column, IntArray
from tllm.runtime.descriptor import SCOPE_UNIT, stage_field
from tllm.runtime.kernels.addresses import view_at, words_at
from tllm.runtime.kernels.backend import HAS_TRITON
from tllm.runtime.latches import NEXT
from tllm.spec.gates import MAX_GATES

if HAS_TRITON:
    import triton
    import triton.language as tl

    LATCHES = tl.constexpr(stage_field("LATCHES"))
    HELD = tl.constexpr(stage_field("HELD"))
    ROW_SUMS = tl.constexpr(stage_field("ROW_SUMS"))
    GATE_COUNT = tl.constexpr(MAX_GATES)
    SCOPED = tl.constexpr(SCOPE_UNIT)
    SCOPE_NEXT = tl.constexpr(NEXT)
    PLAN_GATE = tl.constexpr(Column.GATE.plan_row)
    PLAN_POSITION = tl.constexpr(Column.POSITION.plan_row)

    @triton.jit
    def _latch(fields, plan_ptr, plan_stride):
        """What the sequence of a row remembers, and which token of it the row is; -1 for none."""
        at = plan_ptr + tl.program_id(0)
        row = tl.load(at + PLAN_GATE * plan_stride)
        cells = tl.load(fields + LATCHES).to(tl.pointer_type(tl.int32))
        cells += tl.maximum(row, 0).to(tl.int64) * (2 * GATE_COUNT)
        return cells, tl.where(row >= 0, tl.load(at + PLAN_POSITION * plan_stride), -1)

    @triton.jit
    def _held(fields, cells, number, position, known):
        """The word with the bit of a position, and the bit."""
        words = tl.load(fields + HELD).to(tl.pointer_type(tl.int32))
        start = tl.load(cells + GATE_COUNT + number, mask=known, other=0)
        return words + start + tl.where(known, position // 32, 0), position % 32

    @triton.jit
    def recalled(fields, gate, plan_ptr, plan_stride):
        """Whether a gate held for an earlier token of the sequence of a row, as its scope asks."""
        cells, position = _latch(fields, plan_ptr, plan_stride)
        number = gate % SCOPED - 1
        # Not by way of the first cache, which may have what was there before.
        first = tl.load(cells + number, cache_modifier=".cg")
        held = first < position
        if gate // SCOPED == SCOPE_NEXT:
            word, bit = _held(fields, cells, number, position - 1, position > 0)
            bits = tl.load(word, mask=position > 0, other=0, cache_modifier=".cg")
            held = ((bits >> bit) & 1) != 0
        return tl.where(held, 1.0, 0.0)

    @triton.jit
    def remember(fields, number, scope, plan_ptr, plan_stride):
        """A gate holds for a row."""
        cells, position = _latch(fields, plan_ptr, plan_stride)
        if position >= 0:
            tl.atomic_min(cells + number, position, sem="relaxed")
            if scope == SCOPE_NEXT:
                word, bit = _held(fields, cells, number, position, position >= 0)
                tl.atomic_or(word, 1 << bit, sem="relaxed")

    @triton.jit
    def sum_up(value, fields, number, plan_ptr, plan_stride, offsets, inside, HIDDEN: tl.constexpr):
        """Add a row `[BLOCK]` to the sum that its sequence keeps for a probe."""
        cells, position = _latch(fields, plan_ptr, plan_stride)
        if position >= 0:
            sums = tl.load(fields + ROW_SUMS).to(tl.pointer_type(tl.float32))
            row = tl.load(cells + GATE_COUNT + number)
            tl.atomic_add(
                sums + row.to(tl.int64) * HIDDEN + offsets, value, mask=inside, sem="relaxed"
            )


@dataclass(frozen=True)
class SequenceLatch:
    """What the sequence of a row remembers.

    Attributes:
        cells: int32 `[2, MAX_GATES]`.
        position: which token of it the row is.
    """

    cells: torch.Tensor
    position: int
    at_stage: dict[str, int]

    def row_sum(self, number: int, hidden: int) -> torch.Tensor:
        """The sum that is kept for a probe, `[hidden]`."""
        begin = self.at_stage["ROW_SUMS"] + 4 * hidden * int(self.cells[1, number])
        return view_at(begin, torch.float32, hidden)

    def remember(self, number: int, scope: int) -> None:
        """A gate holds for the row."""
        self.cells[0, number] = min(int(self.cells[0, number]), self.position)
        if scope == NEXT:
            start = int(self.cells[1, number]) + self.position // 32
            bit = 1 << self.position % 32
            word = view_at(self.at_stage["HELD"] + 4 * start, torch.int32, 1)
            word |= bit - (bit >> 31 << 32)


def latch_of(planned: IntArray, at_stage: dict[str, int]) -> SequenceLatch | None:
    """What a row's sequence remembers; `planned` is what the plan says of the row."""
    row = int(planned[Column.GATE.plan_row])
    if row < 0:
        return None
    cells = view_at(at_stage["LATCHES"] + 4 * 2 * MAX_GATES * row, torch.int32, 2, MAX_GATES)
    return SequenceLatch(cells, int(planned[Column.POSITION.plan_row]), at_stage)


def remembered(
    planned: IntArray, number: IntArray, scope: IntArray, at_stage: dict[str, int]
) -> npt.NDArray[np.bool_]:
    """Of each row, whether its gate of that number held for an earlier token of the sequence, as
    the gate's scope asks; not where nothing is remembered of the sequence."""
    row, position = planned[Column.GATE.plan_row], planned[Column.POSITION.plan_row]
    recalled = row >= 0
    if recalled.any():
        cells = words_at(at_stage["LATCHES"], int(row.max()) + 1, 2, MAX_GATES)
        first, held_at = cells[row.clip(0), 0, number], cells[row.clip(0), 1, number]
        before = recalled & (scope == NEXT) & (position > 0)
        recalled &= np.where(scope == NEXT, before, first < position)
        if before.any():
            previous = position[before] - 1
            at = held_at[before] + previous // 32
            words = words_at(at_stage["HELD"], int(at.max()) + 1)[at]
            recalled[before] = (words >> previous % 32 & 1).astype(bool)
    return recalled

"""What earlier pipeline stages found to hold, remembered on this one."""

from __future__ import annotations

import torch

from tllm.kernel_launch import RepeatedLaunch
from tllm.runtime.columns import Column
from tllm.runtime.kernels.backend import HAS_TRITON
from tllm.runtime.latches import HOLDS, NEVER
from tllm.spec.gates import MAX_GATES

if HAS_TRITON:
    import triton
    import triton.language as tl

    GATES = tl.constexpr(MAX_GATES)
    HALF = tl.constexpr(HOLDS)
    NOWHERE = tl.constexpr(NEVER)
    PLAN_GATE = tl.constexpr(Column.GATE.plan_row)
    PLAN_POSITION = tl.constexpr(Column.POSITION.plan_row)

    @RepeatedLaunch
    @triton.jit(do_not_specialize=["plan_stride"])
    def _relayed_kernel(told_ptr, plan_ptr, plan_stride, cells_ptr, held_ptr):
        at = plan_ptr + tl.program_id(0)
        latch = tl.load(at + PLAN_GATE * plan_stride)
        if latch >= 0:
            position = tl.load(at + PLAN_POSITION * plan_stride)
            numbers = tl.arange(0, GATES)
            strengths = tl.load(told_ptr + tl.program_id(0).to(tl.int64) * (2 * GATES) + numbers)
            holds = strengths > HALF  # what was not judged is no number
            cells = cells_ptr + latch.to(tl.int64) * (2 * GATES) + numbers
            tl.atomic_min(cells, position, mask=holds, sem="relaxed")
            start = tl.load(cells + GATES, mask=holds, other=NOWHERE)
            of_next = start != NOWHERE
            word = held_ptr + tl.where(of_next, start + position // 32, 0)
            tl.atomic_or(word, 1 << (position % 32), mask=of_next, sem="relaxed")


def launch(told: torch.Tensor, plan: torch.Tensor, cells: torch.Tensor, held: torch.Tensor) -> None:
    """Remember what holds, as the taps of this stage would (`Latches.tables`).

    Args:
        told: float32 `[tokens, 2, MAX_GATES]`, strengths and scores of conditions that earlier
            stages judged, no numbers where they judged none.
        plan: the row plan of the same tokens.
        cells, held: what sequences remember.
    """
    _relayed_kernel[(len(told),)](told, plan, plan.stride(0), cells, held)


def reference(
    told: torch.Tensor, plan: torch.Tensor, cells: torch.Tensor, held: torch.Tensor
) -> None:
    """The kernel in PyTorch, for host tensors."""
    latches = plan[Column.GATE.plan_row].tolist()
    positions = plan[Column.POSITION.plan_row].tolist()
    for row, number in (told[:, 0] > HOLDS).nonzero().tolist():
        latch, position = latches[row], positions[row]
        if latch < 0:
            continue
        cells[latch, 0, number] = min(int(cells[latch, 0, number]), position)
        start = int(cells[latch, 1, number])
        if start != NEVER:
            bit = 1 << position % 32
            held.view(-1)[start + position // 32] |= bit - (bit >> 31 << 32)

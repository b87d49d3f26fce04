"""The row plan: from the segments of a step to what each token of the batch does."""

from __future__ import annotations

import torch

from tllm.runtime.descriptor import SEGMENT_WIDTH, PlanRow, Segment
from tllm.runtime.kernels.backend import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    WIDTH_OF_SEGMENT = tl.constexpr(SEGMENT_WIDTH)
    ROW = tl.constexpr(int(Segment.ROW))
    COUNT = tl.constexpr(int(Segment.COUNT))
    SKIP = tl.constexpr(int(Segment.SKIP))
    DESTINATION = tl.constexpr(int(Segment.DESTINATION))
    WIDTH = tl.constexpr(int(Segment.WIDTH))
    PROGRAM = tl.constexpr(int(Segment.PROGRAM))
    ADD_ROW = tl.constexpr(int(Segment.ADD))
    STEERING_ROW = tl.constexpr(int(Segment.STEER))

    @triton.jit
    def _row_plan_kernel(segments_ptr, plan_ptr, plan_stride, BLOCK: tl.constexpr):
        segment = segments_ptr + tl.program_id(0) * WIDTH_OF_SEGMENT
        row = tl.load(segment + ROW)
        count = tl.load(segment + COUNT)
        skip = tl.load(segment + SKIP)
        destination = tl.load(segment + DESTINATION)
        width = tl.load(segment + WIDTH)
        program = tl.load(segment + PROGRAM)
        add = tl.load(segment + ADD_ROW)
        steer = tl.load(segment + STEERING_ROW)
        for start in range(0, count, BLOCK):
            j = start + tl.arange(0, BLOCK)
            mask = j < count
            captured = (j >= skip) & (width > 0)
            at = plan_ptr + row + j
            tl.store(at, tl.where(captured, destination + (j - skip) * width, -1), mask=mask)
            tl.store(at + plan_stride, tl.zeros_like(j) + program, mask=mask)
            tl.store(at + 2 * plan_stride, tl.zeros_like(j) + add, mask=mask)
            tl.store(at + 3 * plan_stride, tl.zeros_like(j) + steer, mask=mask)


def launch(segments: torch.Tensor, plan: torch.Tensor) -> None:
    """Fill `plan` (int32 `[4, max_tokens]`) from `segments` (int32 `[n, 8]`)."""
    _row_plan_kernel[(segments.shape[0],)](segments, plan, plan.stride(0), BLOCK=256)


def reference(segments: torch.Tensor, plan: torch.Tensor) -> None:
    """The kernel in PyTorch."""
    counts = segments[:, Segment.COUNT].long()
    each = torch.repeat_interleave(torch.arange(len(segments)), counts)
    first = torch.cumsum(counts, 0) - counts
    j = torch.arange(len(each)) - first[each]
    of = segments[each].long()
    rows = of[:, Segment.ROW] + j
    skip, width = of[:, Segment.SKIP], of[:, Segment.WIDTH]
    destination = of[:, Segment.DESTINATION] + (j - skip) * width
    captured = (j >= skip) & (width > 0)
    plan[PlanRow.DESTINATION, rows] = torch.where(captured, destination, -1).int()
    plan[PlanRow.PROGRAM, rows] = of[:, Segment.PROGRAM].int()
    plan[PlanRow.ADD, rows] = of[:, Segment.ADD].int()
    plan[PlanRow.STEER, rows] = of[:, Segment.STEER].int()

"""The row plan: from the segments of a step to what each token of the batch does."""

from __future__ import annotations

import torch

from tllm.kernel_launch import RepeatedLaunch
from tllm.runtime import columns
from tllm.runtime.columns import CONSECUTIVE, SEGMENT_WIDTH, Column, SegmentWord
from tllm.runtime.kernels.backend import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    WIDTH_OF_SEGMENT = tl.constexpr(SEGMENT_WIDTH)
    ROW = tl.constexpr(int(SegmentWord.ROW))
    COUNT = tl.constexpr(int(SegmentWord.COUNT))
    SKIP = tl.constexpr(int(SegmentWord.SKIP))
    FIRST_RING_ROW = tl.constexpr(int(SegmentWord.DESTINATION))
    WIDTH = tl.constexpr(int(SegmentWord.WIDTH))
    COLUMNS = tl.constexpr(len(Column))
    PROGRAM_FLAG = tl.constexpr(Column.PROGRAM.flag)
    COUNTING_UP = tl.constexpr(CONSECUTIVE)
    FIRST_WORD = tl.constexpr(Column(0).word)
    FIRST_PLAN_ROW = tl.constexpr(Column(0).plan_row)
    DESTINATION = tl.constexpr(columns.DESTINATION)

    @RepeatedLaunch
    @triton.jit(do_not_specialize=["plan_stride", "used"])
    def _row_plan_kernel(segments_ptr, plan_ptr, plan_stride, used, BLOCK: tl.constexpr):
        segment = segments_ptr + tl.program_id(0) * WIDTH_OF_SEGMENT
        row = tl.load(segment + ROW)
        count = tl.load(segment + COUNT)
        skip = tl.load(segment + SKIP)
        destination = tl.load(segment + FIRST_RING_ROW)
        width = tl.load(segment + WIDTH)
        for begin in range(0, count, BLOCK):
            j = begin + tl.arange(0, BLOCK)
            mask = j < count
            at = plan_ptr + row + j
            if (used & PROGRAM_FLAG) != 0:
                captured = (j >= skip) & (width > 0)
                place = tl.where(captured, destination + (j - skip) * width, -1)
                tl.store(at + DESTINATION * plan_stride, place, mask=mask)
            for column in tl.static_range(COLUMNS):
                if ((used >> column) & 1) != 0:
                    value = tl.zeros_like(j) + tl.load(segment + FIRST_WORD + column)
                    if (COUNTING_UP >> column) & 1:
                        value += tl.where(value < 0, 0, j)
                    tl.store(at + (FIRST_PLAN_ROW + column) * plan_stride, value, mask=mask)


def launch(segments: torch.Tensor, plan: torch.Tensor, used: int) -> None:
    """Fill the rows of the plan that columns use.

    Args:
        segments: int32 `[n, SEGMENT_WIDTH]`.
        plan: int32 `[PLAN_ROWS, max_tokens]`.
        used: the columns whose rows are written, as a set of `Column.flag`s.
    """
    _row_plan_kernel[(segments.shape[0],)](segments, plan, plan.stride(0), used, BLOCK=256)


def reference(segments: torch.Tensor, plan: torch.Tensor, used: int) -> None:
    """The kernel in PyTorch."""
    counts = segments[:, SegmentWord.COUNT].long()
    each = torch.repeat_interleave(torch.arange(len(segments)), counts)
    j = torch.arange(len(each)) - (torch.cumsum(counts, 0) - counts)[each]
    of = segments[each].long()
    rows = of[:, SegmentWord.ROW] + j
    if used & Column.PROGRAM.flag:
        skip, width = of[:, SegmentWord.SKIP], of[:, SegmentWord.WIDTH]
        destination = of[:, SegmentWord.DESTINATION] + (j - skip) * width
        captured = (j >= skip) & (width > 0)
        plan[columns.DESTINATION, rows] = torch.where(captured, destination, -1).int()
    for column in Column:
        if used & column.flag:
            value = of[:, column.word]
            if column.consecutive:
                value = torch.where(value < 0, value, value + j)
            plan[column.plan_row, rows] = value.int()

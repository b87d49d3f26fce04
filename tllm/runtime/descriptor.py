"""The layout that the tap op and its kernels share: descriptor fields, plan rows, segments."""

from __future__ import annotations

from enum import IntEnum, IntFlag

#: Bump when the op, the descriptor or the plan changes: it is part of vLLM's compile-cache key.
LAYOUT_VERSION = 1


class Descriptor(IntEnum):
    """Fields of one tap's descriptor, int64 each. Addresses are device addresses."""

    FLAGS = 0
    PLAN = 1
    """Address of the row plan, int32 `[PlanRow, plan_stride]`."""
    PLAN_STRIDE = 2
    ARENA = 3
    """Address of the ring, `[arena_rows, hidden]` in the model's dtype."""
    COLUMNS = 4
    """Address of int32 `[programs]`: the column at which a program captures this tap, or -1."""
    ADD_INDEX = 5
    """Address of int32 `[add_rows]`: the row of the add table for an intervention row, or -1."""
    ADD_TABLE = 6
    """Address of the add table, `[rows, hidden]` in the model's dtype."""


DESCRIPTOR_WIDTH = 16


class Flag(IntFlag):
    """What a tap does. 0 returns before anything is read."""

    CAPTURE = 1
    ADD = 2


class PlanRow(IntEnum):
    """Rows of the plan, one element a token of the batch."""

    DESTINATION = 0
    """First row of the ring for this token, or -1."""
    PROGRAM = 1
    """Which capture program the token follows."""
    ADD = 2
    """Intervention row, or -1."""


class Segment(IntEnum):
    """Fields of one segment: consecutive tokens of one sequence in one phase, int32 each."""

    ROW = 0
    """First row of the batch."""
    COUNT = 1
    SKIP = 2
    """Tokens at its start that are not captured (delivered before a preemption)."""
    DESTINATION = 3
    """Ring row of the first captured token."""
    WIDTH = 4
    """Ring rows a token takes; 0 captures nothing."""
    PROGRAM = 5
    ADD = 6


SEGMENT_WIDTH = 8

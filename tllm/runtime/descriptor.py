"""The layout that the tap op and its kernels share: descriptors, plan rows, segments, operations.

One tap serves up to two hook points, because `post_block` of a layer and `pre_attn` of the next
are one tensor. They are its *stages*, and are worked on one after the other, as two forward hooks
would be: each captures what arrives, then adds, then steers.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

#: Bump when an op, the descriptor, the plan, or what is fused changes: it is part of vLLM's
#: compile-cache key.
LAYOUT_VERSION = 4

STAGES = 2


class Descriptor(IntEnum):
    """Fields of one tap's descriptor, int64 each. Addresses are device addresses."""

    FLAGS = 0
    """`Flag`s of the first stage, and those of the second shifted by `FLAG_BITS`."""
    ARENA = 1
    """Address of the ring, `[arena_rows, hidden]` in the model's dtype."""
    VECTORS = 2
    """Address of the steering vectors, `[vectors, hidden]` in the model's dtype."""
    OPERATIONS = 3
    """Address of the operations after the one in each entry, `Operation.SIZE` words each."""
    STAGE = 4
    """Where the fields of the stages begin, `Stage.SIZE` each."""


class Stage(IntEnum):
    """Fields of one stage of a descriptor."""

    COLUMNS = 0
    """Address of int32 `[programs]`: the column at which a program captures this point, or -1."""
    ADD_INDEX = 1
    """Address of int32 `[add_rows]`: the row of the add table for an add row, or -1."""
    ADD_TABLE = 2
    """Address of the add table, `[rows, hidden]` in the model's dtype."""
    STEERING = 3
    """Address of int32 `[steering_rows, Operation.SIZE]`: the entry of each steering row."""
    SUMS = 4
    """Address of `[steering_rows, hidden]` in the model's dtype: what is added before anything else
    is done. Found without another look-up, because adding is what steering mostly is."""
    SIZE = 5


DESCRIPTOR_WIDTH = 16


class Flag(IntFlag):
    """What a stage does. A descriptor without flags returns before anything is read."""

    CAPTURE = 1
    ADD = 2
    STEER = 4


FLAG_BITS = 8


class Operation(IntEnum):
    """Words of one steering operation, 32 bits each, the coefficients float32.

    With `v` the vector and `p = h . v`, it computes
    `h' = h + (ADD + NORM |h| + COMPONENT p + STRENGTH (clip(p, LOW, HIGH) - p)) v`.
    """

    CHAIN = 0
    """In an entry: how many operations follow the sum, `HAS_SUM` if there is a sum, and
    `CHAIN_UNIT` times the index of the second operation. Unused in the others, which lie one after
    the other."""
    VECTOR = 1
    ADD = 2
    NORM = 3
    COMPONENT = 4
    STRENGTH = 5
    LOW = 6
    HIGH = 7
    SIZE = 8


HAS_SUM = 128
"""No steering row has this many operations at one point."""
CHAIN_UNIT = 256


class PlanRow(IntEnum):
    """Rows of the plan, one element a token of the batch."""

    DESTINATION = 0
    """First row of the ring for this token, or -1."""
    PROGRAM = 1
    """Which capture program the token follows."""
    ADD = 2
    """Add row, or -1."""
    STEER = 3
    """Steering row, or -1."""


class Segment(IntEnum):
    """Fields of one segment: consecutive tokens of one sequence that do the same, int32 each."""

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
    STEER = 7


SEGMENT_WIDTH = 8

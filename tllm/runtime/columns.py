"""What can be done to a row, declared once.

A *column* is one thing that can be done to a row. What it says of a row is a small integer: which
capture program, which add row, which steering row; its `neutral` value says that nothing is done.
`Column` is the only list of them. The tables of slots, the timelines, the segments of a step, the
rows of the plan, the fields and flags of a descriptor and the constants of the kernels derive from
it. A new action is a member here, a branch in the tap's kernel, and one in its reference.

A tap works in this order, whatever the order below is: capture, gate, patch, add, steer, check.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

PREFILL, DECODE = 0, 1
"""Phases: a token of the prompt, and a generated one."""

STAGES = 2
"""Hook points that one tap serves: `post_block` of a layer and `pre_attn` of the next are one
tensor. They are worked on one after the other, as two forward hooks would be."""


class Column(IntEnum):
    """What can be done to a row. The number is the column's place in every table.

    Later columns have later fields in a descriptor: those that every tap reads come first, and lie
    in one line of the cache.

    Attributes:
        neutral: what says that nothing is done.
        by_position: whether it may change from one stretch of positions to the next; else only
            the phases differ.
        consecutive: whether the tokens of a stretch have numbers one after the other, and not all
            the same; none is below 0 then, but the neutral one.
        fields: names of the addresses that a stage of a descriptor has for it.
    """

    neutral: int
    by_position: bool
    consecutive: bool
    fields: tuple[str, ...]

    def __new__(
        cls,
        neutral: int,
        fields: tuple[str, ...] = (),
        by_position: bool = True,
        consecutive: bool = False,
    ) -> Column:
        column = int.__new__(cls, len(cls.__members__))
        column._value_ = len(cls.__members__)
        column.neutral, column.fields = neutral, fields
        column.by_position, column.consecutive = by_position, consecutive
        return column

    PROGRAM = 0, ("RING_OFFSETS",), True, False
    """The capture program. `RING_OFFSETS`: int32 `[programs]`, which of a token's ring rows holds
    this point, or -1."""
    ADD = -1, ("ADD_INDEX", "ADD_TABLE"), False, False
    """The add row. `ADD_INDEX`: int32 `[add rows]`, the row of the add table, or -1. `ADD_TABLE`:
    `[rows, hidden]` in the model's dtype."""
    STEER = -1, ("STEERING", "SUMS"), True, False
    """The steering row; below -1 in a plan that is not complete, a choice by token. `STEERING`:
    int32 `[steering rows, Operation.SIZE]`, the entry of each. `SUMS`: `[steering rows, hidden]`
    in the model's dtype, what is added before anything else is done; found without another
    look-up, because adding is what steering mostly is."""
    PATCH = -1, ("PATCHES", "REPLACEMENTS"), True, True
    """The patch row, one for each patched token. `PATCHES`: int32 `[patch rows]`, the first
    replacement of each, or -1. `REPLACEMENTS`: int32 `[replacements, Replacement.SIZE]`, which are
    the same for every point."""
    GATE = -1, ("GATES", "GATE_RECORDS", "GATE_STATE", "LATCHES", "HELD", "ROW_SUMS"), False, False
    """Conditions are judged, before anything is changed. Which ones, the steering row says: they
    are part of what a configuration does. The column says what the sequence remembers of them: its
    latch. `GATES`: int32 `[steering rows]`, the first record of each at this point, or -1.
    `GATE_RECORDS`: int32 `[records, GateWord.SIZE]`, and `GATE_STATE`: float32
    `[tokens, 2, MAX_GATES]`, strengths and scores, which are the same for every point, as are the
    tables of `Latches`: `LATCHES`, `HELD`, `ROW_SUMS`."""
    POSITION = -1, (), False, True
    """Which token of its sequence it is, where that has a latch."""
    SEQUENCE = -1, ("NOT_FINITE",), False, False
    """Which sequence it is of, by a number that no other has, where anything may change the rows
    of it: at one point, after all else, they are checked to be finite. `NOT_FINITE`: int32
    `[1 + tokens]`, on the host: 1 once any row was not, and by row of the batch its sequence."""

    @property
    def flag(self) -> int:
        """The bit of it: in a descriptor's flags, and in a set of columns."""
        return 1 << self

    @property
    def word(self) -> int:
        """Its word in a segment."""
        return _FIRST_WORD + self

    @property
    def plan_row(self) -> int:
        """Its row in the plan; row `DESTINATION` is before all of them."""
        return DESTINATION + 1 + self


class SegmentWord(IntEnum):
    """Words of one segment: consecutive tokens of one sequence that are treated alike, int32 each.
    The columns' words (`Column.word`) follow."""

    ROW = 0
    """First row of the batch."""
    COUNT = 1
    SKIP = 2
    """Tokens at its start that are not captured (delivered before a preemption)."""
    DESTINATION = 3
    """Ring row of the first captured token."""
    WIDTH = 4
    """Ring rows a token takes; 0 captures nothing."""


_FIRST_WORD = len(SegmentWord)
SEGMENT_WIDTH = 16
COLUMN_WORDS = slice(_FIRST_WORD, _FIRST_WORD + len(Column))
"""The words of a segment that columns have."""

DESTINATION = 0
"""Row of the plan: the first row of the ring for this token, or -1."""
PLAN_ROWS = DESTINATION + 1 + len(Column)
"""The plan is int32 `[PLAN_ROWS, tokens]`. A row that no column uses keeps its neutral values."""

FLAG_BITS = 8
"""Bits of a stage's flags in a descriptor."""

assert _FIRST_WORD + len(Column) <= SEGMENT_WIDTH
assert len(Column) <= FLAG_BITS

NEUTRAL: IntArray = np.array([column.neutral for column in Column], np.int32)
"""`[columns]`, of a row that nothing is done to."""


def used_columns(values: IntArray) -> int:
    """The set of columns (bits as `Column.flag`) that say anything in `[columns, ...]`."""
    says = (values.reshape(len(Column), -1) != NEUTRAL[:, None]).any(1)
    return int(says @ _FLAGS)


_FLAGS = np.array([column.flag for column in Column])
CONSECUTIVE = sum(column.flag for column in Column if column.consecutive)
"""The set of columns whose values count up in a stretch."""

"""The one table of what can be done to a row, and what derives from it."""

import numpy as np

from tllm.runtime.columns import (
    DESTINATION,
    FLAG_BITS,
    NEUTRAL,
    PLAN_ROWS,
    SEGMENT_WIDTH,
    STAGES,
    Column,
    SegmentWord,
    used_columns,
)
from tllm.runtime.descriptor import DESCRIPTOR_WIDTH, STAGE_FIELDS, Descriptor, stage_field

LINE = 16
"""Words of a descriptor in a line of a GPU's cache, 128 bytes."""
LOOKED_UP_BY_EVERY_TAP = ("RING_OFFSETS", "ADD_INDEX", "ADD_TABLE", "STEERING", "SUMS")


def test_every_column_has_places_of_its_own():
    words = [*SegmentWord, *(column.word for column in Column)]
    assert len(set(words)) == len(words) and max(words) < SEGMENT_WIDTH
    rows = [DESTINATION, *(column.plan_row for column in Column)]
    assert sorted(rows) == list(range(PLAN_ROWS))
    assert sum(column.flag for column in Column) < 2**FLAG_BITS
    fields = [*Descriptor][:-1] + [
        stage_field(name) + stage for name in STAGE_FIELDS for stage in range(STAGES)
    ]
    assert len(set(fields)) == len(fields) and max(fields) < DESCRIPTOR_WIDTH


def test_what_every_tap_looks_up_lies_in_one_line_of_the_cache():
    """Idle taps cost what they read: room for more actions is behind it."""
    assert max(stage_field(name) for name in LOOKED_UP_BY_EVERY_TAP) + STAGES <= LINE


def test_columns_are_used_where_any_row_is_not_neutral():
    values = np.tile(NEUTRAL[:, None, None], (3, 4))
    assert used_columns(values) == 0
    for column in Column:
        values[column, 1, 2] += 5
        assert used_columns(values) & column.flag
    assert used_columns(values) == sum(column.flag for column in Column)

"""The segments of a batch, and whether the next step has the same ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from tllm.runtime.batch import Frame, ProgramRows, ProgramSegments, StepBatch
from tllm.runtime.columns import Column, IntArray, SegmentWord
from tllm.runtime.handover import StepFlows
from tllm.runtime.slots import Slots


@dataclass(eq=False)
class BatchLayout:
    """What the segments of a batch are, apart from where in the ring their rows go.

    A decode batch keeps its layout from step to step while nothing about its sequences changes,
    so it is made, and brought to the device, once. So does one of lanes, whose prompts grow by the
    token that is computed.

    Attributes:
        batch: the batch it was made for, or planned for last.
        version: of the slots, when it was made.
        growth: of the slots, when it was looked at last which rows are the prompts'.
        of_prompts: `[sequences]`, whether the first token is the prompt's.
        delivered: `[sequences]`, positions below which all were computed when it was made.
        segments: int32 `[segments, SEGMENT_WIDTH]`, those of a program together; destinations
            are relative to the step's first ring row.
        used: the columns that say anything of any row, as a set of `Column.flag`s.
        whole: whether each segment begins with the first token that the step computes of its
            sequence.
        groups: the segments of each capture program.
        rows: ring rows of the whole step.
        steps_left: for how many more decode steps the segments say the same.
        on_device: the segments with absolute destinations, and what makes the rows behind them do
            nothing, by first ring row and the row before which that ends.
        placed: the rows of each capture program, by first ring row.
        destinations: the plan's row of places in the ring, and what it says on the device, by first
            ring row.
        flows: what has rows of it, and is handed them; None before anybody looked.
    """

    batch: StepBatch
    version: int
    growth: int
    of_prompts: npt.NDArray[np.bool_]
    delivered: IntArray
    segments: IntArray
    used: int
    whole: bool
    groups: tuple[ProgramSegments, ...]
    rows: int
    tokens: int
    steps_left: int
    on_device: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    placed: dict[int, tuple[ProgramRows, ...]] = field(default_factory=dict)
    destinations: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    flows: StepFlows | None = None

    def __post_init__(self) -> None:
        # Bytes: `array_equal` takes ten times as long for so few, and this is every step's.
        self._counts = self.batch.counts.tobytes()
        self._next_starts = self.batch.ends.tobytes()
        self._decodes = not self.of_prompts.any()
        self._of_one = bool((self.batch.counts == 1).all())

    @cached_property
    def steered(self) -> int:
        """Tokens that are steered. All count where which token it is decides."""
        return int(self._saying(Column.STEER)[:, SegmentWord.COUNT].sum())

    @cached_property
    def patched(self) -> int:
        """Tokens that have a patch row."""
        return int(self._saying(Column.PATCH)[:, SegmentWord.COUNT].sum())

    def own(self, column: Column, frame: Frame) -> int:
        """Tokens of which a column says anything, without those that were drafted and rejected."""
        of = self._saying(column)
        return int(frame.own(of[:, SegmentWord.ROW], of[:, SegmentWord.COUNT]).sum())

    def _saying(self, column: Column) -> IntArray:
        """The segments of which a column says anything."""
        if not self.used & column.flag:
            return self.segments[:0]
        return self.segments[self.segments[:, column.word] != column.neutral]

    @cached_property
    def captured(self) -> int:
        return sum(group.total for group in self.groups)

    @cached_property
    def chooses(self) -> bool:
        """Whether the steering of any row depends on its token."""
        steered = bool(self.used & Column.STEER.flag)
        return steered and bool((self.segments[:, Column.STEER.word] < Column.STEER.neutral).any())

    @cached_property
    def has_positions(self) -> bool:
        """Whether the plan says of any row which token it is: another one in each step."""
        return bool(self.used & Column.POSITION.flag)

    def goes_on(
        self, slots: IntArray, starts: IntArray, counts: IntArray, ends: IntArray, table: Slots
    ) -> bool:
        """Whether a batch is the next step of the same sequences, a token of each, in the same
        phase; it is the last one of them then."""
        before = self.batch.slots
        if not (
            self._of_one
            and self.whole
            and table.version == self.version
            and self.steps_left > 0
            and starts.tobytes() == self._next_starts
            and counts.tobytes() == self._counts
            and (slots is before or np.array_equal(slots, before))
        ):
            return False
        if not (self._decodes and table.growth == self.growth):
            if not np.array_equal(starts < table.prompt_len[slots], self.of_prompts):
                return False
            self.growth = table.growth
        self._next_starts = ends.tobytes()
        self.steps_left -= 1
        if self.has_positions:
            positions = self.segments[:, Column.POSITION.word]
            positions += positions >= 0
            self.on_device.clear()
        return True

    def stays(self, slots: IntArray, counts: IntArray, table: Slots) -> bool:
        """Whether the same is done to each row of a later step of the same decoding sequences, with
        as many tokens of each, wherever it begins; it is taken for computed then."""
        most = int(counts.max())
        if not (
            self._decodes
            and self.whole
            and not (self.chooses or self.has_positions)
            and table.version == self.version
            and table.growth == self.growth
            and self.steps_left >= most
            and counts.tobytes() == self._counts
            and np.array_equal(slots, self.batch.slots)
        ):
            return False
        self.steps_left -= most
        return True

    def without_capture(self) -> BatchLayout:
        """The same batch when its rows found no place in the ring: all else is done to them."""
        segments = self.segments.copy()
        segments[:, [SegmentWord.WIDTH, SegmentWord.DESTINATION]] = 0
        segments[:, Column.PROGRAM.word] = Column.PROGRAM.neutral
        return replace(
            self, version=-1, segments=segments, used=self.used & ~Column.PROGRAM.flag, groups=(),
            rows=0, on_device={}, placed={}, destinations={}, flows=None,
        )  # fmt: skip

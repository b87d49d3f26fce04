"""From a step's batch to the row plan: what is done to each of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from tllm.runtime.batch import Frame, ProgramRows, ProgramSegments, StepBatch
from tllm.runtime.batch_layout import BatchLayout
from tllm.runtime.columns import (
    COLUMN_WORDS,
    CONSECUTIVE,
    DECODE,
    DESTINATION,
    NEUTRAL,
    PREFILL,
    SEGMENT_WIDTH,
    Column,
    IntArray,
    SegmentWord,
    used_columns,
)
from tllm.runtime.kernels import row_plan
from tllm.runtime.kernels.backend import uses_triton
from tllm.runtime.programs import Programs
from tllm.runtime.ring import Ring, Span
from tllm.runtime.slots import Slots
from tllm.runtime.taps import Taps
from tllm.runtime.transfer import upload
from tllm.spec.selection import END

_ALL_COLUMNS = sum(column.flag for column in Column)
_OTHERS_CONSECUTIVE = CONSECUTIVE & ~Column.POSITION.flag
_PLACES = 16
"""The most first ring rows of which a layout remembers what follows from them."""


@dataclass(frozen=True, eq=False)
class _Stretches:
    """Positions of a batch's sequences that are treated alike, `[stretches]` each: together all
    that the batch computes.

    Attributes:
        owners: which sequence of the batch.
        low, high: first position, and the one after the last; none is empty.
        values: `[columns, stretches]`, what each column says of the first position.
        whole: whether each is all of its sequence, in the order of the batch.
        steps_left: for how many more steps of one token nothing changes.
    """

    owners: npt.NDArray[np.int64]
    low: IntArray
    high: IntArray
    values: IntArray
    whole: bool = False
    steps_left: int = END

    @staticmethod
    def joined(parts: Sequence[_Stretches]) -> _Stretches:
        """All of these, which lasts as long as each of them."""
        owners, low, high = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("owners", "low", "high")
        )
        values = np.concatenate([part.values for part in parts], 1)
        steps_left = min(part.steps_left for part in parts)
        return _Stretches(owners, low, high, values, steps_left=steps_left)


class RowPlanner:
    """Turns a `StepBatch` into the row plan on the device, and a `Frame` on the host.

    The host knows every position before the forward pass, so a step costs at most one small
    upload and one kernel; work here is per sequence, never per token. With nothing to do it
    costs nothing.

    Args:
        batches: how many take turns, as they do over pipeline stages.

    Attributes:
        taps: which read the plan.
        layout: of the step planned last.
    """

    def __init__(
        self, slots: Slots, taps: Taps, programs: Programs, ring: Ring, batches: int = 1
    ) -> None:
        self._slots = slots
        self.taps = taps
        self._programs = programs
        self._ring = ring
        self._run = row_plan.launch if uses_triton(taps.device) else row_plan.reference
        self._dirty = 0  # tokens of the plan that may say something else than "nothing"
        self._dirty_columns = 0  # the columns that say it
        self.layout: BatchLayout | None = None
        self._batches = batches
        self._recent: list[BatchLayout] = []  # those that may go on, the last planned first
        self._arena = ring.arena  # in which the layouts' rows were placed
        self._held: tuple[BatchLayout, int] | None = None  # what the plan on the device says
        self._counts_up: torch.Tensor | None = None  # 1 where a row of that plan has a position

    def warm_up(self) -> None:
        """Compile the kernel, which the first request would wait for otherwise. Before any step."""
        of_no_rows = upload(np.zeros((1, SEGMENT_WIDTH), np.int32), self.taps.device)
        self._run(of_no_rows, self.taps.plan, _ALL_COLUMNS)

    def plan(
        self,
        step: int,
        batch: StepBatch,
        known: BatchLayout | None = None,
        span: Span | None = None,
    ) -> Frame:
        """Write the row plan for a batch.

        Args:
            known: its layout, where that is known, and `span` where its rows go then.
        """
        stays = known is not None and known is self.layout
        layout, goes_on = known or self.layout, False
        if known is None:
            goes_on = layout is not None and layout.goes_on(
                batch.slots, batch.starts, batch.counts, batch.ends, self._slots
            )
            if not goes_on:
                layout = self._other_of(self._recent, batch.slots, batch.starts, batch.counts)
            if layout is None:
                layout = self._lay_out(batch)
                self._recent = [layout, *self._recent[: self._batches - 1]]
        assert layout is not None
        layout.batch = batch
        self.layout = layout
        frame = Frame(step, batch, (), None, (), layout.chooses, layout.groups, goes_on, layout)
        frame.undecided = batch.drafts is not None
        start = 0
        if layout.rows:
            frame.span = self._ring.reserve(layout.rows) if known is None else span
            if frame.span is None:
                frame.lost = self._rows(layout, None)
                self._recent.remove(layout)
                layout = self.layout = frame.layout = layout.without_capture()
                frame.groups = ()
            else:
                start = frame.span.start
        if layout.groups:
            rows = layout.placed.get(start)
            if rows is None or self._arena is not self._ring.arena:
                rows = self._place_rows(layout, start)
            frame.rows = rows
        held = self._held
        if not (held and held[0] is layout and (held[1] == start or self._move(layout, start))):
            self._write(layout, start)
            if (goes_on or stays) and layout.rows and not layout.chooses:
                self._remember_places(layout, start)
        elif layout.has_positions:
            self._count_up(layout)
        if not frame.undecided:
            self._slots.deliver(batch.slots, batch.ends)
        return frame

    def decide(self, frame: Frame, starts: IntArray, kept: IntArray) -> None:
        """It is known which drafts of a step are accepted.

        Args:
            starts: `[sequences]`, where each was.
            kept: `[sequences]`, how many tokens of each are its own.
        """
        frame.batch.place(starts)
        frame.decide(kept)
        # The others are computed again, with the tokens that are there in truth.
        self._slots.deliver(frame.batch.slots, starts + kept)

    def keep(self, slots: IntArray, starts: IntArray, counts: IntArray) -> bool:
        """Keep the plan for a batch, if it is the next step of the same decoding sequences and
        nothing of them is captured or chosen by token; else the batch is to be planned.

        Arrays as in `StepBatch`.
        """
        layout = self.layout
        if layout is None:
            return False
        ends = starts + counts
        bare = not (layout.groups or layout.chooses)
        if not (bare and layout.goes_on(slots, starts, counts, ends, self._slots)):
            others = [other for other in self._recent if not (other.groups or other.chooses)]
            layout = self._other_of(others, slots, starts, counts)
            if layout is None:
                return False
            self.layout = layout
        if self._held is None or self._held[0] is not layout:
            self._write(layout, 0)
        elif layout.has_positions:
            self._count_up(layout)
        self._slots.deliver(slots, ends)
        return True

    def staying(self, slots: IntArray, counts: IntArray) -> BatchLayout | None:
        """The layout of the last step, if the next one of the same sequences has the same wherever
        they are. Arrays as in `StepBatch`."""
        layout = self.layout
        if layout is not None and layout.stays(slots, counts, self._slots):
            return layout
        return None

    def lay_out_anywhere(self, batch: StepBatch, spread: IntArray) -> BatchLayout | None:
        """What is done to a batch, if it is the same wherever its sequences are.

        Args:
            batch: with the lowest positions that they may have.
            spread: `[sequences]`, by how many tokens each may be further on.
        """
        table, at, moving = self._slots, batch.slots, spread > 0
        least = np.maximum(table.prompt_len[at], table.delivered[at])
        if (moving & (batch.starts < least)).any():
            return None
        if table.timelines:
            ends, (low, high) = batch.ends + spread, table.windows[:, at]
            for i in np.flatnonzero(moving & ((batch.starts < low) | (ends > high))).tolist():
                if not table.move_window(int(at[i]), int(batch.starts[i]), int(ends[i])):
                    return None
        layout = self._lay_out(batch)
        if layout.chooses or layout.has_positions:
            return None
        layout.steps_left = max(layout.steps_left - int(spread.max()), 0)
        return layout

    def plan_undecided(self, step: int, batch: StepBatch, layout: BatchLayout) -> Frame | None:
        """Write the row plan for a batch of which it is not known where its sequences are; None
        where its rows have no place: those that are undecided may be what the ring is full of."""
        span = None
        if layout.rows and (span := self._ring.reserve(layout.rows)) is None:
            return None
        frame = self.plan(step, batch, layout, span)
        frame.nowhere = True
        return frame

    def _other_of(
        self, layouts: Sequence[BatchLayout], slots: IntArray, starts: IntArray, counts: IntArray
    ) -> BatchLayout | None:
        """Of batches that take turns, but for the one planned last, the layout of that of which
        another one is the next step."""
        for layout in layouts:
            if layout is not self.layout and layout.goes_on(
                slots, starts, counts, starts + counts, self._slots
            ):
                self._recent.remove(layout)
                self._recent.insert(0, layout)
                return layout
        return None

    def forget(self) -> None:
        """No batch goes on."""
        self.layout = self._held = self._counts_up = None
        self._recent.clear()
        self._ring.free_spans()

    def own(self, column: Column, frame: Frame) -> int:
        """Rows of a step of which a column says anything, and which are their sequences' own."""
        assert isinstance(frame.layout, BatchLayout)
        return frame.layout.own(column, frame)

    def clear(self) -> None:
        """Make every row of the plan do nothing (before a forward pass that is not a step)."""
        if self._dirty:
            blank = upload(_blank(0, self._dirty), self.taps.device)
            self._expand(blank, self._dirty_columns)
            self.taps.separate()
            self._dirty = self._dirty_columns = 0
            self._held = None

    # -- what is done to a batch -------------------------------------------------------------------

    def _lay_out(self, batch: StepBatch) -> BatchLayout:
        """The segments of a batch: what is done to each of its rows."""
        table, at = self._slots, batch.slots
        # `delivered` is read in every case: that enters what earlier steps have delivered.
        prompt_len, delivered = table.prompt_len[at], table.delivered[at]
        of_prompts = batch.starts < prompt_len
        found = self._stretches(batch, prompt_len, of_prompts)
        owners, low, values, steps_left = found.owners, found.low, found.values, found.steps_left
        used = used_columns(values)
        if used & Column.GATE.flag:
            remembers = values[Column.GATE] >= 0
            values[Column.POSITION, remembers] = low[remembers]
            used |= Column.POSITION.flag
        first_rows, offsets = np.cumsum(batch.counts, dtype=np.int32) - batch.counts, None
        segments = np.zeros((len(owners), SEGMENT_WIDTH), np.int32)
        if found.whole:
            segments[:, SegmentWord.ROW], segments[:, SegmentWord.COUNT] = first_rows, batch.counts
        else:
            offsets = low - batch.starts[owners]
            segments[:, SegmentWord.ROW] = first_rows[owners] + offsets
            segments[:, SegmentWord.COUNT] = found.high - low
        segments[:, COLUMN_WORDS] = values.T
        groups: tuple[ProgramSegments, ...] = ()
        rows, whole = 0, offsets is None or not offsets.any()
        if used & Column.PROGRAM.flag:
            skips = np.maximum(delivered[owners] - low, 0)
            if skips.any():
                whole = False
                segments[:, SegmentWord.SKIP] = skips
                gone = skips >= segments[:, SegmentWord.COUNT]
                segments[gone, Column.PROGRAM.word] = Column.PROGRAM.neutral
                offsets = skips if offsets is None else offsets + skips
            program = segments[:, Column.PROGRAM.word]
            if (program[1:] < program[:-1]).any():
                order = np.argsort(program, kind="stable")
                segments, owners = segments[order], owners[order]
                offsets = None if offsets is None else offsets[order]
            rows = self._place(segments)
            groups = self._groups(batch, segments, owners, None if whole else offsets)
        return BatchLayout(
            batch=batch,
            version=table.version,
            growth=table.growth,
            of_prompts=of_prompts,
            delivered=delivered,
            segments=segments,
            used=used,
            whole=whole,
            groups=groups,
            rows=rows,
            tokens=int(batch.counts.sum()),
            steps_left=0 if used & _OTHERS_CONSECUTIVE else steps_left,
        )

    def _stretches(
        self, batch: StepBatch, prompt_len: IntArray, of_prompts: npt.NDArray[np.bool_]
    ) -> _Stretches:
        """What is done to the positions that a batch computes."""
        table, at = self._slots, batch.slots
        outside, steps_left = None, END
        if table.timelines:
            outside, steps_left = self._outside(batch, of_prompts)
        spans = of_prompts & (batch.ends > prompt_len)
        everyone = np.arange(len(at))
        if outside is None and not spans.any():
            # Of each sequence tokens of one phase, which are all treated alike.
            values = table.values[:, (~of_prompts).view(np.int8), at]
            return _Stretches(everyone, batch.starts, batch.ends, values, True, steps_left)
        inside = np.ones(len(at), bool) if outside is None else ~outside
        border = np.clip(prompt_len, batch.starts, batch.ends)
        apart = np.flatnonzero(~inside).tolist()
        parts = [self._by_timeline(batch, apart)] if apart else []
        for phase, low, high in (
            (PREFILL, batch.starts, border),
            (DECODE, border, batch.ends),
        ):
            own = np.flatnonzero(inside & (high > low))
            values = table.values[:, phase, at[own]]
            parts.append(_Stretches(own, low[own], high[own], values, steps_left=steps_left))
        return _Stretches.joined(parts)

    def _outside(
        self, batch: StepBatch, of_prompts: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.bool_] | None, int]:
        """Which sequences compute positions of which the table of slots does not say all (None:
        of no sequence), and for how many more steps the others have what it says."""
        table, at = self._slots, batch.slots
        low, high = table.windows[:, at]
        outside = (batch.starts < low) | (batch.ends > high)
        for i in np.flatnonzero(outside & ~of_prompts).tolist():
            start, end = int(batch.starts[i]), int(batch.ends[i])
            outside[i] = not table.move_window(int(at[i]), start, end)
        if outside.any():
            return outside, 0  # what is looked up by position may be another at the next one
        return None, int((table.windows[1, at] - batch.ends).min(initial=END))

    def _by_timeline(self, batch: StepBatch, which: Sequence[int]) -> _Stretches:
        """The stretches of some sequences with timelines that this batch computes."""
        table, begin, end = self._slots, batch.starts.tolist(), batch.ends.tolist()
        counts: list[int] = []
        found: list[int] = []
        said: dict[Column, list[int]] = {column: [] for column in Column if column.by_position}
        for i, slot in zip(which, batch.slots[which].tolist(), strict=True):
            timeline = table.timelines[slot]
            of = timeline.between(begin[i], end[i])
            counts.append(len(of))
            found += timeline.starts[of.start : of.stop]
            for column, told in said.items():
                own = timeline.said.get(column)
                told += [column.neutral] * len(of) if own is None else own[of.start : of.stop]
        owners, starts = np.repeat(which, counts), np.array(found, np.int32)
        low, slots = np.maximum(starts, batch.starts[owners]), batch.slots[owners]
        high, last = np.append(low[1:], np.int32(0)), np.append(owners[1:] != owners[:-1], True)
        high[last] = batch.ends[owners[last]]
        values = table.values[:, (low >= table.prompt_len[slots]).view(np.int8), slots]
        for column, told in said.items():
            values[column] = told
            if column.consecutive:
                counting = values[column] >= 0
                values[column, counting] += (low - starts)[counting]
        return _Stretches(owners, low, high, values, steps_left=0)

    def _place(self, segments: IntArray) -> int:
        """Give segments their places in the ring, relative to the first; returns the rows taken."""
        program = segments[:, Column.PROGRAM.word]
        width = np.where(program > 0, self._programs.widths[program], 0)
        taken = (segments[:, SegmentWord.COUNT] - segments[:, SegmentWord.SKIP]) * width
        segments[:, SegmentWord.WIDTH] = width
        segments[:, SegmentWord.DESTINATION] = np.cumsum(taken) - taken
        return int(taken.sum())

    def _groups(
        self,
        batch: StepBatch,
        segments: IntArray,
        owners: npt.NDArray[np.int64],
        offsets: IntArray | None,
    ) -> tuple[ProgramSegments, ...]:
        """The segments of each capture program; those of one lie together."""
        program = segments[:, Column.PROGRAM.word]
        changes = np.flatnonzero(program[1:] != program[:-1]).tolist()
        sequences, skips = owners.astype(np.int32), segments[:, SegmentWord.SKIP]
        counts = segments[:, SegmentWord.COUNT] - skips
        first_rows = segments[:, SegmentWord.ROW] + skips
        groups = []
        for low, high in pairwise((0, *(last + 1 for last in changes), len(program))):
            if number := int(program[low]):
                own = sequences[low:high]
                groups.append(
                    ProgramSegments(
                        self._programs[number],
                        int(segments[low, SegmentWord.DESTINATION]),
                        own,
                        batch.slots[own],
                        counts[low:high],
                        first_rows[low:high],
                        int(counts[low:high].sum()),
                        None if offsets is None else offsets[low:high],
                    )
                )
        return tuple(groups)

    # -- rows --------------------------------------------------------------------------------------

    def _place_rows(self, layout: BatchLayout, start: int) -> tuple[ProgramRows, ...]:
        """Which rows of the ring, from `start` on, are whose. Those of a batch that goes on lie in
        a few places, so that nothing is found out twice."""
        if self._arena is not self._ring.arena:
            self._arena = self._ring.arena
            for each in (layout, *self._recent):  # those that it takes turns with, too
                each.placed.clear()
        rows = self._rows(layout, start)
        if len(layout.placed) < _PLACES:
            layout.placed[start] = rows
        return rows

    def _rows(self, layout: BatchLayout, start: int | None) -> tuple[ProgramRows, ...]:
        """The rows of each capture program; without `start` they have no place in the ring."""
        return tuple(
            [
                ProgramRows(group, None if start is None else self._captured(group, start))
                for group in layout.groups
            ]
        )

    def _captured(self, group: ProgramSegments, start: int) -> torch.Tensor | None:
        """`[rows, taps, hidden]`, where the rows of a group will lie in the ring."""
        width = len(group.program.taps)
        if not width:
            return None
        begin = start + group.destination
        return self._ring.arena[begin : begin + group.total * width].view(group.total, width, -1)

    # -- the device --------------------------------------------------------------------------------

    def _write(self, layout: BatchLayout, start: int) -> None:
        """Expand the layout into the plan; rows behind it do nothing any more."""
        # What depends on tokens is chosen anew in each step.
        self._held = None if layout.chooses else (layout, start)
        self._counts_up = None
        if not layout.used and not self._dirty:
            return
        end = max(layout.tokens, self._dirty)
        segments = layout.on_device.get((start, end))
        if segments is None:
            placed = np.concatenate([layout.segments, _blank(layout.tokens, end)])
            placed[: len(layout.segments), SegmentWord.DESTINATION] += start
            segments = upload(placed, self.taps.device)
            if len(layout.on_device) < _PLACES:
                layout.on_device[start, end] = segments
        self._expand(segments, layout.used | self._dirty_columns)
        self._dirty = layout.tokens if layout.used else 0
        self._dirty_columns = layout.used

    def _move(self, layout: BatchLayout, start: int) -> bool:
        """Put remembered places into the plan on the device, which is the layout's; whether they
        are known."""
        known = layout.destinations.get(start)
        if known is None:
            return False
        self.taps.note_write()
        plan_row, places = known
        plan_row.copy_(places)
        self._held = (layout, start)
        return True

    def _remember_places(self, layout: BatchLayout, start: int) -> None:
        """Places in the ring that the plan says now: a batch that goes on takes turns between a
        few, and a copy takes the host less time than the kernel."""
        if len(layout.destinations) < _PLACES:
            plan_row = self.taps.plan[DESTINATION, : layout.tokens]
            layout.destinations[start] = plan_row, plan_row.clone()

    def _count_up(self, layout: BatchLayout) -> None:
        """Each row of the plan on the device is the next token of its sequence."""
        positions = self.taps.plan[Column.POSITION.plan_row, : layout.tokens]
        if self._counts_up is None:
            self._counts_up = (positions >= 0).int()
        self.taps.note_write()
        positions.add_(self._counts_up)

    def _expand(self, segments: torch.Tensor, used: int) -> None:
        self.taps.note_write()
        self._run(segments, self.taps.plan, used)


def _blank(row: int, end: int) -> IntArray:
    """`[segments, SEGMENT_WIDTH]`, what makes the rows from `row` to before `end` do nothing."""
    blank = np.zeros((int(end > row), SEGMENT_WIDTH), np.int32)
    blank[:, [SegmentWord.ROW, SegmentWord.COUNT]] = row, end - row
    blank[:, COLUMN_WORDS] = NEUTRAL
    return blank

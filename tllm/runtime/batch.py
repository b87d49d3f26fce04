"""One step's batch: which rows are captured where, and what is added to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from tllm.runtime.descriptor import SEGMENT_WIDTH, Segment
from tllm.runtime.kernels import row_plan
from tllm.runtime.kernels.backend import uses_triton
from tllm.runtime.programs import Program, Programs
from tllm.runtime.ring import Ring, Span
from tllm.runtime.slots import Slots
from tllm.runtime.taps import Taps
from tllm.runtime.transfer import upload
from tllm.spec.selection import END

PREFILL, DECODE = 0, 1

IntArray = npt.NDArray[np.int32]


@dataclass(eq=False)
class StepBatch:
    """What the engine computes in one step; arrays `[sequences]`, in batch order.

    Attributes:
        slots: slot of each sequence.
        starts: position of the first token computed.
        counts: number of tokens computed.
        sampled_from: length from which on tokens are sampled and kept (the chunks of a prompt
            but the last do not reach it).
    """

    slots: IntArray
    starts: IntArray
    counts: IntArray
    sampled_from: IntArray

    @cached_property
    def ends(self) -> IntArray:
        """Position after the last token computed."""
        return self.starts + self.counts

    @cached_property
    def samples(self) -> npt.NDArray[np.bool_]:
        """Whether a token is sampled and kept."""
        return self.ends >= self.sampled_from

    @property
    def last_rows(self) -> IntArray:
        """Row of the batch at which each sequence's last token lies."""
        return (np.cumsum(self.counts) - 1).astype(np.int32)


@dataclass(frozen=True, eq=False)
class ProgramRows:
    """The rows that follow one capture program this step: consecutive in the ring.

    Attributes:
        program: the program.
        tensor: `[rows, taps, hidden]` view of the ring, None for a program without taps.
        slots, positions, counts: `[segments]`: sequence, first position, number of rows, which is
            never 0.
        batch_rows: `[segments]`: row of the batch of each segment's first row.
        total: number of rows.
    """

    program: Program
    tensor: torch.Tensor | None
    slots: IntArray
    positions: IntArray
    counts: IntArray
    batch_rows: IntArray
    total: int

    def by_row(self, firsts: IntArray) -> IntArray:
        """`[rows]`, what counts up in each segment from its one of `firsts` `[segments]`."""
        if self.total == len(self.counts):
            return firsts.copy()
        first = np.cumsum(self.counts) - self.counts
        offsets = np.arange(self.total, dtype=np.int32) - first.repeat(self.counts)
        return (firsts.repeat(self.counts) + offsets).astype(np.int32)


@dataclass(eq=False)
class Frame:
    """One step's batch with the rows captured from it."""

    step: int
    batch: StepBatch
    rows: Sequence[ProgramRows] = ()
    span: Span | None = None
    lost: Sequence[ProgramRows] = ()
    """Rows given up because the ring was full; they have no tensor."""
    chooses: bool = False
    """Whether the plan has choices by token."""
    logits: torch.Tensor | None = field(default=None, init=False)
    sampled: torch.Tensor | None = field(default=None, init=False)
    targets: torch.Tensor | None = field(default=None, init=False)
    """`[tokens]` int64, the token after each."""

    @cached_property
    def batch_index(self) -> IntArray:
        """By slot: where the sequence is in the batch, or -1."""
        index = np.full(int(self.batch.slots.max()) + 1, -1, np.int32)
        index[self.batch.slots] = np.arange(len(self.batch.slots), dtype=np.int32)
        return index


@dataclass(frozen=True, eq=False)
class Group:
    """The segments of a layout that follow one capture program.

    Attributes:
        program: the program.
        segments: which.
        destination: of the first, relative to the step's first ring row.
        slots, counts, batch_rows, total: as in `ProgramRows`.
    """

    program: Program
    segments: slice
    destination: int
    slots: IntArray
    counts: IntArray
    batch_rows: IntArray
    total: int


@dataclass(eq=False)
class Layout:
    """What the segments of a batch are, apart from where in the ring their rows go.

    A decode batch keeps its layout from step to step while nothing about its sequences changes,
    so it is made, and brought to the device, once.

    Attributes:
        batch: the batch it was made for, or planned for last.
        version: of the slots, when it was made.
        segments: int32 `[segments, SEGMENT_WIDTH]`, those of a program together; destinations
            are relative to the step's first ring row.
        owners: `[segments]`, which sequence of the batch.
        positions: `[segments]`, position of the first token; None when it is the sequence's start.
        groups: the segments of each capture program.
        rows: ring rows of the whole step.
        tokens: tokens of the batch.
        steps_left: for how many more decode steps no timeline begins a new stretch.
        on_device: the segments with absolute destinations, by first ring row.
    """

    batch: StepBatch
    version: int
    segments: IntArray
    owners: IntArray
    positions: IntArray | None
    groups: tuple[Group, ...]
    rows: int
    tokens: int
    steps_left: int = END
    on_device: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Bytes: `array_equal` takes ten times as long for so few, and this is every step's.
        self._counts = self.batch.counts.tobytes()
        self._next_starts = self.batch.ends.tobytes()

    @cached_property
    def steered(self) -> int:
        """Tokens that are steered, or are where they are the right ones."""
        chosen = self.segments[:, Segment.STEER] != -1
        return int(self.segments[chosen, Segment.COUNT].sum())

    @cached_property
    def chooses(self) -> bool:
        """Whether the steering of any row depends on its token."""
        return bool((self.segments[:, Segment.STEER] < -1).any())

    def continues(self, slots: IntArray, starts: IntArray, counts: IntArray, version: int) -> bool:
        """Whether a batch is the next step of the same decoding sequences."""
        before = self.batch.slots
        return (
            self.positions is None
            and version == self.version
            and self.steps_left > 0
            and starts.tobytes() == self._next_starts
            and counts.tobytes() == self._counts
            and (slots is before or np.array_equal(slots, before))
        )

    def advance(self, ends: IntArray) -> None:
        """The next step is computed, up to these positions."""
        self._next_starts = ends.tobytes()
        self.steps_left -= 1


class RowPlanner:
    """Turns a `StepBatch` into the row plan on the device, and a `Frame` on the host.

    The host knows every position before the forward pass, so a step costs at most one small
    upload and one kernel; work here is per sequence, never per token. With nothing to do it
    costs nothing.
    """

    def __init__(self, slots: Slots, taps: Taps, programs: Programs, ring: Ring) -> None:
        self._slots = slots
        self._taps = taps
        self._programs = programs
        self._ring = ring
        self._use_kernel = uses_triton(taps.device)
        self._dirty = 0  # tokens of the plan that may say something else than "nothing"
        self._layout: Layout | None = None
        self._held: tuple[Layout, int] | None = None  # what the plan on the device says

    def plan(self, step: int, batch: StepBatch) -> Frame:
        """Write the row plan for a batch."""
        layout = self._layout
        if layout is not None and layout.continues(
            batch.slots, batch.starts, batch.counts, self._slots.version
        ):
            layout.batch = batch
            layout.advance(batch.ends)
        else:
            layout = self._layout = self._lay_out(batch)
        frame = Frame(step, batch, chooses=layout.chooses)
        if layout.rows:
            frame.span = self._ring.take(layout.rows)
            if frame.span is None:
                frame.lost = self._rows(layout, None)
                layout = self._layout = layout_without_capture(layout)
        start = frame.span.start if frame.span else 0
        if layout.groups:
            frame.rows = self._rows(layout, start)
        if self._held != (layout, start):
            self._write(layout, start)
        self._slots.deliver(batch.slots, batch.ends)
        return frame

    def keep(self, slots: IntArray, starts: IntArray, counts: IntArray) -> bool:
        """Keep the plan for a batch, if it is the next step of the same decoding sequences and
        nothing of them is captured or chosen by token; else the batch is to be planned.

        Arrays as in `StepBatch`.
        """
        layout = self._layout
        if layout is None or self._held is None or layout.groups:
            return False
        if not layout.continues(slots, starts, counts, self._slots.version):
            return False
        ends = starts + counts
        layout.advance(ends)
        self._slots.deliver(slots, ends)
        return True

    @property
    def steered(self) -> int:
        """Rows of the step planned last that follow a steering row, or a choice of one."""
        return self._layout.steered if self._layout else 0

    def clear(self) -> None:
        """Make every row of the plan do nothing (before a forward pass that is not a step)."""
        if self._dirty:
            blank = _blank_segments([(0, self._dirty)])
            self._expand(upload(blank, self._taps.device))
            self._taps.settle()
            self._dirty = 0
            self._held = None

    def _lay_out(self, batch: StepBatch) -> Layout:
        """The segments of a batch that do something."""
        table, at = self._slots, batch.slots
        # Whichever way it goes: reading enters what the steps before delivered.
        prompt_len, delivered = table.prompt_len[at], table.delivered[at]
        first_rows = np.cumsum(batch.counts) - batch.counts
        decoding = bool((batch.counts == 1).all() and (batch.starts >= prompt_len).all())
        if (steer := self._only_steers(batch)) is not None:
            return self._steering_layout(batch, steer, first_rows, decoding)
        parts, positions, owners = [], [], []
        by_phase = np.ones(len(at), bool)
        steps_left = END
        own = np.flatnonzero(table.settled[at] > batch.starts).tolist()
        if own:
            by_phase[own] = False
            stretches = [self._stretches(batch, i) for i in own]
            steps_left = min((left for *_, left in stretches), default=END)
            for i, (low, high, program, add, steer, _) in zip(own, stretches, strict=True):
                keep = np.flatnonzero((program > 0) | (add >= 0) | (steer != -1))
                if len(keep):
                    owner = np.full(len(keep), i)
                    skip = np.maximum(delivered[i] - low[keep], 0)
                    parts.append(
                        _segments(
                            first_rows[i] + low[keep] - batch.starts[i],
                            high[keep] - low[keep],
                            skip,
                            program[keep],
                            add[keep],
                            steer[keep],
                        )
                    )
                    positions.append(low[keep])
                    owners.append(owner)
        for phase in (PREFILL, DECODE):
            low = np.maximum(batch.starts, prompt_len) if phase == DECODE else batch.starts
            high = np.minimum(batch.ends, prompt_len) if phase == PREFILL else batch.ends
            program, add = table.program[phase, at], table.add[phase, at]
            steer = table.steer[phase, at]
            active = (program > 0) | (add >= 0) | (steer != -1)
            keep = np.flatnonzero((high > low) & active & by_phase)
            if not len(keep):
                continue
            low, high = low[keep], high[keep]
            skip = np.maximum(delivered[keep] - low, 0)
            row = first_rows[keep] + low - batch.starts[keep]
            parts.append(_segments(row, high - low, skip, program[keep], add[keep], steer[keep]))
            positions.append(low)
            owners.append(keep)
        segments = np.concatenate(parts) if parts else _blank_segments([])
        owner = np.concatenate(owners) if owners else np.zeros(0, np.int64)
        first = np.concatenate(positions) if positions else np.zeros(0, np.int32)
        program = segments[:, Segment.PROGRAM]
        if len(program) and (program != program[0]).any():
            order = np.argsort(program, kind="stable")
            segments, owner, first, program = (
                segments[order],
                owner[order],
                first[order],
                program[order],
            )
        width = np.where(program > 0, self._programs.widths[program], 0)
        taken = (segments[:, Segment.COUNT] - segments[:, Segment.SKIP]) * width
        segments[:, Segment.WIDTH] = width
        segments[:, Segment.DESTINATION] = np.cumsum(taken) - taken
        bounds = [*np.flatnonzero(np.diff(program, prepend=-1)), len(program)]
        return Layout(
            batch=batch,
            version=table.version,
            segments=segments,
            owners=owner.astype(np.int32),
            positions=None
            if decoding and not segments[:, Segment.SKIP].any()
            else (first + segments[:, Segment.SKIP]).astype(np.int32),
            groups=tuple(
                self._group(batch, segments[low:high], owner[low:high], slice(low, high))
                for low, high in pairwise(map(int, bounds))
                if program[low] > 0
            ),
            rows=int(taken.sum()),
            tokens=int(batch.counts.sum()),
            steps_left=steps_left,
        )

    def _only_steers(self, batch: StepBatch) -> IntArray | None:
        """`[sequences]`, the steering row of each (-1: none), if nothing else is done to a batch,
        and the same to all rows of a sequence; else None."""
        table, at = self._slots, batch.slots
        steer = table.steer[:, at]
        if (
            table.program[:, at].any()
            or (table.add[:, at] >= 0).any()
            or (table.settled[at] > batch.starts).any()
            or (steer[0] != steer[1]).any()
        ):
            return None
        only: IntArray = steer[0]
        return only

    def _steering_layout(
        self, batch: StepBatch, steer: IntArray, first_rows: IntArray, decoding: bool
    ) -> Layout:
        """One segment for each steered sequence, and nothing for the ring."""
        owners = np.flatnonzero(steer != -1)
        segments = np.zeros((len(owners), SEGMENT_WIDTH), np.int32)
        segments[:, Segment.ROW] = first_rows[owners]
        segments[:, Segment.COUNT] = batch.counts[owners]
        segments[:, Segment.ADD] = -1
        segments[:, Segment.STEER] = steer[owners]
        return Layout(
            batch=batch,
            version=self._slots.version,
            segments=segments,
            owners=owners.astype(np.int32),
            positions=None if decoding else batch.starts[owners],
            groups=(),
            rows=0,
            tokens=int(batch.counts.sum()),
        )

    def _stretches(
        self, batch: StepBatch, i: int
    ) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray, int]:
        """The stretches of a sequence with a timeline that this batch computes.

        Returns:
            First position, position after the last, program, add row and steering row of each,
            and for how many more steps of one token nothing changes.
        """
        table, slot = self._slots, int(batch.slots[i])
        timeline = table.timelines[slot]
        start, end = int(batch.starts[i]), int(batch.ends[i])
        of = timeline.between(start, end)
        low = np.maximum(timeline.starts[of], start)
        high = np.append(low[1:], np.int32(end))
        phase = (low >= table.prompt_len[slot]).astype(np.int32)
        return (
            low,
            high,
            timeline.program[of],
            table.add[phase, slot],
            timeline.steer[of],
            timeline.lasts_until(end - 1) - end,
        )

    def _group(self, batch: StepBatch, segments: IntArray, owners: IntArray, which: slice) -> Group:
        """The segments `which` of a batch, that follow the same program."""
        first, skip = segments[0], segments[:, Segment.SKIP]
        counts = segments[:, Segment.COUNT] - skip
        return Group(
            self._programs[int(first[Segment.PROGRAM])],
            which,
            int(first[Segment.DESTINATION]),
            batch.slots[owners],
            counts,
            segments[:, Segment.ROW] + skip,
            int(counts.sum()),
        )

    def _rows(self, layout: Layout, start: int | None) -> list[ProgramRows]:
        """Which rows of the ring, from `start` on, are whose; None: they have no place in it."""
        positions = layout.positions
        if positions is None:
            positions = layout.batch.starts[layout.owners]
        return [
            ProgramRows(
                group.program,
                None if start is None else self._captured(group, start),
                group.slots,
                positions[group.segments],
                group.counts,
                group.batch_rows,
                group.total,
            )
            for group in layout.groups
        ]

    def _captured(self, group: Group, start: int) -> torch.Tensor | None:
        """`[rows, taps, hidden]`, where the rows of a group will lie in the ring."""
        width = len(group.program.taps)
        if not width:
            return None
        begin = start + group.destination
        return self._ring.arena[begin : begin + group.total * width].view(group.total, width, -1)

    def _write(self, layout: Layout, start: int) -> None:
        """Expand the layout into the plan; rows that no segment covers do nothing."""
        # What depends on tokens is chosen anew in each step.
        self._held = None if layout.chooses else (layout, start)
        end = max(layout.tokens, self._dirty)
        if not len(layout.segments) and not self._dirty:
            return
        segments = None
        if end == layout.tokens:
            segments = layout.on_device.get(start)
        if segments is None:
            placed = layout.segments.copy()
            placed[:, Segment.DESTINATION] += start
            blank = _blank_segments(_gaps(layout.segments, end))
            segments = upload(np.concatenate([placed, blank]), self._taps.device)
            if end == layout.tokens and len(layout.on_device) < 16:
                layout.on_device[start] = segments
        self._expand(segments)
        self._dirty = layout.tokens if len(layout.segments) else 0

    def _expand(self, segments: torch.Tensor) -> None:
        self._taps.unsettle()
        if self._use_kernel:
            row_plan.launch(segments, self._taps.plan)
        else:
            row_plan.reference(segments, self._taps.plan)


def _segments(
    row: IntArray,
    count: IntArray,
    skip: IntArray,
    program: IntArray,
    add: IntArray,
    steer: IntArray,
) -> IntArray:
    """Segments without a place in the ring."""
    segments = np.zeros((len(row), SEGMENT_WIDTH), np.int32)
    segments[:, Segment.ROW] = row
    segments[:, Segment.COUNT] = count
    segments[:, Segment.SKIP] = skip
    segments[:, Segment.PROGRAM] = np.where(skip < count, program, 0)
    segments[:, Segment.ADD] = add
    segments[:, Segment.STEER] = steer
    return segments


def layout_without_capture(layout: Layout) -> Layout:
    """The same batch when its rows found no place: additions only."""
    segments = layout.segments.copy()
    segments[:, [Segment.PROGRAM, Segment.WIDTH, Segment.DESTINATION]] = 0
    return Layout(
        batch=layout.batch,
        version=-1,
        segments=segments,
        owners=layout.owners,
        positions=layout.positions,
        groups=(),
        rows=0,
        tokens=layout.tokens,
    )


def _blank_segments(gaps: Sequence[tuple[int, int]]) -> IntArray:
    """Segments that make the rows of each `(row, count)` do nothing."""
    blank = np.zeros((len(gaps), SEGMENT_WIDTH), np.int32)
    if gaps:
        blank[:, [Segment.ROW, Segment.COUNT]] = gaps
        blank[:, [Segment.ADD, Segment.STEER]] = -1
    return blank


def _gaps(segments: IntArray, end: int) -> list[tuple[int, int]]:
    """`(row, count)` of the stretches of rows below `end` that no segment covers."""
    order = np.argsort(segments[:, Segment.ROW])
    begins = segments[order, Segment.ROW]
    ends = begins + segments[order, Segment.COUNT]
    gap_begin = np.concatenate([[0], ends])
    gap_end = np.concatenate([begins, [end]])
    chosen = gap_end > gap_begin
    return list(zip(gap_begin[chosen], (gap_end - gap_begin)[chosen], strict=True))

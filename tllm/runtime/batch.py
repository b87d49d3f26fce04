"""One step's batch: which rows are captured where, and what is added to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

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

PREFILL, DECODE = 0, 1

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class StepBatch:
    """What the engine computes in one step; arrays `[sequences]`, in batch order.

    Attributes:
        slots: slot of each sequence.
        starts: position of the first token computed.
        counts: number of tokens computed.
        samples: whether a token is sampled and kept (False for all but the last prompt chunk).
    """

    slots: IntArray
    starts: IntArray
    counts: IntArray
    samples: npt.NDArray[np.bool_]

    @property
    def ends(self) -> IntArray:
        """Position after the last token computed."""
        return self.starts + self.counts

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
        slots, positions, counts: `[segments]`: sequence, first position, number of rows.
        batch_rows: `[segments]`: row of the batch of each segment's first row.
    """

    program: Program
    tensor: torch.Tensor | None
    slots: IntArray
    positions: IntArray
    counts: IntArray
    batch_rows: IntArray

    @property
    def offsets(self) -> IntArray:
        """`[rows]`, how far each row is from its segment's first."""
        first = np.cumsum(self.counts) - self.counts
        return (np.arange(int(self.counts.sum())) - first.repeat(self.counts)).astype(np.int32)


@dataclass(eq=False)
class Frame:
    """One step's batch with the rows captured from it."""

    step: int
    batch: StepBatch
    rows: list[ProgramRows] = field(default_factory=list)
    span: Span | None = None
    dropped: int = 0
    """Rows given up because the ring was full."""
    input_ids: torch.Tensor | None = None
    """`[tokens]`, on the device."""
    logits: torch.Tensor | None = None
    sampled: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    """`[tokens]` int64, the token after each."""

    @cached_property
    def batch_index(self) -> IntArray:
        """By slot: where the sequence is in the batch, or -1."""
        index = np.full(int(self.batch.slots.max()) + 1, -1, np.int32)
        index[self.batch.slots] = np.arange(len(self.batch.slots), dtype=np.int32)
        return index


class RowPlanner:
    """Turns a `StepBatch` into the row plan on the device, and a `Frame` on the host.

    The host knows every position before the forward pass, so a step costs one small upload and
    one kernel; work here is per sequence, never per token. With nothing to do it costs nothing.
    """

    def __init__(self, slots: Slots, taps: Taps, programs: Programs, ring: Ring) -> None:
        self._slots = slots
        self._taps = taps
        self._programs = programs
        self._ring = ring
        self._use_kernel = uses_triton(taps.device)
        self._dirty = 0  # tokens of the plan that may say something else than "nothing"

    def plan(self, step: int, batch: StepBatch) -> Frame:
        """Write the row plan for a batch."""
        frame = Frame(step, batch)
        segments, first_positions, slots = self._segments(batch)
        tokens = int(batch.counts.sum())
        if len(segments):
            self._allocate(frame, segments, first_positions, slots)
        if len(segments) or self._dirty:
            self._write(segments, tokens)
        self._slots.delivered[batch.slots] = np.maximum(
            self._slots.delivered[batch.slots], batch.ends
        )
        return frame

    def clear(self) -> None:
        """Make every row of the plan do nothing (before a forward pass that is not a step)."""
        if self._dirty:
            self._write(np.zeros((0, SEGMENT_WIDTH), np.int32), 0)

    def _segments(self, batch: StepBatch) -> tuple[IntArray, IntArray, IntArray]:
        """Segments of the batch that do something, those of a program together."""
        table, at = self._slots, batch.slots
        prompt_len, delivered = table.prompt_len[at], table.delivered[at]
        first_rows = np.cumsum(batch.counts) - batch.counts
        parts, positions, owners = [], [], []
        for phase in (PREFILL, DECODE):
            low = np.maximum(batch.starts, prompt_len) if phase == DECODE else batch.starts
            high = np.minimum(batch.ends, prompt_len) if phase == PREFILL else batch.ends
            program, add = table.program[phase, at], table.add[phase, at]
            keep = np.flatnonzero((high > low) & ((program > 0) | (add >= 0)))
            if not len(keep):
                continue
            low, high, program = low[keep], high[keep], program[keep]
            skip = np.maximum(delivered[keep] - low, 0)
            program = np.where(skip < high - low, program, 0)
            part = np.zeros((len(keep), SEGMENT_WIDTH), np.int32)
            part[:, Segment.ROW] = first_rows[keep] + low - batch.starts[keep]
            part[:, Segment.COUNT] = high - low
            part[:, Segment.SKIP] = skip
            part[:, Segment.PROGRAM] = program
            part[:, Segment.ADD] = add[keep]
            parts.append(part)
            positions.append(low)
            owners.append(at[keep])
        if not parts:
            empty = np.zeros(0, np.int32)
            return np.zeros((0, SEGMENT_WIDTH), np.int32), empty, empty
        segments = np.concatenate(parts)
        first_positions, slots = np.concatenate(positions), np.concatenate(owners)
        program = segments[:, Segment.PROGRAM]
        if (program != program[0]).any():
            order = np.argsort(program, kind="stable")
            segments, first_positions, slots = (
                segments[order],
                first_positions[order],
                slots[order],
            )
        return segments, first_positions, slots

    def _allocate(
        self,
        frame: Frame,
        segments: IntArray,
        first_positions: IntArray,
        slots: IntArray,
    ) -> None:
        """Give captured rows their place in the ring, and enter them in the frame."""
        widths = self._programs.widths
        program = segments[:, Segment.PROGRAM]
        captured = np.where(program > 0, segments[:, Segment.COUNT] - segments[:, Segment.SKIP], 0)
        taken = captured * widths[program]
        total = int(taken.sum())
        if total:
            frame.span = self._ring.take(total)
            if frame.span is None:
                frame.dropped = int(captured.sum())
                segments[:, Segment.PROGRAM] = 0
                return
        start = frame.span.start if frame.span else 0
        segments[:, Segment.WIDTH] = np.where(program > 0, widths[program], 0)
        segments[:, Segment.DESTINATION] = start + np.cumsum(taken) - taken
        skip = segments[:, Segment.SKIP]
        bounds = np.flatnonzero(np.diff(program, prepend=-1))
        for low, high in zip(bounds, [*bounds[1:], len(program)], strict=True):
            number = int(program[low])
            if number == 0:
                continue
            of = slice(low, high)
            rows, width = int(captured[of].sum()), int(widths[number])
            tensor = None
            if width:
                begin = int(segments[low, Segment.DESTINATION])
                tensor = self._ring.arena[begin : begin + rows * width].view(rows, width, -1)
            frame.rows.append(
                ProgramRows(
                    self._programs[number],
                    tensor,
                    slots[of],
                    first_positions[of] + skip[of],
                    captured[of],
                    segments[of, Segment.ROW] + skip[of],
                )
            )

    def _write(self, segments: IntArray, tokens: int) -> None:
        """Bring the segments to the device and expand them; rows no segment covers do nothing."""
        covered = int(segments[:, Segment.COUNT].sum())
        blanks = self._blanks(segments, tokens) if covered < max(tokens, self._dirty) else []
        if blanks:
            blank = np.zeros((len(blanks), SEGMENT_WIDTH), np.int32)
            blank[:, [Segment.ROW, Segment.COUNT]] = blanks
            blank[:, Segment.ADD] = -1
            segments = np.concatenate([segments, blank])
        self._dirty = tokens if covered else 0
        if not len(segments):
            return
        on_device = upload(segments, self._taps.device)
        if self._use_kernel:
            row_plan.launch(on_device, self._taps.plan)
        else:
            row_plan.reference(on_device, self._taps.plan)

    def _blanks(self, segments: IntArray, tokens: int) -> Sequence[tuple[int, int]]:
        """`(row, count)` of the stretches of the plan that no segment covers."""
        order = np.argsort(segments[:, Segment.ROW])
        begins = segments[order, Segment.ROW]
        ends = begins + segments[order, Segment.COUNT]
        gap_begin = np.concatenate([[0], ends])
        gap_end = np.concatenate([begins, [max(tokens, self._dirty)]])
        gaps = gap_end > gap_begin
        return list(zip(gap_begin[gaps], (gap_end - gap_begin)[gaps], strict=True))

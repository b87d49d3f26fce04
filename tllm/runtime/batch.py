"""One step's batch, and the rows that are captured from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from tllm.runtime.columns import IntArray
from tllm.runtime.programs import Program
from tllm.runtime.ring import Span


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
    """The rows that one capture program has in this step: consecutive in the ring.

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

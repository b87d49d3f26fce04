"""One step's batch, and the rows that are captured from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from tllm.ports import RequestInfo
from tllm.runtime.columns import IntArray
from tllm.runtime.flows import BoundConsumer
from tllm.runtime.programs import Program
from tllm.runtime.ring import Span
from tllm.runtime.slots import Slots


@dataclass(eq=False)
class StepBatch:
    """What the engine computes in one step; arrays `[sequences]`, in batch order.

    Attributes:
        starts: position of the first token computed.
        counts: number of tokens computed.
        sampled_from: length from which on tokens are sampled and kept (the chunks of a prompt
            but the last do not reach it).
        drafts: how many of the tokens are drafted: the last ones of each sequence. Which of them
            are its own is known when they were compared with what is drawn. None: none.
    """

    slots: IntArray
    starts: IntArray
    counts: IntArray
    sampled_from: IntArray
    drafts: IntArray | None = None
    ends: IntArray = field(init=False)

    def __post_init__(self) -> None:
        self.ends = self.starts + self.counts

    def place(self, starts: IntArray) -> None:
        """It is known where the sequences of a step are, all of which have come so far before that
        a token is sampled."""
        self.starts, self.ends = starts, starts + self.counts

    @cached_property
    def samples(self) -> npt.NDArray[np.bool_]:
        """Whether a token is sampled and kept."""
        return self.ends >= self.sampled_from

    @cached_property
    def all_sampled(self) -> bool:
        """Whether a token is sampled after each token, and kept: row i of the logits is computed
        from row i of the batch."""
        of_one = self.drafts is None and bool((self.counts == 1).all())
        return of_one and bool(self.samples.all())

    @property
    def last_rows(self) -> IntArray:
        """Row of the batch at which each sequence's last token lies."""
        return (np.cumsum(self.counts) - 1).astype(np.int32)

    @cached_property
    def drawn(self) -> IntArray:
        """How many tokens are drawn for each sequence: one after each draft, and one more."""
        return np.ones_like(self.counts) if self.drafts is None else self.drafts + 1

    @cached_property
    def drawn_index(self) -> IntArray:
        """`[tokens drawn]`, which of its sequence's each is."""
        first = np.cumsum(self.drawn) - self.drawn
        return (np.arange(self.drawn.sum()) - first.repeat(self.drawn)).astype(np.int32)

    @cached_property
    def logits_rows(self) -> IntArray:
        """`[tokens drawn]`, the rows of the batch that the LM head sees, in its order."""
        if self.drafts is None:
            return self.last_rows
        return (self.last_rows - self.drafts).repeat(self.drawn) + self.drawn_index

    @cached_property
    def logits_index(self) -> IntArray:
        """`[tokens]`, the row of the logits that is computed from each, or -1."""
        index = np.full(int(self.counts.sum()), -1, np.int32)
        index[self.logits_rows] = np.arange(len(self.logits_rows), dtype=np.int32)
        return index

    @cached_property
    def sampled_rows(self) -> npt.NDArray[np.bool_]:
        """`[tokens]`, whether a token is drawn after each, and kept if the row itself is."""
        sampled = np.full(int(self.counts.sum()), False)
        sampled[self.logits_rows[self.samples.repeat(self.drawn)]] = True
        return sampled


@dataclass(eq=False)
class ProgramSegments:
    """The segments of a batch that one capture program has. They last as long as its layout, and so
    does what is found out about them.

    Attributes:
        destination: of the first, relative to the step's first ring row.
        sequences: `[segments]`, which of the batch each is of.
        slots, counts: `[segments]`: sequence, and number of rows, which is never 0.
        batch_rows: `[segments]`: row of the batch of each segment's first row.
        total: number of rows.
        offsets: `[segments]`, which of the tokens that the step computes of its sequence each
            segment's first row is; None where it is the first of each.
    """

    program: Program
    destination: int
    sequences: IntArray
    slots: IntArray
    counts: IntArray
    batch_rows: IntArray
    total: int
    offsets: IntArray | None
    _owners: dict[BoundConsumer, tuple[int, tuple[RequestInfo, ...], IntArray]] = field(
        default_factory=dict, init=False
    )

    def by_row(self, firsts: IntArray) -> IntArray:
        """`[rows]`, what counts up in each segment from its one of `firsts` `[segments]`."""
        if self.total == len(self.counts):
            return firsts.copy()
        first = np.cumsum(self.counts) - self.counts
        offsets = np.arange(self.total, dtype=np.int32) - first.repeat(self.counts)
        return (firsts.repeat(self.counts) + offsets).astype(np.int32)

    def positions(self, batch: StepBatch) -> IntArray:
        """`[segments]`, position of each segment's first row in a step."""
        starts = batch.starts[self.sequences]
        return starts if self.offsets is None else starts + self.offsets

    @cached_property
    def place(self) -> slice | IntArray:
        """Where the rows lie in the batch, as `together` has it."""
        return together(self.by_row(self.batch_rows))

    def owners(
        self, consumer: BoundConsumer, slots: Slots
    ) -> tuple[tuple[RequestInfo, ...], IntArray]:
        """The distinct sequences as a consumer sees them, and which of them each row is of."""
        found = self._owners.get(consumer)
        if found is None or found[0] != consumer.forgotten:
            requests, index = consumer.requests(self.slots, slots)
            if found is None:
                index = index.repeat(self.counts)
                index.setflags(write=False)  # consumers keep it, and steps share it
            else:  # sequences may have grown; which of them each row is of stays
                index = found[2]
            found = self._owners[consumer] = consumer.forgotten, requests, index
        return found[1:]


@dataclass(eq=False)
class ProgramRows:
    """The rows that one capture program has in a step: consecutive in the ring. The same object in
    each step of a batch that only goes on, where they lie in the same place.

    Attributes:
        group: what stays the same while the batch does.
        tensor: `[rows, taps, hidden]` view of the ring, None for a program without taps.
    """

    group: ProgramSegments
    tensor: torch.Tensor | None


@dataclass(eq=False)
class Frame:
    """One step's batch with the rows captured from it."""

    step: int
    batch: StepBatch
    rows: tuple[ProgramRows, ...] = ()
    span: Span | None = None
    lost: Sequence[ProgramRows] = ()
    """Rows given up because the ring was full; they have no tensor."""
    chooses: bool = False
    """Whether the plan has choices by token."""
    groups: tuple[ProgramSegments, ...] = ()
    """Of `rows`; the same object in each step of a batch that only goes on."""
    goes_on: bool = False
    """Whether it is the next step of the same decoding sequences, with the plan of the last."""
    layout: object = None
    """The same object in each step of a batch that only goes on."""
    undecided: bool = False
    """Whether it is not known yet which drafts are their sequence's."""
    nowhere: bool = False
    """Whether it is not known yet where its sequences are either: `batch` has the positions of an
    earlier step, or the lowest that they may have."""
    logits: torch.Tensor | None = field(default=None, init=False)
    targets: torch.Tensor | None = field(default=None, init=False)
    """`[tokens]` int64, the token after each."""
    signals: torch.Tensor | None = field(default=None, init=False)
    """`[tokens or more, 2, MAX_GATES]` float32, until the next forward pass; None: no condition was
    ever judged."""
    rejected: npt.NDArray[np.bool_] | None = field(default=None, init=False)
    """`[tokens]`, the drafts that turned out not to be their sequence's; None: there are none."""

    def decide(self, kept: IntArray) -> None:
        """Of each sequence, its first `kept` tokens are its own, and the others never were."""
        counts = self.batch.counts
        self.undecided = self.nowhere = False
        if (kept < counts).any():
            first = np.cumsum(counts) - counts
            at = np.arange(int(counts.sum())) - first.repeat(counts)
            self.rejected = at >= kept.repeat(counts)

    def own(self, firsts: IntArray, counts: IntArray) -> IntArray:
        """`[segments]`, how many rows that are not rejected there are among `counts` rows of the
        batch from each of `firsts` on."""
        if self.rejected is None:
            return counts
        before = np.append(0, np.cumsum(self.rejected)).astype(np.int32)
        return (counts - (before[firsts + counts] - before[firsts])).astype(np.int32)

    @property
    def captured(self) -> int:
        """How many rows were captured that are not rejected."""
        return sum([int(self.own(each.batch_rows, each.counts).sum()) for each in self.groups])


def together(index: IntArray) -> slice | IntArray:
    """Which rows: a slice where they follow each other, as those of a decode batch do, since that
    needs nothing on the device."""
    first, end = int(index[0]), int(index[0]) + len(index)
    return slice(first, end) if np.array_equal(index, np.arange(first, end)) else index

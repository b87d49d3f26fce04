"""The running sequences, by slot: a small integer each, and what is done to their rows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tllm.ports.request_meta import RequestInfo
from tllm.runtime.columns import DECODE, NEUTRAL, PREFILL, Column, IntArray
from tllm.runtime.decided_actions import ControlledSequence
from tllm.runtime.decided_steering import DecidedSteering
from tllm.runtime.latches import Latch
from tllm.runtime.patching import PatchedRows
from tllm.runtime.token_choices import Choice
from tllm.spec.groups import GroupUse
from tllm.spec.patching import PatchUse
from tllm.spec.selection import END
from tllm.spec.stretches import Configuration

_BY_POSITION = tuple((column, int(column)) for column in Column if column.by_position)
_CONSECUTIVE = frozenset(column for column in Column if column.consecutive)


@dataclass(frozen=True, eq=False)
class Timeline:
    """Consecutive stretches of positions of one sequence; within one, all rows are treated alike.

    Attributes:
        starts: first position of each stretch; the first is 0, the last has no end.
        said: what columns that go by position say in each stretch; of one that is consecutive, of
            the first position. Those that are not here do nothing.
    """

    starts: Sequence[int]
    said: Mapping[Column, Sequence[int]]

    def between(self, start: int, stop: int) -> range:
        """The stretches that the positions from `start` to before `stop` lie in."""
        return range(bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop))

    def counts_up(self, stretch: int) -> bool:
        """Whether the tokens of a stretch have numbers one after the other in any column."""
        return any(
            values[stretch] != column.neutral
            for column, values in self.said.items()
            if column in _CONSECUTIVE
        )

    def lasts_until(self, position: int) -> int:
        """The first position of the stretch after the one that `position` lies in."""
        following = bisect_right(self.starts, position)
        return self.starts[following] if following < len(self.starts) else END


@dataclass(eq=False)
class RunningSequence:
    """One running sequence, and what it asked."""

    engine_id: str
    """The engine's own id of it."""
    info: RequestInfo
    consumers: Mapping[str, Mapping[str, Any]]
    """Options by consumer id."""
    keep_results: bool
    """Whether somebody will come for its results."""
    prompt_token_ids: list[int] | None = None
    steering: tuple[GroupUse, ...] = ()
    patch: tuple[PatchUse, ...] = ()
    held_before: tuple[int, ...] = ()
    """Numbers of conditions that held in an earlier request of its conversation."""
    errors: dict[str, str] = field(default_factory=dict)
    """By consumer id."""
    refused: set[str] = field(default_factory=set)
    """Consumers that cannot do what it asks: they are never told of it."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows that were given up, by the id of the consumer that asked for them."""
    left: set[str] = field(default_factory=set)
    """Consumers that were unregistered while it ran. One may have come anew since."""
    replaced: set[str] = field(default_factory=set)
    """Consumers that it names, and of whose ids there was another when it was accepted."""
    rewritten: set[str] = field(default_factory=set)
    """Consumers that wrote other vectors since, when rows of it were computed again."""
    registrations: Mapping[str, str] = field(default_factory=dict)
    """Of the consumers that it names, which one of that id it was accepted with."""
    isolated: bool = False
    """Whether its cached blocks are its own, so that its rows may be written to."""
    drafted: bool = False
    """Whether its tokens may be drafted: then nobody guides which are drawn."""
    head_adapter: str = ""
    """Name of its adapter, where that changes the LM head."""
    token_ids: tuple[int, ...] | None = None
    """All tokens, once it has ended and they are known."""
    let_go: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of the last input of its prompt that used a consumer, where a later one does not."""
    ended: bool = False
    """Its results were made; the engine may not have let go of it yet."""
    steering_rows: dict[Configuration, int] = field(default_factory=dict)
    """Steering row by groups, for each combination that applies somewhere in it."""
    token_choices: dict[Choice, int] = field(default_factory=dict)
    """What stands in the row plan for each choice by token."""
    patched: PatchedRows | None = None
    """Its patch rows."""
    number: int | None = None
    """By which it is known where something may change its rows, and no other ever is."""
    latch: Latch | None = None
    """What it remembers of its conditions."""
    decided: DecidedSteering | None = None
    """What controllers steer it with."""
    controlled: ControlledSequence | None = None
    """What controllers did to it; None where they may not act."""
    laid_out: Any = None
    """Which flows want its rows and which consumers it uses, where every row is treated alike."""

    def uses(self, consumer_id: str) -> bool:
        """Whether the consumer is enabled for this sequence, where it is for all that do not name
        it."""
        if self.ended or consumer_id in self.refused:
            return False
        return bool(self.consumers.get(consumer_id, {}).get("enabled", True))


_EVERYWHERE = np.array([0, END], np.int32)
_NEUTRAL = NEUTRAL[:, None]
_MOST_BATCHES = 8
"""Batches whose slots are remembered: over pipeline stages some take turns."""


def _neutral(slots: int) -> IntArray:
    """`[columns, 2, slots]` of sequences that nothing is done to."""
    return np.broadcast_to(NEUTRAL[:, None, None], (len(Column), 2, slots)).copy()


class Slots:
    """Sequences by the engine's id and by slot. The arrays are indexed by slot.

    Attributes:
        values: `[columns, 2, slots]`, what each column says of prefill and of decode rows.
        timelines: by slot, for sequences whose rows are not all treated alike within a phase.
        windows: `[2, slots]`, the positions from which on, and before which, `values` says all:
            every one without a timeline, else those of one stretch.
        version: changes whenever any of these does, but for prompts that have grown.
        growth: changes whenever prompts have grown.
    """

    def __init__(self, max_sequences: int) -> None:
        self._sequences: dict[str, RunningSequence] = {}
        #: The slot of each: it is looked up for all sequences of a batch that is another one.
        self._slot_of: dict[str, int] = {}
        self._free = list(range(max_sequences - 1, -1, -1))
        #: How many consumers have still to hear of the end of the sequence that had the slot.
        self._held: Counter[int] = Counter()
        self.by_slot: list[RunningSequence | None] = [None] * max_sequences
        self.prompt_len = np.zeros(max_sequences, np.int32)
        self._delivered = np.zeros(max_sequences, np.int32)
        self._delivering: tuple[np.ndarray, np.ndarray] | None = None
        self.windows = np.tile(_EVERYWHERE[:, None], max_sequences)
        self.values = _neutral(max_sequences)
        self.timelines: dict[int, Timeline] = {}
        self.version = self.growth = 0
        self._asked: list[tuple[list[str], np.ndarray]] = []
        self._users: dict[str, np.ndarray] = {}

    def __iter__(self) -> Iterator[RunningSequence]:
        return iter(self._sequences.values())

    def __len__(self) -> int:
        return len(self._sequences)

    def snapshot(self) -> list[RunningSequence]:
        """The sequences that run now; unlike iterating, safe on any thread."""
        return list(self._sequences.values())

    def get(self, engine_id: str) -> RunningSequence | None:
        return self._sequences.get(engine_id)

    def running(self, info: RequestInfo) -> RunningSequence | None:
        """The sequence of a request; None where it is gone, whoever has its slot now."""
        owner = self.by_slot[info.slot] if 0 <= info.slot < len(self.by_slot) else None
        if owner is None:
            return None
        own = owner.info
        same = own.prompt_id == info.prompt_id and own.sample_index == info.sample_index
        return owner if same else None

    def users(self, consumer_id: str) -> np.ndarray:
        """`[slots]` bool, which sequences use a consumer. To be kept true by the caller."""
        users = self._users.get(consumer_id)
        if users is None or len(users) < len(self.by_slot):
            grown = np.zeros(len(self.by_slot), bool)
            if users is not None:
                grown[: len(users)] = users
            self._users[consumer_id] = users = grown
        return users

    @property
    def delivered(self) -> np.ndarray:
        """`[slots]`, positions below which all were delivered: they are not captured again when
        the engine recomputes them after a preemption."""
        if self._delivering is not None:
            self._enter_delivered()
        return self._delivered

    def deliver(self, slots: np.ndarray, ends: np.ndarray) -> None:
        """The positions of some sequences below `ends` are delivered.

        That is entered when `delivered` is read, or others are delivered: a long decode of the
        same sequences enters it once. Until then every call with the same array must be for the
        step that follows the last call's.
        """
        if self._delivering is not None and self._delivering[0] is not slots:
            self._enter_delivered()
        self._delivering = slots, ends

    def _enter_delivered(self) -> None:
        assert self._delivering is not None
        (slots, ends), self._delivering = self._delivering, None
        self._delivered[slots] = np.maximum(self._delivered[slots], ends)

    def pop_slot(self) -> int:
        """A free slot; doubles the tables when there is none."""
        if not self._free:
            size = len(self.by_slot)
            self._free = list(range(2 * size - 1, size - 1, -1))
            self.by_slot += [None] * size
            self.prompt_len = np.concatenate([self.prompt_len, np.zeros(size, np.int32)])
            self._delivered = np.concatenate([self.delivered, np.zeros(size, np.int32)])
            self.windows = np.concatenate([self.windows, np.tile(_EVERYWHERE[:, None], size)], 1)
            self.values = np.concatenate([self.values, _neutral(size)], 2)
        return self._free.pop()

    def add_sequence(self, sequence: RunningSequence) -> None:
        """Enter a sequence whose slot was taken."""
        slot = sequence.info.slot
        self._sequences[sequence.engine_id] = sequence
        self._slot_of[sequence.engine_id] = slot
        self._asked.clear()
        self.by_slot[slot] = sequence
        self.prompt_len[slot] = sequence.info.prompt_len
        self.delivered[slot] = 0
        self.windows[:, slot] = _EVERYWHERE
        self.values[:, :, slot] = _NEUTRAL
        self.timelines.pop(slot, None)
        self.version += 1

    def grow(
        self, slots: Sequence[int], lengths: Sequence[int], positions: Sequence[int] | np.ndarray
    ) -> None:
        """The prompts of sequences have grown (streaming input).

        Args:
            lengths: those of the prompts now.
            positions: from which on what was delivered is not the sequences' own any more.
        """
        self.prompt_len[slots] = lengths
        self.delivered[slots] = np.minimum(self.delivered[slots], positions)
        self.growth += 1

    def assign(self, slot: int, phase: int, column: Column, value: int) -> None:
        """What a column says of the rows of a phase."""
        if self.values[column, phase, slot] != value:
            self.values[column, phase, slot] = value
            self.version += 1

    def assign_timeline(self, slot: int, timeline: Timeline, prompt_len: int) -> None:
        """What is done to the rows of a sequence, by position.

        One stretch, or one for each phase, needs no timeline. Else most of a sequence is decoded
        in the last stretch, which is looked up as a phase is.
        """
        self.version += 1
        starts, last = timeline.starts, len(timeline.starts) - 1
        simple = last == 0 or (last == 1 and starts[1] == prompt_len)
        if simple and not timeline.counts_up(0) and not timeline.counts_up(last):
            self._say(slot, timeline, 0, last)
            if self.timelines.pop(slot, None) is not None:
                self.windows[:, slot] = _EVERYWHERE
            return
        self.timelines[slot] = timeline
        self.windows[:, slot] = 0
        self.move_window(slot, starts[last], END)

    def move_window(self, slot: int, start: int, end: int) -> bool:
        """Let `values` say what is done from position `start` to before `end`, if a sequence with
        a timeline is treated alike there; returns whether it is."""
        timeline = self.timelines[slot]
        of = timeline.between(start, end)
        if len(of) > 1 or timeline.counts_up(of.start):
            return False
        self._say(slot, timeline, of.start, of.start)
        self.windows[:, slot] = timeline.starts[of.start], timeline.lasts_until(start)
        return True

    def _say(self, slot: int, timeline: Timeline, prefill: int, decode: int) -> None:
        """Let `values` say what two stretches do, one for each phase."""
        for column, number in _BY_POSITION:
            said = timeline.said.get(column)
            of_prefill = column.neutral if said is None else said[prefill]
            of_decode = column.neutral if said is None else said[decode]
            self.values[number, PREFILL, slot] = of_prefill
            self.values[number, DECODE, slot] = of_decode

    def stop_capturing(self, slot: int) -> None:
        """Capture no row of a sequence any more."""
        if (timeline := self.timelines.get(slot)) is not None:
            said = dict(timeline.said)
            said.pop(Column.PROGRAM, None)
            self.timelines[slot] = Timeline(timeline.starts, said)
        if timeline is not None or self.values[Column.PROGRAM, :, slot].any():
            self.values[Column.PROGRAM, :, slot] = Column.PROGRAM.neutral
            self.version += 1

    def invalidate(self) -> None:
        """The meaning of capture programs has changed."""
        self.version += 1

    def remove(self, engine_id: str) -> None:
        """Forget a sequence and free its slot, unless that is held."""
        del self._sequences[engine_id]
        slot = self._slot_of.pop(engine_id)
        self.by_slot[slot] = None
        self.timelines.pop(slot, None)
        if slot not in self._held:
            self._free.append(slot)

    def hold(self, slot: int) -> None:
        """A consumer will hear later of the end of the sequence that has a slot: until then the
        slot is nobody else's. To be given back with `let_go`."""
        self._held[slot] += 1

    def let_go(self, slot: int) -> None:
        """A consumer has heard of the end of the sequence that had a slot."""
        self._held[slot] -= 1
        if not self._held[slot]:
            del self._held[slot]
            if self.by_slot[slot] is None:
                self._free.append(slot)

    def of(self, engine_ids: list[str]) -> np.ndarray:
        """`[len(engine_ids)]`, the slot of each. Steady batches that take turns are looked up
        once, and are one array each."""
        for asked, slots in self._asked:
            if asked == engine_ids:
                return slots
        slots = np.fromiter(map(self._slot_of.__getitem__, engine_ids), np.int32, len(engine_ids))
        self._asked = [(engine_ids, slots), *self._asked[: _MOST_BATCHES - 1]]
        return slots

"""The running sequences, by slot: a small integer each, and what the row plan needs of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tllm.ports.request_meta import RequestInfo
from tllm.runtime.timeline import Timeline
from tllm.runtime.token_choices import Choice
from tllm.spec.steering import Configuration, GroupUse


@dataclass(eq=False)
class Sequence:
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
    errors: dict[str, str] = field(default_factory=dict)
    """By consumer id."""
    refused: set[str] = field(default_factory=set)
    """Consumers that cannot do what it asks: they are never told of it."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows that were given up, by the id of the consumer that asked for them."""
    token_ids: tuple[int, ...] | None = None
    """All tokens, once it has ended and they are known."""
    ended: bool = False
    """Its results were made; the engine may not have let go of it yet."""
    steering_rows: dict[Configuration, int] = field(default_factory=dict)
    """Steering row by groups, for each combination that applies somewhere in it."""
    token_choices: dict[Choice, int] = field(default_factory=dict)
    """What stands in the row plan for each choice by token."""

    def uses(self, consumer_id: str, *, unasked: bool = True) -> bool:
        """Whether the consumer is enabled for this sequence.

        Args:
            unasked: whether it is where the request does not name it.
        """
        if self.ended or consumer_id in self.refused:
            return False
        if not unasked and consumer_id not in self.consumers:
            return False
        return bool(self.consumers.get(consumer_id, {}).get("enabled", True))


_NOBODY: tuple[list[str], np.ndarray] = [], np.zeros(0, np.int32)
_NOTHING = np.array([0, 0, -1, -1, -1, -1], np.int32)
"""Programs, add rows and steering rows of a sequence that nothing is done to."""


class Slots:
    """Sequences by the engine's id and by slot. The arrays are indexed by slot.

    Attributes:
        prompt_len: prompt tokens.
        program: `[2, slots]`, the capture program of prefill and of decode rows; 0 for none.
        add: `[2, slots]`, the add row of prefill and of decode rows; -1 for none.
        steer: `[2, slots]`, the steering row of prefill and of decode rows; -1 for none, less for
            a choice by token.
        timelines: by slot, for sequences whose rows do not all do the same within a phase; it
            replaces `program` and `steer` below the position `settled`.
        settled: `[slots]`, the position from which on `program` and `steer` say all again: where
            the last stretch of a timeline begins; 0 without one.
        version: changes whenever any of these does.
    """

    def __init__(self, max_sequences: int) -> None:
        self._sequences: dict[str, Sequence] = {}
        self._free = list(range(max_sequences - 1, -1, -1))
        self.by_slot: list[Sequence | None] = [None] * max_sequences
        self.prompt_len = np.zeros(max_sequences, np.int32)
        self._delivered = np.zeros(max_sequences, np.int32)
        self._delivering: tuple[np.ndarray, np.ndarray] | None = None
        self.settled = np.zeros(max_sequences, np.int32)
        self._set_rows(np.tile(_NOTHING[:, None], max_sequences))
        self.timelines: dict[int, Timeline] = {}
        self.version = 0
        self._asked = _NOBODY
        self._users: dict[str, np.ndarray] = {}

    def _set_rows(self, rows: np.ndarray) -> None:
        """Keep `[6, slots]` in place of what was kept; columns as `_NOTHING`."""
        self._rows = rows
        self.program, self.add, self.steer = rows[0:2], rows[2:4], rows[4:6]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __len__(self) -> int:
        return len(self._sequences)

    def snapshot(self) -> list[Sequence]:
        """The sequences that run now; unlike iterating, safe on any thread."""
        return list(self._sequences.values())

    def get(self, engine_id: str) -> Sequence | None:
        """The sequence the engine knows by this id."""
        return self._sequences.get(engine_id)

    def is_current(self, info: RequestInfo) -> bool:
        """Whether the sequence still runs (its slot may have a new owner)."""
        owner = self.by_slot[info.slot]
        return owner is not None and (
            owner.info.prompt_id == info.prompt_id and owner.info.sample_index == info.sample_index
        )

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
            (slots, ends), self._delivering = self._delivering, None
            self._delivered[slots] = np.maximum(self._delivered[slots], ends)
        return self._delivered

    def deliver(self, slots: np.ndarray, ends: np.ndarray) -> None:
        """The positions of some sequences below `ends` are delivered.

        That is entered when `delivered` is read: a long decode of the same sequences enters it
        once. Until it is read, every call must be for the step that follows the last call's.
        """
        self._delivering = slots, ends

    def withdraw(self, slot: int, position: int) -> None:
        """What was delivered of a sequence from a position on is not its own any more."""
        self.delivered[slot] = min(self.delivered[slot], position)

    def take_slot(self) -> int:
        """A free slot; doubles the tables when there is none."""
        if not self._free:
            size = len(self.by_slot)
            self._free = list(range(2 * size - 1, size - 1, -1))
            self.by_slot += [None] * size
            self.prompt_len = np.concatenate([self.prompt_len, np.zeros(size, np.int32)])
            self._delivered = np.concatenate([self.delivered, np.zeros(size, np.int32)])
            self.settled = np.concatenate([self.settled, np.zeros(size, np.int32)])
            self._set_rows(np.concatenate([self._rows, np.tile(_NOTHING[:, None], size)], 1))
        return self._free.pop()

    def add_sequence(self, sequence: Sequence) -> None:
        """Enter a sequence whose slot was taken."""
        slot = sequence.info.slot
        self._sequences[sequence.engine_id] = sequence
        self._asked = _NOBODY
        self.by_slot[slot] = sequence
        self.prompt_len[slot] = sequence.info.prompt_len
        self.delivered[slot] = 0
        self.settled[slot] = 0
        self._rows[:, slot] = _NOTHING
        self.timelines.pop(slot, None)
        self.version += 1

    def set_prompt_len(self, slot: int, length: int) -> None:
        """The sequence's prompt has grown (streaming input)."""
        self.prompt_len[slot] = length
        self.version += 1

    def follow(self, slot: int, phase: int, program: int, steer: int) -> None:
        """Let the rows of a phase follow a capture program and a steering row."""
        if self.program[phase, slot] != program or self.steer[phase, slot] != steer:
            self.program[phase, slot] = program
            self.steer[phase, slot] = steer
            self.version += 1

    def only_steer(self, slot: int, row: int) -> None:
        """Let all rows of a sequence follow one steering row and no capture program."""
        self.set_timeline(slot, None)
        self.program[:, slot] = 0
        self.steer[:, slot] = row
        self.version += 1

    def set_timeline(self, slot: int, timeline: Timeline | None) -> None:
        """Let the rows of a sequence follow a timeline instead; None takes it away.

        Most of a sequence is decoded in the last stretch, which is looked up as a phase is.
        """
        self.settled[slot] = 0
        if timeline is not None:
            self.timelines[slot] = timeline
            self.settled[slot] = timeline.starts[-1]
            self.program[1, slot] = timeline.program[-1]
            self.steer[1, slot] = timeline.steer[-1]
            self.version += 1
        elif self.timelines.pop(slot, None) is not None:
            self.version += 1

    def stop_capturing(self, slot: int) -> None:
        """Let the rows of a sequence follow no capture program any more."""
        if (timeline := self.timelines.get(slot)) is not None:
            program = np.zeros_like(timeline.program)
            self.set_timeline(slot, replace(timeline, program=program))
        for phase, steer in enumerate(self.steer[:, slot].tolist()):
            self.follow(slot, phase, 0, steer)

    def invalidate(self) -> None:
        """The meaning of capture programs has changed."""
        self.version += 1

    def intervene(self, slot: int, phase: int, row: int) -> None:
        """Let the vectors of an add row be added to the rows of a phase; -1 for none."""
        if self.add[phase, slot] != row:
            self.add[phase, slot] = row
            self.version += 1

    def remove(self, engine_id: str) -> Sequence | None:
        """Forget a sequence and free its slot."""
        sequence = self._sequences.pop(engine_id, None)
        if sequence is not None:
            self.by_slot[sequence.info.slot] = None
            self.timelines.pop(sequence.info.slot, None)
            self._free.append(sequence.info.slot)
        return sequence

    def of(self, engine_ids: list[str]) -> np.ndarray:
        """`[len(engine_ids)]`, the slot of each. A steady batch is looked up once."""
        if engine_ids == self._asked[0]:
            return self._asked[1]
        sequences = self._sequences
        slots = np.fromiter((sequences[i].info.slot for i in engine_ids), np.int32, len(engine_ids))
        self._asked = engine_ids, slots
        return slots

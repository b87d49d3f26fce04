"""Decides what the rows of each sequence do: which are captured for whom, patched and steered."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tllm.runtime.broken_sequences import NOT_FINITE, BrokenSequences
from tllm.runtime.columns import DECODE, PREFILL, Column
from tllm.runtime.flows import BoundConsumer, BoundFlow
from tllm.runtime.patching import Patching
from tllm.runtime.programs import Asked, Programs, TooManyProgramsError
from tllm.runtime.slots import RunningSequence, Slots, Timeline
from tllm.runtime.steering import Steering
from tllm.runtime.token_choices import Choice
from tllm.spec.groups import STEERING
from tllm.spec.patching import PATCHING
from tllm.spec.selection import (
    END,
    Intervals,
    columns_of,
    covers_each,
    intersected,
    stretch_starts,
    stretches_of,
)
from tllm.spec.stretches import (
    Configuration,
    Stretches,
    TokenChoice,
    configurations,
    steering_stretches,
)

logger = logging.getLogger(__name__)

_MAX_FAILED = 4096
_MOST_KINDS, _SHORT = 1024, 16
"""Layouts that are remembered, and the most stretches and intervals of one."""
_EVERYWHERE: Intervals = ((0, END),)


class Assignments:
    """A capture program, a patch row and a steering row for every stretch of every sequence.

    Args:
        consumers: those that are registered, by id.
        broken: is told of the sequences whose rows may be changed, or cannot be as they ask.

    Attributes:
        steering, patching: what sequences can be steered and patched with.
        flows: what every sequence has.
        served: slots of the sequences that use any consumer.
        failed: prompts that were to be steered or patched and could not be, until somebody asks;
            the latest of them.
        not_steered, not_patched: sequences that were to be, and could not be, ever.
        not_finite: sequences that ended because a row of them was not finite, ever.
    """

    def __init__(
        self,
        slots: Slots,
        programs: Programs,
        steering: Steering,
        patching: Patching,
        consumers: Mapping[str, BoundConsumer],
        broken: BrokenSequences,
    ) -> None:
        self._slots = slots
        self._broken = broken
        self._programs = programs
        self.steering = steering
        self.patching = patching
        self._consumers = consumers
        self.flows: list[BoundFlow] = []
        self.served: set[int] = set()
        self.failed: dict[str, None] = {}
        self.not_steered = 0
        self.not_patched = 0
        self.not_finite = 0
        #: By length of the prompt, stretches and what is wanted: most ask what others asked.
        self._kinds: dict[tuple[Any, ...], tuple[list[Asked], list[int]]] = {}

    @property
    def crowded(self) -> bool:
        """Whether programs that are still had may be what new sequences lack."""
        return 2 * len(self._programs) > self._programs.capacity

    def change(self, flows: list[BoundFlow]) -> None:
        """Every sequence has other flows from now on."""
        self.flows = flows
        self._kinds.clear()
        self._programs.clear()
        self._slots.invalidate()
        for sequence in self._slots:
            sequence.laid_out = None
            self.assign(sequence)

    def assign(self, sequence: RunningSequence) -> list[BoundConsumer]:
        """Say what the rows of a sequence do: which are captured for whom, patched and steered.
        Returns the consumers that serve it."""
        steered = self._acquire_steering(sequence)  # first: without it nobody gets any rows
        patched = self._acquire_patches(sequence)
        self._acquire_latch(sequence)
        served = [owner for owner in self._consumers.values() if owner.serves(sequence)]
        self._lay_out(sequence, steered, patched, served)
        changed = sequence.steering_rows or sequence.patched is not None
        if changed or any(owner.writes_rows for owner in served):
            self._broken.check(sequence)
        return served

    def _lay_out(
        self,
        sequence: RunningSequence,
        steered: list[tuple[int, int]],
        patched: list[tuple[int, int]],
        served: list[BoundConsumer],
    ) -> None:
        slot, prompt_len = sequence.info.slot, sequence.info.prompt_len
        wanted = self._wanted(sequence, served) if served else []
        if not steered and not patched and sequence.laid_out == (wanted, served):
            return
        starts: list[int] = [0]
        said: dict[Column, list[int]] = {}
        if wanted or patched or len(steered) > 1:
            starts = stretch_starts(prompt_len, [intervals for _, intervals in wanted])
            if len(steered) > 1 or patched:
                starts = sorted({*starts, *(start for start, _ in (*steered, *patched))})
        said[Column.PROGRAM] = self._programs_of(sequence, wanted, starts)
        if steered:
            said[Column.STEER] = [row for _, row in _said_at(steered, starts)]
        if patched:
            rows = zip(starts, _said_at(patched, starts), strict=True)
            said[Column.PATCH] = [
                row if row < 0 else row + start - first for start, (first, row) in rows
            ]
        self._slots.assign_timeline(slot, Timeline(starts, said), prompt_len)
        self.served.discard(slot)
        for owner in self._consumers.values():
            self._slots.users(owner.id)[slot] = uses = owner in served
            if owner.alive and uses:
                self.served.add(slot)
        # Where every row is treated alike, a prompt that grows changes nothing.
        alike = all(
            flow.phases == (PREFILL, DECODE) and intervals == _EVERYWHERE
            for flow, intervals in wanted
        )
        known = alike and not steered and not patched and not sequence.errors
        sequence.laid_out = (wanted, served) if known else None

    def _wanted(
        self, sequence: RunningSequence, served: list[BoundConsumer]
    ) -> list[tuple[BoundFlow, Intervals]]:
        """The flows that want rows of a sequence, and at which positions."""
        info, tokens = sequence.info, sequence.prompt_token_ids
        asked = [(flow, flow.flow.selection) for flow in self.flows if flow.owner in served]
        for owner in served:
            if owner.alive:
                asked += owner.asked.get(info.slot, ())
        found: list[tuple[BoundFlow, Intervals]] = []
        for flow, selection in asked:
            if tokens is None and (selection.include.token_ids or selection.exclude.token_ids):
                sequence.errors[flow.owner.id] = (
                    "positions: token_ids cannot be found in a prompt that was given as "
                    "embeddings; give positions"
                )
                continue
            intervals = selection.intervals(info.prompt_len, tokens or ())
            if info.sample_index and flow.flow.prompt_rows == "once":
                intervals = intersected(intervals, ((info.prompt_len, END),))
            found.append((flow, intervals))
        return found

    def _programs_of(
        self,
        sequence: RunningSequence,
        wanted: list[tuple[BoundFlow, Intervals]],
        starts: list[int],
    ) -> list[int]:
        """The capture program of each stretch; those that the sequence had are released."""
        slot, prompt_len = sequence.info.slot, sequence.info.prompt_len
        if not wanted:
            self._programs.assign(slot, ())
            return [0] * len(starts)
        key = prompt_len, tuple(starts), tuple(wanted)
        kinds = self._kinds.get(key)
        if kinds is None:
            kinds = _kinds_of_stretches(*key)
            if len(starts) + sum(len(intervals) for _, intervals in wanted) <= _SHORT:
                if len(self._kinds) >= _MOST_KINDS:
                    self._kinds.clear()
                self._kinds[key] = kinds
        asked, kind_of = kinds
        try:
            numbers = self._programs.assign(slot, asked)
            return [numbers[kind] for kind in kind_of]
        except TooManyProgramsError as error:
            # What everybody is given comes before what single sequences ask for.
            for_all = [(flow, where) for flow, where in wanted if flow.number >= 0]
            refused = [flow for flow, _ in wanted if flow.number < 0 or len(for_all) == len(wanted)]
            for flow in refused:
                sequence.errors[flow.owner.id] = str(error)
            if len(for_all) == len(wanted):
                return [0] * len(starts)
            return self._programs_of(sequence, for_all, starts)

    def _acquire_steering(self, sequence: RunningSequence) -> list[tuple[int, int]]:
        """`(first position, steering row)` of each stretch of a sequence; rows are kept until it
        is removed.

        When a row cannot be had, no consumer is given rows that were to be steered and were not.
        """
        decided = sequence.decided
        if not sequence.steering and decided is None:
            return []
        info, rows = sequence.info, sequence.steering_rows
        tokens = sequence.prompt_token_ids
        stretches: Stretches = [(0, ())]
        if sequence.steering:
            stretches = steering_stretches(sequence.steering, info.prompt_len, tokens or ())
        if decided is not None:
            stretches = decided.after(stretches)
        try:
            if tokens is None and any(use.names_prompt_tokens for use in sequence.steering):
                raise ValueError(
                    "steering by token_ids: they cannot be found in a prompt that was given as "
                    "embeddings; give positions"
                )
            for groups in configurations(stretches) - rows.keys():
                rows[groups] = self.steering.acquire(groups)
        except ValueError as error:  # the engine is told so late only what nobody could see before
            logger.error("request %s is not steered: %s", info.request_id, error)
            self.not_steered += STEERING not in sequence.errors
            self._note_failed(sequence, STEERING, error)
            return []
        found = [
            (start, self._choice(sequence, applied))
            if isinstance(applied, TokenChoice)
            else (start, rows[applied])
            for start, applied in stretches
        ]
        if decided is not None:
            self._release_unneeded(sequence, stretches)
        return found

    def _release_unneeded(self, sequence: RunningSequence, stretches: Stretches) -> None:
        """What controllers decide is other things all the time: let go of rows that are not needed
        from here on."""
        rows, choices = sequence.steering_rows, sequence.token_choices
        applied = (each for _, each in stretches if isinstance(each, TokenChoice))
        kept = {_rows_of(chosen, rows) for chosen in applied}
        for choice in choices.keys() - kept:
            self.steering.choices.release(choice)
            del choices[choice]
        for groups in rows.keys() - configurations(stretches):
            self.steering.release(groups)
            del rows[groups]

    def _acquire_latch(self, sequence: RunningSequence) -> None:
        """What a sequence remembers of its conditions; kept until it is removed."""
        if sequence.steering_rows and sequence.latch is None:
            groups = {digest for groups in sequence.steering_rows for digest in groups}
            info = sequence.info
            sequence.latch = self.steering.remember(
                info.slot, groups, info.prompt_len, sequence.held_before
            )
        if sequence.latch is not None:
            for phase in (PREFILL, DECODE):
                slot, row = sequence.info.slot, sequence.latch.row
                self._slots.assign(slot, phase, Column.GATE, row)

    def _acquire_patches(self, sequence: RunningSequence) -> list[tuple[int, int]]:
        """`(first position, patch row)` of each stretch of a sequence; patch rows are kept until it
        is removed. When they cannot be had, no consumer is given rows, as with steering."""
        if sequence.patch and sequence.patched is None:
            info = sequence.info
            try:
                sequence.patched = self.patching.acquire(sequence.patch, info.prompt_len)
            except ValueError as error:  # rows were dropped meanwhile
                logger.error("request %s is not patched: %s", info.request_id, error)
                self.not_patched += PATCHING not in sequence.errors
                self._note_failed(sequence, PATCHING, error)
        return sequence.patched.starts if sequence.patched is not None else []

    def note_not_finite(self) -> None:
        """The results of sequences that have a row that is not finite will say so."""
        for sequence in self._broken.not_finite():
            if sequence.ended or NOT_FINITE in sequence.errors.values():
                continue
            writers = (
                o.id for o in self._consumers.values() if o.writes_rows and o.serves(sequence)
            )
            changing = STEERING if sequence.steering else PATCHING if sequence.patch else None
            for name in (*writers, *([] if changing is None else [changing])):
                sequence.errors.setdefault(name, NOT_FINITE)
            logger.error("request %s: %s", sequence.info.request_id, NOT_FINITE)
            self.not_finite += 1
            self._tell(sequence)

    def _tell(self, sequence: RunningSequence) -> None:
        """Whoever asks for the prompt will hear that it was not changed as it asked."""
        self.failed[sequence.info.prompt_id] = None
        if len(self.failed) > _MAX_FAILED:
            del self.failed[next(iter(self.failed))]

    def _note_failed(self, sequence: RunningSequence, what: str, error: ValueError) -> None:
        """A sequence is not changed as it asked: it ends, and its results, and whoever asks, will
        say so."""
        if what not in sequence.errors:
            self._tell(sequence)
        if sequence.decided is None:  # a controller that asks too much is told itself
            self._broken.give_up(sequence, str(error))
        concerned = [o.id for o in self._consumers.values() if o.serves(sequence)]
        sequence.refused.update(concerned)
        sequence.errors.update(dict.fromkeys([what, *concerned], str(error)))

    def _choice(self, sequence: RunningSequence, chosen: TokenChoice) -> int:
        """What stands in the row plan for a choice by token; kept until the sequence is removed."""
        choices = sequence.token_choices
        choice = _rows_of(chosen, sequence.steering_rows)
        if choice not in choices:
            choices[choice] = self.steering.choices.acquire(choice)
        return choices[choice]

    def end(self, sequence: RunningSequence) -> None:
        """Nobody looks at the rows of a sequence any more; it is steered as before."""
        slot = sequence.info.slot
        if slot not in self.served:
            return
        sequence.laid_out = None
        self._programs.assign(slot, ())
        self._slots.stop_capturing(slot)
        self._slots.invalidate()  # those that guide it have it no more
        self.served.remove(slot)
        for name in self._consumers:
            self._slots.users(name)[slot] = False

    def release(self, sequence: RunningSequence) -> None:
        """The engine let go of a sequence."""
        self._broken.forget(sequence)
        for groups in sequence.steering_rows:
            self.steering.release(groups)
        for choice in sequence.token_choices:
            self.steering.choices.release(choice)
        if sequence.latch is not None:
            self.steering.forget(sequence.info.slot, sequence.latch)
        if sequence.patched is not None:
            self.patching.release(sequence.patched)


def _kinds_of_stretches(
    prompt_len: int, starts: Sequence[int], wanted: Sequence[tuple[BoundFlow, Intervals]]
) -> tuple[list[Asked], list[int]]:
    """What is asked of the rows of some stretches, each of it once; and which of it of each."""
    covered = (covers_each(intervals, starts) for _, intervals in wanted)
    kinds, kind_of = columns_of([[start >= prompt_len for start in starts], *covered])
    asked = []
    for decoded, *of_kind in kinds:
        phase = DECODE if decoded else PREFILL
        meant = [flow for (flow, _), at in zip(wanted, of_kind, strict=True) if at]
        asked.append((phase, tuple(dict.fromkeys(f for f in meant if phase in f.phases))))
    return asked, kind_of


def _rows_of(chosen: TokenChoice, rows: Mapping[Configuration, int]) -> Choice:
    """A choice by token, between steering rows."""
    return tuple((t, rows[groups]) for t, groups in chosen.by_token), rows[chosen.others]


def _said_at(said: list[tuple[int, int]], positions: list[int]) -> Iterator[tuple[int, int]]:
    """`[positions]`, of what is said from some positions on, what each position lies behind."""
    return map(said.__getitem__, stretches_of([start for start, _ in said], positions))

"""Decides what the rows of each sequence do: which are captured for whom, and how steered."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import numpy as np

from tllm.runtime.batch import DECODE, PREFILL
from tllm.runtime.dispatch import BoundConsumer, BoundFlow
from tllm.runtime.programs import Programs, TooManyProgramsError
from tllm.runtime.slots import Sequence, Slots
from tllm.runtime.steering import Steering
from tllm.runtime.timeline import Timeline, covers_each
from tllm.runtime.token_choices import TokenChoices
from tllm.spec.selection import END, Intervals, intersected, stretch_starts
from tllm.spec.steering import TokenChoice, configurations, steering_stretches

logger = logging.getLogger(__name__)

_MAX_FAILED = 4096


class Assignments:
    """A capture program and a steering row for every stretch of every sequence.

    Args:
        consumers: those that are registered, by id.

    Attributes:
        flows: what every sequence has.
        served: slots of the sequences that use any consumer.
        failed: prompts that were to be steered and could not be, until somebody asks; the latest
            of them.
        not_steered: sequences that were to be steered and could not be, ever.
    """

    def __init__(
        self,
        slots: Slots,
        programs: Programs,
        steering: Steering,
        choices: TokenChoices,
        consumers: Mapping[str, BoundConsumer],
    ) -> None:
        self._slots = slots
        self._programs = programs
        self._steering = steering
        self._choices = choices
        self._consumers = consumers
        self.flows: list[BoundFlow] = []
        self.served: set[int] = set()
        self.failed: dict[str, None] = {}
        self.not_steered = 0

    def change(self, flows: list[BoundFlow]) -> None:
        """Every sequence has other flows from now on."""
        self.flows = flows
        self._programs.clear()
        self._slots.invalidate()
        for sequence in self._slots:
            self.follow(sequence)

    def follow(self, sequence: Sequence) -> None:
        """Say what the rows of a sequence do: which are captured for whom, and how steered."""
        slot, prompt_len = sequence.info.slot, sequence.info.prompt_len
        steered = self._acquire_steering(sequence)  # first: without it nobody gets any rows
        if not self._consumers and len(steered) <= 1:
            self._slots.only_steer(slot, steered[0][1] if steered else -1)
            self.served.discard(slot)
            return
        wanted = list(self._wanted(sequence))
        starts = stretch_starts(prompt_len, [intervals for _, intervals in wanted])
        starts = sorted({*starts, *(start for start, _ in steered)})
        rows, steer, row = dict(steered), [], -1
        for start in starts:
            row = rows.get(start, row)
            steer.append(row)
        program = self._programs_of(sequence, wanted, starts)
        if starts == [0, prompt_len]:
            self._slots.set_timeline(slot, None)
            for phase in (PREFILL, DECODE):
                self._slots.follow(slot, phase, program[phase], steer[phase])
        else:
            timeline = Timeline(*(np.array(each, np.int32) for each in (starts, program, steer)))
            self._slots.set_timeline(slot, timeline)
        self.served.discard(slot)
        for owner in self._consumers.values():
            self._slots.users(owner.id)[slot] = owner.serves(sequence)
            if owner.alive and owner.serves(sequence):
                self.served.add(slot)

    def _wanted(self, sequence: Sequence) -> Iterator[tuple[BoundFlow, Intervals]]:
        """The flows that want rows of a sequence, and at which positions."""
        info, tokens = sequence.info, sequence.prompt_token_ids
        asked = [(flow, flow.flow.selection) for flow in self.flows]
        for owner in self._consumers.values():
            if owner.alive:
                asked += owner.asked.get(info.slot, ())
        for flow, selection in asked:
            if not flow.owner.serves(sequence):
                continue
            if tokens is None and (selection.include.token_ids or selection.exclude.token_ids):
                sequence.errors[flow.owner.id] = (
                    "positions: token_ids cannot be found in a prompt that was given as "
                    "embeddings; give positions"
                )
                continue
            intervals = selection.intervals(info.prompt_len, tokens or ())
            if info.sample_index and flow.flow.prompt_rows == "once":
                intervals = intersected(intervals, ((info.prompt_len, END),))
            yield flow, intervals

    def _programs_of(
        self,
        sequence: Sequence,
        wanted: list[tuple[BoundFlow, Intervals]],
        starts: list[int],
    ) -> list[int]:
        """The capture program of each stretch; those that the sequence followed are let go."""
        slot, prompt_len = sequence.info.slot, sequence.info.prompt_len
        if not wanted:
            self._programs.follow(slot, ())
            return [0] * len(starts)
        phases = [PREFILL if start < prompt_len else DECODE for start in starts]
        covered = [(flow, covers_each(intervals, starts)) for flow, intervals in wanted]
        asked = [
            (phase, tuple(dict.fromkeys(f for f, at in covered if at[i] and phase in f.phases)))
            for i, phase in enumerate(phases)
        ]
        try:
            return self._programs.follow(slot, asked)
        except TooManyProgramsError as error:
            # What everybody is given comes before what single sequences ask for.
            for_all = [(flow, where) for flow, where in wanted if flow.number >= 0]
            refused = [flow for flow, _ in wanted if flow.number < 0 or len(for_all) == len(wanted)]
            for flow in refused:
                sequence.errors[flow.owner.id] = str(error)
            if len(for_all) == len(wanted):
                return [0] * len(starts)
            return self._programs_of(sequence, for_all, starts)

    def _acquire_steering(self, sequence: Sequence) -> list[tuple[int, int]]:
        """`(first position, steering row)` of each stretch of a sequence; rows are kept until it
        is removed.

        When a row cannot be had, no consumer is given rows that were to be steered and were not.
        """
        if not sequence.steering:
            return []
        info, rows = sequence.info, sequence.steering_rows
        stretches = steering_stretches(
            sequence.steering, info.prompt_len, sequence.prompt_token_ids or ()
        )
        try:
            for groups in configurations(stretches) - rows.keys():
                rows[groups] = self._steering.acquire(groups)
        except ValueError as error:  # a fault of ours: what a request asks was checked before
            logger.error("request %s is not steered: %s", info.request_id, error)
            if "steering" not in sequence.errors:
                self.not_steered += 1
                self.failed[info.prompt_id] = None
                if len(self.failed) > _MAX_FAILED:
                    del self.failed[next(iter(self.failed))]
            concerned = [o.id for o in self._consumers.values() if o.serves(sequence)]
            sequence.refused.update(concerned)
            sequence.errors.update(dict.fromkeys(["steering", *concerned], str(error)))
            return []
        return [
            (start, self._choice(sequence, applied))
            if isinstance(applied, TokenChoice)
            else (start, rows[applied])
            for start, applied in stretches
        ]

    def _choice(self, sequence: Sequence, chosen: TokenChoice) -> int:
        """What stands in the row plan for a choice by token; kept until the sequence is removed."""
        rows, choices = sequence.steering_rows, sequence.token_choices
        choice = tuple((t, rows[groups]) for t, groups in chosen.by_token), rows[chosen.others]
        if choice not in choices:
            choices[choice] = self._choices.acquire(choice)
        return choices[choice]

    def end(self, sequence: Sequence) -> None:
        """Nobody looks at the rows of a sequence any more; it is steered as before."""
        slot = sequence.info.slot
        if slot not in self.served:
            return
        self._programs.follow(slot, ())
        self._slots.stop_capturing(slot)
        self.served.remove(slot)
        for name in self._consumers:
            self._slots.users(name)[slot] = False

    def release(self, sequence: Sequence) -> None:
        """The engine let go of a sequence."""
        for groups in sequence.steering_rows:
            self._steering.release(groups)
        for choice in sequence.token_choices:
            self._choices.release(choice)

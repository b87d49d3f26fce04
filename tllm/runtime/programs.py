"""Capture programs: which taps a row of a phase is captured at, and for which flows."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from tllm.cuda_runtime import current_stream
from tllm.runtime.flows import BoundFlow
from tllm.runtime.taps import TapKey, Taps
from tllm.runtime.transfer import upload

_RESERVED = 32

Asked = tuple[int, tuple[BoundFlow, ...]]
"""A phase, and the flows that want its rows."""


_OnStream = tuple[tuple[TapKey, ...], int]
"""Taps, and the stream that their rows are read on."""


class TooManyProgramsError(RuntimeError):
    """More distinct combinations of flows are in use at once than there are programs."""


@dataclass(frozen=True, eq=False)
class Program:
    """What happens to the rows that have it.

    Attributes:
        number: its number in the row plan; 0 is kept for "nothing".
        phase: `PREFILL` or `DECODE`.
        taps: captured, in the order of the token's ring rows.
        flows: the flows its rows go to.
    """

    number: int
    phase: int
    taps: tuple[TapKey, ...]
    flows: tuple[BoundFlow, ...]
    _places: dict[_OnStream, slice | torch.Tensor] = field(default_factory=dict)

    @cached_property
    def ring_offsets(self) -> dict[TapKey, int]:
        """Which of a token's ring rows holds each tap."""
        return {tap: offset for offset, tap in enumerate(self.taps)}

    def has_together(self, taps: tuple[TapKey, ...]) -> bool:
        """Whether the rows of some taps lie side by side, in that order."""
        offsets = [self.ring_offsets[tap] for tap in taps]
        return not offsets or offsets == list(range(offsets[0], offsets[0] + len(offsets)))

    def block(self, rows: torch.Tensor, taps: tuple[TapKey, ...]) -> torch.Tensor:
        """Rows `[rows, len(taps), hidden]` of some taps: a view where they lie side by side."""
        if taps == self.taps:
            return rows
        # What one stream has uploaded another may not have yet.
        stream = current_stream(rows.device).cuda_stream if rows.is_cuda else 0
        place = self._places.get((taps, stream))
        if place is None:
            offsets = [self.ring_offsets[tap] for tap in taps]
            first, stop = offsets[0], offsets[0] + len(offsets)
            if offsets == list(range(first, stop)):
                place = slice(first, stop)
            else:
                place = upload(np.array(offsets, np.int64), rows.device)
            self._places[taps, stream] = place
        return rows[:, place] if isinstance(place, slice) else rows.index_select(1, place)


class Programs:
    """The distinct programs in use. Sequences that ask the same share one.

    A program that no sequence has is kept for the next one that asks the same, until its number is
    needed. Frames in flight hold the programs of their rows, not their numbers.

    Attributes:
        capacity: how many there may be.
        widths: `[programs]`, number of taps of each.
    """

    def __init__(self, taps: Taps, capacity: int) -> None:
        self._taps = taps
        self.capacity = capacity
        self._by_asked: dict[tuple[int, tuple[int, ...]], Program] = {}
        self._programs: dict[int, Program] = {}
        self._users: Counter[int] = Counter()
        self._assigned: dict[int, list[int]] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._captured: Counter[TapKey] = Counter()
        self._next = 1
        self.widths: npt.NDArray[np.int32] = np.zeros(capacity, np.int32)

    def __getitem__(self, number: int) -> Program:
        return self._programs[number]

    def __len__(self) -> int:
        """Programs that sequences have."""
        return len(self._programs) - len(self._unused)

    def assign(self, slot: int, asked: Sequence[Asked]) -> list[int]:
        """Give the sequence in a slot these programs, and no others any more.

        Returns:
            The number of each; 0 where there are no flows. Raises `TooManyProgramsError`, and then
            the sequence has none.
        """
        before = self._assigned.pop(slot, [])
        numbers: list[int] = []
        try:
            for phase, flows in asked:
                numbers.append(self._acquire(phase, flows) if flows else 0)
        except TooManyProgramsError:
            for number in numbers:
                self._release(number)
            raise
        finally:
            for number in before:
                self._release(number)
        if any(numbers):
            self._assigned[slot] = numbers
        return numbers

    def _acquire(self, phase: int, flows: tuple[BoundFlow, ...]) -> int:
        key = (phase, tuple(id(flow) for flow in flows))
        program = self._by_asked.get(key)
        if program is None:
            program = self._by_asked[key] = self._define(phase, flows)
        number = program.number
        self._unused.pop(number, None)
        self._users[number] += 1
        if self._users[number] == 1:
            self._capture(program, 1)
        return number

    def _release(self, number: int) -> None:
        if not number:
            return
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number]
            self._unused[number] = None
            self._capture(self._programs[number], -1)

    def _capture(self, program: Program, more: int) -> None:
        """Turn capturing on or off where the first or the last program that needs it is."""
        before = {tap for tap, count in self._captured.items() if count}
        for tap in program.taps:
            self._captured[tap] += more
        after = {tap for tap, count in self._captured.items() if count}
        if before != after:
            self._taps.set_capturing(after)

    def _define(self, phase: int, flows: tuple[BoundFlow, ...]) -> Program:
        number = self._free_number(all(flow.number >= 0 for flow in flows))
        taps = tuple(dict.fromkeys(tap for flow in flows for tap in flow.taps))
        program = self._programs[number] = Program(number, phase, taps, flows)
        self.widths[number] = len(taps)
        self._taps.set_program(number, taps)
        return program

    def _free_number(self, for_all: bool) -> int:
        """A number for a new program; the last ones are for flows that every sequence has."""
        limit = self.capacity - (0 if for_all else min(_RESERVED, self.capacity // 4))
        if self._next < limit:
            self._next += 1
            return self._next - 1
        number = next((n for n in self._unused if n < limit), None)
        if number is None:
            raise TooManyProgramsError(
                f"the running requests ask for more than {limit - 1} distinct combinations of rows "
                "at once; let them choose among fewer, or lower max_num_seqs"
            )
        del self._unused[number]
        old = self._programs.pop(number)
        del self._by_asked[old.phase, tuple(id(flow) for flow in old.flows)]
        return number

    def clear(self) -> None:
        """Forget all programs (whoever has one must be assigned another)."""
        self._by_asked.clear()
        self._programs.clear()
        self._users.clear()
        self._assigned.clear()
        self._unused.clear()
        self._captured.clear()
        self._next = 1
        self._taps.set_capturing(())

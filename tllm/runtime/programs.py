"""Capture programs: which taps a row of a phase is captured at, and for which flows."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tllm.runtime.taps import TapKey, Taps
from tllm.runtime.transfer import upload

if TYPE_CHECKING:
    from tllm.runtime.dispatch import BoundFlow

_RESERVED = 32

Asked = tuple[int, tuple["BoundFlow", ...]]
"""A phase, and the flows that want its rows."""


class TooManyProgramsError(RuntimeError):
    """More distinct combinations of flows are followed at once than there are programs."""


@dataclass(frozen=True, eq=False)
class Program:
    """What happens to the rows that follow it.

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
    _indices: dict[tuple[TapKey, ...], torch.Tensor] = field(default_factory=dict)

    @cached_property
    def columns(self) -> dict[TapKey, int]:
        """Which of a token's ring rows holds each tap."""
        return {tap: column for column, tap in enumerate(self.taps)}

    def block(self, rows: torch.Tensor, taps: tuple[TapKey, ...]) -> torch.Tensor:
        """The columns `[rows, len(taps), hidden]` of some taps: a view where they lie so."""
        columns = [self.columns[tap] for tap in taps]
        first = columns[0]
        if columns == list(range(first, first + len(columns))):
            return rows[:, first : first + len(columns)]
        index = self._indices.get(taps)
        if index is None:
            index = self._indices[taps] = upload(np.array(columns, np.int64), rows.device)
        return rows.index_select(1, index)


class Programs:
    """The distinct programs in use. Sequences that ask the same share one.

    A program that no sequence follows is kept for the next one that asks the same, until its
    number is needed. Frames in flight hold the programs of their rows, not their numbers.

    Attributes:
        widths: `[programs]`, number of taps of each.
    """

    def __init__(self, taps: Taps, capacity: int) -> None:
        self._taps = taps
        self._capacity = capacity
        self._by_asked: dict[tuple[int, tuple[int, ...]], Program] = {}
        self._programs: dict[int, Program] = {}
        self._followers: Counter[int] = Counter()
        self._followed: dict[int, list[int]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._captured: Counter[TapKey] = Counter()
        self._next = 1
        self.widths: npt.NDArray[np.int32] = np.zeros(capacity, np.int32)

    def __getitem__(self, number: int) -> Program:
        return self._programs[number]

    def __len__(self) -> int:
        """Programs that sequences follow."""
        return len(self._programs) - len(self._idle)

    def follow(self, slot: int, asked: Sequence[Asked]) -> list[int]:
        """Let the sequence in a slot follow these programs, and no others any more.

        Returns:
            The number of each; 0 where there are no flows. Raises `TooManyProgramsError`, and then
            the sequence follows none.
        """
        before = self._followed.pop(slot, [])
        numbers: list[int] = []
        try:
            for phase, flows in asked:
                numbers.append(self._take(phase, flows) if flows else 0)
        except TooManyProgramsError:
            for number in numbers:
                self._let_go(number)
            raise
        finally:
            for number in before:
                self._let_go(number)
        if any(numbers):
            self._followed[slot] = numbers
        return numbers

    def _take(self, phase: int, flows: tuple[BoundFlow, ...]) -> int:
        key = (phase, tuple(id(flow) for flow in flows))
        program = self._by_asked.get(key)
        if program is None:
            program = self._by_asked[key] = self._define(phase, flows)
        number = program.number
        self._idle.pop(number, None)
        self._followers[number] += 1
        if self._followers[number] == 1:
            self._capture(program, 1)
        return number

    def _let_go(self, number: int) -> None:
        if not number:
            return
        self._followers[number] -= 1
        if not self._followers[number]:
            del self._followers[number]
            self._idle[number] = None
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
        limit = self._capacity - (0 if for_all else min(_RESERVED, self._capacity // 4))
        if self._next < limit:
            self._next += 1
            return self._next - 1
        number = next((n for n in self._idle if n < limit), None)
        if number is None:
            raise TooManyProgramsError(
                f"the running requests ask for more than {limit - 1} distinct combinations of rows "
                "at once; let them choose among fewer, or lower max_num_seqs"
            )
        del self._idle[number]
        old = self._programs.pop(number)
        del self._by_asked[old.phase, tuple(id(flow) for flow in old.flows)]
        return number

    def clear(self) -> None:
        """Forget all programs (whoever followed one must follow anew)."""
        self._by_asked.clear()
        self._programs.clear()
        self._followers.clear()
        self._followed.clear()
        self._idle.clear()
        self._captured.clear()
        self._next = 1
        self._taps.set_capturing(())

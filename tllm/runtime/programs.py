"""Capture programs: which taps a row of a phase is captured at, and for which flows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tllm.runtime.taps import TapKey, Taps

if TYPE_CHECKING:
    from tllm.runtime.dispatch import BoundFlow


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

    @cached_property
    def columns(self) -> dict[TapKey, int]:
        """Which of a token's ring rows holds each tap."""
        return {tap: column for column, tap in enumerate(self.taps)}


class Programs:
    """The distinct programs in use. Sequences that ask the same share one.

    Attributes:
        widths: `[programs]`, number of taps of each.
    """

    def __init__(self, taps: Taps, capacity: int) -> None:
        self._taps = taps
        self._capacity = capacity
        self._by_flows: dict[tuple[int, tuple[int, ...]], Program] = {}
        self._programs: list[Program | None] = [None]
        self.widths: npt.NDArray[np.int32] = np.zeros(1, np.int32)

    def __getitem__(self, number: int) -> Program:
        program = self._programs[number]
        assert program is not None, f"capture program {number} is not defined"
        return program

    def number_for(self, phase: int, flows: Sequence[BoundFlow]) -> int:
        """The program that feeds these flows; 0 when there are none."""
        if not flows:
            return 0
        key = (phase, tuple(id(flow) for flow in flows))
        program = self._by_flows.get(key)
        if program is None:
            program = self._define(phase, tuple(flows))
            self._by_flows[key] = program
        return program.number

    def _define(self, phase: int, flows: tuple[BoundFlow, ...]) -> Program:
        number = len(self._programs)
        if number >= self._capacity:
            raise RuntimeError(
                f"more than {self._capacity} combinations of consumers were used in one engine; "
                "restart it, or let requests choose among fewer combinations"
            )
        taps = tuple(dict.fromkeys(tap for flow in flows for _, tap in flow.taps))
        program = Program(number, phase, taps, flows)
        self._programs.append(program)
        self.widths = np.append(self.widths, np.int32(len(taps)))
        self._taps.set_program(number, taps)
        self._taps.set_capturing({tap for p in self._programs if p for tap in p.taps})
        return program

    def clear(self) -> None:
        """Forget all programs (no sequence may follow one any more)."""
        self._by_flows.clear()
        self._programs = [None]
        self.widths = np.zeros(1, np.int32)
        self._taps.set_capturing(())

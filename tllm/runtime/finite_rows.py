"""Sequences whose rows stop being finite: taps at the end of the network find them, and their
requests end with an error."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from tllm.runtime.columns import DECODE, PREFILL, Column
from tllm.runtime.slots import RunningSequence, Slots
from tllm.runtime.taps import Taps

NOT_FINITE = (
    "a row of it is not finite any more at the end of the network, or float32 does not hold its "
    "square: what its rows were changed with is too large for this model; give a smaller scale, or "
    "smaller vectors"
)


class FiniteRows:
    """Knows which of the sequences whose rows may be changed have a row that is not finite.

    A tap makes zeros of such a row: of NaN, vLLM may draw a token that is not in the vocabulary,
    whose embedding the next step would read where there is none. Then it writes to memory of the
    host, so that a step in which all is well costs no copy, and nothing is waited for. What a step
    found is there when its tokens are.

    Attributes:
        told: `[1 + tokens]`, written by the device: the first is 0 while all is well.
        watching: whether any sequence is watched.
    """

    def __init__(self, slots: Slots, taps: Taps) -> None:
        self._slots = slots
        self._taps = taps
        self.watching = False
        self._numbers = itertools.count()
        self._watched: dict[int, RunningSequence] = {}
        self._memory = torch.full((1 + taps.plan.shape[1],), -1, dtype=torch.int32)
        if taps.device.type == "cuda":
            self._memory = self._memory.pin_memory()
        self.told = self._memory.numpy()
        self.told[0] = 0
        taps.place_check(self._memory)

    def watch(self, sequence: RunningSequence) -> None:
        """Something may change rows of a sequence, from now until `forget`."""
        if not self._taps.checked or sequence.number is not None:
            return
        sequence.number = number = next(self._numbers)
        self._watched[number] = sequence
        for phase in (PREFILL, DECODE):
            self._slots.assign(sequence.info.slot, phase, Column.SEQUENCE, number)
        if not self.watching:
            self.watching, self.told[0] = True, 0
            self._taps.set_checking(True)

    def forget(self, sequence: RunningSequence) -> None:
        """A sequence has ended."""
        if sequence.number is None:
            return
        del self._watched[sequence.number]
        if not self._watched:
            self.watching = False
            self._taps.set_checking(False)

    def look(self) -> Mapping[str, str]:
        """Why sequences that run cannot go on, by the engine's id of each. From any thread."""
        # What was told stays where it is while anything is watched: to take it out would be a race
        # with the device.
        rows = self.told[1:]
        numbers = set(rows[rows >= 0].tolist())
        found = (self._watched.get(number) for number in numbers)
        return {sequence.engine_id: NOT_FINITE for sequence in found if sequence is not None}

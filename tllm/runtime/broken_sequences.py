"""Sequences that cannot go on: what they ask cannot be done to their rows, or a row of them is not
finite any more. Their requests end with an error."""

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


class BrokenSequences:
    """Knows which sequences cannot go on.

    Rows are checked where anything may change them. A tap makes zeros of one that is not finite: of
    NaN, vLLM may draw a token that is not in the vocabulary, whose embedding the next step would
    read where there is none. Then it writes to memory of the host, so that a step in which all is
    well costs no copy, and nothing is waited for. What a step found is there when its tokens are.

    Attributes:
        told: `[1 + tokens]`, written by the device: the first is 0 while all is well.
        watching: whether `told` is to be looked at.
    """

    def __init__(self, slots: Slots, taps: Taps) -> None:
        self._slots = slots
        self._taps = taps
        self.watching = False
        self._numbers = itertools.count()
        self._checked: dict[int, RunningSequence] = {}
        self._given_up: dict[str, str] = {}
        self._memory = torch.full((1 + taps.plan.shape[1],), -1, dtype=torch.int32)
        if taps.device.type == "cuda":
            self._memory = self._memory.pin_memory()
        self.told = self._memory.numpy()
        self.told[0] = 0
        taps.place_check(self._memory)

    def check(self, sequence: RunningSequence) -> None:
        """Something may change rows of a sequence, from now until `forget`."""
        if not self._taps.checked or sequence.number is not None:
            return
        self._watch()
        sequence.number = number = next(self._numbers)
        if not self._checked:
            self._taps.set_checking(True)
        self._checked[number] = sequence
        for phase in (PREFILL, DECODE):
            self._slots.assign(sequence.info.slot, phase, Column.SEQUENCE, number)

    def give_up(self, sequence: RunningSequence, why: str) -> None:
        """A sequence cannot be treated as it asks."""
        self._watch()
        self._given_up[sequence.engine_id] = why
        self.told[0] = 1

    def _watch(self) -> None:
        if not self.watching:
            self.watching, self.told[0] = True, 0

    def forget(self, sequence: RunningSequence) -> None:
        """A sequence has ended."""
        if not self.watching:
            return
        self._given_up.pop(sequence.engine_id, None)
        if sequence.number is not None:
            del self._checked[sequence.number]
            if not self._checked:
                self._taps.set_checking(False)
        self.watching = bool(self._checked or self._given_up)

    def not_finite(self) -> list[RunningSequence]:
        """Those that run and have a row that is not finite. From any thread."""
        # What was told stays where it is while anything is watched: to take it out would be a race
        # with the device.
        rows = self.told[1:]
        found = (self._checked.get(number) for number in set(rows[rows >= 0].tolist()))
        return [sequence for sequence in found if sequence is not None]

    def reasons(self) -> Mapping[str, str]:
        """Why sequences that run cannot go on, by the engine's id of each. From any thread."""
        found = {sequence.engine_id: NOT_FINITE for sequence in self.not_finite()}
        return {**found, **self._given_up}

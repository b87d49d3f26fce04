"""What conditions made of a step's tokens, from one pipeline stage to those after it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from tllm.runtime.columns import IntArray
from tllm.runtime.steering import Steering


class ScoreRelay:
    """Takes strengths and scores from the stage before, and gives them to the one after.

    They travel beside the rows that they were judged for, in the steps that have a sequence which
    needs them there, and in no others. A stage knows which these are: every stage is told of all
    that a sequence asks. What arrives stands where this stage's own taps leave what they find,
    before they run; so what is known here is what one stage alone would know.

    Args:
        num_stages: pipeline stages of the engine.
        is_last: whether there is none after this one.
        max_sequences: the most that are expected at once; preempted ones may come on top.
    """

    def __init__(
        self, steering: Steering, num_stages: int, *, is_last: bool, max_sequences: int
    ) -> None:
        self._steering = steering
        self.alone = num_stages == 1
        self.is_last = is_last
        #: Of each slot: whether a later stage needs what is judged here, and this one what is
        #: judged on an earlier one.
        self._tells = np.zeros(max_sequences, bool)
        self._hears = np.zeros(max_sequences, bool)
        self._users = 0
        self._leaving: torch.Tensor | None = None

    def ask(self, slot: int, groups: Iterable[str]) -> None:
        """A sequence begins that has these groups; to be followed by `forget`."""
        if self.alone:
            return
        tells, hears = self._steering.crossings(groups)
        if tells or hears:
            self._make_room(slot)
            self._users += 1
            self._tells[slot], self._hears[slot] = tells and not self.is_last, hears

    def forget(self, slot: int) -> None:
        """A sequence has ended."""
        if self._users and slot < len(self._tells) and (self._tells[slot] or self._hears[slot]):
            self._users -= 1
            self._tells[slot] = self._hears[slot] = False

    def _make_room(self, slot: int) -> None:
        if slot >= len(self._tells):
            more = max(slot + 1, 2 * len(self._tells)) - len(self._tells)
            self._tells, self._hears = (
                np.pad(each, (0, more)) for each in (self._tells, self._hears)
            )

    def skip(self) -> None:
        """Nothing travels with the next forward pass."""
        self._leaving = None

    def begin(self, slots: IntArray, counts: IntArray, arrived: torch.Tensor | None) -> None:
        """Before a forward pass, behind its row plan.

        Args:
            slots: of the sequences of the step.
            counts: how many tokens of each.
            arrived: float32 `[tokens, 2, MAX_GATES]` of the stage before; None for nothing.
        """
        self._leaving = None
        if not self._users and arrived is None:
            return
        tokens = int(counts.sum())
        self._make_room(int(slots.max(initial=0)))
        gates = self._steering.gates
        if arrived is not None:
            gates.hear(arrived)
        elif self._hears[slots].any():
            raise RuntimeError(
                "conditions that were judged on an earlier pipeline stage did not arrive with the "
                "rows of a step; give probes in layers of the stage that they decide on, and "
                "report how this engine was started"
            )
        elif self._tells[slots].any():
            gates.forget_scores(tokens)  # what is not judged must not be what stood there before
        if not self.is_last and (arrived is not None or self._tells[slots].any()):
            self._leaving = arrived if gates.state is None else gates.state[:tokens]

    def take(self) -> torch.Tensor | None:
        """What goes to the next stage; None for nothing. Behind the forward pass, on its stream,
        and to be sent before the next one begins, which writes there."""
        leaving, self._leaving = self._leaving, None
        return leaving

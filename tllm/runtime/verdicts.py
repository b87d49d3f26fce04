"""What conditions that end requests, or that conversations remember, made of the rows of a step, on
its way to the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tllm.runtime.batch import together
from tllm.runtime.broken_sequences import BrokenSequences
from tllm.runtime.columns import IntArray
from tllm.runtime.gates import Gates
from tllm.runtime.latches import HOLDS
from tllm.runtime.transfer import PinnedCopy, upload
from tllm.spec.gates import MAX_GATES

PROMPT = -1
"""In a `Fired`, for a row of the prompt."""
BROKEN = -2
"""In a `Fired`, for whatever row: the sequence cannot go on."""

Fired: TypeAlias = tuple[tuple[int, int | str], ...]
"""Of one sequence: `(which token drawn in the step, number of the condition)` for each condition
that held for the row that a token was drawn from; in order. What a controller stops, and what
cannot go on, has its reason in place of a number."""

BoolArray: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Judged:
    """The rows of one step that are judged; arrays `[rows]`.

    Attributes:
        sequence: the place of each row's sequence in the batch.
        drawn: which of the tokens of its sequence is drawn from it; `PROMPT` for a prompt's row.
        asked: `[rows, MAX_GATES]`, the conditions that are asked for.
        batch_rows: where they are in the batch, as `together` has it.
    """

    engine_ids: Sequence[str]
    sequence: IntArray
    drawn: IntArray
    asked: BoolArray
    batch_rows: slice | IntArray


@dataclass(eq=False)
class _Steady:
    """What is judged in each step of sequences that all decode, a token in each.

    Attributes:
        next_starts: where they go on.
        partial: whether some rows are judged that may hold what stood there before.
    """

    slots: IntArray
    counts: bytes
    next_starts: bytes
    partial: bool
    judged: _Judged

    def goes_on(self, slots: IntArray, starts: IntArray, counts: IntArray) -> bool:
        """Whether a batch is the next step of the same; it is the last one then."""
        same = (
            slots is self.slots
            and counts.tobytes() == self.counts
            and starts.tobytes() == self.next_starts
        )
        if same:
            self.next_starts = (starts + counts).tobytes()
        return same


class StepVerdicts(ABC):
    """What the engine must hear of one step, of which the host knows nothing yet."""

    @abstractmethod
    def wait(self) -> Mapping[str, Fired]:
        """What held, by the engine's id of the sequence. From any thread, once, when the step's
        tokens are there."""


class JudgedRows(StepVerdicts):
    """What was judged in one step."""

    def __init__(self, judged: _Judged, strengths: PinnedCopy) -> None:
        self._judged = judged
        self._strengths = strengths

    def wait(self) -> Mapping[str, Fired]:
        judged = self._judged
        # What is no number was not judged, and holds nowhere.
        rows, numbers = np.nonzero((self._strengths.wait().numpy() > HOLDS) & judged.asked)
        found: dict[str, set[tuple[int, int]]] = {}
        for row, number in zip(rows.tolist(), numbers.tolist(), strict=True):
            engine_id = judged.engine_ids[judged.sequence[row]]
            found.setdefault(engine_id, set()).add((int(judged.drawn[row]), number))
        return {engine_id: tuple(sorted(fired)) for engine_id, fired in found.items()}


class StoppedSequences(StepVerdicts):
    """What controllers stopped in one step, with what was judged in it.

    Args:
        stopped: by the engine's id of each sequence that ends. In a step that drafts, what is
            decided by its rows is added when these are handed out.
        judged: None for nothing.
    """

    def __init__(self, stopped: Mapping[str, Fired], judged: StepVerdicts | None) -> None:
        self._stopped = stopped
        self._others = judged

    def wait(self) -> Mapping[str, Fired]:
        # Conditions come before controllers.
        found = {} if self._others is None else dict(self._others.wait())
        for engine_id, fired in self._stopped.items():
            found[engine_id] = (*found.get(engine_id, ()), *fired)
        return found


class BrokenVerdicts(StepVerdicts):
    """The sequences that cannot go on, with what else ends any.

    Args:
        others: None for nothing.
    """

    def __init__(self, broken: BrokenSequences, others: StepVerdicts | None = None) -> None:
        self._broken = broken
        self._others = others

    def wait(self) -> Mapping[str, Fired]:
        found = {} if self._others is None else self._others.wait()
        if not self._broken.told[0]:
            return found
        reasons = self._broken.reasons()
        return {**found, **{name: ((BROKEN, why),) for name, why in reasons.items()}}


class Verdicts:
    """The sequences of whose conditions the engine must be told, and the rows of each step that
    decide.

    Args:
        max_sequences: the most that are expected at once; preempted ones may come on top.
    """

    def __init__(self, gates: Gates, max_sequences: int) -> None:
        self._gates = gates
        self._asked = 0
        self._asks = np.zeros(max_sequences, bool)
        self._asks_prompt = np.zeros(max_sequences, bool)
        self._partial = np.zeros(max_sequences, bool)
        self._prompt_len = np.zeros(max_sequences, np.int32)
        #: Which conditions are asked for at rows of a prompt, and at generated tokens.
        self._numbers = np.zeros((2, max_sequences, MAX_GATES), bool)
        self._judged: _Judged | None = None
        self._steady: _Steady | None = None
        self._copied: StepVerdicts | None = None

    @property
    def asked(self) -> bool:
        """Whether the engine must be told of any sequence."""
        return self._asked > 0

    def ask(
        self,
        slot: int,
        prompt_len: int,
        in_prompt: Iterable[int],
        generated: Iterable[int],
        *,
        each: bool = True,
    ) -> None:
        """A sequence begins of which the engine must be told.

        Args:
            in_prompt, generated: numbers of conditions, for rows of the prompt and of generated
                tokens.
            each: whether each of these rows is judged.
        """
        self._make_room(slot)
        self._steady = None
        self._asked += 1
        self._asks[slot] = True
        self._partial[slot] = not each
        self._prompt_len[slot] = prompt_len
        for kind, numbers in enumerate((in_prompt, generated)):
            self._numbers[kind, slot, list(numbers)] = True
        self._asks_prompt[slot] = self._numbers[0, slot].any()

    def forget(self, slot: int) -> None:
        """A sequence has ended."""
        if slot < len(self._asks) and self._asks[slot]:
            self._steady = None
            self._asked -= 1
            self._asks[slot] = False
            self._numbers[:, slot] = False

    def _make_room(self, slot: int) -> None:
        size = len(self._asks)
        if slot < size:
            return
        more = max(slot + 1, 2 * size) - size
        self._asks = np.pad(self._asks, (0, more))
        self._asks_prompt = np.pad(self._asks_prompt, (0, more))
        self._partial = np.pad(self._partial, (0, more))
        self._prompt_len = np.pad(self._prompt_len, (0, more))
        self._numbers = np.pad(self._numbers, ((0, 0), (0, more), (0, 0)))

    def skip(self) -> None:
        """Nothing is judged in the next forward pass."""
        self._judged = self._copied = None

    def begin(
        self,
        engine_ids: Sequence[str],
        slots: IntArray,
        starts: IntArray,
        counts: IntArray,
        drafts: IntArray | None,
    ) -> None:
        """A step begins; arrays `[sequences]` as in `StepBatch`. Before the forward pass."""
        self._judged = self._copied = None
        if not self._asked:
            return
        steady = self._steady
        if steady is not None and drafts is None and steady.goes_on(slots, starts, counts):
            self._judge(steady.judged, steady.partial, counts)
            return
        self._steady = None
        self._make_room(int(slots.max(initial=0)))
        at = np.flatnonzero(self._asks[slots])
        if not len(at):
            return
        slot, start, end = slots[at], starts[at], starts[at] + counts[at]
        prompt_len = self._prompt_len[slot]
        drawn_from = end - 1 if drafts is None else end - 1 - drafts[at]
        in_prompt = self._asks_prompt[slot] & (start < prompt_len)
        low = np.where(in_prompt, start, np.maximum(drawn_from, prompt_len))
        lengths = np.maximum(end - low, 0)
        total = int(lengths.sum())
        if not total:
            return
        each = np.repeat(np.arange(len(at)), lengths)
        first = np.cumsum(lengths) - lengths
        positions = low[each] + np.arange(total) - first[each]
        of_prompt = positions < prompt_len[each]
        drawn = np.where(of_prompt, PROMPT, positions - drawn_from[each])
        asked = self._numbers[np.where(of_prompt, 0, 1), slot[each]]
        asked &= (of_prompt | (drawn >= 0))[:, None]
        batch_rows = (np.cumsum(counts) - counts)[at][each] + positions - start[each]
        judged = _Judged(
            engine_ids,
            at[each].astype(np.int32),
            drawn.astype(np.int32),
            asked,
            together(batch_rows.astype(np.int32)),
        )
        partial = bool(self._partial[slot].any())
        self._judge(judged, partial, counts)
        if drafts is None and (counts == 1).all() and (start >= prompt_len).all():
            ends = (starts + counts).tobytes()
            self._steady = _Steady(slots, counts.tobytes(), ends, partial, judged)

    def _judge(self, judged: _Judged, partial: bool, counts: IntArray) -> None:
        if partial:  # what is not judged must not be what stood there before
            self._gates.forget_scores(int(counts.sum()))
        self._judged = judged

    def copy(self) -> None:
        """Let what was judged come to the host. After the forward pass, on its stream."""
        judged = self._judged
        if judged is None or (state := self._gates.state) is None:
            return
        self._judged = None
        strengths, rows = state[:, 0], judged.batch_rows
        if isinstance(rows, slice):
            strengths = strengths[rows].contiguous()
        else:
            strengths = strengths.index_select(0, upload(rows.astype(np.int64), state.device))
        self._copied = JudgedRows(judged, PinnedCopy(strengths))

    def take(self) -> StepVerdicts | None:
        """What was judged in this step; None for nothing."""
        if self._judged is not None:
            self.copy()
        taken, self._copied = self._copied, None
        return taken

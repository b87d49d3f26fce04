"""What controllers decide, from the call of `decide` to where it acts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tllm.ports import (
    Action,
    ActionLog,
    Note,
    PortBundle,
    RequestInfo,
    Stop,
    TakenAction,
)
from tllm.runtime.columns import IntArray
from tllm.runtime.flows import BoundConsumer, BoundFlow
from tllm.runtime.slots import RunningSequence, Slots

_LATE = (
    "the request was added before consumer {consumer!r} was registered, and nothing that it "
    "decides can act on it; register it before requests are added"
)
_UNASKED = (
    "{action} was decided by rows of a flow that has only Actions.write({allowed}); name "
    "{kind!r} there"
)
_UNUSED = "consumer {consumer!r} decided for a request that does not use it"


@dataclass(eq=False)
class DecidedAction:
    """An action on its way; attributes as in `TakenAction`.

    Attributes:
        step: the engine step of its rows.
        window: of the flow that has decided it.
    """

    action: str
    position: int
    data: Mapping[str, Any]
    step: int
    window: str
    acts_from: int | None = None
    lag_steps: int | None = None
    error: str | None = None

    def taken(self) -> TakenAction:
        """As the user hears of it."""
        return TakenAction(
            self.action, self.position, self.data, self.acts_from, self.lag_steps, self.error
        )


@dataclass(eq=False)
class ControlledSequence:
    """What controllers did to one running sequence, and what they have still to do.

    Attributes:
        decided: all actions, by the consumer that has decided them.
        stop: the first that ends it.
    """

    decided: dict[str, list[DecidedAction]] = field(default_factory=dict)
    stop: DecidedAction | None = None

    def log(self, consumer: str) -> ActionLog | None:
        """What a consumer did; None for nothing."""
        decided = self.decided.get(consumer)
        return ActionLog(tuple(each.taken() for each in decided)) if decided else None


@dataclass(eq=False)
class ActionCounts:
    """What a controller has decided so far.

    Attributes:
        by_kind: actions.
        refused: those among them that could not be done.
        too_late: for requests that had ended.
        raised: calls of `decide` that raised.
        lags: of those that acted, by window and engine steps after the rows' own.
    """

    by_kind: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    too_late: int = 0
    raised: int = 0
    lags: Counter[tuple[str, int]] = field(default_factory=Counter)

    def counters(self) -> dict[str, Any]:
        """As plain data."""
        lags: dict[str, dict[int, int]] = {}
        for (window, lag), count in sorted(self.lags.items()):
            lags.setdefault(window, {})[lag] = count
        return {
            "by_kind": dict(self.by_kind),
            "refused": self.refused,
            "too_late": self.too_late,
            "raised": self.raised,
            "lag_steps": lags,
        }


class Controllers:
    """Takes what consumers decide, and lets it act.

    `decide` may be called on delivery threads; everything else runs on the engine's.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._counts: dict[str, ActionCounts] = {}
        #: Sequences that end, by the engine's id; told until the engine lets go of them.
        self._stopping: dict[str, RunningSequence] = {}
        self._failed: list[tuple[BoundConsumer, RequestInfo, str]] = []
        self._batch: tuple[list[str], IntArray, int] | None = None

    def counters(self, consumer: str) -> dict[str, Any] | None:
        """What a consumer has decided; None for nothing."""
        counts = self._counts.get(consumer)
        return None if counts is None else counts.counters()

    # -- deciding ----------------------------------------------------------------------------------

    def hear(
        self, flow: BoundFlow, bundle: PortBundle, actions: Iterable[Action], step: int
    ) -> None:
        """A consumer has decided by the rows of a bundle. Raises `TypeError` for what is no action;
        then nothing is done."""
        decided = list(actions)
        for action in decided:
            if not isinstance(action, Action) or not isinstance(action.request, RequestInfo):
                raise TypeError(
                    f"decide returned {action!r:.80}; it returns Stop, Note, Steer and SetScale "
                    "with one of rows.meta.requests"
                )
        last = np.full(len(bundle.meta.requests), -1, np.int64)
        np.maximum.at(last, bundle.meta.request_index, bundle.meta.positions)
        numbers = {(r.prompt_id, r.sample_index): i for i, r in enumerate(bundle.meta.requests)}
        for action in decided:
            number = numbers.get((action.request.prompt_id, action.request.sample_index))
            self._take(flow, action, -1 if number is None else int(last[number]), step)

    def _take(self, flow: BoundFlow, action: Action, position: int, step: int) -> None:
        owner = flow.owner
        counts = self._counts.setdefault(owner.id, ActionCounts())
        counts.by_kind[type(action).__name__] += 1
        sequence = self._slots.by_slot[action.request.slot]
        if sequence is None or sequence.ended or not self._slots.is_current(action.request):
            counts.too_late += 1
            return
        decided = DecidedAction(action.kind, position, {}, step, flow.flow.window)
        error = self._refusal(flow, action, sequence)
        if error is None:
            error = self._do(sequence, owner, action, decided)
        if error is not None:
            decided.error = error
            counts.refused += 1
        if sequence.controlled is None or not owner.serves(sequence):
            sequence.errors[owner.id] = decided.error or ""
        else:
            sequence.controlled.decided.setdefault(owner.id, []).append(decided)

    @staticmethod
    def _refusal(flow: BoundFlow, action: Action, sequence: RunningSequence) -> str | None:
        """Why an action cannot be done, whatever it says; None where it can."""
        owner = flow.owner
        if not owner.serves(sequence):
            return _UNUSED.format(consumer=owner.id)
        if sequence.controlled is None:
            return _LATE.format(consumer=owner.id)
        if action.kind not in flow.flow.actions:
            allowed = ", ".join(map(repr, sorted(flow.flow.actions)))
            name = type(action).__name__
            return _UNASKED.format(action=name, allowed=allowed, kind=action.kind)
        return None

    def _do(
        self,
        sequence: RunningSequence,
        owner: BoundConsumer,
        action: Action,
        decided: DecidedAction,
    ) -> str | None:
        """Let an action act when it can; returns why it cannot."""
        assert sequence.controlled is not None
        if isinstance(action, Note):
            if not isinstance(action.data, Mapping):
                return f"Note(data={action.data!r:.80}): give a mapping of plain data"
            decided.data = dict(action.data)
        elif isinstance(action, Stop):
            decided.data = {"reason": action.reason}
            if sequence.controlled.stop is None:
                sequence.controlled.stop = decided
                self._stopping[sequence.engine_id] = sequence
        else:
            return f"{type(action).__name__} is no action that is known"
        return None

    def fail(self, owner: BoundConsumer, bundle: PortBundle, error: BaseException) -> None:
        """`decide` raised: the requests of the bundle will hear of it, before the next step."""
        counts = self._counts.setdefault(owner.id, ActionCounts())
        counts.raised += 1
        text = f"{type(error).__name__}: {error}"
        self._failed += [(owner, request, text) for request in bundle.meta.requests]

    # -- acting ------------------------------------------------------------------------------------

    def take_failed(self) -> list[tuple[BoundConsumer, RunningSequence, str]]:
        """Sequences for which `decide` raised since this was asked, and what."""
        failed, self._failed = self._failed, []
        found = []
        for owner, request, text in failed:
            sequence = self._slots.by_slot[request.slot]
            if sequence is not None and not sequence.ended and self._slots.is_current(request):
                found.append((owner, sequence, text))
        return found

    def begin(self, engine_ids: list[str], ends: IntArray, step: int) -> None:
        """A step begins.

        Args:
            ends: `[sequences]`, position after the last token that is computed of each.
        """
        self._batch = engine_ids, ends, step

    def take_stops(self) -> Mapping[str, str]:
        """Sequences of the step whose last token is the one that it draws from, and why."""
        batch, self._batch = self._batch, None
        if not self._stopping or batch is None:
            return {}
        engine_ids, ends, step = batch
        found: dict[str, str] = {}
        for engine_id, sequence in list(self._stopping.items()):
            if self._slots.get(engine_id) is not sequence:
                del self._stopping[engine_id]
            elif engine_id in engine_ids:
                stop = sequence.controlled.stop if sequence.controlled else None
                assert stop is not None
                row = int(ends[engine_ids.index(engine_id)]) - 1
                # Nothing is drawn from a prompt that is not complete, nor from what is computed
                # again.
                if row >= max(stop.position, sequence.info.prompt_len - 1):
                    found[engine_id] = stop.data["reason"]
                    self._note_acted(sequence, stop, row, step)
        return found

    def _note_acted(
        self, sequence: RunningSequence, decided: DecidedAction, position: int, step: int
    ) -> None:
        """An action acts from a position on, in this step."""
        if decided.acts_from is not None or sequence.controlled is None:
            return
        decided.acts_from, decided.lag_steps = position, step - decided.step
        for consumer, all_decided in sequence.controlled.decided.items():
            if decided in all_decided:
                self._counts[consumer].lags[decided.window, decided.lag_steps] += 1

"""What controllers decide, from the call of `decide` to where it acts."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from tllm.inference_mode import advice_on
from tllm.ports import Action, Note, PortBundle, RequestInfo, SetScale, Steer, Stop
from tllm.ports.payload import reason_of
from tllm.runtime.assignments import Assignments
from tllm.runtime.columns import IntArray
from tllm.runtime.decided_actions import ActionCounts, ControlledSequence, DecidedAction
from tllm.runtime.decided_steering import DecidedGroups, DecidedSteering, NamedSteering
from tllm.runtime.flows import BoundConsumer, BoundFlow
from tllm.runtime.slots import RunningSequence, Slots
from tllm.runtime.verdicts import Fired
from tllm.spec.reading import check_text, scalar, whole_number
from tllm.spec.selection import END
from tllm.spec.tiers import Tiers

MAX_ACTIONS = 4096
"""The most that one call of `decide` may return."""

_LATE = (
    "the request was added before consumer {consumer!r} was registered, and nothing that it "
    "decides can act on it; register it before requests are added"
)
_UNASKED = (
    "{action} was decided by rows of a flow that has only Actions.write({allowed}); name "
    "{kind!r} there"
)
_UNUSED = "consumer {consumer!r} decided for a request that does not use it"


@dataclass(frozen=True, eq=False)
class SteeringDecision:
    """What a controller steers a sequence with, as every rank is told.

    Attributes:
        tiers: None where only the scale is another, or where it ends.
        scale: None where it is given anew.
    """

    engine_id: str
    consumer: str
    name: str
    tiers: Tiers | None
    tokens: int | None
    scale: float | None


_Read: TypeAlias = dict[int, Tiers]
"""What was read of the vectors of one decision, by the object that they were given as."""


@dataclass(frozen=True, eq=False)
class _RowsDrawnFrom:
    """The rows that the tokens of a step are drawn from; arrays `[sequences]`.

    Attributes:
        rows: position of the first of each sequence.
        drafts: how many drafted tokens follow, from each of which one is drawn, too; None: none.
    """

    engine_ids: list[str]
    rows: IntArray
    drafts: IntArray | None
    step: int


Failure: TypeAlias = tuple[str, str, str]
"""The engine's id of a sequence, a consumer whose `decide` raised, and what it raised."""


class Controllers:
    """Takes what consumers decide, and lets it act.

    `decide` may be called on delivery threads; everything else runs on the engine's. Under tensor
    parallelism the first rank decides, and what steers is told to all before each step.

    Args:
        share: from the first rank's to every rank's: to be called by all of them; None where there
            is one.

    Attributes:
        acting: sequences that controllers may act on. The same on every rank.
    """

    def __init__(
        self,
        slots: Slots,
        groups: DecidedGroups,
        assignments: Assignments,
        share: Callable[[Any], Any] | None,
    ) -> None:
        self._slots = slots
        self._groups = groups
        self._assignments = assignments
        self._share = share
        self.acting = 0
        self._counts: defaultdict[str, ActionCounts] = defaultdict(ActionCounts)
        #: Sequences that end, by the engine's id; told until the engine lets go of them.
        self._stopping: dict[str, RunningSequence] = {}
        self._steered: dict[str, RunningSequence] = {}
        self._lock = threading.Lock()
        self._waiting: list[tuple[SteeringDecision, DecidedAction]] = []
        self._failed: list[Failure] = []
        self._left: list[str] = []
        self._batch: _RowsDrawnFrom | None = None
        self._told: _RowsDrawnFrom | None = None

    def start(self, sequence: RunningSequence, steered_from: int | None) -> None:
        """A sequence begins that controllers may act on; see `ControlledSequence`."""
        self.acting += 1
        sequence.controlled = ControlledSequence(steered_from)

    def finish(self, sequence: RunningSequence) -> None:
        """The engine let go of a sequence, and its rows are given back."""
        if sequence.controlled is None:
            return
        self.acting -= 1
        self._stopping.pop(sequence.engine_id, None)
        self._steered.pop(sequence.engine_id, None)
        if sequence.decided is not None:
            self._groups.place(sequence.decided, frozenset())()
        self._groups.release(sequence.controlled.held)

    def counters(self, consumer: str) -> dict[str, Any] | None:
        """What a consumer has decided; None for nothing."""
        return self._counts[consumer].counters() if consumer in self._counts else None

    def forget(self, consumer: str) -> None:
        self._counts.pop(consumer, None)

    def end_steering_of(self, consumer: str) -> None:
        """A consumer leaves, or raised: what it steers with ends before the next step, and what it
        decided since the last is not done."""
        with self._lock:
            self._waiting = [each for each in self._waiting if each[0].consumer != consumer]
            if self._steered:
                self._left.append(consumer)

    # -- deciding ----------------------------------------------------------------------------------

    def hear(
        self, flow: BoundFlow, bundle: PortBundle, actions: Iterable[Action], step: int
    ) -> None:
        """A consumer has decided by the rows of a bundle.

        Raises `TypeError` for what is no action, and `ValueError` for more than `MAX_ACTIONS`: then
        nothing is done.
        """
        if not isinstance(actions, Iterable):
            raise TypeError(
                f"decide returned {actions!r:.80}; it returns a list of Steer, SetScale, Stop and "
                "Note, or yields them"
            )
        decided = list(islice(actions, MAX_ACTIONS + 1))
        if len(decided) > MAX_ACTIONS:
            raise ValueError(
                f"decide returned more than {MAX_ACTIONS} actions for {len(bundle.meta.requests)} "
                "requests; does it end?"
            )
        for action in decided:
            known_kind = isinstance(action, (Steer, SetScale, Stop, Note))
            if not known_kind or not isinstance(action.request, RequestInfo):
                raise TypeError(
                    f"decide returned {action!r:.80}; it returns Steer, SetScale, Stop and Note, "
                    "each with one of rows.meta.requests"
                )
        last = np.full(len(bundle.meta.requests), -1, np.int64)
        np.maximum.at(last, bundle.meta.request_index, bundle.meta.positions)
        numbers = {(r.prompt_id, r.sample_index): i for i, r in enumerate(bundle.meta.requests)}
        known: _Read = {}
        for action in decided:
            number = numbers.get((action.request.prompt_id, action.request.sample_index))
            self._take(flow, action, -1 if number is None else int(last[number]), step, known)

    def _take(
        self, flow: BoundFlow, action: Action, position: int, step: int, known: _Read
    ) -> None:
        owner = flow.owner
        counts = self._counts[owner.id]
        counts.by_kind[type(action).__name__] += 1
        sequence = self._slots.running(action.request)
        if sequence is None or sequence.ended:
            counts.too_late += 1
            return
        decided = DecidedAction(owner.id, action.verb, position, {}, step, flow.flow.window)
        error = self._refusal(flow, action, sequence)
        if error is None:
            error = self._do(sequence, action, decided, known)
        if error is not None:
            decided.error = error
            counts.refused += 1
        if not owner.serves(sequence):
            return  # it has heard why it goes on without the consumer, or never asked for it
        if sequence.controlled is None:
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
        action: Action,
        decided: DecidedAction,
        known: _Read,
    ) -> str | None:
        """Let an action act when it can; returns why it cannot."""
        assert sequence.controlled is not None
        if isinstance(action, Note):
            if not isinstance(action.data, Mapping):
                return f"Note(data={action.data!r:.80}): give a mapping of plain data"
            decided.data = dict(action.data)
        elif isinstance(action, Stop):
            if not isinstance(action.reason, str) or not action.reason:
                return f"Stop(reason={action.reason!r:.80}): give a text that is not empty"
            try:
                decided.data = {"reason": check_text(action.reason, "Stop(reason)")}
            except ValueError as error:
                return str(error)
            if sequence.controlled.stop is None:
                sequence.controlled.stop = decided
                self._stopping[sequence.engine_id] = sequence
        else:
            assert isinstance(action, (Steer, SetScale))
            try:
                decided.data, decision = self._decision(sequence, decided.consumer, action, known)
            except (TypeError, ValueError) as error:
                return str(error)
            with self._lock:
                self._waiting.append((decision, decided))
        return None

    def _decision(
        self,
        sequence: RunningSequence,
        consumer: str,
        action: Steer | SetScale,
        known: _Read,
    ) -> tuple[Mapping[str, Any], SteeringDecision]:
        """What the user hears of an action that steers, and every rank. Raises `ValueError`."""
        if not isinstance(action.name, str):
            raise ValueError(f"{action.verb}: name={action.name!r:.80} is no text")
        tiers, tokens, scale = None, None, None
        if isinstance(action, SetScale):
            scale = scalar(action.scale, "SetScale(scale)")
        else:
            if action.vectors is not None:
                given = action.vectors
                if id(given) not in known:  # for many requests it is often one object
                    known[id(given)] = self._groups.read(given, "Steer(vectors)")
                tiers = known[id(given)]
                tokens = action.tokens
            if tokens is not None:
                whole_number(tokens, "Steer(tokens)=", 1)
        decision = SteeringDecision(sequence.engine_id, consumer, action.name, tiers, tokens, scale)
        said = {"name": action.name}
        return said | ({"tokens": tokens} if scale is None else {"scale": scale}), decision

    def fail(self, owner: BoundConsumer, bundle: PortBundle, error: BaseException) -> None:
        """`decide` raised: the requests of the bundle will hear of it, before the next step."""
        counts = self._counts[owner.id]
        counts.raised += 1
        text = reason_of(error) + advice_on(error)
        found = map(self._slots.running, bundle.meta.requests)
        failed = [(sequence.engine_id, owner.id, text) for sequence in found if sequence]
        with self._lock:
            self._failed += failed

    # -- acting ------------------------------------------------------------------------------------

    def note_failures(self, sequence: RunningSequence) -> None:
        """A sequence ends before the step in which `decide` raising would be acted on."""
        with self._lock:
            for engine_id, consumer, text in self._failed:
                if engine_id == sequence.engine_id:
                    sequence.errors[consumer] = text

    def act(self, engine_ids: list[str], starts: IntArray, step: int) -> list[Failure]:
        """Let what was decided act on the step that begins. What consumers steer with that left, or
        whose `decide` raised for a sequence, ends.

        Args:
            starts: `[sequences]`, position of the first token that is computed of each.

        Returns:
            Sequences for which `decide` raised; consumers are to be kept from them.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
            failed, self._failed = self._failed, []
            left, self._left = self._left, []
        decisions = [decision for decision, _ in waiting]
        if self._share is not None:
            decisions, failed, left = self._share((decisions, failed, left))
        changed: dict[str, RunningSequence] = {}
        for consumer in left:
            for engine_id in self._steered:
                self._end(engine_id, consumer, changed)
        for number, decision in enumerate(decisions):
            sequence = self._slots.get(decision.engine_id)
            if sequence is None or sequence.ended or sequence.controlled is None:
                continue
            error, position = self._steer(sequence, decision)
            if error is None:
                changed[decision.engine_id] = sequence
            if waiting:  # of the first rank
                decided = waiting[number][1]
                if error is None:
                    self._note_acted(decided, position, step)
                else:
                    decided.error = error
                    self._counts[decision.consumer].refused += 1
        for engine_id, consumer, _ in failed:
            self._end(engine_id, consumer, changed)
        if self._steered or changed:
            self._place(changed, engine_ids, starts)
        return failed

    def _next_row(self, sequence: RunningSequence) -> int:
        """Position of the first row of a sequence that is steered by what is decided now."""
        controlled = sequence.controlled
        assert controlled is not None and controlled.steered_from is not None
        return max(int(self._slots.delivered[sequence.info.slot]), controlled.steered_from)

    def _end(self, engine_id: str, consumer: str, changed: dict[str, RunningSequence]) -> None:
        """Steer a sequence no more in a consumer's name."""
        sequence = self._steered.get(engine_id)
        if sequence is None or sequence.ended or sequence.decided is None:
            return
        named = sequence.decided.named
        others = {key: each for key, each in named.items() if key[0] != consumer}
        if len(others) < len(named):
            sequence.decided.named = others
            sequence.decided.change(self._next_row(sequence))
            changed[engine_id] = sequence

    def _steer(
        self, sequence: RunningSequence, decision: SteeringDecision
    ) -> tuple[str | None, int]:
        """Steer a sequence otherwise from its next row on; why it cannot be, and from where on."""
        controlled, position = sequence.controlled, self._next_row(sequence)
        assert controlled is not None
        decided = sequence.decided or DecidedSteering()
        named = {key: each for key, each in decided.named.items() if each.until > position}
        key = decision.consumer, decision.name
        tiers, until = decision.tiers, END
        if decision.tokens is not None:
            until = position + decision.tokens
        if decision.scale is not None:
            before = named.get(key)
            if before is None:
                names = [name for consumer, name in named if consumer == decision.consumer]
                return (
                    f"SetScale(name={decision.name!r}): this consumer steers nothing of that name; "
                    f"there is {', '.join(map(repr, names)) or 'nothing'}"
                ), position
            tiers, until = before.tiers, before.until
        if tiers is None:
            named.pop(key, None)
        else:
            done = tiers if decision.scale is None else tiers.scaled(decision.scale)
            others = [each.done for other, each in named.items() if other != key]
            try:
                self._groups.check([*others, done], "what controllers steer a request with")
            except ValueError as error:
                return str(error), position
            groups = self._groups.hold(done)
            controlled.held.update(groups)
            named[key] = NamedSteering(tiers, done, until, groups)
        decided.named = named
        decided.change(position)
        sequence.decided = decided
        self._steered[sequence.engine_id] = sequence
        return None, position

    def _place(
        self, changed: Mapping[str, RunningSequence], engine_ids: list[str], starts: IntArray
    ) -> None:
        """Bring to the tables what a step needs: of sequences that are steered otherwise, and of
        those that are computed again from before what is there."""
        begins = {
            engine_id: int(starts[number])
            for number, engine_id in enumerate(engine_ids)
            if engine_id in self._steered
        }
        for engine_id, sequence in self._steered.items():
            decided = sequence.decided
            assert decided is not None
            begin = begins.get(engine_id)
            if engine_id in changed:
                known = int(self._slots.delivered[sequence.info.slot])
                decided.begin = known if begin is None else min(begin, known)
            elif begin is None or begin >= decided.begin:
                continue
            else:
                decided.begin = begin
            needed = (digest for _, groups in decided.in_force() for digest in groups)
            let_go = self._groups.place(decided, frozenset(needed))
            self._assignments.assign(sequence)
            let_go()

    def begin(
        self,
        engine_ids: list[str],
        starts: IntArray,
        counts: IntArray,
        drafts: IntArray | None,
        step: int,
    ) -> None:
        """A step begins; arrays `[sequences]` as in `StepBatch`."""
        last = starts + counts - 1
        self._batch = _RowsDrawnFrom(
            engine_ids, last if drafts is None else last - drafts, drafts, step
        )

    def take_stops(self) -> dict[str, Fired]:
        """Sequences of the step whose last token is that of one of the rows that the step draws
        from, and why: in a step that drafts, for each of these rows from the first that may be it.
        Asked before the step's rows are handed out; `late_stops` has what is decided by them."""
        batch, self._batch = self._batch, None
        self._told = batch
        return {} if batch is None else self._stops(batch)

    def late_stops(self) -> dict[str, Fired]:
        """The same again, when the rows of a step that drafts are handed out."""
        batch, self._told = self._told, None
        return {} if batch is None else self._stops(batch)

    def _stops(self, batch: _RowsDrawnFrom) -> dict[str, Fired]:
        found: dict[str, Fired] = {}
        for engine_id, sequence in list(self._stopping.items()):
            if self._slots.get(engine_id) is not sequence:
                del self._stopping[engine_id]
            elif engine_id in batch.engine_ids:
                stop = sequence.controlled.stop if sequence.controlled else None
                assert stop is not None
                number = batch.engine_ids.index(engine_id)
                first = int(batch.rows[number])
                drafts = 0 if batch.drafts is None else int(batch.drafts[number])
                # Nothing is drawn from a prompt that is not complete, nor from what is computed
                # again.
                row = max(first, stop.position, sequence.info.prompt_len - 1)
                if row <= first + drafts:
                    places = range(row - first, drafts + 1)
                    found[engine_id] = tuple((place, stop.data["reason"]) for place in places)
                    self._note_acted(stop, row, batch.step)
        return found

    def _note_acted(self, decided: DecidedAction, position: int, step: int) -> None:
        """An action acts from a position on, in this step."""
        if decided.acts_from is not None:
            return
        decided.acts_from, decided.lag_steps = position, step - decided.step
        self._counts[decided.consumer].lags[decided.window, decided.lag_steps] += 1

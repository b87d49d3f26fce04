"""Steering as requests carry it: groups of operations, and which of them meet which positions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from tllm.spec.conditions import Condition
from tllm.spec.conversations import ConversationUse
from tllm.spec.gates import Gate, GateNumbers, GroupGates
from tllm.spec.memory import OVERS, SCOPES
from tllm.spec.operations import (
    MAX_CLAMPS,
    MAX_FEATURES,
    MAX_OPERATIONS,
    MAX_UNITS_OF_ALL,
    Coefficients,
    Features,
    Gradient,
    OperationForm,
)
from tllm.spec.phases import Phase
from tllm.spec.reading import FloatArray, digest_of
from tllm.spec.selection import EVERYWHERE, Selection
from tllm.spec.tiers import SteeringEntry, Tiers

STEERING = "steering"
"""Under which results say that a request was not steered as it asked."""
_JUDGED, _FOR_LATER = "judged:", "for_later:"
"""What the digests of groups begin with that change nothing: those whose conditions end a request,
or belong to entries without effect, and those whose conditions decide on the tokens after the
prompt."""
_JOIN = "join vectors that are added, or drop some"
_LIMITS = {
    "operations": (MAX_OPERATIONS, "operations", _JOIN),
    "clamps": (MAX_CLAMPS, "clamps (operations on a component)", _JOIN),
    "features": (MAX_FEATURES, "features and rows of low_rank", "drop some"),
    "units": (MAX_UNITS_OF_ALL, "units of k_steering", "take fewer steps, or classifiers"),
}
"""Of what is counted at one place: the most of it, its name, and what to do about more."""


@dataclass(frozen=True, eq=False)
class Endings:
    """Conditions that end a request.

    Attributes:
        stop: a sample ends where any of them holds for the row of a generated token.
        abort: the prompt is refused where any of them holds for one of its rows.
    """

    stop: tuple[Condition, ...] = ()
    abort: tuple[Condition, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.stop or self.abort)

    @property
    def key(self) -> Hashable:
        """Equal for two that end requests alike, for reasons of the same names."""
        return tuple(each.key for each in self.stop), tuple(each.key for each in self.abort)

    @property
    def is_complete(self) -> bool:
        return all(condition.is_complete for condition in (*self.stop, *self.abort))


@dataclass(frozen=True, eq=False)
class RequestSteering:
    """What one request asks; `SamplingParams` carries it to the engine's front door.

    Attributes:
        modules: names of registered modules, each with the factor of its effect.
        positions: tokens, for entries that say none.
    """

    tiers: Tiers
    modules: tuple[tuple[str, float], ...] = ()
    positions: Selection = field(default_factory=Selection)
    endings: Endings = field(default_factory=Endings)

    @cached_property
    def own(self) -> Tiers:
        """What it asks beside modules, at the tokens it means."""
        return self.tiers.at(self.positions)

    @cached_property
    def groups(self) -> tuple[SteeringGroup, ...]:
        """What is done to it where nothing but its own steering applies."""
        return compose([self.own], self.endings)

    @cached_property
    def key(self) -> Hashable:
        """Equal for two requests that ask the same."""
        return self.tiers.key, self.modules, self.positions, self.endings.key

    def hash(self) -> None:
        """Do now, once, what every request that asks this needs."""
        for entry in self.own:
            entry.largest  # noqa: B018 - computed once, when first looked at
            if entry.when is not None and not entry.when.is_complete:
                return  # what a monitor judges is known when the engine is asked
        if not self.endings.is_complete:
            return
        for group in self.groups:
            group.digest  # noqa: B018

    def __deepcopy__(self, memo: Any) -> RequestSteering:
        # Copies of the parameters share it: it never changes, and vectors are large.
        return self


@dataclass(frozen=True)
class SteeringGroup:
    """Operations that apply to the same tokens, in this order.

    Attributes:
        operations: `(hook point, layer, digest of the vector, coefficients)`.
        vectors: float32 `[hidden]` or `[vectors, hidden]`, by digest.
        reach: the most that it adds to a number of a row, by hook point and layer.
        gates: the conditions of its operations; None where all are done always.
        ends: of a group without operations, whose conditions are only judged: number and name of
            each that ends a sample (in decode), or refuses its prompt (in prefill). A name is ""
            where the user gave none.
    """

    phase: Phase
    positions: Selection
    operations: tuple[tuple[str, int | None, str, OperationForm], ...]
    vectors: Mapping[str, FloatArray] = field(compare=False, repr=False)
    reach: Mapping[tuple[str, int | None], float] = field(compare=False, repr=False)
    gates: GroupGates | None = None
    ends: tuple[tuple[int, str], ...] = field(default=(), compare=False)

    @classmethod
    def judging(
        cls, phase: Phase, conditions: Sequence[Condition], numbers: GateNumbers
    ) -> SteeringGroup:
        """What judges these at all tokens of a phase, and changes nothing.

        Args:
            numbers: of the conditions of the request; theirs are all known.
        """
        ends = tuple((numbers.number(each), each.name) for each in conditions)
        gates = numbers.gates(number for number, _ in ends)
        return cls(phase, EVERYWHERE, (), numbers.of(gates), {}, GroupGates((), gates), ends)

    @classmethod
    def watching(
        cls,
        phase: Phase,
        positions: Selection,
        conditions: Iterable[Condition],
        numbers: GateNumbers,
    ) -> SteeringGroup:
        """What judges the conditions of entries that change nothing, at their tokens.

        Args:
            numbers: of the conditions of the request; theirs are all known.
        """
        gates = numbers.gates(numbers.number(each) for each in conditions)
        return cls(phase, positions, (), numbers.of(gates), {}, GroupGates((), gates))

    @classmethod
    def of_prompt(cls, over: str, numbered: Iterable[int], numbers: GateNumbers) -> SteeringGroup:
        """What judges the prompt, and changes nothing.

        Args:
            over: of `OVERS`, that of these.
            numbered: conditions that decide on the tokens after the prompt.
        """
        gates = numbers.gates(numbered)
        where = _LAST if over == "prompt_last" else EVERYWHERE
        judged = GroupGates((), gates, judges=True)
        return cls("prefill", where, (), numbers.of(gates), {}, judged)

    @classmethod
    def of(
        cls,
        phase: Phase,
        positions: Selection,
        entries: Sequence[SteeringEntry],
        numbers: GateNumbers,
    ) -> SteeringGroup:
        """What these entries do, whatever tokens they name themselves.

        Args:
            numbers: of the conditions of the request; theirs are all known.
        """
        reach: dict[tuple[str, int | None], float] = defaultdict(float)
        operations: list[tuple[str, int | None, str, OperationForm]] = []
        vectors: dict[str, FloatArray] = {}
        for entry in entries:
            hook, layer, digest = entry.point.value, entry.layer, entry.digest
            reach[hook, layer] += entry.reach
            operations.append((hook, layer, digest, entry.coefficients))
            vectors[digest] = entry.vector
        if all(e.when is None for e in entries):
            return cls(phase, positions, tuple(operations), vectors, reach)
        of_each = tuple(-1 if e.when is None else numbers.number(e.when) for e in entries)
        gates = GroupGates(of_each, numbers.gates(number for number in of_each if number >= 0))
        vectors |= numbers.of(gates.judged)
        return cls(phase, positions, tuple(operations), vectors, reach, gates)

    @staticmethod
    def check_limits(groups: Sequence[SteeringGroup], what: str, max_reach: float) -> None:
        """Refuse groups that do too much at one place.

        Args:
            what: has them, for the message.
            max_reach: the most that may be added to a number of a row.
        """
        SteeringGroup.check_counts(groups, what)
        reach: dict[tuple[str, int | None], float] = defaultdict(float)
        for group in groups:
            for place, added in group.reach.items():
                reach[place] += added
        if reach and (added := max(reach.values())) > max_reach:
            hook, layer = max(reach, key=reach.__getitem__)
            raise ValueError(
                f"{what} adds up to {added:.3g} to the numbers of a row at {hook!r} of layer "
                f"{layer}, and this model can use rows up to {max_reach:.3g}; give "
                "smaller scales, or smaller factors of modules"
            )

    @staticmethod
    def check_counts(groups: Iterable[SteeringGroup], what: str) -> None:
        """Refuse groups with too many operations at one place.

        Args:
            what: has them, for the message.
        """
        groups = [*groups]
        if len(groups) == 1 and groups[0].acts_once:
            return
        counts: dict[str, Counter[tuple[str, int | None]]] = defaultdict(Counter)
        for group in groups:
            for hook, layer, _, done in group.operations:
                counts["operations"][hook, layer] += 1
                counts["clamps"][hook, layer] += done.reads_component
                if isinstance(done, Features):
                    counts["features"][hook, layer] += len(done.rules)
                if isinstance(done, Gradient):
                    counts["units"][hook, layer] += done.units
        for counted, (limit, kind, fix) in _LIMITS.items():
            for (hook, layer), most in counts[counted].most_common(1):
                if most > limit:
                    raise ValueError(
                        f"{what} has {most} {kind} at {hook!r} of layer {layer}; at most {limit} "
                        f"are allowed at one place: {fix}"
                    )

    @cached_property
    def digest(self) -> str:
        """Of what is done, whatever tokens it is done to."""
        done = {id(form): form for *_, form in self.operations}  # most have one object
        contents = {known: form.content for known, form in done.items()}
        parts = [
            f"{hook}:{layer}:{digest}:".encode() + contents[id(form)]
            for hook, layer, digest, form in self.operations
        ]
        if self.gates is not None:
            judged = [gate._replace(names=()) for gate in self.gates.gates]
            parts.append(repr((self.gates.of_operations, judged)).encode())
        digest = digest_of(b"".join(parts))
        if self.operations:
            return digest
        judges = self.gates is not None and (self.gates.judges or self.remembers)
        return f"{_FOR_LATER if judges else _JUDGED}{digest}"

    @property
    def acts_once(self) -> bool:
        """Whether all it does is one operation along a vector at each of its places."""
        if len(self.reach) < len(self.operations):
            return False
        return all(type(done) is Coefficients for *_, done in self.operations)

    @property
    def remembers(self) -> bool:
        """Whether any of its conditions decides for other tokens than those it is judged for."""
        return self.gates is not None and any(gate.scope for gate in self.gates.gates)

    @property
    def is_kept(self) -> bool:
        """Whether any of its conditions decides in later requests of a conversation."""
        return self.gates is not None and any(gate.kept_as for gate in self.gates.gates)

    @property
    def needs_prompt(self) -> bool:
        """Whether it remembers what its conditions said of rows of the prompt other than the last,
        which is always computed."""
        return bool(self._remembered_of_prompt)

    @property
    def needs_prompt_once(self) -> bool:
        """Whether that is known in a conversation of which all its conditions held before."""
        return all(gate.kept_as and not gate.of_mean for gate in self._remembered_of_prompt)

    @property
    def _remembered_of_prompt(self) -> list[Gate]:
        if self.gates is None or self.phase == "decode" or self.positions.phase == "generation":
            return []
        return [
            gate
            for gate in self.gates.judged
            if (gate.scope or gate.over) and OVERS[gate.over] != "prompt_last"
        ]

    @cached_property
    def use(self) -> GroupUse:
        """What a request carries of it."""
        return GroupUse(self.phase, self.positions, self.digest)


@dataclass(frozen=True)
class GroupUse:
    """A group in a request: which tokens, and the digest of what is done to them."""

    phase: Phase
    positions: Selection
    digest: str

    @property
    def changes_rows(self) -> bool:
        """Whether anything is done to the tokens, which are only judged otherwise."""
        return not self.digest.startswith((_JUDGED, _FOR_LATER))

    @property
    def judges_for_later(self) -> bool:
        """Whether what others do to later tokens depends on what it judges."""
        return self.digest.startswith(_FOR_LATER)

    @property
    def names_prompt_tokens(self) -> bool:
        """Whether which token of the prompt it is decides."""
        where = self.positions
        named = bool(where.include.token_ids or where.exclude.token_ids)
        return named and self.phase != "decode" and where.phase != "generation"

    def to_wire(self) -> list[Any]:
        positions = None if self.positions.everything else self.positions.to_wire()
        return [self.phase, positions, self.digest]

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> GroupUse:
        phase, positions, digest = wire
        return cls(phase, EVERYWHERE if positions is None else Selection.parse(positions), digest)


_LAST = Selection.parse("last_prompt")


def compose(parties: Sequence[Tiers], endings: Endings | None = None) -> tuple[SteeringGroup, ...]:
    """One list of groups from what several parties ask.

    All vectors come first, in the parties' order (each one's base tier, then its phases), then all
    clamps likewise. What changes nothing is left out; its conditions are judged all the same. Last
    comes what is only judged.
    """
    runs: list[tuple[tuple[Phase, Selection], list[SteeringEntry]]] = []
    idle: list[tuple[Phase, SteeringEntry]] = []
    tiers = [party.vectors for party in parties] + [party.clamps for party in parties]
    for tier in tiers:
        for phase, entries in tier.items():
            for entry in entries:
                if entry.coefficients.idle:
                    idle.append((phase, entry))
                    continue
                after_prompt = entry.when is not None and entry.when.memory.of_prompt
                tokens = "decode" if after_prompt else phase, entry.positions
                if not runs or runs[-1][0] != tokens:
                    runs.append((tokens, []))
                runs[-1][1].append(entry)
    numbers = GateNumbers()
    of_prompt: dict[str, list[int]] = {}
    steering = [entry.when for _, run in runs for entry in run if entry.when is not None]
    judged_for = {
        (numbers.number(entry.when), tokens)
        for tokens, run in runs
        for entry in run
        if entry.when is not None
    }
    watched: dict[tuple[Phase, Selection], list[Condition]] = {}
    for phase, entry in idle:
        if entry.when is None:
            continue
        number = numbers.number(entry.when)
        covering = product((phase, "any"), (entry.positions, EVERYWHERE))
        if any((number, tokens) in judged_for for tokens in covering):
            continue  # for these tokens it is judged where it steers
        if not entry.when.memory.of_prompt:
            watched.setdefault((phase, entry.positions), []).append(entry.when)
        steering.append(entry.when)
    for condition in steering:
        if condition.memory.of_prompt:
            of_prompt.setdefault(condition.memory.over, []).append(numbers.number(condition))
    judged: list[tuple[Phase, tuple[Condition, ...]]] = []
    if endings is not None:
        judged = [("decode", endings.stop), ("prefill", endings.abort)]
    for condition in (condition for _, conditions in judged for condition in conditions):
        numbers.number(condition)
    groups = [SteeringGroup.of(*tokens, entries, numbers) for tokens, entries in runs]
    groups += [SteeringGroup.of_prompt(over, of, numbers) for over, of in of_prompt.items()]
    groups += [SteeringGroup.watching(*tokens, of, numbers) for tokens, of in watched.items()]
    groups += [
        SteeringGroup.judging(phase, conditions, numbers)
        for phase, conditions in judged
        if conditions
    ]
    return tuple(groups)


def check_lasting(groups: Iterable[SteeringGroup], what: str) -> None:
    """Refuse conditions that decide on the tokens after those that they are judged for, and on
    none of them: all that has such a condition is for one token alone, or, where it decides on the
    one after it, for tokens of which no two follow each other.

    Args:
        what: has them, for the message.
    """
    lasting: dict[Gate, set[Selection]] = defaultdict(set)
    for group in groups:
        for gate in group.gates.judged if group.gates is not None else ():
            if gate.scope and not (gate.over or gate.kept_as):
                positions = group.positions
                if group.phase == "prefill" and positions.phase == "any":
                    positions = replace(positions, phase="prompt")
                lasting[gate].add(positions)
    for gate, where in lasting.items():
        each = [positions.single_tokens for positions in where]
        tokens = {token for found in each if found is not None for token in found}
        scope = SCOPES[gate.scope]
        if None in each or (len(tokens) > 1 and (scope != "next" or _may_follow(tokens))):
            continue
        named = f"one token alone, {_described(*min(tokens))}"
        if len(tokens) > 1:
            named = f"{len(tokens)} single tokens, and no two of them follow each other"
        raise ValueError(
            f"{what} has a condition at {gate.hook!r} with scope={scope!r}, which decides on "
            f"{'the token' if scope == 'next' else 'tokens'} after those that it is judged for, "
            f"and its entry is for {named}: nothing would be steered. Leave the positions out; "
            "with 'over': 'prompt_last' the last token of the prompt decides"
        )


def _may_follow(tokens: Collection[tuple[bool, int]]) -> bool:
    """Whether one of these may come after another in some sequence; see
    `Selection.single_tokens`."""
    both_kinds = len({from_end for from_end, _ in tokens}) > 1
    return both_kinds or any((from_end, number + 1) in tokens for from_end, number in tokens)


def _described(from_end: bool, number: int) -> str:
    """A token of `Selection.single_tokens`, in words."""
    if from_end and number >= 0:
        return f"window [{number}, {number + 1}] of the generated tokens"
    return f"position {number}"


def gates_of(groups: Iterable[SteeringGroup]) -> dict[int, Gate]:
    """The conditions of a request's groups, by number."""
    found = (gate for group in groups if group.gates is not None for gate in group.gates.gates)
    return {gate.number: gate for gate in found}


def use_of_conversation(
    groups: Iterable[SteeringGroup], place: int, serial: int
) -> ConversationUse:
    """What requests of a conversation remember of the conditions of one of them."""
    conditions: dict[int, str] = {}
    in_prompt: set[int] = set()
    generated: set[int] = set()
    for group in groups:
        if group.gates is None:
            continue
        conditions |= {gate.number: gate.kept_as for gate in group.gates.gates if gate.kept_as}
        judged = [gate.number for gate in group.gates.judged if gate.kept_as]
        if group.phase != "decode" and group.positions.phase != "generation":
            in_prompt.update(judged)
        if group.phase != "prefill" and group.positions.phase != "prompt":
            generated.update(judged)
    numbers = (tuple(sorted(each)) for each in (in_prompt, generated))
    return ConversationUse(place, serial, tuple(sorted(conditions.items())), *numbers)

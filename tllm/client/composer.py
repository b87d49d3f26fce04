"""What is registered to steer, and the groups that it and a request come to."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import starmap
from typing import Any
from weakref import WeakKeyDictionary

from tllm.client.facts import Facts
from tllm.consumers.base import Consumer
from tllm.consumers.sae import SaeConsumer
from tllm.spec.condition_reading import parse_condition
from tllm.spec.conditions import Condition, FeatureCondition, Known, NamedCondition, check_order
from tllm.spec.gates import MAX_GATES, Gate, GateNumbers, signal_names
from tllm.spec.groups import (
    Endings,
    RequestSteering,
    SteeringGroup,
    check_lasting,
    compose,
    gates_of,
)
from tllm.spec.memory import NOTHING
from tllm.spec.phases import SELECTED_PHASES, Phase
from tllm.spec.probes import FeatureProbe
from tllm.spec.reading import check_name, registered_names, said_of
from tllm.spec.selection import Selection
from tllm.spec.stretches import most_configurations
from tllm.spec.tiers import OTHER_LAYERS, TIER_FIELDS, SteeringEntry, Tiers

GLOBAL, MODULE, MONITOR = "steering", "module:", "monitor:"
"""Keys under which the workers keep global steering, and the beginnings of those of modules and of
monitors."""

_MOST_FEATURES = 1024
"""Features that are kept: each is read from a file."""

_OF_PHASE = {
    "any": "",
    "prefill": ", for tokens of the prompt,",
    "decode": ", for generated tokens,",
}


class Composer:
    """What is registered, and what requests that are added make of it.

    A request is composed of what is global, then the modules it names, then its own. It keeps what
    was composed for it; later changes meet later requests.

    Args:
        consumers: those that are registered, by id; autoencoders among them have features.

    Attributes:
        facts: None until the workers have told.
        everywhere: what is global.
    """

    def __init__(self, consumers: Mapping[str, Consumer]) -> None:
        self._consumers = consumers
        self._features: dict[tuple[str, int], FeatureProbe] = {}
        self.facts: Facts | None = None
        self.everywhere = Tiers()
        self.modules: dict[str, Tiers] = {}
        self.monitors: dict[str, Condition] = {}
        self._composed: WeakKeyDictionary[RequestSteering, tuple[SteeringGroup, ...]] = (
            WeakKeyDictionary()
        )
        self._plain: tuple[SteeringGroup, ...] | None = ()

    def forget_features(self) -> None:
        """A consumer has come or gone whose features requests may name."""
        self._features.clear()
        self._composed.clear()

    def learn(self, key: str, value: bytes | None) -> None:
        """Know what somebody has registered, or removed."""
        self._composed.clear()
        content = None if value is None else pickle.loads(value)
        if key == GLOBAL:
            self.everywhere = content or Tiers()
            self._plain = None if self.everywhere else ()
            return
        kind = MONITOR if key.startswith(MONITOR) else MODULE
        known: dict[str, Any] = self.monitors if kind == MONITOR else self.modules
        if content is None:
            known.pop(key[len(kind) :], None)
        else:
            known[key[len(kind) :]] = content

    def with_more(self, given: Mapping[str, Any], positions: Any, replace_all: bool) -> Tiers:
        """What is global, with entries in the place of those at the same hook and layer."""
        added = self._checked(_tiers(given, positions))
        before = Tiers() if replace_all else self.everywhere
        merged = _without_places_of(before, added).joined(added)
        self._limited(compose([merged]), "global steering")
        return merged

    def module_of(self, name: str, given: Any) -> Tiers:
        """A module that somebody defines."""
        tiers = self._checked(module_tiers(name, given))
        self._limited(compose([tiers]), f"module {name!r}")
        return tiers

    def module(self, name: str, field: str = "steering_module_ref: ") -> Tiers:
        """A module that a request names, or whoever begins the message where there is none."""
        if name not in self.modules:
            raise ValueError(
                f"{field}no module {name!r} is registered; registered are "
                f"{registered_names(self.modules)}. Use "
                "llm.steering.register_module, or POST /v1/steering/modules/register"
            )
        return self.modules[name]

    def monitor_of(self, name: str, given: Any) -> Condition:
        """A monitor that somebody defines."""
        name = check_name(name, "monitor")
        condition = parse_condition(given, f"monitor {name!r}")
        found = self._found(condition)
        if isinstance(found, (NamedCondition, FeatureCondition)):
            raise TypeError("a condition that was found has no name to look up")
        found = replace(found, name=name)
        numbers = GateNumbers()
        _check_gates(numbers.gates([numbers.number(found)]), f"monitor {name!r}")
        return found

    def check_monitor(self, name: str) -> None:
        """Refuse a name that no monitor has."""
        if name not in self.monitors:
            raise ValueError(
                f"no monitor {name!r} is registered; registered are "
                f"{registered_names(self.monitors)}"
            )

    # -- one request ----------------------------------------------------------------------------

    def concerns(self, asked: RequestSteering | None) -> bool:
        """Whether a request is steered at all."""
        return asked is not None or self._plain is None or bool(self._plain)

    def groups(self, asked: RequestSteering | None) -> tuple[SteeringGroup, ...]:
        """What is done to a request. Raises `ValueError` naming the field that is wrong."""
        if asked is None:
            if self._plain is None:
                self._plain = compose([self.everywhere])
            return self._plain
        composed = self._composed.get(asked)
        if composed is None:
            modules = [self.module(name).scaled(factor) for name, factor in asked.modules]
            own = self._checked(asked.own)
            endings = self._endings(asked.endings)
            alike = own is asked.own and endings is asked.endings
            if alike and not modules and not self.everywhere:
                composed = asked.groups
            else:
                at = [tiers.at(asked.positions) for tiers in modules]
                _check_modules(asked, at)
                composed = compose([self.everywhere, *at, own], endings)
            try:
                composed = self._limited(composed, _WITH_GLOBAL)
            except ValueError:
                self._check_factors(asked.modules)
                _check_own_conditions(own, endings, [self.everywhere, *modules])
                raise
            self._composed[asked] = composed
        return composed

    def for_generated_alone(self, asked: RequestSteering) -> str | None:
        """What of a request's steering does nothing to a prompt, beside entries that say so
        themselves: one by a monitor of its condition, or a module that has no other. None without
        any."""

        found: dict[Condition, Condition] = {}

        def alone(phase: Phase, entry: SteeringEntry) -> bool:
            return phase == "decode" or self._located(entry, found).needs_generated

        for phase, entry in asked.own.by_phase():
            if entry.when is not None and alone(phase, entry):
                return entry.name
        for name, _ in asked.modules:
            entries = [*self.module(name).at(asked.positions).by_phase()]
            if entries and all(starmap(alone, entries)):
                return f"the module {name!r}"
        return None

    # -- checks ----------------------------------------------------------------------------------

    def _checked(self, tiers: Tiers) -> Tiers:
        """The tiers with layers counted from 0; raises for what this engine does not have."""
        changes = False
        found: dict[Condition, Condition] = {}  # entries of many layers share one
        for tier in (tiers.vectors, tiers.clamps):
            for phase, entries in tier.items():
                for entry in entries:
                    if self._check(entry, phase, found) is not entry:
                        changes = True
        return tiers.map(partial(self._located, found=found)) if changes else tiers

    def _located(self, entry: SteeringEntry, found: dict[Condition, Condition]) -> SteeringEntry:
        """An entry with layers counted from 0, and what its condition names found.

        Args:
            found: conditions that were looked up before, with what they are; takes new ones.
        """
        assert self.facts is not None
        when = entry.when
        if when is not None:
            if when not in found:
                found[when] = self._found(when)
            when = found[when]
        from_end = entry.layer is not None and entry.layer < 0
        narrow = entry.vector.shape[-1] < self.facts.hidden_size
        if not from_end and not narrow and when is entry.when:
            return entry
        layer = None if entry.layer is None else entry.layer % self.facts.points.num_layers
        vector = self.facts.widened(entry.vector)
        return replace(entry, layer=layer, when=when, vector=vector)

    def _endings(self, asked: Endings) -> Endings:
        """What ends a request, with its conditions found. Raises where the engine judges none."""
        if not asked:
            return asked
        assert self.facts is not None
        name = "stop_when" if asked.stop else "abort_when"
        if not self.facts.max_configs:
            raise ValueError(
                f"{name}: rows are judged as they are steered, and steering is not enabled in this "
                "engine; start it with max_steering_configs=512"
            )
        stop, abort = (tuple(map(self._found, each)) for each in (asked.stop, asked.abort))
        for found in (*stop, *abort):
            if found.memory != NOTHING:
                raise ValueError(
                    f"{name}: a condition that ends a request is judged for each token and ends it "
                    f"there; leave {' and '.join(found.memory.described())} out"
                )
        pairs = zip((*stop, *abort), (*asked.stop, *asked.abort), strict=True)
        return asked if all(ours is theirs for ours, theirs in pairs) else Endings(stop, abort)

    def _found(self, condition: Condition) -> Condition:
        """A condition with layers counted from 0, and the monitors that it names."""
        facts = self.facts
        assert facts is not None
        found = condition.found(Known(facts.points, self.monitors, self._feature))
        for probe in found.probes():
            if probe.vector.shape[-1] != facts.hidden_size:
                key = "['layers'][0] takes" if probe.widths else "['vector'] has"
                raise ValueError(
                    f"{condition.field}['probe']{key} {probe.vector.shape[-1]} numbers; the "
                    f"model's hidden size is {facts.hidden_size}"
                )
        return found

    def _feature(self, name: str, number: int) -> FeatureProbe:
        """A feature of an autoencoder, as a probe; `ValueError` for one that there is not."""
        found = self._features.get((name, number))
        if found is None:
            consumer = self._consumers.get(name)
            if not isinstance(consumer, SaeConsumer):
                known = [n for n, each in self._consumers.items() if isinstance(each, SaeConsumer)]
                raise ValueError(
                    f"no autoencoder {name!r} is registered; registered are "
                    f"{', '.join(sorted(known)) or 'none'}. Use "
                    "llm.register_consumer(SaeConsumer(path))"
                )
            if len(self._features) >= _MOST_FEATURES:
                self._features.clear()
            assert self.facts is not None
            found = consumer.probe_of(number, centers_rows=self.facts.centers_rows)
            self._features[name, number] = found
        return found

    def _check(
        self, entry: SteeringEntry, phase: Phase, found: dict[Condition, Condition]
    ) -> SteeringEntry:
        """Refuse an entry that this engine cannot do; returns it as `_located` has it."""
        facts, name = self.facts, entry.name
        assert facts is not None
        if not facts.max_configs:
            raise ValueError(
                f"{name}: steering is not enabled in this engine; start it with "
                "max_steering_configs=512 (the number of distinct ways of steering at once)"
            )
        if entry.num_layers not in (None, facts.points.num_layers):
            raise ValueError(OTHER_LAYERS.format(name, entry.num_layers, facts.points.num_layers))
        try:
            widths = facts.checked_widths(entry.point, entry.layer)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if not entry.steers_in(phase):
            raise ValueError(
                f"{name}{_OF_PHASE[phase]} steers no token at the positions that it was given, by "
                f"itself or for all entries: {_phases_of(entry.positions)}; give other positions, "
                "or the entry in another field"
            )
        located = entry
        if entry.when is not None:
            located = self._located(entry, found)
            self._check_condition(located, phase)
        if entry.vector.shape[-1] not in widths:
            raise ValueError(
                f"{name} has {entry.vector.shape[-1]} numbers; the model's hidden size is "
                f"{facts.hidden_size}"
            )
        entry.check_numbers(facts.max_value, facts.max_reach, facts.smallest)
        return self._located(entry, found) if entry.when is None else located

    def _check_condition(self, entry: SteeringEntry, phase: Phase) -> None:
        """Refuse a condition, found, that cannot decide on its entry."""
        facts, when, name = self.facts, entry.when, entry.name
        assert facts is not None
        assert when is not None
        generated = "generation" in (entry.positions.phase, SELECTED_PHASES[phase])
        check_order(when, entry.point, entry.layer, facts.points, name, generated=generated)
        if _decides_too_late(entry, phase):
            raise ValueError(
                f"{name}: its condition has over={when.memory.over!r} and decides on the tokens "
                "after the prompt, but the entry is for tokens of the prompt; give "
                "steering_vectors or decode_steering_vectors"
            )

    def _check_factors(self, modules: Iterable[tuple[str, float]]) -> None:
        """Refuse the first module of a request that alone does more than a row can have."""
        assert self.facts is not None
        for name, factor in modules:
            groups = compose([self.module(name).scaled(factor)])
            what = f"steering_module_ref: module {name!r} times {factor:.3g}"
            SteeringGroup.check_limits(groups, what, self.facts.max_reach)

    def _limited(self, groups: tuple[SteeringGroup, ...], what: str) -> tuple[SteeringGroup, ...]:
        assert self.facts is not None
        SteeringGroup.check_limits(groups, what, self.facts.max_reach)
        _check_gates(gates_of(groups).values(), what)
        check_lasting(groups, what)
        needed = most_configurations([group.use for group in groups])
        if needed > self.facts.max_configs:
            raise ValueError(
                f"{what} selects tokens in so many ways that it may need {needed} steering "
                f"configurations, and max_steering_configs={self.facts.max_configs}; give entries "
                "the same positions, or start the engine with more"
            )
        return groups


_WITH_GLOBAL = "the request with global steering"


def _check_gates(gates: Collection[Gate], what: str) -> None:
    """Refuse conditions that no request can have together.

    Args:
        what: has them, for the message.
    """
    signal_names(gates, what)
    if len(gates) > MAX_GATES:
        raise ValueError(
            f"{what} has {len(gates)} distinct probes and joints of them as conditions; at most "
            f"{MAX_GATES} are allowed: let entries share their conditions"
        )


def _check_own_conditions(own: Tiers, endings: Endings, others: Sequence[Tiers]) -> None:
    """Refuse the first condition of a request that cannot be beside those of others, by the field
    that has it."""
    each = [
        (f"{entry.name}['when']", Tiers(vectors={phase: (entry,)}), Endings())
        for phase, entry in own.by_phase()
        if entry.when is not None
    ]
    each += [(stop.field, Tiers(), Endings(stop=(stop,))) for stop in endings.stop]
    each += [(abort.field, Tiers(), Endings(abort=(abort,))) for abort in endings.abort]
    for field, tiers, ending in each:
        with said_of(field):
            _check_gates(gates_of(compose([*others, tiers], ending)).values(), _WITH_GLOBAL)


def module_tiers(name: str, given: Any) -> Tiers:
    """What a module is to do, before it is known which model is to do it."""
    check_name(name, "module")
    spec = given.to_spec() if hasattr(given, "to_spec") else given
    if spec is None:
        raise ValueError(
            f"module {name!r} is None; give {{hook point: {{layer: vector}}}}, or a mapping "
            f"with any of {', '.join(TIER_FIELDS)}"
        )
    if not (isinstance(spec, Mapping) and set(spec) & {*TIER_FIELDS, "positions"}):
        return _tiers({"vectors": given}, None)
    if unknown := sorted(set(spec) - {*TIER_FIELDS, "positions"}):
        raise ValueError(
            f"module {name!r} has unknown fields {unknown}; it takes "
            f"{', '.join(TIER_FIELDS)} and positions"
        )
    given = {key: spec[key] for key in TIER_FIELDS if spec.get(key) is not None}
    return _tiers(given, spec.get("positions"))


def _tiers(given: Mapping[str, Any], positions: Any) -> Tiers:
    if not given:
        raise ValueError(f"nothing to steer with: give any of {', '.join(TIER_FIELDS)}")
    tiers = Tiers.parse(**given)
    return tiers if positions is None else tiers.at(Selection.parse(positions))


def _check_modules(asked: RequestSteering, modules: Sequence[Tiers]) -> None:
    """Refuse positions of a request at which a module that it names steers nothing."""
    for (name, _), tiers in zip(asked.modules, modules, strict=True):
        there = [(phase, entry) for phase, entry in tiers.by_phase() if entry.steers_in(phase)]
        overs = [
            entry.when.memory.over
            for phase, entry in there
            if entry.when is not None and _decides_too_late(entry, phase)
        ]
        if len(overs) < len(there):
            continue
        after = ", and its condition with over={!r} decides on the tokens after the prompt"
        after = after.format(overs[0]) if overs else ""
        raise ValueError(
            f"steering_positions: the module {name!r} steers no token there: "
            f"{_phases_of(asked.positions)}{after}; give other positions, or leave them out"
        )


def _decides_too_late(entry: SteeringEntry, phase: Phase) -> bool:
    """Whether a condition, found, decides on the tokens after the prompt, and its entry is for
    none of these."""
    when = entry.when
    if when is None or not when.memory.of_prompt:
        return False
    return phase == "prefill" or not entry.steers_in("decode")


def _phases_of(positions: Selection) -> str:
    """Of what phases the tokens are that positions may mean, in words."""
    phases = positions.phases
    if len(phases) == 1:
        return f"they are of {'the prompt' if 'prompt' in phases else 'generated tokens'} alone"
    return "negative ones count from the end of the prompt, and the phase is 'generation'"


def _without_places_of(tiers: Tiers, other: Tiers) -> Tiers:
    """The entries of `tiers` at places for which `other` has none, in the same tier."""

    def keep(
        ours: Mapping[Any, tuple[SteeringEntry, ...]],
        theirs: Mapping[Any, tuple[SteeringEntry, ...]],
    ) -> Any:
        taken = {phase: {(e.point, e.layer) for e in tier} for phase, tier in theirs.items()}
        return {
            phase: tuple(e for e in tier if (e.point, e.layer) not in taken.get(phase, ()))
            for phase, tier in ours.items()
        }

    return Tiers(keep(tiers.vectors, other.vectors), keep(tiers.clamps, other.clamps))

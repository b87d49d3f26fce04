"""Steering as the user's process knows it: global tiers, modules, and what the workers hold."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from tllm.spec.selection import Selection
from tllm.spec.steering import (
    MAX_CLAMPS,
    MAX_OPERATIONS,
    Entry,
    Group,
    RequestSteering,
    Tiers,
    compose,
    most_configurations,
)

_TIER_FIELDS = (
    "vectors",
    "prefill_vectors",
    "decode_vectors",
    "clamps",
    "prefill_clamps",
    "decode_clamps",
)


@dataclass(frozen=True)
class Facts:
    """What may be steered in an engine.

    Attributes:
        points: hook points with a tap, in every layer.
        missing: why, for hook points that the model lacks.
        row_bytes: device memory of one vector.
        max_value: the largest number that the model's dtype holds.
        max_configs, max_mib: the engine's options `max_steering_configs`, `max_steering_mib`.
    """

    num_layers: int
    hidden_size: int
    points: Sequence[str]
    missing: Mapping[str, str]
    row_bytes: int
    max_value: float
    max_configs: int
    max_mib: int


@dataclass(frozen=True)
class Upload:
    """What the workers do not have yet, and what they may forget first."""

    vectors: Mapping[str, npt.NDArray[np.float32]]
    groups: Mapping[str, Any]
    forgotten_groups: Sequence[str]
    forgotten_vectors: Sequence[str]

    @property
    def call(self) -> tuple[Any, ...]:
        """Arguments of the workers' `update_steering`."""
        return self.vectors, self.groups, self.forgotten_groups, self.forgotten_vectors


class SteeringState:
    """Global steering and modules of one engine, and which vectors its workers have.

    Requests are composed here: what is global, then the modules a request names, then its own.
    A request keeps what was composed for it; later changes meet later requests.
    """

    def __init__(self) -> None:
        self.facts: Facts | None = None
        self.version = 0
        self._global = Tiers()
        self._modules: dict[str, Tiers] = {}
        self._composed: WeakKeyDictionary[RequestSteering, tuple[Group, ...]] = WeakKeyDictionary()
        self._plain: tuple[Group, ...] | None = ()
        self._sent: OrderedDict[str, frozenset[str]] = OrderedDict()  # group: its vectors
        self._sent_vectors: Counter[str] = Counter()  # groups that have it
        self._users: Counter[str] = Counter()
        self._held: dict[str, tuple[Group, ...]] = {}

    # -- what holds for every request -----------------------------------------------------------

    def set(self, given: Mapping[str, Any], positions: Any, replace_all: bool) -> None:
        """Change global steering; entries take the place of those at the same hook and layer."""
        added = self._checked(_tiers(given, positions))
        before = Tiers() if replace_all else self._global
        merged = _without_places_of(before, added).joined(added)
        self._change(merged, self._modules)

    def clear(self) -> None:
        """No global steering any more. Modules stay."""
        self._change(Tiers(), self._modules)

    def register_module(self, name: str, given: Any) -> None:
        """Define a module, or define it anew."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"module name {name!r}: give a text that is not empty")
        spec = given.to_spec() if hasattr(given, "to_spec") else given
        if isinstance(spec, Mapping) and set(spec) & {*_TIER_FIELDS, "positions"}:
            if unknown := sorted(set(spec) - {*_TIER_FIELDS, "positions"}):
                raise ValueError(
                    f"module {name!r} has unknown fields {unknown}; it takes "
                    f"{', '.join(_TIER_FIELDS)} and positions"
                )
            fields = {key: spec[key] for key in _TIER_FIELDS if spec.get(key) is not None}
            tiers = _tiers(fields, spec.get("positions"))
        else:
            tiers = _tiers({"vectors": spec}, None)
        self._change(self._global, {**self._modules, name: self._checked(tiers)})

    def unregister_module(self, name: str) -> None:
        """Forget a module; requests that run keep it."""
        self._module(name)
        self._change(self._global, {k: v for k, v in self._modules.items() if k != name})

    def modules(self) -> dict[str, dict[str, Any]]:
        """What each registered module does."""
        return {name: _described(tiers) for name, tiers in self._modules.items()}

    def status(self) -> dict[str, Any]:
        """Global steering, module names, and what is in use."""
        assert self.facts is not None
        return {
            "enabled": self.facts.max_configs > 0,
            "global": _described(self._global),
            "modules": sorted(self._modules),
            "vectors_on_device": len(self._sent_vectors),
            "requests": len(self._held),
            "max_steering_configs": self.facts.max_configs,
            "max_steering_mib": self.facts.max_mib,
        }

    def layers(self) -> dict[str, Any]:
        """Where this engine can be steered."""
        assert self.facts is not None
        return {
            "num_layers": self.facts.num_layers,
            "hidden_size": self.facts.hidden_size,
            "hook_points": list(self.facts.points),
            "missing": dict(self.facts.missing),
        }

    def _change(self, everywhere: Tiers, modules: dict[str, Tiers]) -> None:
        self._limited(compose([everywhere]), "global steering")
        for name, tiers in modules.items():
            self._limited(compose([tiers]), f"module {name!r}")
        self._global, self._modules = everywhere, modules
        self.version += 1
        self._composed.clear()
        self._plain = None if everywhere else ()

    def _module(self, name: str) -> Tiers:
        if name not in self._modules:
            raise ValueError(
                f"steering_module_ref: no module {name!r} is registered; registered are "
                f"{', '.join(sorted(self._modules)) or 'none'}. Use llm.steering.register_module"
            )
        return self._modules[name]

    # -- one request ----------------------------------------------------------------------------

    def concerns(self, asked: RequestSteering | None) -> bool:
        """Whether a request is steered at all."""
        return asked is not None or self._plain is None or bool(self._plain)

    def groups(self, asked: RequestSteering | None) -> tuple[Group, ...]:
        """What is done to a request. Raises `ValueError` naming the field that is wrong."""
        if asked is None:
            if self._plain is None:
                self._plain = compose([self._global])
            return self._plain
        composed = self._composed.get(asked)
        if composed is None:
            modules = [self._module(name).scaled(factor) for name, factor in asked.modules]
            own = self._checked(asked.own)
            if own is asked.own and not modules and not self._global:
                composed = asked.groups
            else:
                at = [tiers.at(asked.positions) for tiers in modules]
                composed = compose([self._global, *at, own])
            composed = self._limited(composed, "the request with global steering")
            self._composed[asked] = composed
        return composed

    def hold(self, prompt_id: str, groups: tuple[Group, ...]) -> None:
        """A request runs with these groups: the workers must keep them."""
        if groups:
            self._held[prompt_id] = groups
            self._users.update(group.digest for group in groups)

    def release(self, prompt_id: str) -> None:
        """A request has ended."""
        groups = self._held.pop(prompt_id, ())
        self._users.subtract(group.digest for group in groups)

    def upload(self, groups: Iterable[Group]) -> Upload | None:
        """What must be sent to the workers before these groups are used; None when they have all.

        They are then taken to be there; call `undo` if sending failed.
        """
        assert self.facts is not None
        groups = tuple(groups)
        for group in groups:
            if group.digest in self._sent:
                self._sent.move_to_end(group.digest)
        missing = {g.digest: g for g in groups if g.digest not in self._sent}
        if not missing:
            return None
        needed = {digest: frozenset(group.vectors) for digest, group in missing.items()}
        new = frozenset().union(*needed.values()) - self._sent_vectors.keys()
        room = self.facts.max_mib * 2**20 // self.facts.row_bytes
        current = {group.digest for group in groups}
        forgotten: list[str] = []
        count = Counter(self._sent_vectors)
        for digest, vectors in self._sent.items():  # least recently used first
            if len(+count) + len(new) <= room:
                break
            if not self._users[digest] and digest not in current:
                forgotten.append(digest)
                count.subtract(vectors)
        if len(+count) + len(new) > room:
            raise ValueError(
                f"steering needs {(len(+count) + len(new)) * self.facts.row_bytes / 2**20:.1f} MiB "
                f"of vectors for the requests that run, and max_steering_mib={self.facts.max_mib}; "
                "start the engine with a larger max_steering_mib, or run fewer distinct vectors "
                "at once"
            )
        for digest in forgotten:
            del self._sent[digest]
        dropped = [digest for digest in self._sent_vectors if not count[digest]]
        dropped = [digest for digest in dropped if digest not in new]
        # A forgotten vector that a new group needs is sent again.
        self._sent_vectors = +count
        new = frozenset().union(*needed.values()) - self._sent_vectors.keys()
        for digest, vectors in needed.items():
            self._sent[digest] = vectors
            self._sent_vectors.update(vectors)
        return Upload(
            vectors={
                digest: group.vectors[digest]
                for group in missing.values()
                for digest in group.vectors.keys() & new
            },
            groups={digest: group.operations for digest, group in missing.items()},
            forgotten_groups=forgotten,
            forgotten_vectors=[digest for digest in dropped if digest not in new],
        )

    def undo(self, upload: Upload) -> None:
        """The workers refused an upload: they do not have it."""
        for digest in upload.groups:
            self._sent_vectors.subtract(self._sent.pop(digest, ()))
        self._sent_vectors = +self._sent_vectors

    # -- checks ----------------------------------------------------------------------------------

    def _checked(self, tiers: Tiers) -> Tiers:
        """The tiers with layers counted from 0; raises for what this engine does not have."""
        from_end = False
        for entry in tiers:
            self._check(entry)
            from_end = from_end or (entry.layer is not None and entry.layer < 0)
        if not from_end:
            return tiers
        assert self.facts is not None
        layers = self.facts.num_layers
        return tiers.map(
            lambda e: e if e.layer is None else replace(e, layer=e.layer % layers),
        )

    def _check(self, entry: Entry) -> None:
        facts, name = self.facts, entry.name
        assert facts is not None
        if not facts.max_configs:
            raise ValueError(
                f"{name}: steering is not enabled in this engine; start it with "
                "max_steering_configs=512 (the number of distinct ways of steering at once)"
            )
        point = entry.point
        if point.value not in facts.points:
            why = facts.missing.get(point.value)
            has = ", ".join(facts.points) or "none"
            if why:
                raise ValueError(
                    f"{name}: the model has no hook point {point}: {why} (it has {has})"
                )
            raise ValueError(
                f"{name}: hook point {point} has no tap in this engine (it has {has}); start it "
                f"with hook_points=[..., {point.value!r}] or hook_points='all'"
            )
        if entry.vector.shape != (facts.hidden_size,):
            raise ValueError(
                f"{name} has {entry.vector.size} numbers; the model's hidden size is "
                f"{facts.hidden_size}"
            )
        if (largest := entry.largest) > facts.max_value:
            raise ValueError(
                f"{name} has values up to {largest:.3g}, and the model's dtype holds at most "
                f"{facts.max_value:.3g}; give a smaller vector and a larger scale"
            )
        if entry.layer is not None and not -facts.num_layers <= entry.layer < facts.num_layers:
            raise ValueError(
                f"{name}: layer {entry.layer} is out of range; the model has layers 0 to "
                f"{facts.num_layers - 1} (or {-facts.num_layers} to -1 from the end)"
            )

    def _limited(self, groups: tuple[Group, ...], what: str) -> tuple[Group, ...]:
        operations: Counter[tuple[str, int | None]] = Counter()
        clamps: Counter[tuple[str, int | None]] = Counter()
        for group in groups:
            for hook, layer, _, coefficients in group.operations:
                operations[hook, layer] += 1
                clamps[hook, layer] += coefficients.reads_component
        for counts, limit, kind in (
            (operations, MAX_OPERATIONS, "operations"),
            (clamps, MAX_CLAMPS, "clamps (operations on a component)"),
        ):
            if counts and (most := max(counts.values())) > limit:
                hook, layer = max(counts, key=counts.__getitem__)
                raise ValueError(
                    f"{what} has {most} {kind} at {hook!r} of layer {layer}; at most {limit} are "
                    "allowed at one place: join vectors that are added, or drop some"
                )
        assert self.facts is not None
        needed = most_configurations([group.use for group in groups])
        if needed > self.facts.max_configs:
            raise ValueError(
                f"{what} selects tokens in so many ways that it may need {needed} steering "
                f"configurations, and max_steering_configs={self.facts.max_configs}; give entries "
                "the same positions, or start the engine with more"
            )
        return groups


def _tiers(given: Mapping[str, Any], positions: Any) -> Tiers:
    if not given:
        raise ValueError(f"nothing to steer with: give any of {', '.join(_TIER_FIELDS)}")
    tiers = Tiers.parse(**given)
    return tiers if positions is None else tiers.at(Selection.parse(positions))


def _without_places_of(tiers: Tiers, other: Tiers) -> Tiers:
    """The entries of `tiers` at places for which `other` has none, in the same tier."""

    def keep(ours: Mapping[Any, tuple[Entry, ...]], theirs: Mapping[Any, tuple[Entry, ...]]) -> Any:
        taken = {phase: {(e.point, e.layer) for e in tier} for phase, tier in theirs.items()}
        return {
            phase: tuple(e for e in tier if (e.point, e.layer) not in taken.get(phase, ()))
            for phase, tier in ours.items()
        }

    return Tiers(keep(tiers.vectors, other.vectors), keep(tiers.clamps, other.clamps))


def _described(tiers: Tiers) -> dict[str, Any]:
    """Tiers for people: which hooks and layers, and how long the vectors are."""
    described: dict[str, Any] = {}
    for kind, phases in (("vectors", tiers.vectors), ("clamps", tiers.clamps)):
        for phase, entries in phases.items():
            name = kind if phase == "any" else f"{phase}_{kind}"
            places = described.setdefault(name, {})
            for entry in entries:
                hook = places.setdefault(entry.point.value, {})
                hook.setdefault(entry.layer, []).append(
                    {
                        "norm": float(np.linalg.norm(entry.vector)),
                        "coefficients": entry.coefficients._asdict(),
                        "positions": entry.positions.to_wire(),
                    }
                )
    return described

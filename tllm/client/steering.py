"""Steering as the user's process knows it: what is registered, what requests make of it, and which
groups the workers hold for it."""

from __future__ import annotations

import pickle
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import cloudpickle
import numpy as np
import numpy.typing as npt

from tllm.client.calls import ALONE, Steps, WorkerCall
from tllm.spec.conditions import (
    MAX_GATES,
    Condition,
    FeatureCondition,
    Gate,
    GateNumbers,
    Known,
    NamedCondition,
    check_order,
    condition_described,
    parse_condition,
    signal_names,
)
from tllm.spec.groups import (
    Endings,
    RequestSteering,
    SteeringGroup,
    check_lasting,
    compose,
    gates_of,
    most_configurations,
)
from tllm.spec.hooks import HookPoint, ModelPoints
from tllm.spec.memory import NOTHING
from tllm.spec.operations import max_reach
from tllm.spec.packed_vectors import PackedVectors
from tllm.spec.phases import SELECTED_PHASES, Phase
from tllm.spec.probes import FindFeature
from tllm.spec.reading import FloatArray, check_text
from tllm.spec.selection import Selection
from tllm.spec.tiers import TIER_FIELDS, SteeringEntry, Tiers

if TYPE_CHECKING:
    from tllm.client.core import Client

GLOBAL, MODULE, MONITOR = "steering", "module:", "monitor:"
"""Keys under which the workers keep global steering, and the beginnings of those of modules and of
monitors."""

_OF_PHASE = {
    "any": "",
    "prefill": ", for tokens of the prompt,",
    "decode": ", for generated tokens,",
}


@dataclass(frozen=True)
class Facts:
    """What may be steered and patched in an engine.

    Attributes:
        points: the hook points of the model by layer.
        vocab_size: the model's tokens.
        row_bytes: device memory of one vector.
        max_value: the largest number that the model's dtype holds.
        max_configs, max_mib: the engine's options `max_steering_configs`, `max_steering_mib`.
        max_patch_mib, max_patch_host_mib: the engine's options.
        centers_rows: whether the model's final norm takes the mean off rows, as no RMS norm does.
    """

    points: ModelPoints
    hidden_size: int
    vocab_size: int
    row_bytes: int
    max_value: float
    max_configs: int
    max_mib: int
    max_patch_mib: int
    max_patch_host_mib: int
    centers_rows: bool

    @classmethod
    def of_workers(cls, answers: Sequence[Mapping[str, Any]]) -> Facts:
        """From the answers of all workers to `attach`."""
        points = ModelPoints.of_stages([answer["points"] for answer in answers])
        told = {each.name: answers[0][each.name] for each in fields(cls)}
        centers = all(answer["centers_rows"] for answer in answers)  # the last stage knows
        return cls(**{**told, "points": points, "centers_rows": centers})

    @cached_property
    def max_reach(self) -> float:
        """The most that may be added to a number of a row."""
        return max_reach(self.max_value, self.hidden_size)

    @cached_property
    def _checked_widths(self) -> dict[tuple[HookPoint, int | None], tuple[int, ...]]:
        return {}

    def checked_widths(self, point: HookPoint, layer: int | None) -> tuple[int, ...]:
        """As `widths_at`; `ValueError` for a place that the model lacks, or that has no tap."""
        widths = self._checked_widths.get((point, layer))
        if widths is None:
            self.points.check(point, layer)
            widths = self._checked_widths[point, layer] = self.widths_at(point, layer)
        return widths

    def widths_at(self, point: HookPoint, layer: int | None) -> tuple[int, ...]:
        """How many numbers may be given for a row there: as many as heads or experts have, too."""
        if layer is None:
            return (self.hidden_size,)
        layer %= self.points.num_layers
        if point is HookPoint.ROUTER:
            return self.hidden_size, self.points.experts[layer]
        split = self.points.heads.get((point, layer))
        return (self.hidden_size,) if split is None else (self.hidden_size, split.width)

    def widened(self, rows: FloatArray) -> FloatArray:
        """Rows, or one, `[..., numbers]`, filled up with zeros to `[..., hidden]`."""
        ends = [(0, 0)] * (rows.ndim - 1)
        return np.pad(rows, [*ends, (0, self.hidden_size - rows.shape[-1])])


class Composer:
    """What is registered, and what requests that are added make of it.

    A request is composed of what is global, then the modules it names, then its own. It keeps what
    was composed for it; later changes meet later requests.

    Args:
        find_feature: of autoencoders that are registered as consumers.

    Attributes:
        facts: None until the workers have told.
        everywhere: what is global.
        modules, monitors: by name.
    """

    def __init__(self, find_feature: FindFeature) -> None:
        self._find_feature = find_feature
        self.facts: Facts | None = None
        self.everywhere = Tiers()
        self.modules: dict[str, Tiers] = {}
        self.monitors: dict[str, Condition] = {}
        self._composed: WeakKeyDictionary[RequestSteering, tuple[SteeringGroup, ...]] = (
            WeakKeyDictionary()
        )
        self._plain: tuple[SteeringGroup, ...] | None = ()

    def forget_composed(self) -> None:
        """Requests are composed anew: a consumer has come or gone whose features they may name."""
        self._composed.clear()

    def learn(self, key: str, value: bytes | None) -> None:
        """Know what somebody has registered, or removed."""
        self.forget_composed()
        if key.startswith(MONITOR):
            self._learn_monitor(key[len(MONITOR) :], value)
            return
        tiers = Tiers() if value is None else pickle.loads(value)
        if key == GLOBAL:
            self.everywhere = tiers
            self._plain = None if tiers else ()
        elif value is None:
            self.modules.pop(key[len(MODULE) :], None)
        else:
            self.modules[key[len(MODULE) :]] = tiers

    def _learn_monitor(self, name: str, value: bytes | None) -> None:
        if value is None:
            self.monitors.pop(name, None)
        else:
            self.monitors[name] = pickle.loads(value)

    def with_more(self, given: Mapping[str, Any], positions: Any, replace_all: bool) -> Tiers:
        """What is global, with entries in the place of those at the same hook and layer."""
        added = self._checked(_tiers(given, positions))
        before = Tiers() if replace_all else self.everywhere
        merged = _without_places_of(before, added).joined(added)
        self._limited(compose([merged]), "global steering")
        return merged

    def module_of(self, name: str, given: Any) -> Tiers:
        """A module that somebody defines."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"module name {name!r}: give a text that is not empty")
        check_text(name, "module name")
        spec = given.to_spec() if hasattr(given, "to_spec") else given
        if isinstance(spec, Mapping) and set(spec) & {*TIER_FIELDS, "positions"}:
            if unknown := sorted(set(spec) - {*TIER_FIELDS, "positions"}):
                raise ValueError(
                    f"module {name!r} has unknown fields {unknown}; it takes "
                    f"{', '.join(TIER_FIELDS)} and positions"
                )
            given = {key: spec[key] for key in TIER_FIELDS if spec.get(key) is not None}
            tiers = _tiers(given, spec.get("positions"))
        elif spec is None:
            raise ValueError(
                f"module {name!r} is None; give {{hook point: {{layer: vector}}}}, or a mapping "
                f"with any of {', '.join(TIER_FIELDS)}"
            )
        else:
            tiers = _tiers({"vectors": given}, None)
        tiers = self._checked(tiers)
        self._limited(compose([tiers]), f"module {name!r}")
        return tiers

    def module(self, name: str, field: str = "steering_module_ref: ") -> Tiers:
        """A module that a request names, or whoever begins the message where there is none."""
        if name not in self.modules:
            raise ValueError(
                f"{field}no module {name!r} is registered; registered are "
                f"{', '.join(sorted(self.modules)) or 'none'}. Use "
                "llm.steering.register_module, or POST /v1/steering/modules/register"
            )
        return self.modules[name]

    def monitor_of(self, name: str, given: Any) -> Condition:
        """A monitor that somebody defines."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"monitor name {name!r}: give a text that is not empty")
        name = check_text(name, "monitor name")
        condition = parse_condition(given, f"monitor {name!r}")
        found = self._found(condition)
        if isinstance(found, (NamedCondition, FeatureCondition)):
            raise TypeError("a condition that was found has no name to look up")
        found = replace(found, name=name)
        numbers = GateNumbers()
        _check_gates(numbers.gates([numbers.number(found)]), f"monitor {name!r}")
        return found

    def monitor(self, name: str) -> Condition:
        if name not in self.monitors:
            raise ValueError(
                f"no monitor {name!r} is registered; registered are "
                f"{', '.join(sorted(self.monitors)) or 'none'}"
            )
        return self.monitors[name]

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
            composed = self._limited(composed, "the request with global steering")
            self._composed[asked] = composed
        return composed

    # -- checks ----------------------------------------------------------------------------------

    def _checked(self, tiers: Tiers) -> Tiers:
        """The tiers with layers counted from 0; raises for what this engine does not have."""
        changes = False
        for tier in (tiers.vectors, tiers.clamps):
            for phase, entries in tier.items():
                for entry in entries:
                    self._check(entry, phase)
                    changes = changes or self._located(entry) is not entry
        return tiers.map(self._located) if changes else tiers

    def _located(self, entry: SteeringEntry) -> SteeringEntry:
        """An entry with layers counted from 0, and what its condition names found."""
        assert self.facts is not None
        when = None if entry.when is None else self._found(entry.when)
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
        found = condition.found(Known(facts.points, self.monitors, self._find_feature))
        for probe in found.probes():
            if probe.vector.shape[-1] != facts.hidden_size:
                key = "['layers'][0] takes" if probe.widths else "['vector'] has"
                raise ValueError(
                    f"{condition.field}['probe']{key} {probe.vector.shape[-1]} numbers; the "
                    f"model's hidden size is {facts.hidden_size}"
                )
        return found

    def _check(self, entry: SteeringEntry, phase: Phase) -> None:
        facts, name = self.facts, entry.name
        assert facts is not None
        if not facts.max_configs:
            raise ValueError(
                f"{name}: steering is not enabled in this engine; start it with "
                "max_steering_configs=512 (the number of distinct ways of steering at once)"
            )
        if entry.num_layers not in (None, facts.points.num_layers):
            raise ValueError(
                f"{name}: the vector is one of {entry.num_layers} rows that say no layer, and the "
                f"model has {facts.points.num_layers} layers; give a row for each layer, or say "
                "which they are: {layer: vector}, or layers= of tllm.steering.load"
            )
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
        if entry.when is not None:
            self._check_condition(self._located(entry), phase)
        if entry.vector.shape[-1] not in widths:
            raise ValueError(
                f"{name} has {entry.vector.shape[-1]} numbers; the model's hidden size is "
                f"{facts.hidden_size}"
            )
        entry.check_numbers(facts.max_value, facts.max_reach)

    def _check_condition(self, entry: SteeringEntry, phase: Phase) -> None:
        """Refuse a condition, found, that cannot decide on its entry."""
        facts, when, name = self.facts, entry.when, entry.name
        assert facts is not None
        assert when is not None
        generated = "generation" in (entry.positions.phase, SELECTED_PHASES[phase])
        check_order(when, entry.point, entry.layer, facts.points, name, generated=generated)
        if when.memory.of_prompt and (phase == "prefill" or not entry.steers_in("decode")):
            raise ValueError(
                f"{name}: its condition has over={when.memory.over!r} and decides on the tokens "
                "after the prompt, but the entry is for tokens of the prompt; give "
                "steering_vectors or decode_steering_vectors"
            )

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


@dataclass(frozen=True)
class Upload:
    """What the workers do not hold yet, and what they may give up first."""

    vectors: Mapping[str, npt.NDArray[np.float32]]
    groups: Mapping[str, SteeringGroup]
    released: Sequence[str]

    @property
    def packed(self) -> PackedVectors:
        return PackedVectors.of(self.vectors)


class HeldByWorkers:
    """The groups that the workers hold for this front end, and the requests that use them."""

    def __init__(self) -> None:
        #: By group: its vectors, and how many rows each is.
        self._groups: OrderedDict[str, dict[str, int]] = OrderedDict()
        self._vectors: Counter[str] = Counter()  # groups that have it
        self._num_rows = 0  # that all vectors have
        #: Groups of calls that failed, or that nobody waited for: some workers may hold them.
        self._unknown: set[str] = set()
        self._users: Counter[str] = Counter()
        self._requests: dict[str, tuple[SteeringGroup, ...]] = {}

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def hold(self, prompt_id: str, groups: tuple[SteeringGroup, ...]) -> None:
        """A request runs with these groups: the workers must keep them."""
        if groups:
            self._requests[prompt_id] = groups
            self._users.update(group.digest for group in groups)

    def release(self, prompt_id: str) -> None:
        """A request has ended."""
        for group in self._requests.pop(prompt_id, ()):
            self._users[group.digest] -= 1
            if not self._users[group.digest]:
                del self._users[group.digest]

    def has(self, groups: Sequence[SteeringGroup]) -> bool:
        """Whether the workers hold these groups, which are used now."""
        for group in groups:
            if group.digest not in self._groups:
                return False
            self._groups.move_to_end(group.digest)
        return True

    def upload(self, groups: Sequence[SteeringGroup], facts: Facts, front_ends: int) -> Upload:
        """What must be sent to the workers before these groups are used.

        Args:
            front_ends: how many share the memory for vectors.
        """
        missing = {g.digest: g for g in groups if g.digest not in self._groups}
        needed = {v: _rows_of(rows) for g in missing.values() for v, rows in g.vectors.items()}
        room = facts.max_mib * 2**20 // facts.row_bytes // front_ends
        total = self._num_rows + sum(n for v, n in needed.items() if v not in self._vectors)
        current = {group.digest for group in groups}
        released: list[str] = []
        lost: Counter[str] = Counter()  # groups that had it
        gone: set[str] = set()
        for digest, vectors in self._groups.items():  # least recently used first
            if total <= room:
                break
            if not self._users[digest] and digest not in current:
                released.append(digest)
                lost.update(vectors.keys())
                gone_now = {v for v in vectors if lost[v] == self._vectors[v]}
                gone |= gone_now
                total -= sum(vectors[v] for v in gone_now - needed.keys())
        if total > room:
            share = f" between {front_ends} front ends" if front_ends > 1 else ""
            raise ValueError(
                f"steering needs {total * facts.row_bytes / 2**20:.1f} MiB of vectors for the "
                f"requests that run, and max_steering_mib={facts.max_mib}{share}; start the engine "
                "with a larger max_steering_mib, or run fewer distinct vectors at once"
            )
        new = {
            digest: vector
            for group in missing.values()
            for digest, vector in group.vectors.items()
            if digest not in self._vectors or digest in gone  # what is given up is sent again
        }
        return Upload(new, missing, [*released, *self._unknown])

    def sent(self, upload: Upload, arrived: bool) -> None:
        """An upload was sent; what it gives up is gone, also where the rest was refused."""
        if arrived:
            self._unknown.difference_update(upload.released)
        else:
            self._unknown.update(upload.groups, upload.released)
        for digest in upload.released:
            for vector, rows in self._groups.pop(digest, {}).items():
                self._vectors[vector] -= 1
                if not self._vectors[vector]:
                    del self._vectors[vector]
                    self._num_rows -= rows
        for digest, group in upload.groups.items() if arrived else ():
            held = self._groups[digest] = {v: _rows_of(rows) for v, rows in group.vectors.items()}
            self._num_rows += sum(n for v, n in held.items() if v not in self._vectors)
            self._vectors.update(held.keys())


def _rows_of(vector: FloatArray) -> int:
    """How many rows a vector is, or several that an operation takes together."""
    return len(vector) if vector.ndim > 1 else 1


class SteeringControl:
    """Global steering of an engine: it applies to every request that is added from then on.

    A request keeps what was set when it was added. Vector specs are as `SamplingParams` takes them:
    `{hook: {layer: vector | {"vector": ..., "scale": ..., "method": ..., "positions": ...}}}`.
    What is set belongs to the engine: every front end that shares its workers has it.

    On an `AsyncLLM` every method is to be awaited.
    """

    def __init__(self, client: Client, run: Callable[[Steps[Any]], Any]) -> None:
        self._client = client
        self._run = run

    @property
    def version(self) -> int:
        """Another number after each change of what is global, or of a module."""
        return self._client.steering_version

    def set(
        self,
        vectors: Mapping[Any, Any] | None = None,
        prefill_vectors: Mapping[Any, Any] | None = None,
        decode_vectors: Mapping[Any, Any] | None = None,
        clamps: Mapping[Any, Any] | None = None,
        prefill_clamps: Mapping[Any, Any] | None = None,
        decode_clamps: Mapping[Any, Any] | None = None,
        *,
        positions: Any = None,
        replace: bool = False,
    ) -> Any:
        """Steer all requests from now on.

        Args:
            vectors, clamps: in both phases; the `prefill_` and `decode_` forms in one.
            positions: tokens, for entries that say none (default: all).
            replace: forget what was set before. Otherwise only entries at the same hook point and
                layer, in the same tier, are replaced.

        Raises `ValueError` naming the field that is wrong; nothing has changed then.
        """
        tiers = (vectors, prefill_vectors, decode_vectors, clamps, prefill_clamps, decode_clamps)
        named = zip(TIER_FIELDS, tiers, strict=True)
        given = {name: tier for name, tier in named if tier is not None}
        composer = self._client.composer

        def steps() -> Steps[None]:
            yield ALONE
            changed = False
            while not changed:
                yield from self._client.current()
                merged = composer.with_more(given, positions, replace)
                # What the workers have no room for would be refused with every request.
                yield from self._client.bring(compose([merged]))
                changed = yield from self._client.change(GLOBAL, cloudpickle.dumps(merged))

        return self._run(steps())

    def clear(self) -> Any:
        """Stop steering globally. Registered modules stay."""
        return self._run(self._change(GLOBAL, lambda: None))

    def status(self) -> Any:
        """What is set, which modules there are, and what is in use."""

        def steps() -> Steps[dict[str, Any]]:
            yield from self._client.current()
            vectors = yield WorkerCall("vectors_on_device")
            composer, facts = self._client.composer, self._client.facts
            return {
                "enabled": facts.max_configs > 0,
                "global": _described(composer.everywhere),
                "modules": sorted(composer.modules),
                "monitors": sorted(composer.monitors),
                "vectors_on_device": vectors[0],
                "requests": self._client.held.num_requests,
                "max_steering_configs": facts.max_configs,
                "max_steering_mib": facts.max_mib,
            }

        return self._run(steps())

    def layers(self) -> Any:
        """Where the model can be steered: its hook points, layers and hidden size."""

        def steps() -> Steps[dict[str, Any]]:
            yield from self._client.current()
            facts = self._client.facts
            sizes = {"hidden_size": facts.hidden_size, "row_bytes": facts.row_bytes}
            return {**sizes, **facts.points.described()}

        return self._run(steps())

    def register_module(self, name: str, spec: Any) -> Any:
        """Give steering a name, for `SamplingParams(steering_module_ref=(name, scale))`.

        Args:
            spec: a vector spec, a mapping with any of the fields of `set`, or anything with a
                `to_spec()` that returns one, and perhaps `num_layers`, which must be the model's
                then. A name that exists is defined anew: requests that are added later get the new
                one.
        """
        composer = self._client.composer
        return self._run(self._change(f"{MODULE}{name}", lambda: composer.module_of(name, spec)))

    def unregister_module(self, name: str) -> Any:
        """Forget a module; requests that run keep it."""
        composer = self._client.composer

        def removed() -> None:
            composer.module(name, "")

        return self._run(self._change(f"{MODULE}{name}", removed))

    def modules(self) -> Any:
        """What each registered module does."""

        def steps() -> Steps[dict[str, dict[str, Any]]]:
            yield from self._client.current()
            modules = self._client.composer.modules
            return {name: _described(tiers) for name, tiers in modules.items()}

        return self._run(steps())

    def register_monitor(self, name: str, condition: Any) -> Any:
        """Give a condition a name, for entries of steering that say `"when": name`.

        Args:
            condition: `{"probe": {"hook", "layer", "vector", "bias", "score"}, "above": 0.5}` or
                another that an entry's `when` may be. A name that exists is defined anew: what
                steers already keeps the old one, and so do modules and global steering, which have
                it as it was when they were set.
        """
        composer = self._client.composer
        made = partial(composer.monitor_of, name, condition)
        return self._run(self._change(f"{MONITOR}{name}", made))

    def unregister_monitor(self, name: str) -> Any:
        """Forget a monitor; what steers with it keeps it."""
        composer = self._client.composer

        def removed() -> None:
            composer.monitor(name)

        return self._run(self._change(f"{MONITOR}{name}", removed))

    def monitors(self) -> Any:
        """What each registered monitor judges."""

        def steps() -> Steps[dict[str, dict[str, Any]]]:
            yield from self._client.current()
            monitors = self._client.composer.monitors
            return {name: condition_described(condition) for name, condition in monitors.items()}

        return self._run(steps())

    def conversations(self) -> Any:
        """The conversations that conditions are remembered for (`scope: "conversation"`), by id:
        when each `begun` (seconds since the epoch), `expires_in_s`, and its `requests` so far."""

        def steps() -> Steps[dict[str, dict[str, Any]]]:
            answers = yield from self._client.ask(WorkerCall("conversations", (time.time(),)))
            return dict(answers[0])

        return self._run(steps())

    def forget_conversation(self, name: str) -> Any:
        """Forget a conversation: a request that names its id begins another one. Requests of it
        that run go on as they began, and nothing is remembered of them.

        Raises `ValueError` for one that is not there.
        """

        def steps() -> Steps[None]:
            call = WorkerCall("forget_conversation", (name, time.time()))
            answers = yield from self._client.ask(call)
            if not answers[0]:
                raise ValueError(
                    f"no conversation {name!r:.80} is remembered; llm.steering.conversations(), or "
                    "GET /v1/steering/conversations, says which are"
                )

        return self._run(steps())

    def _change(self, key: str, made: Callable[[], Tiers | Condition | None]) -> Steps[None]:
        """Register what `made` gives when everything that others have registered is known."""
        yield ALONE
        changed = False
        while not changed:
            yield from self._client.current()
            content = made()
            value = None if content is None else cloudpickle.dumps(content)
            changed = yield from self._client.change(key, value)


def _tiers(given: Mapping[str, Any], positions: Any) -> Tiers:
    if not given:
        raise ValueError(f"nothing to steer with: give any of {', '.join(TIER_FIELDS)}")
    tiers = Tiers.parse(**given)
    return tiers if positions is None else tiers.at(Selection.parse(positions))


def _check_modules(asked: RequestSteering, modules: Sequence[Tiers]) -> None:
    """Refuse positions of a request at which a module that it names steers nothing."""
    for (name, _), tiers in zip(asked.modules, modules, strict=True):
        if not any(entry.steers_in(phase) for phase, entry in tiers.by_phase()):
            raise ValueError(
                f"steering_positions: the module {name!r} steers no token there: "
                f"{_phases_of(asked.positions)}; give other positions, or leave them out"
            )


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


def _described(tiers: Tiers) -> dict[str, Any]:
    """Tiers for people: which hooks and layers, and how long the vectors are."""
    described: dict[str, Any] = {}
    for kind, phases in (("vectors", tiers.vectors), ("clamps", tiers.clamps)):
        for phase, entries in phases.items():
            name = kind if phase == "any" else f"{phase}_{kind}"
            places = described.setdefault(name, {})
            for entry in entries:
                hook = places.setdefault(entry.point.value, {})
                told = {
                    "norm": float(np.linalg.norm(entry.vector)),
                    "coefficients": dict(vars(entry.coefficients)),
                    "positions": entry.positions.to_wire(),
                }
                if entry.when is not None:
                    told["when"] = condition_described(entry.when)
                hook.setdefault(entry.layer, []).append(told)
    return described

"""Conditions of steering: when an entry steers, and how much."""

from __future__ import annotations

import math
import struct
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tllm.spec.hooks import HEAD_POINTS, HookPoint, ModelPoints, TapKey
from tllm.spec.layers import layer_at
from tllm.spec.memory import NOTHING, OVERS, SCOPES, Memory
from tllm.spec.probes import KINDS, SCORES, FindFeature, MlpProbe
from tllm.spec.reading import (
    FloatArray,
    allow_keys,
    check_text,
    digest_of,
    float_array,
    hook_named,
    own_numbers,
    require_one_of,
    scalar,
)

MAX_GATES = 32
"""The most probes, and joints of them, that one request may have, global steering together with its
own."""
PROBE = "probe:"
"""What the digest of a probe's vector begins with, among those of steering vectors."""

_DEEPEST = 8
_LONGEST = 1e18
"""Of a probe's vector: a score beyond float32 is no number, and holds nowhere."""
_NUMBERS = struct.Struct("<6d")
_RANGES = ("above", "below", "between")


class Gate(NamedTuple):
    """A condition in a request, as taps judge it: a probe, or a joint of others.

    Attributes:
        number: which of the request's it is; those that a joint names have smaller ones.
        hook, layer: where it is judged; a joint, where the last of its terms is.
        vector: digest of the probe's vector; none for a joint.
        score: index in `KINDS`.
        bias, low, high, soft, middle: with the score `s`, bias included, its strength is 1 where
            `low < s < high` and else 0; or `sigmoid(soft (s - middle))` where `soft` is not 0.
        terms: numbers of those that a joint joins.
        every: whether all of them must hold: its strength is then the least of theirs, else the
            greatest.
        names: of its signal, as the user gave them: what is judged alike is judged once.
        scope: index in `SCOPES`: the tokens for which it decides.
        over: index in `OVERS`: what it is judged for.
        threshold: of the feature of an autoencoder, which is 0 where it is not above.
        kept_as: what it is known by in the requests of a conversation; empty where none but its
            own sample remembers it.
        widths: of the hidden layers of a small MLP, see `MlpProbe`; its bias is the last layer's.
    """

    number: int
    hook: str
    layer: int | None
    vector: str = ""
    score: int = 0
    bias: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    soft: float = 0.0
    middle: float = 0.0
    terms: tuple[int, ...] = ()
    every: bool = False
    names: tuple[str, ...] = ()
    scope: int = 0
    over: int = 0
    threshold: float = 0.0
    kept_as: str = ""
    widths: tuple[int, ...] = ()

    @property
    def of_mean(self) -> bool:
        """Whether it is judged for the mean of the prompt's rows."""
        return OVERS[self.over] == "prompt_mean"


class GroupGates(NamedTuple):
    """The conditions of a group.

    Attributes:
        of_operations: the number of the gate of each operation, -1 for none.
        gates: what must be judged for it, terms before joints.
        judges: whether its tokens are those for which conditions on the prompt are judged; all
            others are judged for the tokens of every group that has them.
    """

    of_operations: tuple[int, ...]
    gates: tuple[Gate, ...]
    judges: bool = False

    @property
    def judged(self) -> tuple[Gate, ...]:
        """What is judged for the tokens of the group."""
        return tuple(gate for gate in self.gates if bool(gate.over) == self.judges)

    def made_of(self, number: int) -> frozenset[int]:
        """A gate of the group with all that it joins; nothing for none."""
        terms = next((gate.terms for gate in self.gates if gate.number == number), ())
        own = frozenset((number,) if number >= 0 else ())
        return own.union(*(self.made_of(term) for term in terms))

    def scope_of(self, number: int) -> int:
        """That of a gate of the group; 0 for none."""
        return next((gate.scope for gate in self.gates if gate.number == number), 0)


class Edges(NamedTuple):
    """The scores for which a condition holds, as in a `Gate`."""

    low: float
    high: float
    soft: float = 0.0
    middle: float = 0.0


@dataclass(frozen=True, eq=False)
class ProbeCondition:
    """A row's score decides.

    Attributes:
        field: where it was given, for messages.
        name: of its signal; "" for none of its own.
        layer: negative counts from the end.
        vector: float32 `[hidden]`; of a small MLP, what `MlpProbe` packs.
        score: one of `KINDS`.
        memory: for which tokens it decides.
        threshold, widths: see `Gate`.
        feature: the autoencoder and the feature that it is made of; None for none.
    """

    field: str
    name: str
    point: HookPoint
    layer: int | None
    vector: FloatArray
    bias: float
    score: str
    edges: Edges
    memory: Memory = NOTHING
    threshold: float = 0.0
    feature: tuple[str, int] | None = None
    widths: tuple[int, ...] = ()

    is_complete = True

    @cached_property
    def vector_digest(self) -> str:
        """Of the vector's content. Probes are kept in float32, whatever the model's dtype is."""
        return f"{PROBE}{digest_of(self.vector.data)}"

    @cached_property
    def digest(self) -> str:
        """Of what is judged, whatever it is called."""
        numbers = _NUMBERS.pack(self.bias, *self.edges, self.threshold)
        kind = f"{self.score}:{self.widths}"
        place = f"{self.point.value}:{self.layer}:{kind}:{self.vector_digest}:"
        return digest_of(place.encode() + numbers)

    @property
    def key(self) -> Hashable:
        """Equal for two that judge alike, for the same tokens, and are called alike."""
        return self.name, self.digest, self.memory

    def probes(self) -> Iterator[ProbeCondition]:
        """Those that it is made of."""
        yield self

    def found(self, known: Known) -> Condition:
        """The condition with its layer counted from 0. `ValueError` for a point without a tap."""
        try:
            known.points.check(self.point, self.layer)
        except ValueError as error:
            raise ValueError(f"{self.field}['probe']: {error}") from None
        if self.layer is None or self.layer >= 0:
            return self
        return replace(self, layer=self.layer % known.points.num_layers)


@dataclass(frozen=True, eq=False)
class JointCondition:
    """Several conditions, of which all must hold, or any.

    Attributes:
        field, name, memory: as of a `ProbeCondition`.
        every: whether all must hold.
    """

    field: str
    name: str
    terms: tuple[Condition, ...]
    every: bool
    memory: Memory = NOTHING

    @property
    def is_complete(self) -> bool:
        """Whether it names no monitor."""
        return all(term.is_complete for term in self.terms)

    @cached_property
    def digest(self) -> str:
        """Of what is judged, whatever it is called."""
        return digest_of(repr((self.every, [term.digest for term in self.terms])).encode())

    @property
    def key(self) -> Hashable:
        """As that of a `ProbeCondition`."""
        return self.name, self.every, tuple(term.key for term in self.terms), self.memory

    def probes(self) -> Iterator[ProbeCondition]:
        """Those that it is made of."""
        for term in self.terms:
            yield from term.probes()

    def found(self, known: Known) -> Condition:
        """The same with its terms found."""
        terms = tuple(term.found(known) for term in self.terms)
        for term, asked in zip(terms, self.terms, strict=True):
            if isinstance(asked, NamedCondition) and term.memory != NOTHING:
                raise ValueError(
                    f"{asked.field}: the monitor {asked.name!r} has "
                    f"{term.memory.described()}, and is joined with others here; give that to the "
                    "condition that joins them, and register a monitor without it"
                )
        alike = all(ours is theirs for ours, theirs in zip(terms, self.terms, strict=True))
        return self if alike else replace(self, terms=terms)


@dataclass(frozen=True, eq=False)
class _UnknownCondition:
    """A condition that names something: nobody knows what it judges before that is found."""

    field: str
    name: str

    is_complete = False

    @property
    def looked_for(self) -> str:
        """What it names, in words."""
        return f"the monitor {self.name!r}"

    @property
    def digest(self) -> str:
        """Nobody knows yet."""
        raise ValueError(f"{self.field}: {self.looked_for} was not looked up")

    def probes(self) -> Iterator[ProbeCondition]:
        """As `digest`."""
        raise ValueError(f"{self.field}: {self.looked_for} was not looked up")


@dataclass(frozen=True, eq=False)
class NamedCondition(_UnknownCondition):
    """A condition that was registered under a name (`llm.steering.register_monitor`)."""

    @property
    def memory(self) -> Memory:
        """As `digest`."""
        raise ValueError(f"{self.field}: {self.looked_for} was not looked up")

    @property
    def key(self) -> Hashable:
        """As that of a `ProbeCondition`; what the monitor judges is not looked at."""
        return self.name

    def found(self, known: Known) -> Condition:
        """What is registered under the name."""
        monitors = known.monitors
        if self.name not in monitors:
            raise ValueError(
                f"{self.field}: no monitor {self.name!r} is registered; registered are "
                f"{', '.join(sorted(monitors)) or 'none'}. Use "
                "llm.steering.register_monitor, or POST /v1/steering/monitors/register"
            )
        return monitors[self.name].found(known)


@dataclass(frozen=True, eq=False)
class FeatureCondition(_UnknownCondition):
    """How active a feature is of an autoencoder that is registered as a consumer decides.

    Attributes:
        field, name, edges, memory: as of a `ProbeCondition`.
        sae: the id of the consumer.
    """

    sae: str
    feature: int
    edges: Edges
    memory: Memory = NOTHING

    @property
    def looked_for(self) -> str:
        """What it names, in words."""
        return f"the autoencoder {self.sae!r}"

    @property
    def key(self) -> Hashable:
        """As that of a `ProbeCondition`; the autoencoder is not looked at."""
        return self.name, self.sae, self.feature, self.edges, self.memory

    def found(self, known: Known) -> Condition:
        """The feature as a probe, where the autoencoder reads."""
        try:
            probe = known.feature(self.sae, self.feature)
        except ValueError as error:
            raise ValueError(f"{self.field}['probe']: {error}") from None
        return ProbeCondition(
            self.field,
            self.name,
            probe.point,
            probe.layer,
            probe.vector,
            probe.bias,
            probe.kind,
            self.edges,
            self.memory,
            probe.threshold,
            (self.sae, self.feature),
        ).found(known)


Condition = ProbeCondition | JointCondition | NamedCondition | FeatureCondition


class Known(NamedTuple):
    """What conditions are found in.

    Attributes:
        points: the hook points of the model.
        monitors: those that are registered, by name.
        feature: raises `ValueError` for an autoencoder or a feature that there is not.
    """

    points: ModelPoints
    monitors: Mapping[str, Condition]
    feature: FindFeature


# -- in a request ----------------------------------------------------------------------------------


class GateNumbers:
    """Numbers the conditions of a request, those that judge alike together."""

    def __init__(self) -> None:
        self._gates: dict[tuple[str, Memory], Gate] = {}
        self._needed: dict[int, frozenset[int]] = {}
        self.vectors: dict[str, FloatArray] = {}

    def number(self, condition: Condition, memory: Memory | None = None) -> int:
        """The number of a condition; it gets one if it has none.

        Args:
            memory: of one that is joined with others; by default its own.
        """
        memory = condition.memory if memory is None else memory
        key = condition.digest, memory
        known = self._gates.get(key)
        if known is not None:
            if condition.name and condition.name not in known.names:
                names = *known.names, condition.name
                self._gates[key] = known._replace(names=names)
            return known.number
        assert not isinstance(condition, (NamedCondition, FeatureCondition))
        scope, over = SCOPES.index(memory.scope), OVERS.index(memory.over)
        kept_as = f"{memory.over}:{condition.digest}" if memory.is_kept else ""
        if isinstance(condition, JointCondition):
            numbers = [self.number(term, memory.of_terms) for term in condition.terms]
            terms = tuple(dict.fromkeys(numbers))  # each once
            last = max(condition.probes(), key=lambda probe: order_of(probe.point, probe.layer))
            place = last.point.value, last.layer
            gate = Gate(len(self._gates), *place, terms=terms, every=condition.every)
        else:
            gate = Gate(
                len(self._gates),
                condition.point.value,
                condition.layer,
                condition.vector_digest,
                KINDS.index(condition.score),
                condition.bias,
                *condition.edges,
                threshold=condition.threshold,
                widths=condition.widths,
            )
            self.vectors[condition.vector_digest] = condition.vector
        self._needed[gate.number] = frozenset((gate.number,)).union(
            *(self._needed[term] for term in gate.terms)
        )
        names = (condition.name,) if condition.name else ()
        gate = gate._replace(names=names, scope=scope, over=over, kept_as=kept_as)
        self._gates[key] = gate
        return gate.number

    def of(self, gates: Iterable[Gate]) -> dict[str, FloatArray]:
        return {gate.vector: self.vectors[gate.vector] for gate in gates if gate.vector}

    def gates(self, numbers: Iterable[int]) -> tuple[Gate, ...]:
        """What must be judged for these."""
        needed = frozenset().union(*(self._needed[number] for number in numbers))
        return tuple(gate for gate in self._gates.values() if gate.number in needed)


def signal_names(
    gates: Iterable[Gate], what: str = "the request with global steering"
) -> dict[str, int]:
    """What the signals of a request are called, each with the number of its gate: as their
    conditions are named, else by their places.

    Args:
        what: has the conditions, for the message.

    Raises `ValueError` where two conditions have one name.
    """
    by_number = {gate.number: gate for gate in gates}
    names: dict[str, int] = {}
    for number, gate in sorted(by_number.items()):
        for name in gate.names:
            if names.setdefault(name, number) != number:
                raise ValueError(
                    f"two conditions of {what} are called {name!r}; give each its own 'name'"
                )
    for number, gate in sorted(by_number.items()):
        if not gate.names:
            names[_free_name(gate, names)] = number
    return names


def _free_name(gate: Gate, taken: Container[str]) -> str:
    """A name from the place of a gate."""
    place = gate.hook if gate.layer is None else f"{gate.hook}:{gate.layer}"
    if gate.terms:
        place = f"{'all' if gate.every else 'any'}:{place}"
    name, count = place, 1
    while name in taken:
        count += 1
        name = f"{place}#{count}"
    return name


def order_of(point: HookPoint, layer: int | None) -> tuple[int, int]:
    """Places in the order of the network compare as these do."""
    if layer is None:
        layer = -1 if point is HookPoint.EMBED else 1 << 30
    return layer, list(HookPoint).index(point)


def check_order(
    condition: Condition,
    point: HookPoint,
    layer: int | None,
    points: ModelPoints,
    name: str,
    *,
    generated: bool,
) -> None:
    """Refuse a condition that is not known yet where it is to decide.

    Args:
        condition: found.
        point, layer: of the entry that it gates.
        name: of the entry, for messages.
        generated: whether the entry is for generated tokens alone. What earlier tokens have said is
            known wherever one is computed after the other.
    """
    memory = condition.memory
    if memory.of_prompt or (memory.lasts and generated):
        return
    for probe in condition.probes():
        if memory.lasts and _one_tensor((probe.point, probe.layer), (point, layer), points):
            raise ValueError(
                f"{name}: its condition looks at {_place(probe.point, probe.layer)}, and decides "
                f"on later tokens at {_place(point, layer)}; the tokens of a prompt pass it "
                "together. Give a probe at an earlier place, or decode_steering_vectors"
            )
        if order_of(probe.point, probe.layer) > order_of(point, layer):
            raise ValueError(
                f"{name}: its condition looks at {_place(probe.point, probe.layer)}, which the "
                f"network computes after {_place(point, layer)}; give a probe at or before the "
                f"place that it gates{_OR_DECODE if memory.lasts else ''}"
            )
        if probe.layer == layer and _side_by_side(probe.point, point, layer, points):
            raise ValueError(
                f"{name}: in layer {layer} of {points.family} attention and MLP are computed side "
                f"by side, and what {probe.point} says may not be known at {point}; give a probe "
                "of an earlier layer, or of pre_attn"
            )


_OR_DECODE = ", or decode_steering_vectors"


def _one_tensor(first: TapKey, second: TapKey, points: ModelPoints) -> bool:
    """Whether two places are the same one, or the same tensor between two blocks."""
    (point, layer), (other, other_layer) = first, second
    if other is HookPoint.PRE_ATTN and point is HookPoint.EMBED:
        return other_layer == 0
    if other is HookPoint.PRE_ATTN and point is HookPoint.POST_BLOCK and points.linked:
        assert layer is not None
        return other_layer == layer + 1
    return first == second


def _side_by_side(
    first: HookPoint, second: HookPoint, layer: int | None, points: ModelPoints
) -> bool:
    """Whether neither of two points of a layer is computed from the other."""
    attention = {HookPoint.ATTN_IN, *HEAD_POINTS, HookPoint.ATTN_OUT}
    mlp = {HookPoint.MLP_IN, HookPoint.ROUTER, HookPoint.MLP_OUT}
    return first in attention and second in mlp and (HookPoint.POST_ATTN, layer) in points.missing


def _place(point: HookPoint, layer: int | None) -> str:
    return point.value if layer is None else f"{point.value} of layer {layer}"


def condition_described(condition: Condition) -> dict[str, Any]:
    """A condition for people: what it looks at, without the vectors."""
    told: dict[str, Any] = {"name": condition.name} if condition.name else {}
    if isinstance(condition, NamedCondition):
        return told
    if isinstance(condition, JointCondition):
        kind = "all" if condition.every else "any"
        terms = [condition_described(term) for term in condition.terms]
        return {**told, kind: terms, **condition.memory.described()}
    if isinstance(condition, FeatureCondition):
        return {**told, "probe": {"sae": condition.sae, "feature": condition.feature}}
    low, high, soft, _ = condition.edges
    threshold: dict[str, Any] = {"above": low, "below": high}
    if low > -math.inf and high < math.inf:
        threshold = {"between": [low, high]}
    probe = {
        **dict(zip(("sae", "feature"), condition.feature or (), strict=False)),
        "hook": condition.point.value,
        "layer": condition.layer,
        "norm": float(np.linalg.norm(condition.vector)),
        "bias": condition.bias,
        "score": condition.score,
        **({"widths": list(condition.widths)} if condition.widths else {}),
    }
    told |= {"probe": probe, **{k: x for k, x in threshold.items() if x not in _UNBOUND}}
    told |= condition.memory.described()
    return {**told, "soft": abs(soft)} if soft else told


_UNBOUND = (-math.inf, math.inf)


# -- reading what users write ----------------------------------------------------------------------


def parse_condition(given: Any, field: str, depth: int = 0) -> Condition:
    """A condition from what users write; `ValueError` naming the field that is wrong."""
    if isinstance(given, str):
        if not given:
            raise ValueError(f"{field} is empty; give the name of a registered monitor")
        return NamedCondition(field, given)
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{field}={given!r:.60} is {type(given).__name__}; give the name of a registered "
            "monitor, or a mapping with 'probe' and any of above, below, between"
        )
    memory = Memory.parse(given, field, joined=depth > 0)
    kinds = [kind for kind in ("probe", "all", "any") if given.get(kind) is not None]
    if len(kinds) != 1:
        raise ValueError(f"{field} has {kinds or 'none'} of probe, all and any; give one of them")
    name = given.get("name", "")
    if not isinstance(name, str) or ("name" in given and not name):
        raise ValueError(f"{field}['name']={name!r} is no name; give a text that is not empty")
    name = check_text(name, f"{field}['name']")
    if kinds == ["probe"]:
        return _probe_condition(given, field, name, memory)
    [kind] = kinds
    allow_keys(given, {kind, "name", "scope", "over"}, field, f"a condition with {kind!r}")
    terms = given[kind]
    if isinstance(terms, (str, Mapping)) or not isinstance(terms, Sequence) or not terms:
        raise ValueError(f"{field}[{kind!r}] is {terms!r:.60}; give a list of conditions")
    if depth == _DEEPEST:
        raise ValueError(f"{field} joins conditions more than {_DEEPEST} levels deep")
    parsed = [
        parse_condition(term, f"{field}[{kind!r}][{i}]", depth + 1) for i, term in enumerate(terms)
    ]
    return JointCondition(field, name, tuple(parsed), kind == "all", memory)


def parse_conditions(given: Any, field: str) -> tuple[Condition, ...]:
    """One condition or a list of them, any of which decides; `ValueError` as `parse_condition`."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
        return (parse_condition(given, field),)
    if not given:
        raise ValueError(f"{field} is an empty list; give a condition, or leave it out")
    return tuple(parse_condition(each, f"{field}[{i}]") for i, each in enumerate(given))


def _probe_condition(
    given: Mapping[str, Any], field: str, name: str, memory: Memory
) -> ProbeCondition | FeatureCondition:
    allow_keys(given, {"probe", "name", "scope", "over", "soft", *_RANGES}, field, "a condition")
    probe = given["probe"]
    if not isinstance(probe, Mapping):
        raise ValueError(
            f"{field}['probe'] is {type(probe).__name__}; give a mapping with hook, layer and "
            "vector, or with hook, layer and layers, or with sae and feature"
        )
    inner = f"{field}['probe']"
    if probe.get("sae") is not None:
        return _feature_condition(given, field, name, memory)
    mlp = MlpProbe.parse(probe, inner) if probe.get("layers") is not None else None
    if mlp is None:
        allow_keys(probe, {"hook", "layer", "vector", "bias", "score"}, inner, "a probe")
    else:
        allow_keys(probe, _OF_MLPS, inner, "a probe that is a small MLP")
    for key in ("hook", "vector"):
        if probe.get(key) is None and (mlp is None or key == "hook"):
            raise ValueError(f"{inner} has no {key!r}; give a hook point, a layer and a vector")
    point = hook_named(probe["hook"], inner)
    layer = layer_at(point, probe.get("layer"), inner)
    score = probe.get("score", SCORES[0])
    edges = _range(given, field)
    if mlp is not None:
        if score != SCORES[0]:
            raise ValueError(
                f"{inner}['score']={score!r:.60} with layers: the score is what the last layer "
                "gives; leave score out"
            )
        weights, bias, kind = mlp.packed, mlp.bias, mlp.kind
        made = ProbeCondition(field, name, point, layer, weights, bias, kind, edges, memory)
        return replace(made, widths=mlp.widths)
    require_one_of(f"{inner}['score']", score, SCORES)
    vector = _vector(probe["vector"], f"{inner}['vector']", unit=score != "dot")
    bias = scalar(probe.get("bias", 0.0), f"{inner}['bias']")
    return ProbeCondition(field, name, point, layer, vector, bias, score, edges, memory)


_OF_MLPS = frozenset(("hook", "layer", "layers", "activation", "score"))


def _feature_condition(
    given: Mapping[str, Any], field: str, name: str, memory: Memory
) -> FeatureCondition:
    probe, inner = given["probe"], f"{field}['probe']"
    allow_keys(probe, {"sae", "feature"}, inner, "a probe that is a feature of an autoencoder")
    sae, feature = probe["sae"], own_numbers(probe.get("feature"))
    if not isinstance(sae, str) or not sae:
        raise ValueError(
            f"{inner}['sae']={sae!r:.60} is no name; give the consumer_id of an SaeConsumer that "
            "is registered"
        )
    if type(feature) is not int or feature < 0:
        raise ValueError(f"{inner}['feature']={feature!r:.60}; give the number of a feature")
    edges = _range(given, field)
    if edges.high <= 0 and not edges.soft:
        raise ValueError(
            f"{field} is for scores below {edges.high:g}, and how active a feature is, is 0 or "
            "more: it would hold nowhere; give a small number above 0, such as 1e-6, for rows "
            "where the feature is not active"
        )
    return FeatureCondition(field, name, str(sae), feature, edges, memory)


def _range(given: Mapping[str, Any], field: str) -> Edges:
    """Which scores fire."""
    chosen = [key for key in _RANGES if given.get(key) is not None]
    if len(chosen) != 1:
        raise ValueError(
            f"{field} has {chosen or 'none'} of above, below and between; give one of them"
        )
    [key] = chosen
    soft = 0.0
    if given.get("soft") is not None:
        soft = scalar(given["soft"], f"{field}['soft']")
        if soft <= 0 or key == "between":
            raise ValueError(
                f"{field}['soft']={soft:g} with {key}: give a number above 0, and the threshold as "
                "above or below"
            )
    if key == "between":
        edges = float_array(given[key], f"{field}['between']")
        if edges.shape != (2,) or not edges[0] < edges[1]:
            raise ValueError(
                f"{field}['between'] is {given[key]!r:.60}; give two numbers, the smaller first"
            )
        return Edges(float(edges[0]), float(edges[1]))
    threshold = scalar(given[key], f"{field}[{key!r}]")
    if key == "above":
        return Edges(threshold, math.inf, soft, threshold)
    return Edges(-math.inf, threshold, -soft, threshold)


def _vector(given: Any, name: str, *, unit: bool) -> FloatArray:
    array = float_array(given, name)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name} has shape {list(array.shape)}; give one vector [hidden]")
    wide = array.astype(np.float64)
    length = float(np.sqrt(wide @ wide))
    if length == 0:
        raise ValueError(f"{name} is all zeros, which tells no rows apart")
    if length > _LONGEST and not unit:
        raise ValueError(
            f"{name} has length {length:.3g}, and scores of rows may be beyond float32; give one "
            f"of length {_LONGEST:g} or less, and a smaller threshold"
        )
    if unit:
        array = (wide / length).astype(np.float32)
    array.setflags(write=False)
    return array

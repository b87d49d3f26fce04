"""Conditions of steering: when an entry steers, and how much."""

from __future__ import annotations

import math
import struct
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tllm.spec.hooks import HEAD_POINTS, HookPoint, ModelPoints, TapKey
from tllm.spec.memory import NOTHING, Memory
from tllm.spec.probes import FindFeature
from tllm.spec.reading import FloatArray, digest_of, registered_names, said_of

PROBE = "probe:"
"""What the digest of a probe's vector begins with, among those of steering vectors."""

_NUMBERS = struct.Struct("<6d")


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
        with said_of(f"{self.field}['probe']"):
            known.points.check(self.point, self.layer)
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
                f"{registered_names(monitors)}. Use "
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
        with said_of(f"{self.field}['probe']"):
            probe = known.feature(self.sae, self.feature)
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


def autoencoders_of(condition: Condition) -> Iterator[str]:
    """The ids of the consumers whose features a condition names. A monitor has found its own."""
    if isinstance(condition, FeatureCondition):
        yield condition.sae
    elif isinstance(condition, JointCondition):
        for term in condition.terms:
            yield from autoencoders_of(term)


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


_ORDER = {point: number for number, point in enumerate(HookPoint)}


def order_of(point: HookPoint, layer: int | None) -> tuple[int, int]:
    """Places in the order of the network compare as these do."""
    if layer is None:
        layer = -1 if point is HookPoint.EMBED else 1 << 30
    return layer, _ORDER[point]


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
    lasts = memory.lasts
    if memory.of_prompt or (lasts and generated):
        return
    own = order_of(point, layer)
    for probe in condition.probes():
        if not lasts and probe.layer is not None and probe.layer < own[0]:
            continue  # as of most
        if lasts and _one_tensor((probe.point, probe.layer), (point, layer), points):
            raise ValueError(
                f"{name}: its condition looks at {_place(probe.point, probe.layer)}, and decides "
                f"on later tokens at {_place(point, layer)}; the tokens of a prompt pass it "
                "together. Give a probe at an earlier place, or decode_steering_vectors"
            )
        if order_of(probe.point, probe.layer) > own:
            raise ValueError(
                f"{name}: its condition looks at {_place(probe.point, probe.layer)}, which the "
                f"network computes after {_place(point, layer)}; give a probe at or before the "
                f"place that it gates{_OR_DECODE if lasts else ''}"
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

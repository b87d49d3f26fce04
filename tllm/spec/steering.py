"""What steering may ask: vectors, directions and clamps, by hook point, layer, phase and token."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tllm.spec.hooks import HookPoint
from tllm.spec.selection import Selection, stretch_starts

SteeringPhase = Literal["any", "prefill", "decode"]
FloatArray = npt.NDArray[np.float32]

MAX_OPERATIONS = 64
"""The most operations at one hook point of one layer, global and request together."""
MAX_CLAMPS = 16
"""The most of them that need the row's component along a direction: each reads the whole row."""


_COEFFICIENTS = struct.Struct("<6d")


class Coefficients(NamedTuple):
    """One steering operation in the form that the kernel computes.

    With `v` the vector and `p = h . v`:
    `h' = h + (add + norm |h| + component p + strength (clip(p, low, high) - p)) v`.
    """

    add: float = 0.0
    norm: float = 0.0
    component: float = 0.0
    strength: float = 0.0
    low: float = -math.inf
    high: float = math.inf

    def scaled(self, factor: float) -> Coefficients:
        """The operation with its whole effect multiplied."""
        return Coefficients(
            self.add * factor,
            self.norm * factor,
            self.component * factor,
            self.strength * factor,
            self.low,
            self.high,
        )

    @property
    def idle(self) -> bool:
        """Whether it changes nothing."""
        return not any(self[:4])

    @property
    def only_adds(self) -> bool:
        """Whether it adds the same to every row."""
        return not any(self[1:4])

    @property
    def reads_component(self) -> bool:
        """Whether it needs the row's component along the vector."""
        return self.component != 0 or self.strength != 0


@dataclass(frozen=True)
class Method:
    """A way to steer. Adding one is adding a row to `METHODS`.

    Attributes:
        formula: of the new row, with `w` the vector as given, `v = w / |w|`, `p = h . v`.
        unit: whether the operation takes `v` rather than `w`.
        parameters: what an entry may give, with defaults; None must be given (or has a meaning
            of its own, see `coefficients`).
        coefficients: the operation that these parameters mean.
    """

    formula: str
    unit: bool
    parameters: Mapping[str, float | None]
    coefficients: Callable[[Mapping[str, float | None]], Coefficients]


def _clamp(given: Mapping[str, float | None]) -> Coefficients:
    low, high, value = given["min"], given["max"], given["value"]
    if value is not None:
        if low is not None or high is not None:
            raise ValueError("gives both value and min or max; give value, or a range")
        low = high = value
    if low is None and high is None:
        raise ValueError("gives no bound; give value, min or max")
    low = -math.inf if low is None else low
    high = math.inf if high is None else high
    if low > high:
        raise ValueError(f"has min={low} above max={high}")
    return Coefficients(strength=_number(given["strength"]), low=low, high=high)


def _project(given: Mapping[str, float | None]) -> Coefficients:
    if given["value"] is None:
        raise ValueError("gives no value; give the component that rows shall have")
    return Coefficients(
        strength=_number(given["strength"]), low=given["value"], high=given["value"]
    )


def _multiply(given: Mapping[str, float | None]) -> Coefficients:
    if given["factor"] is None:
        raise ValueError("gives no factor; give what the component is multiplied with")
    return Coefficients(component=(given["factor"] - 1) * _number(given["strength"]))


def _number(value: float | None) -> float:
    assert value is not None
    return value


METHODS: Mapping[str, Method] = {
    "add": Method(
        "h + scale w",
        unit=False,
        parameters={"scale": 1.0},
        coefficients=lambda given: Coefficients(add=_number(given["scale"])),
    ),
    "norm_match": Method(
        "h + scale |h| v",
        unit=True,
        parameters={"scale": 1.0},
        coefficients=lambda given: Coefficients(norm=_number(given["scale"])),
    ),
    "clamp": Method(
        "h + strength (clip(p, min, max) - p) v",
        unit=True,
        parameters={"min": None, "max": None, "value": None, "strength": 1.0},
        coefficients=_clamp,
    ),
    "ablate": Method(
        "h - strength p v",
        unit=True,
        parameters={"strength": 1.0},
        coefficients=lambda given: Coefficients(
            strength=_number(given["strength"]), low=0.0, high=0.0
        ),
    ),
    "project": Method(
        "h + strength (value - p) v",
        unit=True,
        parameters={"value": None, "strength": 1.0},
        coefficients=_project,
    ),
    "multiply": Method(
        "h + strength (factor - 1) p v",
        unit=True,
        parameters={"factor": None, "strength": 1.0},
        coefficients=_multiply,
    ),
}


@dataclass(frozen=True, eq=False)
class Entry:
    """One operation at one hook point, as a user asked it.

    Attributes:
        name: the field it was given in, for messages.
        layer: negative counts from the end; None for `lm_head_in`.
        vector: float32 `[hidden]`, of length 1 when the method takes a direction.
        positions: which tokens.
    """

    name: str
    point: HookPoint
    layer: int | None
    vector: FloatArray
    coefficients: Coefficients
    positions: Selection

    @cached_property
    def digest(self) -> str:
        """Of the vector's content."""
        return _digest(self.vector.data)

    @cached_property
    def largest(self) -> float:
        """The largest absolute value of the vector."""
        return float(max(self.vector.max(), -self.vector.min()))


@dataclass(frozen=True, eq=False)
class Tiers:
    """What one party asks in each phase: vectors first, clamps after them.

    Attributes:
        vectors, clamps: entries in the order given, by phase (`any` is the base tier).
    """

    vectors: Mapping[SteeringPhase, tuple[Entry, ...]] = field(default_factory=dict)
    clamps: Mapping[SteeringPhase, tuple[Entry, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(self.vectors.values()) or any(self.clamps.values())

    def __iter__(self) -> Iterator[Entry]:
        for tier in (*self.vectors.values(), *self.clamps.values()):
            yield from tier

    @classmethod
    def parse(
        cls,
        *,
        vectors: Any = None,
        prefill_vectors: Any = None,
        decode_vectors: Any = None,
        clamps: Any = None,
        prefill_clamps: Any = None,
        decode_clamps: Any = None,
        names: Mapping[str, str] | None = None,
    ) -> Tiers:
        """Tiers from what users write.

        Args:
            vectors, prefill_vectors, decode_vectors: `{hook: {layer: entry}}`.
            clamps, prefill_clamps, decode_clamps: likewise; an entry without a `method` is a
                `clamp`.
            names: what these fields are called in messages.
        """
        called = dict(names or {})

        def tiers(given: Mapping[str, Any], method: str) -> dict[SteeringPhase, tuple[Entry, ...]]:
            phases: dict[SteeringPhase, tuple[Entry, ...]] = {}
            for phase, key in zip(("any", "prefill", "decode"), given, strict=True):
                if given[key] is not None:
                    name = called.get(key, key)
                    phases[phase] = tuple(_entries(given[key], name, method))  # type: ignore[index]
            return phases

        return cls(
            tiers(
                {
                    "vectors": vectors,
                    "prefill_vectors": prefill_vectors,
                    "decode_vectors": decode_vectors,
                },
                "add",
            ),
            tiers(
                {
                    "clamps": clamps,
                    "prefill_clamps": prefill_clamps,
                    "decode_clamps": decode_clamps,
                },
                "clamp",
            ),
        )

    def map(self, change: Callable[[Entry], Entry]) -> Tiers:
        """The same tiers with every entry changed."""
        return Tiers(
            {phase: tuple(map(change, tier)) for phase, tier in self.vectors.items()},
            {phase: tuple(map(change, tier)) for phase, tier in self.clamps.items()},
        )

    def at(self, positions: Selection) -> Tiers:
        """The same tiers, with these tokens for the entries that mean every token."""
        if positions.everything:
            return self
        return self.map(lambda e: replace(e, positions=positions) if e.positions.everything else e)

    def scaled(self, factor: float) -> Tiers:
        """The same tiers with the effect of every entry multiplied."""
        return self.map(lambda e: replace(e, coefficients=e.coefficients.scaled(factor)))

    def joined(self, other: Tiers) -> Tiers:
        """These entries, then the other's, tier by tier."""

        def join(
            ours: Mapping[SteeringPhase, tuple[Entry, ...]],
            theirs: Mapping[SteeringPhase, tuple[Entry, ...]],
        ) -> dict[SteeringPhase, tuple[Entry, ...]]:
            phases = dict.fromkeys((*ours, *theirs))
            return {phase: (*ours.get(phase, ()), *theirs.get(phase, ())) for phase in phases}

        return Tiers(join(self.vectors, other.vectors), join(self.clamps, other.clamps))


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

    @cached_property
    def own(self) -> Tiers:
        """What it asks beside modules, at the tokens it means."""
        return self.tiers.at(self.positions)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """What is done to it where nothing but its own steering applies."""
        return compose([self.own])

    def hash(self) -> None:
        """Do now, once, what every request that asks this needs."""
        for entry in self.own:
            entry.largest  # noqa: B018 - computed once, when first looked at
        for group in self.groups:
            group.digest  # noqa: B018

    def __deepcopy__(self, memo: Any) -> RequestSteering:
        # Copies of the parameters share it: it never changes, and vectors are large.
        return self


def parse_modules(given: Any, name: str = "steering_module_ref") -> tuple[tuple[str, float], ...]:
    """`(module, factor)` pairs from a name, a pair, or a list of either."""
    if isinstance(given, str):
        return ((given, 1.0),)
    if isinstance(given, Sequence):
        if (
            len(given) == 2
            and isinstance(given[0], str)
            and not isinstance(given[1], (str, Sequence))
        ):
            return ((given[0], _scalar(given[1], f"{name}[1]")),)
        if given and all(isinstance(each, (str, Sequence)) for each in given):
            return tuple(pair for each in given for pair in parse_modules(each, name))
    raise ValueError(
        f"{name}={given!r} is not understood; give the name of a registered module, "
        "(name, factor), or a list of these"
    )


@dataclass(frozen=True)
class Group:
    """Operations that apply to the same tokens, in this order.

    Attributes:
        operations: `(hook point, layer, digest of the vector, coefficients)`.
        vectors: float32 `[hidden]`, by digest.
    """

    phase: SteeringPhase
    positions: Selection
    operations: tuple[tuple[str, int | None, str, Coefficients], ...]
    vectors: Mapping[str, FloatArray] = field(compare=False, repr=False)

    @cached_property
    def digest(self) -> str:
        """Of what is done, whatever tokens it is done to."""
        parts = [
            f"{hook}:{layer}:{digest}:".encode() + _COEFFICIENTS.pack(*coefficients)
            for hook, layer, digest, coefficients in self.operations
        ]
        return _digest(b"".join(parts))

    @cached_property
    def use(self) -> GroupUse:
        """What a request carries of it."""
        return GroupUse(self.phase, self.positions, self.digest)


@dataclass(frozen=True)
class GroupUse:
    """A group in a request: which tokens, and the digest of what is done to them."""

    phase: SteeringPhase
    positions: Selection
    digest: str

    def to_wire(self) -> list[Any]:
        """As plain data."""
        positions = None if self.positions.everything else self.positions.to_wire()
        return [self.phase, positions, self.digest]

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> GroupUse:
        """What `to_wire` gave."""
        phase, positions, digest = wire
        return cls(phase, _EVERYWHERE if positions is None else Selection.parse(positions), digest)


_EVERYWHERE = Selection()


def compose(parties: Sequence[Tiers]) -> tuple[Group, ...]:
    """One list of groups from what several parties ask.

    All vectors come first, in the parties' order (each one's base tier, then its phases), then all
    clamps likewise. What changes nothing is left out.
    """
    tokens: list[tuple[SteeringPhase, Selection]] = []
    operations: list[list[tuple[str, int | None, str, Coefficients]]] = []
    vectors: list[dict[str, FloatArray]] = []
    for kind in ("vectors", "clamps"):
        for party in parties:
            tiers: Mapping[SteeringPhase, tuple[Entry, ...]] = getattr(party, kind)
            for phase, entries in tiers.items():
                for entry in entries:
                    if entry.coefficients.idle:
                        continue
                    operation = entry.point.value, entry.layer, entry.digest, entry.coefficients
                    same_tokens = bool(tokens) and tokens[-1] == (phase, entry.positions)
                    if not same_tokens:
                        tokens.append((phase, entry.positions))
                        operations.append([])
                        vectors.append({})
                    operations[-1].append(operation)
                    vectors[-1][entry.digest] = entry.vector
    return tuple(
        Group(phase, positions, tuple(done), content)
        for (phase, positions), done, content in zip(tokens, operations, vectors, strict=True)
    )


Configuration: TypeAlias = tuple[str, ...]
"""Digests of the groups that apply to a token, in order: one row of the workers' tables."""


@dataclass(frozen=True)
class TokenChoice:
    """What is done to generated tokens where it depends on which they are.

    Attributes:
        by_token: configurations of the tokens that are treated otherwise than all others, in the
            order of their ids.
        others: of all others.
    """

    by_token: tuple[tuple[int, Configuration], ...]
    others: Configuration

    @property
    def configurations(self) -> frozenset[Configuration]:
        """All that may be needed."""
        return frozenset((self.others, *(configuration for _, configuration in self.by_token)))


Stretches: TypeAlias = list[tuple[int, Configuration | TokenChoice]]
"""`(first position, what is done)` of each stretch of positions; the first begins at 0, the last
has no end."""


def steering_stretches(
    uses: Sequence[GroupUse], prompt_len: int, tokens: Sequence[int]
) -> Stretches:
    """What is done to each position of a sequence.

    Args:
        uses: the groups of a request.
        prompt_len: number of prompt tokens.
        tokens: the prompt's tokens (for selections by token).
    """
    if len(uses) == 1 and uses[0].phase == "any" and uses[0].positions.everything:
        return [(0, (uses[0].digest,))]  # as most requests are, and a burst of them is waited for
    if all(use.positions.everything for use in uses):
        prefill = tuple(use.digest for use in uses if use.phase != "decode")
        decode = tuple(use.digest for use in uses if use.phase != "prefill")
        return [(0, prefill)] if prefill == decode else [(0, prefill), (prompt_len, decode)]
    kinds = _kinds_of_tokens(uses)
    where = [
        [use.positions.intervals(prompt_len, tokens, kind[0] if kind else None) for use in uses]
        for kind in kinds
    ]
    edges = [[[e for pair in intervals for e in pair] for intervals in each] for each in where]

    def configuration(kind: int, position: int) -> Configuration:
        phase = "prefill" if position < prompt_len else "decode"
        return tuple(
            use.digest
            for use, of_use in zip(uses, edges[kind], strict=True)
            if use.phase in ("any", phase) and bisect_right(of_use, position) % 2
        )

    stretches: Stretches = []
    for start in stretch_starts(prompt_len, [each for of_kind in where for each in of_kind]):
        applied: Configuration | TokenChoice = configuration(0, start)
        if start >= prompt_len and len(kinds) > 1:
            found = [configuration(number, start) for number in range(len(kinds))]
            by_token = [
                (token, of_kind)
                for kind, of_kind in zip(kinds, found, strict=True)
                if of_kind != found[0]
                for token in kind
            ]
            if by_token:
                applied = TokenChoice(tuple(sorted(by_token)), found[0])
        if not stretches or stretches[-1][1] != applied:
            stretches.append((start, applied))
    return stretches


def configurations(stretches: Stretches) -> frozenset[Configuration]:
    """All configurations that a sequence may need; `()` where nothing is done."""
    found: set[Configuration] = set()
    for _, applied in stretches:
        found |= applied.configurations if isinstance(applied, TokenChoice) else {applied}
    return frozenset(found)


def _kinds_of_tokens(uses: Sequence[GroupUse]) -> list[list[int]]:
    """Tokens that every selection treats alike, together; first those that none names: `[]`."""
    criteria = [
        frozenset(each.token_ids)
        for use in uses
        if use.phase != "prefill" and use.positions.depends_on_generated_tokens
        for each in (use.positions.include, use.positions.exclude)
    ]
    kinds: dict[tuple[bool, ...], list[int]] = {}
    for token in frozenset().union(*criteria):
        kinds.setdefault(tuple(token in each for each in criteria), []).append(token)
    return [[], *kinds.values()]


def most_configurations(uses: Sequence[GroupUse]) -> int:
    """How many distinct combinations of groups a request may need, whatever its tokens are."""
    found: set[tuple[str, ...]] = set()
    for phase in ("prefill", "decode"):
        there = [use for use in uses if use.phase in ("any", phase)]
        choices = [(True,) if use.positions.everything else (True, False) for use in there]
        if sum(len(choice) > 1 for choice in choices) > 12:
            return 2**13
        for chosen in product(*choices):
            applied = zip(there, chosen, strict=True)
            found.add(tuple(use.digest for use, applies in applied if applies))
    return len(found - {()})


# -- reading what users write ----------------------------------------------------------------------


def _digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _entries(given: Any, name: str, method: str) -> Iterator[Entry]:
    if hasattr(given, "to_spec"):
        given = given.to_spec()
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{name} is {type(given).__name__}; give a mapping {{hook point: {{layer: vector}}}}"
        )
    if not given:
        raise ValueError(
            f"{name} is empty; name at least one hook point and layer, or leave it out"
        )
    for hook, layers in given.items():
        point = _hook(hook, name)
        of_hook = f"{name}[{point.value!r}]"
        if not point.has_layer:
            for entry in _listed(layers):
                yield _entry(entry, f"{of_hook}", point, None, method)
            continue
        for layer, at_layer in _by_layer(layers, of_hook):
            for entry in _listed(at_layer):
                yield _entry(entry, f"{of_hook}[{layer}]", point, layer, method)


def _hook(hook: Any, name: str) -> HookPoint:
    try:
        return HookPoint.parse(hook)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _by_layer(given: Any, name: str) -> Iterator[tuple[int, Any]]:
    """`(layer, entry)` pairs of one hook point."""
    if isinstance(given, Mapping) and "data" in given:
        yield from _unpacked(given, name)
        return
    if not isinstance(given, Mapping):
        array = _array(given, name)
        if array.ndim != 2:
            raise ValueError(
                f"{name} has shape {list(array.shape)}; give {{layer: vector}}, a packed mapping, "
                "or an array [layers, hidden]"
            )
        yield from enumerate(array)
        return
    if not given:
        raise ValueError(f"{name} is empty; name at least one layer, or leave the hook point out")
    for layer, entry in given.items():
        try:
            number = int(layer) if isinstance(layer, str) else layer
        except ValueError:
            number = None
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise ValueError(f"{name}: layer {layer!r} is not a whole number")
        yield int(number), entry


def _unpacked(given: Mapping[str, Any], name: str) -> Iterator[tuple[int, Any]]:
    """Entries of the packed form: `dtype`, `shape`, `layer_indices`, base64 `data`, `scales`."""
    allowed = {"dtype", "shape", "layer_indices", "data", "scales", "positions"}
    if unknown := sorted(set(given) - allowed):
        raise ValueError(f"{name} has unknown keys {unknown}; packed takes {sorted(allowed)}")
    for key in ("dtype", "shape", "layer_indices"):
        if key not in given:
            raise ValueError(f"{name} has data but no {key!r}; packed needs it")
    dtypes = {"float32": np.float32, "float16": np.float16, "bfloat16": None}
    if given["dtype"] not in dtypes:
        raise ValueError(
            f"{name}['dtype']={given['dtype']!r} is not known; choose one of {', '.join(dtypes)}"
        )
    data = given["data"]
    try:
        raw = base64.b64decode(data, validate=True) if isinstance(data, str) else bytes(data)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ValueError(f"{name}['data'] is not base64: {error}") from None
    kind = dtypes[given["dtype"]]
    shape = tuple(given["shape"])
    size = 2 if kind is not np.float32 else 4
    if len(shape) != 2 or len(raw) != math.prod(shape) * size:
        raise ValueError(
            f"{name}['data'] has {len(raw)} bytes, but shape {list(shape)} of {given['dtype']} has "
            f"{math.prod(shape) * size}; shape is [layers, hidden]"
        )
    if kind is None:  # numpy has no bfloat16: its bits are the upper half of a float32's
        values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(raw, kind).astype(np.float32)
    rows = values.reshape(shape)
    layers = list(given["layer_indices"])
    scales = list(given.get("scales") or [1.0] * len(layers))
    if len(layers) != len(rows) or len(scales) != len(rows):
        raise ValueError(
            f"{name}: shape {list(shape)} with {len(layers)} layer_indices and {len(scales)} "
            "scales; give one of each for every row"
        )
    extra = {"positions": given["positions"]} if "positions" in given else {}
    for layer, row, scale in zip(layers, rows, scales, strict=True):
        yield int(layer), {"vector": row, "scale": scale, **extra}


def _listed(given: Any) -> list[Any]:
    """The entries at one place: one, or a list of mappings."""
    if isinstance(given, Sequence) and given and all(isinstance(e, Mapping) for e in given):
        return list(given)
    return [given]


def _entry(
    given: Any,
    name: str,
    point: HookPoint,
    layer: int | None,
    default_method: str,
) -> Entry:
    if not isinstance(given, Mapping):
        given = {"vector": given}
    if "vector" not in given:
        raise ValueError(f"{name} has no 'vector'; give a list of numbers, an array or a tensor")
    named = given.get("method", default_method)
    method = METHODS.get(named)
    if method is None:
        raise ValueError(
            f"{name}['method']={named!r} is not known; choose one of {', '.join(METHODS)}"
        )
    allowed = {"vector", "method", "positions", *method.parameters}
    if unknown := sorted(set(map(str, given)) - allowed):
        raise ValueError(f"{name} has unknown keys {unknown}; {named} takes {sorted(allowed)}")
    parameters = {
        key: default if given.get(key) is None else _scalar(given[key], f"{name}[{key!r}]")
        for key, default in method.parameters.items()
    }
    try:
        coefficients = method.coefficients(parameters)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    positions = Selection()
    if given.get("positions") is not None:
        positions = Selection.parse(given["positions"], f"{name}['positions']")
    return Entry(
        name, point, layer, _vector(given["vector"], name, method), coefficients, positions
    )


def _scalar(given: Any, name: str) -> float:
    try:
        value = float(given)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={given!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} is not finite")
    return value


def _vector(given: Any, name: str, method: Method) -> FloatArray:
    array = _array(given, name)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name} has shape {list(array.shape)}; give one vector [hidden]")
    if method.unit:
        wide = array.astype(np.float64)
        length = float(np.sqrt(wide @ wide))
        if length == 0:
            raise ValueError(f"{name} is all zeros, which is no direction")
        array = (wide / length).astype(np.float32)
    array.setflags(write=False)
    return array


def _array(given: Any, name: str) -> FloatArray:
    """A float32 copy of a list, an array, or a tensor on any device."""
    if hasattr(given, "detach"):
        given = given.detach().float().cpu().numpy()
    if isinstance(given, (str, bytes)) or not isinstance(given, (Iterable, np.ndarray)):
        raise ValueError(f"{name} is {given!r}; give a list of numbers, an array or a tensor")
    try:
        with np.errstate(over="ignore"):
            array = np.array(given, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is not an array of numbers: {error}") from None
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has values that are NaN, infinite or beyond float32")
    return array

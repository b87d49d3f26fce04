"""Steering as a user asks it: entries by hook point, layer, phase and token."""

from __future__ import annotations

import base64
import binascii
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from tllm.spec.condition_reading import parse_condition
from tllm.spec.conditions import Condition, NamedCondition
from tllm.spec.hooks import HookPoint
from tllm.spec.layers import layer_numbered
from tllm.spec.methods import METHODS, SteeringMethod
from tllm.spec.operations import OperationForm
from tllm.spec.phases import SELECTED_PHASES, Phase
from tllm.spec.reading import (
    FiniteVector,
    FloatArray,
    allow_keys,
    digest_of,
    float_array,
    hook_named,
    require_one_of,
    scalar,
    vectors_together,
    whole_number,
)
from tllm.spec.selection import EVERYWHERE, Selection

TIER_FIELDS: Mapping[str, tuple[str, Phase, str]] = {
    "vectors": ("vectors", "any", "add"),
    "prefill_vectors": ("vectors", "prefill", "add"),
    "decode_vectors": ("vectors", "decode", "add"),
    "clamps": ("clamps", "any", "clamp"),
    "prefill_clamps": ("clamps", "prefill", "clamp"),
    "decode_clamps": ("clamps", "decode", "clamp"),
}
"""The fields in which steering is given: attribute of `Tiers`, phase, and method of entries that
name none."""

OTHER_LAYERS = (
    "{}: the vector is one of {} rows that say no layer, and the model has {} layers; give a row "
    "for each layer, or say which they are: {{layer: vector}}, or layers= of tllm.steering.load"
)
"""What is said of an array of rows for other layers than the model has."""

_ROUGH = 16
"""How much smaller a vector may be than the smallest number that its dtype holds exactly."""

_MAPPINGS, _SEQUENCES = (dict, Mapping), (list, Sequence)
"""What most are first: to ask an abstract class takes ten times as long."""

_PACKED_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""numpy has no bfloat16: its bits are the upper half of a float32's."""


@dataclass(frozen=True, eq=False)
class SteeringEntry:
    """One operation at one hook point, as a user asked it.

    Attributes:
        name: the field it was given in, for messages.
        layer: negative counts from the end; None for `lm_head_in`.
        vector: float32 `[hidden]`, of length 1 when the method takes a direction; of a method with
            several vectors `[vectors, hidden]`.
        coefficients: what is done with it.
        when: the condition on which it steers; None: always.
        num_layers: how many the model must have: `layer` is the row's place in an array with one
            for each. None where the layer was named.
    """

    name: str
    point: HookPoint
    layer: int | None
    vector: FloatArray
    coefficients: OperationForm
    positions: Selection
    when: Condition | None = None
    num_layers: int | None = None

    @cached_property
    def digest(self) -> str:
        return digest_of(self.vector.data)

    @property
    def key(self) -> Hashable:
        """Equal for two that do the same to the same tokens."""
        when = None if self.when is None else self.when.key
        return self.point, self.layer, self.digest, self.coefficients, self.positions, when

    @cached_property
    def largest(self) -> float:
        """The largest absolute value of the vector."""
        return float(max(self.vector.max(), -self.vector.min()))

    @cached_property
    def reach(self) -> float:
        """The most that it may add to a number of a row whose norm is at most 1."""
        return self.coefficients.reach(self.largest)

    def steers_in(self, phase: Phase) -> bool:
        """Whether any token of a phase may be meant."""
        phases = self.positions.phases
        return bool(phases) if phase == "any" else SELECTED_PHASES[phase] in phases

    @property
    def needs_generated(self) -> bool:
        """Whether it steers generated tokens alone, by its positions or since its condition decides
        on what follows the prompt. What a monitor decides on is not known here."""
        when = None if isinstance(self.when, NamedCondition) else self.when
        return not self.steers_in("prefill") or (when is not None and when.memory.of_prompt)

    def check_numbers(self, max_value: float, max_reach: float, smallest: float) -> None:
        """Refuse numbers that a model cannot use.

        Args:
            max_value: the largest number that the model's dtype holds.
            smallest: the smallest number above 0 that it holds as exactly as larger ones.
            max_reach: the most that may be added to a number of a row.
        """
        if (largest := self.largest) > max_value:
            raise ValueError(
                f"{self.name} has values up to {largest:.3g}, and the model's dtype holds at most "
                f"{max_value:.3g}; give a smaller vector and a larger scale"
            )
        if 0 < largest < smallest / _ROUGH and self.reach > smallest:
            raise ValueError(
                f"{self.name} has values of {largest:.3g} at most, of which the model's dtype "
                "keeps little or nothing; give a larger vector and a smaller scale or strength"
            )
        if (reach := self.reach) > max_reach:
            raise ValueError(
                f"{self.name} adds up to {reach:.3g} to the numbers of a row, and this model can "
                f"use rows up to {max_reach:.3g}; give a smaller vector, scale or strength"
            )


@dataclass(frozen=True, eq=False)
class Tiers:
    """What one party asks in each phase: vectors first, clamps after them.

    Attributes:
        vectors, clamps: entries in the order given, by phase (`any` is the base tier).
    """

    vectors: Mapping[Phase, tuple[SteeringEntry, ...]] = field(default_factory=dict)
    clamps: Mapping[Phase, tuple[SteeringEntry, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(self.vectors.values()) or any(self.clamps.values())

    def __iter__(self) -> Iterator[SteeringEntry]:
        for tier in (*self.vectors.values(), *self.clamps.values()):
            yield from tier

    def by_phase(self) -> Iterator[tuple[Phase, SteeringEntry]]:
        """Each entry with the phase of its tier."""
        for phases in (self.vectors, self.clamps):
            for phase, tier in phases.items():
                for entry in tier:
                    yield phase, entry

    @property
    def key(self) -> Hashable:
        """Equal for two that ask the same."""
        return tuple(
            (phase, tuple(entry.key for entry in entries))
            for tier in (self.vectors, self.clamps)
            for phase, entries in sorted(tier.items())
        )

    @classmethod
    def parse(cls, *, names: Mapping[str, str] | None = None, **given: Any) -> Tiers:
        """Tiers from what users write.

        Args:
            names: what the fields are called in messages.
            **given: any of `TIER_FIELDS`, as `{hook: {layer: entry}}`. An entry without a `method`
                adds its vector, or clamps, as the field says.
        """
        parsed: dict[str, dict[Phase, tuple[SteeringEntry, ...]]]
        parsed = {"vectors": {}, "clamps": {}}
        conditions = _Conditions()
        for name, (kind, phase, method) in TIER_FIELDS.items():
            if (spec := given.pop(name, None)) is not None:
                parsed[kind][phase] = tuple(
                    _entries(spec, (names or {}).get(name, name), method, conditions)
                )
        if given:
            raise TypeError(f"there are no tiers {sorted(given)}, only {list(TIER_FIELDS)}")
        return cls(**parsed)

    def map(self, change: Callable[[SteeringEntry], SteeringEntry]) -> Tiers:
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
            ours: Mapping[Phase, tuple[SteeringEntry, ...]],
            theirs: Mapping[Phase, tuple[SteeringEntry, ...]],
        ) -> dict[Phase, tuple[SteeringEntry, ...]]:
            phases = dict.fromkeys((*ours, *theirs))
            return {phase: (*ours.get(phase, ()), *theirs.get(phase, ())) for phase in phases}

        return Tiers(join(self.vectors, other.vectors), join(self.clamps, other.clamps))


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
            return ((given[0], scalar(given[1], f"{name}[1]")),)
        if given and all(isinstance(each, (str, Sequence)) for each in given):
            return tuple(pair for each in given for pair in parse_modules(each, name))
    raise ValueError(
        f"{name}={given!r} is not understood; give the name of a registered module, "
        "(name, factor), or a list of these"
    )


# -- reading what users write ----------------------------------------------------------------------


class _Conditions:
    """Reads each condition once, however many entries have the same object."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[Any, Condition]] = {}

    def read(self, given: Any, name: str) -> Condition | None:
        """What an entry has as `when`; None for nothing."""
        if given is None or isinstance(given, Condition):
            return given
        known = self._read.get(id(given))
        if known is None:
            # With what was given, whose id would be another's when it is gone.
            known = self._read[id(given)] = given, parse_condition(given, f"{name}['when']")
        return known[1]


def _entries(
    given: Any, name: str, method: str, conditions: _Conditions
) -> Iterator[SteeringEntry]:
    counted: int | None = None
    if hasattr(given, "to_spec"):
        counted = given.num_layers if hasattr(given, "num_layers") else None
        given = given.to_spec()
    if not isinstance(given, Mapping):
        file = "; a file is read by tllm.steering.load" if isinstance(given, str | PurePath) else ""
        raise ValueError(
            f"{name} is {type(given).__name__}; give a mapping {{hook point: {{layer: vector}}}}"
            f"{file}"
        )
    if not given:
        raise ValueError(
            f"{name} is empty; name at least one hook point and layer, or leave it out"
        )
    for hook, layers in given.items():
        point = hook_named(hook, name)
        of_hook = f"{name}[{point.value!r}]"
        if not point.has_layer:
            if isinstance(layers, Mapping) and any(_is_layer(key) for key in layers):
                raise ValueError(
                    f"{of_hook} has the keys {list(layers)!r:.60}, but {point.value} belongs to no "
                    "layer; give the entry itself in the place of {layer: entry}"
                )
            reader = _EntryReader(point, method, conditions)
            for entry in _listed(layers):
                yield reader.read(entry, of_hook, None)
            continue
        by_layer = [*_by_layer(layers, of_hook, conditions)]
        if not by_layer:
            raise ValueError(f"{of_hook} has no rows; give some, or leave the hook point out")
        num_layers = counted if isinstance(layers, Mapping) else len(by_layer)
        reader = _EntryReader(point, method, conditions, num_layers)
        listed = [(layer, entry) for layer, at_layer in by_layer for entry in _listed(at_layer)]
        vectors = _read_together([entry for _, entry in listed])
        for (layer, entry), vector in zip(listed, vectors, strict=True):
            yield reader.read(entry, f"{of_hook}[{layer}]", layer, vector)


def _read_together(entries: Sequence[Mapping[str, Any]]) -> Sequence[FiniteVector | None]:
    """The vector of each entry; None for all where any of them has to be read by itself, if only
    for a message to name what is wrong with it."""
    given = [entry.get("vector") for entry in entries]
    return vectors_together(given) or [None] * len(entries)


def _by_layer(given: Any, name: str, conditions: _Conditions) -> Iterator[tuple[int, Any]]:
    """`(layer, entry)` pairs of one hook point."""
    if isinstance(given, Mapping) and "data" in given:
        yield from _unpacked(given, name, conditions)
        return
    if not isinstance(given, Mapping):
        array = float_array(given, name)
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
        yield layer_numbered(layer, name), entry


def _is_layer(key: Any) -> bool:
    return isinstance(key, int) or (isinstance(key, str) and key.lstrip("-").isdecimal())


def _unpacked(
    given: Mapping[str, Any], name: str, conditions: _Conditions
) -> Iterator[tuple[int, Any]]:
    """Entries of the packed form: `dtype`, `shape`, `layer_indices`, base64 `data`, `scales`."""
    allowed = {"dtype", "shape", "layer_indices", "data", "scales", "positions", "when"}
    allow_keys(given, allowed, name, "packed")
    for key in ("dtype", "shape", "layer_indices"):
        if key not in given:
            raise ValueError(f"{name} has data but no {key!r}; packed needs it")
    dtype = given["dtype"]
    require_one_of(f"{name}['dtype']", dtype, _PACKED_DTYPES)
    shape = [whole_number(size, f"{name}['shape']: ") for size in _list(given, "shape", name)]
    raw = _bytes(given["data"], f"{name}['data']")
    needed = math.prod(shape) * np.dtype(_PACKED_DTYPES[dtype]).itemsize
    if len(shape) != 2 or min(shape) < 0 or len(raw) != needed:
        raise ValueError(
            f"{name}['data'] has {len(raw)} bytes, but shape {shape} of {dtype} has {needed}; "
            "shape is [layers, hidden]"
        )
    values = np.frombuffer(raw, _PACKED_DTYPES[dtype])
    if dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    rows = values.reshape(shape)
    layers = [layer_numbered(layer, name) for layer in _list(given, "layer_indices", name)]
    scales = [1.0] * len(layers)
    if given.get("scales") is not None:
        scales = _list(given, "scales", name)
    if len(layers) != len(rows) or len(scales) != len(rows):
        raise ValueError(
            f"{name}: shape {shape} with {len(layers)} layer_indices and {len(scales)} scales; "
            "give one of each for every row"
        )
    extra = {"positions": given["positions"]} if "positions" in given else {}
    extra["when"] = conditions.read(given.get("when"), name)
    for layer, row, scale in zip(layers, rows, scales, strict=True):
        yield layer, {"vector": row, "scale": scale, **extra}


def _bytes(given: Any, name: str) -> bytes:
    if not isinstance(given, str):
        if not isinstance(given, (bytes, bytearray, memoryview)):
            raise ValueError(f"{name} is {type(given).__name__}; give base64 text, or bytes")
        return bytes(given)
    try:
        return base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name} is not base64: {error}") from None


def _list(given: Mapping[str, Any], key: str, name: str) -> list[Any]:
    value = given[key]
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{name}[{key!r}]={value!r} is {type(value).__name__}; give a list")
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _listed(given: Any) -> list[Mapping[str, Any]]:
    """The entries at one place, of which there may be several in a list; a vector alone is one."""
    if isinstance(given, np.ndarray):
        return [{"vector": given}]
    if isinstance(given, _MAPPINGS):
        return [given]
    if isinstance(given, _SEQUENCES) and given and isinstance(given[0], _MAPPINGS):
        entries = [each for each in given if isinstance(each, _MAPPINGS)]
        if len(entries) == len(given):
            return entries
    return [{"vector": given}]


class _Effect(NamedTuple):
    """What an entry does with its vector."""

    coefficients: OperationForm
    positions: Selection
    when: Condition | None


class _EntryReader:
    """Reads the entries at one hook point. Most say the same as the one before, but for the vector.

    Args:
        method: of entries that name none.
        num_layers: of each entry.
    """

    def __init__(
        self,
        point: HookPoint,
        method: str,
        conditions: _Conditions,
        num_layers: int | None = None,
    ) -> None:
        self._point = point
        self._method = method
        self._conditions = conditions
        self._num_layers = num_layers
        #: Of the last that does what it does with its vector as it was given: what it says beside.
        self._before: tuple[dict[str, Any], _Effect] | None = None

    def read(
        self,
        given: Mapping[str, Any],
        name: str,
        layer: int | None,
        vector: FiniteVector | None = None,
    ) -> SteeringEntry:
        """One entry.

        Args:
            vector: its vector, where that was read before.
        """
        if vector is None:
            numbers, effect = self._whole(given, name, None)
            return SteeringEntry(name, self._point, layer, numbers, *effect, self._num_layers)
        if self._before is not None and _says(given, self._before[0]):
            numbers, effect = vector.numbers, self._before[1]
        else:
            numbers, effect = self._whole(given, name, vector.numbers)
            if numbers is vector.numbers:
                said = {key: value for key, value in given.items() if key != "vector"}
                self._before = said, effect
        entry = SteeringEntry(name, self._point, layer, numbers, *effect, self._num_layers)
        if numbers is vector.numbers:
            vars(entry)["largest"] = vector.largest  # as the property would find
        return entry

    def _whole(
        self, given: Mapping[str, Any], name: str, vector: FloatArray | None
    ) -> tuple[FloatArray, _Effect]:
        """An entry's vectors, and what it does with them.

        Args:
            vector: its vector, where that was read before.
        """
        method = _method(given, name, self._method)
        if vector is not None and method.takes_one_vector:
            arrays = {"vector": vector}
        else:
            arrays = _arrays(given, name, method)
        parameters = _parameters(given, name, method)
        try:
            vectors, coefficients = method.operation(arrays, parameters)
        except ValueError as error:
            between = "" if str(error).startswith("[") else " "
            raise ValueError(f"{name}{between}{error}") from None
        vectors.setflags(write=False)
        positions = EVERYWHERE
        if given.get("positions") is not None:
            positions = Selection.parse(given["positions"], f"{name}['positions']")
        when = self._conditions.read(given.get("when"), name)
        return vectors, _Effect(coefficients, positions, when)


def _says(given: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
    """Whether all that an entry has beside its vector are these very objects."""
    if len(given) != len(said) + 1:
        return False
    if not said:
        return True
    if not said.keys() <= given.keys():
        return False
    return all(map(operator.is_, map(given.get, said), said.values()))


def _method(given: Mapping[str, Any], name: str, default: str) -> SteeringMethod:
    """The method of an entry, which has all that this needs and nothing else."""
    named = given.get("method", default)
    if not isinstance(named, str) or named not in METHODS:
        require_one_of(f"{name}['method']", named, METHODS)
    method = METHODS[named]
    if missing := [key for key in method.needed if key not in given]:
        raise ValueError(
            f"{name} has no {missing[0]!r}; give a list of numbers, an array or a tensor"
        )
    if not given.keys() <= method.keys:
        allow_keys(given, method.keys, name, named)
    return method


def _parameters(
    given: Mapping[str, Any], name: str, method: SteeringMethod
) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for key, default in method.parameters.items():
        value = given.get(key)
        if isinstance(default, bool):
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"{name}[{key!r}]={value!r} is no switch; give True or False")
            found[key] = float(default if value is None else value)
        else:
            found[key] = default if value is None else scalar(value, f"{name}[{key!r}]")
    return found


def _arrays(given: Mapping[str, Any], name: str, method: SteeringMethod) -> dict[str, FloatArray]:
    """The arrays of an entry; those of one vector are called as the entry is."""
    found: dict[str, FloatArray] = {}
    sizes: dict[str, int] = {}
    for key, shape in method.arrays.items():
        if given.get(key) is None and key in method.optional:
            continue
        called = name if method.takes_one_vector else f"{name}[{key!r}]"
        array = float_array(given[key], called)
        wanted = [size if isinstance(size, int) else sizes.get(size) for size in shape]
        if (
            array.ndim != len(shape)
            or not array.size
            or any(
                size not in (None, there) for size, there in zip(wanted, array.shape, strict=True)
            )
        ):
            what = (
                "one vector [hidden]" if shape == ("hidden",) else f"[{', '.join(map(str, shape))}]"
            )
            known = ", ".join(f"{size}={sizes[size]}" for size in shape if size in sizes)
            raise ValueError(
                f"{called} has shape {list(array.shape)}; give {what}"
                + (f" with {known}" if known else "")
            )
        sizes |= {s: n for s, n in zip(shape, array.shape, strict=True) if isinstance(s, str)}
        found[key] = array
    return found

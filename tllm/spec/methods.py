"""Ways to steer: a table, from what a user writes to vectors and what is done with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np

from tllm.spec.operations import (
    MAX_FEATURES,
    MAX_UNITS,
    Coefficients,
    DimensionWise,
    FeatureRule,
    Features,
    Gradient,
    OperationForm,
    Rotation,
)
from tllm.spec.reading import FloatArray

Arrays: TypeAlias = Mapping[str, FloatArray]
"""The arrays that an entry gives, by name."""
Parameters: TypeAlias = Mapping[str, float | None]
"""Its numbers, by name; a switch is 0 or 1."""


@dataclass(frozen=True)
class SteeringMethod:
    """A way to steer. Adding one is adding a row to `METHODS`.

    Attributes:
        formula: of the new row, with `w` the vector as given, `v = w / |w|`, `p = h . v`.
        parameters: what an entry may give, with defaults; None must be given (or has a meaning
            of its own), and one whose default is a truth value is a switch.
        operation: the vectors `[hidden]` or `[vectors, hidden]` that arrays and parameters mean,
            and what is done with them. Raises `ValueError` with what is wrong with an entry, to be
            read after its name.
        arrays: those that an entry may give, each with its shape; a name in it is a size, equal
            wherever it stands.
        optional: arrays that need not be given.
    """

    formula: str
    parameters: Mapping[str, float | bool | None]
    operation: Callable[[Arrays, Parameters], tuple[FloatArray, OperationForm]]
    arrays: Mapping[str, tuple[str | int, ...]] = field(
        default_factory=lambda: {"vector": ("hidden",)}
    )
    optional: frozenset[str] = frozenset()

    @cached_property
    def needed(self) -> tuple[str, ...]:
        """Arrays that must be given."""
        return tuple(key for key in self.arrays if key not in self.optional)

    @cached_property
    def keys(self) -> frozenset[str]:
        """All that an entry may have."""
        return frozenset(("method", "positions", "when", *self.arrays, *self.parameters))

    @cached_property
    def takes_one_vector(self) -> bool:
        """Whether that is its only array."""
        return dict(self.arrays) == {"vector": ("hidden",)}


def _along(
    formula: str,
    unit: bool,
    parameters: Mapping[str, float | bool | None],
    coefficients: Callable[[Parameters], Coefficients],
) -> SteeringMethod:
    """A method along one vector.

    Args:
        unit: whether the operation takes `v` rather than `w`.
    """

    def operation(arrays: Arrays, given: Parameters) -> tuple[FloatArray, OperationForm]:
        vector = _unit(arrays["vector"]) if unit else arrays["vector"]
        return vector, coefficients(given)

    return SteeringMethod(formula, parameters, operation)


@lru_cache(256)
def adding(scale: float) -> Coefficients:
    """To add a vector, multiplied: one object for all entries that do."""
    return Coefficients(add=scale)


def _unit(vector: FloatArray, what: str = "") -> FloatArray:
    wide = vector.astype(np.float64)
    length = float(np.sqrt(wide @ wide))
    if length == 0:
        raise ValueError(f"{what}is all zeros, which is no direction")
    return (wide / length).astype(np.float32)


def _clamp(given: Parameters) -> Coefficients:
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


def _project(given: Parameters) -> Coefficients:
    if given["value"] is None:
        raise ValueError("gives no value; give the component that rows shall have")
    return Coefficients(
        strength=_number(given["strength"]), low=given["value"], high=given["value"]
    )


def _multiply(given: Parameters) -> Coefficients:
    if given["factor"] is None:
        raise ValueError("gives no factor; give what the component is multiplied with")
    return Coefficients(component=(given["factor"] - 1) * _number(given["strength"]))


def _rotate(arrays: Arrays, given: Parameters) -> tuple[FloatArray, OperationForm]:
    if given["degrees"] is None:
        raise ValueError("gives no degrees; give the angle, counted from the plane's first vector")
    first = _unit(arrays["plane"][0], "['plane'][0] ").astype(np.float64)
    second = _unit(arrays["plane"][1], "['plane'][1] ").astype(np.float64)
    across = second - (second @ first) * first
    if float(np.linalg.norm(across)) < 1e-3:
        raise ValueError("['plane'] has two vectors of one direction, which span no plane")
    basis = np.stack([first, across / np.linalg.norm(across)]).astype(np.float32)
    angle = math.radians(given["degrees"])
    turned = Rotation(
        _number(given["strength"]), math.cos(angle), math.sin(angle), bool(given["adaptive"])
    )
    return basis, turned


STATISTICS = ("source_mean", "source_std", "target_mean", "target_std")


def _affine(arrays: Arrays, given: Parameters) -> tuple[FloatArray, OperationForm]:
    told = [name for name in STATISTICS if name in arrays]
    weight, shift = arrays.get("weight"), arrays.get("shift")
    if told and (weight is not None or shift is not None or len(told) < len(STATISTICS)):
        raise ValueError(
            f"gives {', '.join(told)}; give all of {', '.join(STATISTICS)}, and no "
            "weight or shift; or these alone"
        )
    if told:
        source, target = arrays["source_std"], arrays["target_std"]
        if (source <= 0).any() or (target < 0).any():
            raise ValueError(
                "has a standard deviation of 0 or less; leave such dimensions alone "
                "with source_std and target_std of 1 and equal means"
            )
        weight = target / source
        shift = arrays["target_mean"] - weight * arrays["source_mean"]
    elif weight is None and shift is None:
        raise ValueError(f"gives no map; give weight, shift or both, or {', '.join(STATISTICS)}")
    hidden = next(iter(arrays.values())).shape
    weight = np.ones(hidden, np.float32) if weight is None else weight
    shift = np.zeros(hidden, np.float32) if shift is None else shift
    rows = [weight - 1, shift]
    low, high = arrays.get("low"), arrays.get("high")
    if (low is None) != (high is None):
        raise ValueError("gives one bound; give low and high, or neither")
    if low is not None and high is not None:
        if (low > high).any():
            raise ValueError("has numbers of low above those of high")
        rows += [low, high]
    if not np.isfinite(np.stack(rows)).all():
        raise ValueError("has a map with numbers beyond float32; give a larger source_std")
    return np.stack(rows).astype(np.float32), DimensionWise(_number(given["strength"]), len(rows))


def _scale_dimensions(arrays: Arrays, given: Parameters) -> tuple[FloatArray, OperationForm]:
    if given["scale"] is None:
        raise ValueError(
            "gives no scale; give what the numbers that the mask chooses are "
            "multiplied with, and added to themselves"
        )
    return arrays["mask"][None], DimensionWise(given["scale"], 1)


def _features(
    read: FloatArray, written: FloatArray, rules: list[FeatureRule], strength: float
) -> tuple[FloatArray, Features]:
    """The operation that reads and writes along the rows of two arrays `[features, hidden]`."""
    if len(rules) > MAX_FEATURES:
        raise ValueError(
            f"has {len(rules)} features; at most {MAX_FEATURES} are allowed at one place"
        )
    vectors = np.stack([read, written], axis=1).reshape(-1, read.shape[1])
    bound = 0.0
    for rule, along, added in zip(rules, read.astype(np.float64), np.abs(written), strict=True):
        edges = [abs(edge) for edge in (rule.low, rule.high) if math.isfinite(edge)]
        feature = math.sqrt(along @ along) + abs(rule.bias)
        bound += float(added.max()) * (
            abs(rule.slope) * feature + (feature if edges else 0.0) + max([0.0, *edges])
        )
    return vectors, Features(strength, tuple(rules), bound)


def _low_rank(arrays: Arrays, given: Parameters) -> tuple[FloatArray, OperationForm]:
    rotation = arrays["rotation"]
    bias = arrays.get("bias", np.zeros(len(rotation), np.float32))
    rules = [FeatureRule(bias=each, slope=1.0) for each in bias.tolist()]
    return _features(arrays["weight"] - rotation, rotation, rules, _number(given["strength"]))


def _sae_features(arrays: Arrays, given: Parameters) -> tuple[FloatArray, OperationForm]:
    encoder = arrays["encoder"]
    count = len(encoder)
    bias = arrays.get("encoder_bias", np.zeros(count, np.float32)).astype(np.float64)
    if "decoder_bias" in arrays:
        bias = bias - encoder.astype(np.float64) @ arrays["decoder_bias"].astype(np.float64)
    threshold = np.maximum(arrays.get("threshold", np.zeros(count, np.float32)), 0.0)
    asked = {
        key: arrays[key].tolist() for key in ("value", "factor", "min", "max") if key in arrays
    }
    if set(asked) not in ({"value"}, {"factor"}, {"min"}, {"max"}, {"min", "max"}):
        raise ValueError(
            f"gives {', '.join(asked) or 'nothing to do'}; give value (what features are set to), "
            "factor (what they are multiplied with), or min, max or both (clamp), one number for "
            "each feature"
        )
    low = asked.get("value") or asked.get("min") or [-math.inf] * count
    high = asked.get("value") or asked.get("max") or [math.inf] * count
    if any(least > most for least, most in zip(low, high, strict=True)):
        raise ValueError("has a feature with min above max")
    slope = [factor - 1 for factor in asked.get("factor", [1.0] * count)]
    only = bool(given["only_if_active"])
    rules = [
        FeatureRule(*rule, only)
        for rule in zip(bias.tolist(), threshold.tolist(), slope, low, high, strict=True)
    ]
    return _features(encoder, arrays["decoder"], rules, _number(given["strength"]))


def _k_steering(arrays: Arrays, given: Parameters) -> tuple[FloatArray, OperationForm]:
    first, last = arrays["weight1"], arrays["last_weight"]
    second = arrays.get("weight2")
    hidden, inner = [first.shape[0]], np.zeros((0, first.shape[0]), np.float32)
    if second is not None:
        hidden, inner = [*hidden, second.shape[0]], second
    if max(hidden) > min(MAX_UNITS, first.shape[1]):
        raise ValueError(
            f"has hidden layers of {' and '.join(map(str, hidden))} units; each may have at most "
            f"{MAX_UNITS}, and at most as many as a row has numbers ({first.shape[1]})"
        )
    if "bias2" in arrays and second is None:
        raise ValueError("gives bias2 without weight2; give both for a second hidden layer")
    if last.shape[1] != hidden[-1]:
        raise ValueError(
            f"['last_weight'] has shape {list(last.shape)}; give [labels, {hidden[-1]}], as many "
            "numbers a label as the last hidden layer has units"
        )
    wanted = _of_labels(arrays, last)
    ends = wanted[None] if second is None else np.stack([wanted, arrays.get("bias2", 0 * wanted)])
    biases = arrays.get("bias1", np.zeros(hidden[0], np.float32))[None]
    parts = (first, biases, ends, inner)
    width = first.shape[1]
    rows = np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts])
    slope = np.abs(wanted) if second is None else np.abs(wanted) @ np.abs(inner)
    bound = float(np.abs(first).max(1) @ slope)
    form = Gradient(_number(given["alpha"]), hidden[0], len(inner), bound)
    return rows.astype(np.float32), form


def _of_labels(arrays: Arrays, last: FloatArray) -> FloatArray:
    """The weight of each unit in what shall grow: the mean of the logits of the labels that are
    wanted, without that of those that are not."""
    total = np.zeros(last.shape[1], np.float32)
    for key, sign in (("target", 1), ("avoid", -1)):
        numbers = arrays.get(key, np.zeros(0, np.float32))
        if not np.isin(numbers, np.arange(len(last))).all():
            raise ValueError(
                f"[{key!r}] names labels {[f'{number:g}' for number in numbers]}; give whole "
                f"numbers from 0 to {len(last) - 1}, rows of last_weight"
            )
        if len(numbers):
            total += sign * last[numbers.astype(int)].mean(0)
    if not any(key in arrays for key in ("target", "avoid")):
        raise ValueError("names no labels; give target, avoid or both, rows of last_weight")
    return total


def _number(value: float | None) -> float:
    assert value is not None
    return value


METHODS: Mapping[str, SteeringMethod] = {
    "add": _along(
        "h + scale w",
        unit=False,
        parameters={"scale": 1.0},
        coefficients=lambda given: adding(_number(given["scale"])),
    ),
    "norm_match": _along(
        "h + scale |h| v",
        unit=True,
        parameters={"scale": 1.0},
        coefficients=lambda given: Coefficients(norm=_number(given["scale"])),
    ),
    "clamp": _along(
        "h + strength (clip(p, min, max) - p) v",
        unit=True,
        parameters={"min": None, "max": None, "value": None, "strength": 1.0},
        coefficients=_clamp,
    ),
    "ablate": _along(
        "h - strength p v",
        unit=True,
        parameters={"strength": 1.0},
        coefficients=lambda given: Coefficients(
            strength=_number(given["strength"]), low=0.0, high=0.0
        ),
    ),
    "project": _along(
        "h + strength (value - p) v",
        unit=True,
        parameters={"value": None, "strength": 1.0},
        coefficients=_project,
    ),
    "multiply": _along(
        "h + strength (factor - 1) p v",
        unit=True,
        parameters={"factor": None, "strength": 1.0},
        coefficients=_multiply,
    ),
    "rotate": SteeringMethod(
        "h + strength (|P h| (cos(degrees) b1 + sin(degrees) b2) - P h)",
        parameters={"degrees": None, "adaptive": False, "strength": 1.0},
        operation=_rotate,
        arrays={"plane": (2, "hidden")},
    ),
    "affine": SteeringMethod(
        "h + strength (weight * h + shift - h), by dimension; where low <= h <= high",
        parameters={"strength": 1.0},
        operation=_affine,
        arrays=dict.fromkeys(("weight", "shift", *STATISTICS, "low", "high"), ("hidden",)),
        optional=frozenset(("weight", "shift", *STATISTICS, "low", "high")),
    ),
    "scale_dimensions": SteeringMethod(
        "h + scale (mask * h), by dimension",
        parameters={"scale": None},
        operation=_scale_dimensions,
        arrays={"mask": ("hidden",)},
    ),
    "low_rank": SteeringMethod(
        "h + strength rotation^T (weight h + bias - rotation h)",
        parameters={"strength": 1.0},
        operation=_low_rank,
        arrays={"rotation": ("rank", "hidden"), "weight": ("rank", "hidden"), "bias": ("rank",)},
        optional=frozenset(["bias"]),
    ),
    "sae_features": SteeringMethod(
        "h + strength sum((target_i - f_i) decoder_i), f_i as the encoder has it",
        parameters={"only_if_active": False, "strength": 1.0},
        operation=_sae_features,
        arrays={
            "encoder": ("features", "hidden"),
            "decoder": ("features", "hidden"),
            **dict.fromkeys(("encoder_bias", "threshold"), ("features",)),
            "decoder_bias": ("hidden",),
            **dict.fromkeys(("value", "factor", "min", "max"), ("features",)),
        },
        optional=frozenset(
            ("encoder_bias", "threshold", "decoder_bias", "value", "factor", "min", "max")
        ),
    ),
    "k_steering": SteeringMethod(
        "h - alpha grad(mean(logits of avoid) - mean(logits of target)), of an MLP with ReLU",
        parameters={"alpha": 1.0},
        operation=_k_steering,
        arrays={
            "weight1": ("units", "hidden"),
            "bias1": ("units",),
            "weight2": ("outer", "units"),
            "bias2": ("outer",),
            "last_weight": ("labels", "inputs"),
            "target": ("targets",),
            "avoid": ("avoided",),
        },
        optional=frozenset(("bias1", "weight2", "bias2", "target", "avoid")),
    ),
}

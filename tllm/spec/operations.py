"""What steering may do to a row: a table of methods, and the one form in which all are computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

MAX_OPERATIONS = 64
"""The most operations at one hook point of one layer, global and request together."""
MAX_CLAMPS = 16
"""The most of them that need the row's component along a direction: each reads the whole row."""

LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


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

    def reach(self, largest: float) -> float:
        """The most that it may add to a number of a row whose norm and component are at most 1.

        Args:
            largest: the largest absolute number of the vector.
        """
        bounds = [abs(bound) for bound in (self.low, self.high) if math.isfinite(bound)]
        clipped = abs(self.strength) * max([1.0, *bounds])
        return largest * (abs(self.add) + abs(self.norm) + abs(self.component) + clipped)

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
class SteeringMethod:
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


METHODS: Mapping[str, SteeringMethod] = {
    "add": SteeringMethod(
        "h + scale w",
        unit=False,
        parameters={"scale": 1.0},
        coefficients=lambda given: Coefficients(add=_number(given["scale"])),
    ),
    "norm_match": SteeringMethod(
        "h + scale |h| v",
        unit=True,
        parameters={"scale": 1.0},
        coefficients=lambda given: Coefficients(norm=_number(given["scale"])),
    ),
    "clamp": SteeringMethod(
        "h + strength (clip(p, min, max) - p) v",
        unit=True,
        parameters={"min": None, "max": None, "value": None, "strength": 1.0},
        coefficients=_clamp,
    ),
    "ablate": SteeringMethod(
        "h - strength p v",
        unit=True,
        parameters={"strength": 1.0},
        coefficients=lambda given: Coefficients(
            strength=_number(given["strength"]), low=0.0, high=0.0
        ),
    ),
    "project": SteeringMethod(
        "h + strength (value - p) v",
        unit=True,
        parameters={"value": None, "strength": 1.0},
        coefficients=_project,
    ),
    "multiply": SteeringMethod(
        "h + strength (factor - 1) p v",
        unit=True,
        parameters={"factor": None, "strength": 1.0},
        coefficients=_multiply,
    ),
}

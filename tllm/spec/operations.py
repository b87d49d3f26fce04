"""What steering may do to a row: the few forms in which all methods are computed."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeAlias

from typing_extensions import Self

MAX_OPERATIONS = 64
"""The most operations at one hook point of one layer, global and request together."""
MAX_CLAMPS = 16
"""The most of them that need the row's component along a direction: each reads the whole row."""

LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127

_FLOATS = struct.Struct("<6d")


@dataclass(frozen=True)
class Coefficients:
    """An operation along one vector.

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
        return replace(
            self,
            add=self.add * factor,
            norm=self.norm * factor,
            component=self.component * factor,
            strength=self.strength * factor,
        )

    def reach(self, largest: float) -> float:
        """The most that it may add to a number of a row whose norm and component are at most 1.

        Args:
            largest: the largest absolute number of the vector.
        """
        if self.only_adds:
            return largest * abs(self.add)
        bounds = [abs(bound) for bound in (self.low, self.high) if math.isfinite(bound)]
        clipped = abs(self.strength) * max([1.0, *bounds])
        return largest * (abs(self.add) + abs(self.norm) + abs(self.component) + clipped)

    @property
    def idle(self) -> bool:
        """Whether it changes nothing."""
        return self.only_adds and self.add == 0

    @property
    def only_adds(self) -> bool:
        """Whether it adds the same to every row."""
        return self.norm == self.component == self.strength == 0

    @property
    def reads_component(self) -> bool:
        """Whether it needs the row's component along the vector."""
        return self.component != 0 or self.strength != 0

    @property
    def content(self) -> bytes:
        """Equal for two that do the same."""
        return _FLOATS.pack(*vars(self).values())


@dataclass(frozen=True)
class Scalable:
    """An operation all of whose effect is in proportion to its strength.

    Attributes:
        reads_component: whether it needs the row's component along a vector, and so counts among
            the clamps. Features and units are counted by themselves.
    """

    strength: float
    reads_component: ClassVar[bool] = False

    def scaled(self, factor: float) -> Self:
        """The operation with its whole effect multiplied."""
        return replace(self, strength=self.strength * factor)

    @property
    def idle(self) -> bool:
        """Whether it changes nothing."""
        return self.strength == 0

    @property
    def content(self) -> bytes:
        """Equal for two that do the same."""
        return repr(self).encode()


@dataclass(frozen=True)
class Rotation(Scalable):
    """The part of a row in a plane, turned to one direction of it.

    With `b1`, `b2` the vectors (an orthonormal basis), `p = (h . b1, h . b2)` and `r = |p|`:
    `h' = h + strength ((r cosine - p1) b1 + (r sine - p2) b2)`; with `adaptive` only of rows with
    `p1 > 0`.
    """

    cosine: float
    sine: float
    adaptive: bool = False
    reads_component = True

    def reach(self, largest: float) -> float:
        """The most that it may add to a number of a row whose norm is at most 1."""
        return 4 * largest * abs(self.strength)


@dataclass(frozen=True)
class DimensionWise(Scalable):
    """Each number of a row by itself: `h' = h + strength (v1 h + v2)`, with the products of
    numbers at the same dimension.

    Attributes:
        vectors: how many there are. Of one, nothing is added to the product; of four, only numbers
            from that of `v3` to that of `v4` change.
    """

    vectors: int

    def reach(self, largest: float) -> float:
        """The most that it may add to a number of a row that is at most 1."""
        return 2 * largest * abs(self.strength)


MAX_FEATURES = 128
"""The most features that operations read at one hook point of one layer, together."""


class FeatureRule(NamedTuple):
    """What is made of one feature of a row.

    With `s` the product of the row with the feature's first vector, and `bias` added, the feature
    is `f = s` where `s > threshold`, else 0. What is added of its second vector:
    `slope f + clip(f, low, high) - f`; with `only_if_active` nothing where `s <= threshold`.
    """

    bias: float = 0.0
    threshold: float = -math.inf
    slope: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    only_if_active: bool = False


@dataclass(frozen=True)
class Features(Scalable):
    """Numbers read from a row, each along a vector, and what they decide added along others.

    With the vectors `e1, d1, e2, d2, ...`: `h' = h + strength sum(a(h . ei) di)`, `a` as each rule
    says. All are read before anything is added.

    Attributes:
        bound: the most that the sum may be at one number of a row whose norm is at most 1.
    """

    rules: tuple[FeatureRule, ...]
    bound: float

    def reach(self, largest: float) -> float:
        """The most that it may add to a number of a row whose norm is at most 1."""
        return abs(self.strength) * self.bound


MAX_UNITS = 128
"""Of a classifier along whose gradient rows are moved: the most units of a hidden layer."""
MAX_UNITS_OF_ALL = 512
"""The most units of their first hidden layers at one hook point of one layer, together."""


@dataclass(frozen=True)
class Gradient(Scalable):
    """A row moved along the gradient of what a small ReLU MLP says of it.

    The MLP has one hidden layer, `f(h) = u . relu(W1 h + b1)`, or two,
    `f(h) = u . relu(W2 relu(W1 h + b1) + b2)`. The vectors are the rows of `W1`; then `b1`, `u`,
    and with two layers `b2` and the rows of `W2`, each filled up with zeros. It computes
    `h' = h + strength grad f(h)`.

    Attributes:
        units: of the first hidden layer.
        outer: units of the second; 0 where there is one layer.
        bound: the most that a number of the gradient may be.
    """

    units: int
    outer: int
    bound: float

    def reach(self, largest: float) -> float:
        """The most that it may add to a number of a row."""
        return abs(self.strength) * self.bound


OperationForm: TypeAlias = Coefficients | Rotation | DimensionWise | Features | Gradient
"""What is done with the vectors of an entry."""


def max_reach(max_value: float, hidden_size: int) -> float:
    """The most that may be added to a number of a row.

    Norms sum a row's squares in float32: above this they are infinite, and what the model computes
    from such a row means nothing, in whatever dtype it is kept.

    Args:
        max_value: the largest number that the model's dtype holds.
    """
    return min(max_value, math.sqrt(LARGEST_FLOAT32 / hidden_size))

"""Layers as users write them: one grammar wherever layers are named, and one reader of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias

from tllm.spec.hooks import HookPoint, counted_layer
from tllm.spec.reading import check_64_bits, own_numbers

_INDEX = re.compile(r"[+-]?\d{1,9}")
_HALF_OPEN = re.compile(r"(-?\d{1,5})?:(-?\d{1,5})?")
_INCLUSIVE = re.compile(r"(-?\d{1,5})-(-?\d{1,5})")
_BETWEEN = re.compile(r"\s*[,+]\s*|\s+")

_ALLOWED = (
    "give 'all', 'last', an index, a range such as '4:9' (4 to 8) or '4-8', or several of these in "
    "a list or as text ('0,4,-1'); negative ones count from the end"
)


@dataclass(frozen=True)
class LayerRange:
    """Layers from `start` to before `stop`; open ends are the model's."""

    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        return ":".join("" if edge is None else str(edge) for edge in (self.start, self.stop))

    def over(self, num_layers: int) -> range | None:
        """The layers that are meant in a model of so many; None where there are not all, or none
        at all."""
        edges = [edge for edge in (self.start, self.stop) if edge is not None]
        chosen = range(*slice(self.start, self.stop).indices(num_layers))
        inside = all(-num_layers <= edge <= num_layers for edge in edges)
        return chosen if chosen and inside else None

    def numbers(self, end: int | None = None) -> range | None:
        """The layers by number, negative ones as they count from the end; None where that hangs on
        how many layers there are, which `end` may say."""
        start, stop = self.start or 0, self.stop
        if stop is None:
            stop = 0 if start < 0 else end
        elif (start < 0) != (stop < 0):
            return None
        return None if stop is None else range(start, stop)


_Part: TypeAlias = int | LayerRange
_ALL: tuple[_Part, ...] = (LayerRange(),)


@dataclass(frozen=True)
class Layers:
    """Layers that a user chose, of a model that need not be known yet.

    `Layers.parse` takes `"all"`; an index, which counts from the end if negative (`"last"` is -1);
    a range, half-open with a colon (`"4:9"`, `"-2:"`, `slice(4, 9)`) or with both ends in it
    (`"4-8"`); and several of these, in any iterable, an array or a tensor, or in a text with
    commas, plus signs or spaces between them (`"0,4-8,-1"`). Numbers may be text. A layer that is
    named twice is there once.
    """

    parts: tuple[_Part, ...]

    @classmethod
    def parse(cls, given: Any, name: str = "layers", *, may_be_empty: bool = False) -> Layers:
        """The layers that a user wrote. Raises `ValueError` naming the field `name`."""
        if isinstance(given, Layers):
            return given
        given = own_numbers(given)
        listed: Iterable[Any]
        if isinstance(given, str):
            listed = _BETWEEN.split(given.strip())
        elif isinstance(given, Iterable) and not isinstance(given, (bytes, Mapping)):
            listed = given
        else:
            listed = [given]
        parts = [part for each in listed for part in _parts(own_numbers(each), name)]
        if not parts and not may_be_empty:
            raise ValueError(f"{name} is empty; {_ALLOWED}")
        return cls(tuple(dict.fromkeys(parts)))

    @property
    def is_all(self) -> bool:
        """Whether they are all that there are."""
        return self.parts == _ALL

    def __str__(self) -> str:
        return "all" if self.is_all else ",".join(map(str, self.parts))

    def of(self, num_layers: int, what: object, name: str) -> tuple[int, ...]:
        """The layers in a model of so many: counted from 0, each once, in the order given.

        Args:
            what: the hook point, or whatever else has layers, as a message names it.
            name: the field.

        Raises `ValueError` for layers that the model does not have.
        """
        found: dict[int, None] = {}
        for part in self.parts:
            if isinstance(part, int):
                try:
                    found[counted_layer(part, num_layers, what)] = None
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
            elif (chosen := part.over(num_layers)) is not None:
                found |= dict.fromkeys(chosen)
            else:
                raise ValueError(
                    f"{name}: {what} has no layers {part}; give edges from 0 to {num_layers}, or "
                    f"from {-num_layers} to -1 counting from the end, the lower layer first"
                )
        return tuple(found)

    def numbers(self, name: str, end: int | None = None) -> tuple[int, ...]:
        """The layers where the model is not known: negative ones stay as given.

        Args:
            end: where open ranges stop, if that is known.

        Raises `ValueError` for what hangs on how many layers there are.
        """
        found: dict[int, None] = {}
        for part in self.parts:
            numbers = (part,) if isinstance(part, int) else part.numbers(end)
            if numbers is None:
                raise ValueError(
                    f"{name}: which layers {'all' if self.is_all else part!s} are is not known "
                    "without the model; give numbers, or ranges such as '0:4' or '-4:'"
                )
            found |= dict.fromkeys(numbers)
        return tuple(found)

    @property
    def certain(self) -> tuple[int, ...]:
        """Those that are the same layers, counted from 0, however many there are."""
        numbers = ((p,) if isinstance(p, int) else p.numbers() or () for p in self.parts)
        return tuple(dict.fromkeys(n for each in numbers for n in each if n >= 0))

    @property
    def uncertain(self) -> tuple[_Part, ...]:
        """The parts of which it hangs on how many layers there are which ones they are."""
        return tuple(part for part in self.parts if not Layers((part,)).certain)

    def from_start(self, name: str, why: str, end: int | None = None) -> tuple[int, ...]:
        """As `numbers`, where none can be counted from the end; `why`, the message says."""
        edges = (e for p in self.parts for e in ((p,) if isinstance(p, int) else (p.start, p.stop)))
        if any(edge is not None and edge < 0 for edge in edges):
            raise ValueError(
                f"{name}={self} has negative numbers; layers count from 0 here, since {why}"
            )
        return self.numbers(name, end)


def layer_numbered(given: Any, name: str) -> int:
    """One layer's number: an index, which a key of JSON gives as text, or `"last"`."""
    if type(given) is int and -(2**31) < given < 2**31:  # as most are
        return given
    given = own_numbers(given)
    if isinstance(given, str) and given.strip() == "last":
        return -1
    if isinstance(given, str) and _INDEX.fullmatch(given.strip()):
        return int(given)
    if isinstance(given, Integral) and not isinstance(given, bool):
        check_64_bits(int(given), f"{name}: the number of a layer")
        return int(given)
    raise ValueError(f"{name}: {given!r:.60} is not a layer; give its index, negative from the end")


def layer_at(point: HookPoint, given: Any, name: str) -> int | None:
    """The layer of a hook point where a field has one of each; None for a point without layers."""
    if point.has_layer == (given is None):
        fix = (
            "needs a layer; give its index, negative from the end"
            if point.has_layer
            else "belongs to no layer; leave it out"
        )
        raise ValueError(f"{name}: {point} {fix}")
    return None if given is None else layer_numbered(given, name)


def _parts(given: Any, name: str) -> Iterable[_Part]:
    """What one of several layers means."""
    if isinstance(given, str):
        text = given.strip()
        if text == "all":
            return _ALL
        if match := _HALF_OPEN.fullmatch(text):
            start, stop = (None if edge is None else int(edge) for edge in match.groups())
            return (_filled(LayerRange(start, stop), given, name),)
        if match := _INCLUSIVE.fullmatch(text):
            return _inclusive(int(match[1]), int(match[2]), given, name)
    if isinstance(given, slice) and given.step is None:
        edges = (None if e is None else layer_numbered(e, name) for e in (given.start, given.stop))
        return (_filled(LayerRange(*edges), given, name),)
    try:
        return (layer_numbered(given, name),)
    except ValueError:
        if isinstance(given, Integral) and not isinstance(given, bool):
            raise
        raise ValueError(f"{name}: {given!r:.60} is not a layer; {_ALLOWED}") from None


def _inclusive(first: int, last: int, given: Any, name: str) -> Iterable[_Part]:
    """A range with both ends in it. From a negative number to one that is not, it goes on from the
    last layer to the first."""
    if first < 0 <= last:
        return LayerRange(first), LayerRange(0, last + 1)
    return (_filled(LayerRange(first, last + 1 if last != -1 else None), given, name),)


def _filled(found: LayerRange, given: Any, name: str) -> LayerRange:
    """A range that is not empty in every model."""
    start, stop = found.start or 0, found.stop
    if stop is not None and (start < 0) == (stop < 0) and start >= stop:
        raise ValueError(f"{name}: the range {given} has no layers; give the smaller edge first")
    return found

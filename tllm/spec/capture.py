"""What may be asked of a capture: hook points, positions, reduction and dtype."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from numbers import Integral
from typing import Any, Literal, TypeAlias

from tllm.spec.hooks import HookPoint
from tllm.spec.reading import hook_named, require_one_of
from tllm.spec.selection import Selection

Reduction = Literal["none", "mean", "max", "last"]
CaptureDtype = Literal["model", "float32", "float16"]

OPTIONS = ("hooks", "positions", "reduction", "dtype")

_RANGE = re.compile(r"(-?\d*):(-?\d*)")

_SHORT = 4096
"""Characters of a capture's text up to which what was parsed is kept for whoever asks the same."""


@dataclass(frozen=True)
class LayerRange:
    """Layers from `start` to before `stop`; open ends are the model's."""

    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        return ":".join("" if edge is None else str(edge) for edge in (self.start, self.stop))


Layers: TypeAlias = "tuple[int, ...] | LayerRange | None"
"""Layers of a hook point: listed, a range, or none to choose."""


@dataclass(frozen=True)
class CaptureSpec:
    """One capture, as a user wrote it and with nothing left to check but the model.

    Attributes:
        hooks: `(hook point, layers)`, in the order given.
        positions: which tokens.
        reduction: `none` keeps every row; `mean`, `max` (of each component) and `last` keep one
            row of a sequence.
        dtype: of what is kept: the model's own, or another.
    """

    hooks: tuple[tuple[str, Layers], ...]
    positions: Selection
    reduction: Reduction = "none"
    dtype: CaptureDtype = "model"

    @classmethod
    def parse(cls, given: Mapping[str, Any], name: str) -> CaptureSpec:
        """The capture in `given`, whose other keys are ignored. `ValueError` names the field.

        Those who ask the same are given the same object.
        """
        chosen = {key: given[key] for key in OPTIONS if key in given}
        try:
            text = json.dumps(chosen)
            return _parsed(text) if len(text) <= _SHORT else cls._parse(chosen, name)
        except (TypeError, ValueError):  # arrays and the like, or what is to be refused by name
            return cls._parse(chosen, name)

    @classmethod
    def _parse(cls, given: Mapping[str, Any], name: str) -> CaptureSpec:
        if "hooks" not in given:
            raise ValueError(
                f"{name} has no 'hooks'; say what to capture, such as "
                "{'hooks': {'post_block': [12]}}"
            )
        reduction, dtype = given.get("reduction", "none"), given.get("dtype", "model")
        hooks = parse_hooks(given["hooks"], f"{name}['hooks']")
        positions = Selection.parse(given.get("positions", "all"), f"{name}['positions']")
        require_one_of(f"{name}['reduction']", reduction, Reduction)
        require_one_of(f"{name}['dtype']", dtype, CaptureDtype)
        return cls(hooks, positions, reduction, dtype)

    @cached_property
    def chooses_late(self) -> bool:
        """Whether some rows are chosen when the sequence ends: by which token was generated."""
        return self.positions.depends_on_generated_tokens

    @property
    def kept(self) -> tuple[Reduction, CaptureDtype]:
        """What becomes of rows while the sequence runs: those that are chosen later are not
        reduced yet."""
        if self.chooses_late and self.reduction != "none":
            return "none", "model"
        return self.reduction, self.dtype

    def places(self, num_layers: int) -> tuple[tuple[str, int | None], ...]:
        """Each hook point with its layer; negative layers stay as given.

        Raises `ValueError` for a range that is empty in a model of `num_layers` layers.
        """
        return _places(self.hooks, num_layers)


@lru_cache(4096)
def _parsed(text: str) -> CaptureSpec:
    return CaptureSpec._parse(json.loads(text), "capture")


@lru_cache(4096)
def _places(
    hooks: tuple[tuple[str, Layers], ...], num_layers: int
) -> tuple[tuple[str, int | None], ...]:
    found: dict[tuple[str, int | None], None] = {}
    for point, layers in hooks:
        if layers is None:
            found[point, None] = None
        elif isinstance(layers, LayerRange):
            chosen = range(*slice(layers.start, layers.stop).indices(num_layers))
            edges = [edge for edge in (layers.start, layers.stop) if edge is not None]
            if not chosen or any(not -num_layers <= edge <= num_layers for edge in edges):
                raise ValueError(
                    f"hooks[{point!r}]: the range {layers} does not lie in a model of "
                    f"{num_layers} layers; give edges from 0 to {num_layers}"
                )
            found.update(dict.fromkeys((point, layer) for layer in chosen))
        else:
            for layer in layers:
                located = layer + num_layers if -num_layers <= layer < 0 else layer
                found[point, located] = None
    return tuple(found)


def parse_hooks(given: Any, name: str = "hooks") -> tuple[tuple[str, Layers], ...]:
    """Hook points with their layers.

    Args:
        given: `{hook point: layers}`, where layers are `"all"`, an index, a list of indices, or a
            range such as `"4:9"` (4 to 8); or text such as `"post_block:4:9 pre_attn:all"`, with
            commas or plus signs between single layers (`"post_block:0,4,8"`); or a list of such
            texts. Negative layers count from the end. `lm_head_in` has no layers.
    """
    if isinstance(given, str):
        given = given.replace(";", " ").split()
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, Iterable):
        pairs = []
        for item in given:
            if not isinstance(item, str):
                raise ValueError(f"{name}: {item!r} is not text such as 'post_block:12'")
            point, separator, layers = item.partition(":")
            pairs.append((point, layers if separator else None))
    else:
        raise ValueError(
            f"{name}={given!r} is {type(given).__name__}; give a mapping such as "
            "{'post_block': [12]}, or text such as 'post_block:12'"
        )
    if not pairs:
        raise ValueError(f"{name} is empty; name at least one hook point")
    found: dict[str, Layers] = {}
    for given_point, layers in pairs:
        point = hook_named(given_point, name)
        if point.value in found:
            raise ValueError(f"{name} names {point} twice; give all of its layers at once")
        found[point.value] = _layers(point, layers, f"{name}[{given_point!r}]")
    return tuple(found.items())


def _layers(point: HookPoint, given: Any, name: str) -> Layers:
    if not point.has_layer:
        if given in (None, True, "", "all", []):
            return None
        raise ValueError(f"{name}={given!r}: {point} belongs to no layer; give 'all'")
    if given is None:
        raise ValueError(
            f"{name} names no layers; give 'all', a list of indices, or a range such as '4:9'"
        )
    if isinstance(given, str):
        if given == "all":
            return LayerRange()
        if match := _RANGE.fullmatch(given):
            return LayerRange(*(int(edge) if edge else None for edge in match.groups()))
        given = re.split("[,+]", given)
    if isinstance(given, Integral) and not isinstance(given, bool):
        given = [given]
    if not isinstance(given, Iterable):
        raise ValueError(
            f"{name}={given!r} is not understood; give 'all', a list of indices, or a range such "
            "as '4:9'"
        )
    layers: list[int] = []
    for layer in given:
        if isinstance(layer, str) and re.fullmatch(r"-?\d+", layer.strip()):
            layer = int(layer)
        if isinstance(layer, bool) or not isinstance(layer, Integral):
            raise ValueError(
                f"{name}: {layer!r} is not a layer; give 'all', indices, or a range such as '4:9'"
            )
        layers.append(int(layer))
    if not layers:
        raise ValueError(f"{name} is empty; give 'all', a list of indices, or leave the point out")
    return tuple(dict.fromkeys(layers))

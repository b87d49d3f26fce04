"""What may be asked of a capture: hook points, positions, reduction and dtype."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import NoneType
from typing import Any, Literal

from tllm.spec.hooks import HookPoint
from tllm.spec.layers import Layers
from tllm.spec.reading import hook_named, require_one_of
from tllm.spec.selection import Selection

Reduction = Literal["none", "mean", "max", "last"]
CaptureDtype = Literal["model", "float32", "float16"]

OPTIONS = ("hooks", "positions", "reduction", "dtype")

_BESIDE_COMMAS = re.compile(r"\s*,\s*")

_SHORT = 4096
"""Bytes of a capture's options up to which what was parsed is kept for whoever asks the same."""


@dataclass(frozen=True)
class CaptureSpec:
    """One capture, as a user wrote it and with nothing left to check but the model.

    Attributes:
        hooks: `(hook point, layers)`, in the order given; no layers where it has none.
        reduction: `none` keeps every row; `mean`, `max` (of each component) and `last` keep one
            row of a sequence.
        dtype: of what is kept: the model's own, or another.
    """

    hooks: tuple[tuple[str, Layers | None], ...]
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
            content = pickle.dumps(chosen)  # json takes several times as long
            return _parsed(content) if len(content) <= _SHORT else cls._parse(chosen, name)
        except Exception:  # what cannot be pickled, or is to be refused by name
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

    def places(self, num_layers: int, name: str = "hooks") -> tuple[tuple[str, int | None], ...]:
        """Each hook point with its layer, counted from 0, in a model of so many layers.

        Raises `ValueError` naming the field `name` for layers that it does not have.
        """
        return _places(self.hooks, num_layers, name)


@lru_cache(4096)
def _parsed(content: bytes) -> CaptureSpec:
    return CaptureSpec._parse(pickle.loads(content), "capture")


@lru_cache(4096)
def _places(
    hooks: tuple[tuple[str, Layers | None], ...], num_layers: int, name: str
) -> tuple[tuple[str, int | None], ...]:
    return tuple(
        (point, layer)
        for point, layers in hooks
        for layer in ((None,) if layers is None else layers.of(num_layers, point, name))
    )


def parse_hooks(given: Any, name: str = "hooks") -> tuple[tuple[str, Layers | None], ...]:
    """Hook points with their layers.

    Args:
        given: `{hook point: layers}`, with layers as `Layers.parse` takes them; or text such as
            `"post_block:0,4:9 pre_attn:all"`, with commas between layers; or a list of such texts.
            `lm_head_in` has no layers.
    """
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, Iterable):
        pairs = []
        for item in given:
            if not isinstance(item, str):
                raise ValueError(f"{name}: {item!r} is not text such as 'post_block:12'")
            for text in _BESIDE_COMMAS.sub(",", item).replace(";", " ").split():
                point, separator, layers = text.partition(":")
                pairs.append((point, layers if separator else None))
    else:
        raise ValueError(
            f"{name}={given!r} is {type(given).__name__}; give a mapping such as "
            "{'post_block': [12]}, or text such as 'post_block:12'"
        )
    if not pairs:
        raise ValueError(f"{name} is empty; name at least one hook point")
    found: dict[str, Layers | None] = {}
    for given_point, layers in pairs:
        point = hook_named(given_point, name)
        if point.value in found:
            raise ValueError(f"{name} names {point} twice; give all of its layers at once")
        found[point.value] = _layers(point, layers, f"{name}[{given_point!r}]")
    return tuple(found.items())


def _layers(point: HookPoint, given: Any, name: str) -> Layers | None:
    if point.has_layer:
        if given is None:
            raise ValueError(f"{name} names no layers; give 'all', an index, a range or a list")
        return Layers.parse(given, name)
    if isinstance(given, (str, list, bool, NoneType)) and given in (None, True, "", "all", []):
        return None
    raise ValueError(f"{name}={given!r:.60}: {point} belongs to no layer; give 'all'")

"""What a file holds, before it is decided where its vectors go."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tllm.spec.hooks import HookPoint
from tllm.steering.formats.names import GRAMMAR, NamedPlace, parse_place

STACK_NAMES = (
    "vector",
    "vectors",
    "direction",
    "directions",
    "steering_vector",
    "steering_vectors",
    "control_vector",
)
"""Names under which a vector `[hidden]`, or one a layer `[layers, hidden]`, says no layer."""

_OF_NUMPY = (torch.float16, torch.float32, torch.float64)

_HOOK_NAMES = ("hook", "hook_point", "hook_name", "site")


@dataclass(frozen=True)
class Placed:
    """A vector whose layer the file names; its hook and its scale are None where it names none."""

    place: NamedPlace
    vector: Any
    scale: float | None = None


@dataclass(frozen=True)
class Contents:
    """Vectors with a place, or one array without: `[hidden]`, or `[layers, hidden]`."""

    placed: tuple[Placed, ...] = ()
    stack: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def from_saved(value: Any) -> Contents:
    """The contents of what was saved: an array, or a dict of them, or of dicts of them.

    A dict is one of

    - `{"vector": [hidden], "layer": 12, "hook": "post_block", "scale": 1.0}`, all but the first
      optional; any name of `STACK_NAMES` will do for "vector", and the array may be
      `[layers, hidden]` if there is no "layer";
    - `{KEY: [hidden]}` or `{KEY: {"vector": [hidden], "scale": 1.0}}`, with layer numbers or the
      keys of `tllm.steering.formats.names`;
    - `{HOOK: {LAYER: ...}}`, tLLM's own shape;
    - either of the last two under a name of `STACK_NAMES`.

    A "hook" and a "scale" beside vectors by layer are those of every vector that has none of its
    own; a "layer" there has to be that of all of them. Other entries that are plain JSON values are
    metadata. Anything else is a `ValueError`.
    """
    if _is_array(value):
        return Contents(stack=_numpy(value))
    if not isinstance(value, Mapping):
        raise ValueError(
            f"it holds a {type(value).__name__}; what is read is an array [hidden] or "
            "[layers, hidden], or a dict of arrays by layer"
        )
    named = [name for name in STACK_NAMES if name in value]
    if len(named) > 1:
        raise ValueError(f"it has {' and '.join(map(repr, named))}; keep one of them")
    if named:
        return _from_record(value, named[0])
    placed: list[Placed] = []
    beside = {}
    for key, entry in value.items():
        found = list(_placed(key, entry))
        if found:
            placed += found
        elif _is_plain(_item(entry)):
            beside[str(key)] = _item(entry)
        else:
            raise ValueError(
                f"it has the key {key!r}, which says no layer; {GRAMMAR}; and what goes where "
                f"layers= says is alone, under one of {', '.join(STACK_NAMES)}"
            )
    if not placed:
        raise ValueError(f"it names no layer; {GRAMMAR}")
    return _told(Contents(tuple(placed)), beside)


def _from_record(value: Mapping[Any, Any], name: str) -> Contents:
    """`{"vector": ..., "layer": ...}`."""
    rest = {key: _item(entry) for key, entry in value.items() if key != name}
    for key, entry in rest.items():
        if not _is_plain(entry):
            raise ValueError(
                f"beside {name!r} it has {key!r}, a {type(entry).__name__}; beside the vector "
                "there may be 'layer', 'hook', 'scale' and plain values"
            )
    inner = value[name]
    if isinstance(inner, Mapping):
        return _told(from_saved(inner), rest)
    if not _is_array(inner):
        raise ValueError(f"{name!r} is a {type(inner).__name__}; it must be an array")
    return _told(Contents(stack=_numpy(inner)), rest)


def _told(contents: Contents, beside: Mapping[Any, Any]) -> Contents:
    """Contents with the layer, hook and scale that stand beside them; the rest is metadata."""
    rest = dict(beside)
    layer, scale = rest.pop("layer", None), rest.pop("scale", None)
    hooks = [key for key in _HOOK_NAMES if key in rest]
    if len(hooks) > 1:
        raise ValueError(f"it has {' and '.join(map(repr, hooks))}; keep one of them")
    hook = rest.pop(hooks[0]) if hooks else None
    metadata = {**rest, **contents.metadata}
    if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int)):
        raise ValueError(f"'layer' is {layer!r}; it must be a whole number that counts from 0")
    if contents.stack is None:
        placed = tuple(_completed(each, layer, hook, scale) for each in contents.placed)
        return Contents(placed, metadata=metadata)
    if layer is None:
        if hooks or scale not in (None, 1.0):
            raise ValueError(
                f"beside its vector it has {hooks[0] if hooks else 'scale'!r}, without 'layer'; "
                "add the number of the layer"
            )
        return Contents(stack=contents.stack, metadata=metadata)
    placed = (Placed(_said_place(hook, layer), contents.stack, scale),)
    return Contents(placed, metadata=metadata)


def _completed(each: Placed, layer: int | None, hook: Any, scale: Any) -> Placed:
    """A vector with a layer, with the hook and the scale that are said of all of them."""
    place, own = each.place, each.scale
    if layer not in (None, place.layer):
        raise ValueError(
            f"'layer' is {layer}, beside a vector for layer {place.layer}; leave 'layer' out, or "
            "make them agree"
        )
    if hook is not None:
        said = _said_place(hook, place.layer).hook
        if None not in (said, place.hook) and said != place.hook:
            raise ValueError(
                f"it has a vector for {place.hook} of layer {place.layer}, and beside it the hook "
                f"{hook!r}; make them agree"
            )
        place = NamedPlace(place.hook or said, place.layer)
    if own is not None and scale not in (None, 1.0):
        raise ValueError(
            f"'scale' is {scale}, beside a vector with a scale of {own}; keep one of them"
        )
    return Placed(place, each.vector, scale if own is None else own)


def _said_place(said: Any, layer: int) -> NamedPlace:
    """Where a record says it goes; its hook may be a full name, with the layer in it."""
    if said is None:
        return NamedPlace(None, layer)
    named = parse_place(said) if isinstance(said, str) else None
    if named is None:
        return NamedPlace(HookPoint.parse(said), layer)
    if named.layer != layer:
        raise ValueError(f"its layer is {layer} and its hook is {said!r}; make them agree")
    return named


def _placed(key: Any, entry: Any) -> Iterator[Placed]:
    """The vectors under one key; none if the key says no layer."""
    if isinstance(key, str) and isinstance(entry, Mapping) and parse_place(key) is None:
        try:
            hook = HookPoint.parse(key)
        except ValueError:
            return
        for layer, inner in entry.items():
            place = _place(layer)
            if place is None or place.hook not in (None, hook):
                raise ValueError(
                    f"under {key!r} it has the key {layer!r}; layers are whole numbers"
                )
            yield _vector(NamedPlace(hook, place.layer), layer, inner)
        return
    place = _place(key)
    if place is not None:
        yield _vector(place, key, entry)


def _place(key: Any) -> NamedPlace | None:
    if isinstance(key, int) and not isinstance(key, bool):
        return NamedPlace(None, key)
    return parse_place(key) if isinstance(key, str) else None


def _vector(place: NamedPlace, key: Any, entry: Any) -> Placed:
    scale = None
    if isinstance(entry, Mapping):
        unknown = set(entry) - {"vector", "scale"}
        if "vector" not in entry or unknown:
            raise ValueError(
                f"under {key!r} it has the keys {sorted(map(str, entry))}; they may be 'vector' "
                "and 'scale'"
            )
        entry, scale = entry["vector"], _item(entry.get("scale"))
    if isinstance(entry, list):
        entry = np.asarray(entry)
    if not _is_array(entry):
        raise ValueError(f"under {key!r} it has a {type(entry).__name__}; it must be an array")
    return Placed(place, _numpy(entry), scale)


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def _numpy(value: Any) -> Any:
    """As numpy, which has no bfloat16 and no float8: these become float32, exactly."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise ValueError(
            f"it has a tensor of layout {value.layout}, dtype {value.dtype}, on {value.device}; "
            "what is read is a dense tensor with its numbers, such as tensor.to_dense()"
        )
    value = value.detach().cpu()
    narrow = value.is_floating_point() and value.dtype not in _OF_NUMPY
    return (value.float() if narrow else value).numpy()


def _item(value: Any) -> Any:
    """A number that was saved as an array of no dimensions."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and value.ndim == 0:
        return value.item()
    return value


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True

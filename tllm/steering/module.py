"""Steering vectors as one thing that can be used, registered, saved and loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file
from typing_extensions import Self

from tllm.spec.hooks import HookPoint
from tllm.spec.layers import Layers
from tllm.spec.reading import FloatArray, float_array, hook_named, numeric_array, scalar

FORMAT = "tllm.steering"
FORMAT_VERSION = 1


class VectorEntry(TypedDict):
    """One vector of a spec: what is added is `scale * vector`, `[hidden]`, float32."""

    vector: FloatArray
    scale: float


Vectors = dict[str, dict[int, VectorEntry]]


@dataclass(frozen=True, eq=False, repr=False)
class SteeringModule:
    """Vectors for some hook points and layers, and where they come from.

    Use it as `SamplingParams(steering_vectors=module)`, or register it by name with
    `llm.steering.register_module(name, module)`.

    Attributes:
        vectors: `{hook: {layer: {"vector": float32 [hidden], "scale": x}}}`, the vector spec that
            every part of tLLM takes. Hook points have their canonical names, layers count from 0.
        source: where the vectors are from: a path, or how they were made.
        metadata: what is known about them, as plain JSON values.
        num_layers: how many layers the model must have: the vectors were rows that say no layer,
            one for each. None where their layers were named.
    """

    vectors: Vectors
    source: str = "given"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    num_layers: int | None = None

    def __post_init__(self) -> None:
        # Checked here and not only in the readers: a module is often put together by hand.
        object.__setattr__(self, "vectors", _checked(self.vectors, self.source))

    def __repr__(self) -> str:
        layers = {hook: [*by_layer] for hook, by_layer in self.vectors.items()}
        of_layers = f" of a model of {self.num_layers} layers" if self.num_layers else ""
        return f"<SteeringModule {layers}{of_layers}, {self.hidden_size} numbers, {self.source}>"

    @property
    def hidden_size(self) -> int:
        """The width of the vectors."""
        return next(len(e["vector"]) for layers in self.vectors.values() for e in layers.values())

    @property
    def layers(self) -> list[int]:
        """The layers that any of its hook points has a vector for, in order."""
        return sorted({layer for layers in self.vectors.values() for layer in layers})

    def select(self, layers: Any = None, hook: str | HookPoint | None = None) -> Self:
        """The same module with only some layers, or one hook point; `ValueError` if it lacks one.

        Layers as `tllm.spec.layers.Layers` reads them, counted from 0: a module does not know how
        many the model has.
        """
        vectors = self.vectors
        if hook is not None:
            point = str(hook_named(hook, "hook"))
            if point not in vectors:
                raise ValueError(
                    f"{self.source} has no vectors for hook={point!r}; it has {', '.join(vectors)}"
                )
            vectors = {point: vectors[point]}
        if layers is not None and not (asked := Layers.parse(layers)).is_all:
            wanted = [*asked.numbers("layers", self.layers[-1] + 1)]
            missing = sorted(set(wanted) - {layer for each in vectors.values() for layer in each})
            if missing or not wanted:
                raise ValueError(
                    f"{self.source} has vectors for the layers {self.layers}, not for all of "
                    f"layers={wanted}; choose among those it has"
                )
            chosen = set(wanted)
            vectors = {
                point: kept
                for point, each in vectors.items()
                if (kept := {layer: entry for layer, entry in each.items() if layer in chosen})
            }
        return replace(self, vectors=vectors)

    def scaled(self, factor: float) -> Self:
        """The same module with every scale multiplied by `factor`."""
        times = scalar(factor, "factor")
        vectors: Vectors = {
            point: {
                layer: {"vector": entry["vector"], "scale": entry["scale"] * times}
                for layer, entry in layers.items()
            }
            for point, layers in self.vectors.items()
        }
        return replace(self, vectors=vectors)

    def to_spec(self) -> dict[str, Any]:
        """The vector spec, as every field that takes one asks a module for it."""
        return dict(self.vectors)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write a safetensors file that `tllm.steering.load` reads back as it was.

        A tensor is named `HOOK.LAYER`; scales, source and metadata are in the file's header, under
        the key `tllm`. `ValueError` if the metadata is not plain JSON, `OSError` with the path if
        it cannot be written.
        """
        try:
            # allow_nan: a score that could not be computed is NaN, and comes back as such.
            header = json.dumps(self._header(), sort_keys=True)
        except TypeError as error:
            raise ValueError(
                f"the metadata of {self.source} cannot be written: {error}; "
                "keep it to strings, numbers, booleans, lists and dicts"
            ) from None
        tensors = {
            f"{point}.{layer}": np.ascontiguousarray(entry["vector"])
            for point, layers in self.vectors.items()
            for layer, entry in layers.items()
        }
        try:
            save_file(tensors, str(path), metadata={"format": FORMAT, "tllm": header})
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from None
        return Path(path)

    def _header(self) -> dict[str, Any]:
        counted = {} if self.num_layers is None else {"num_layers": self.num_layers}
        return {
            "version": FORMAT_VERSION,
            **counted,
            "source": self.source,
            "metadata": dict(self.metadata),
            "scales": {
                point: {str(layer): entry["scale"] for layer, entry in layers.items()}
                for point, layers in self.vectors.items()
            },
        }


@dataclass(frozen=True, eq=False)
class ExtractedModule(SteeringModule):
    """Vectors that `tllm.steering.extract` made, with how well each layer tells the sides apart.

    Attributes:
        method: row of `tllm.steering.directions.FINDERS`.
        separation: layer to held-out AUROC, 0.5 for a layer that knows nothing, 1 for one whose
            direction ranks every positive row above every negative one.
        d_prime: layer to held-out d', the distance of the means in standard deviations. It goes
            on where AUROC has reached 1.

    How both are computed is in `tllm.steering.separation`.
    """

    method: str = ""
    separation: Mapping[int, float] = field(default_factory=dict)
    d_prime: Mapping[int, float] = field(default_factory=dict)

    @property
    def best_layer(self) -> int:
        """The layer of `vectors` with the best separation, by d' among equals."""
        return max(self.layers, key=lambda layer: (self.separation[layer], self.d_prime[layer]))

    def _header(self) -> dict[str, Any]:
        extracted = {
            "method": self.method,
            "separation": {str(layer): score for layer, score in self.separation.items()},
            "d_prime": {str(layer): score for layer, score in self.d_prime.items()},
        }
        return {**super()._header(), "extracted": extracted}


def from_header(
    vectors: Mapping[str, Mapping[int, Any]], header: Mapping[str, Any]
) -> SteeringModule:
    """The module that `save` wrote: its tensors, `{hook: {layer: [hidden]}}`, and its header."""
    if header["version"] != FORMAT_VERSION:
        raise ValueError(
            f"it is version {header['version']} of {FORMAT}, and this tLLM reads version "
            f"{FORMAT_VERSION}; update tLLM, or save it again"
        )
    scaled: Vectors = {
        point: {
            layer: {"vector": vector, "scale": header["scales"][point][str(layer)]}
            for layer, vector in layers.items()
        }
        for point, layers in vectors.items()
    }
    if "extracted" not in header:
        return SteeringModule(
            scaled, header["source"], header["metadata"], header.get("num_layers")
        )
    extracted = header["extracted"]
    return ExtractedModule(
        scaled,
        header["source"],
        header["metadata"],
        method=extracted["method"],
        separation={int(layer): score for layer, score in extracted["separation"].items()},
        d_prime={int(layer): score for layer, score in extracted["d_prime"].items()},
    )


def as_vector(value: Any, where: str) -> FloatArray:
    """`value` as float32 `[hidden]`; leading dimensions of length 1 are taken off.

    Raises:
        ValueError: not a vector of floating-point numbers, or not finite in float32.
    """
    array = numeric_array(value, where)
    while array.ndim > 1 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{where} has shape {list(array.shape)}; a vector is [hidden]")
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{where} is {array.dtype}; a vector is of floating-point numbers")
    return float_array(array, where)


def _checked(vectors: Mapping[str, Mapping[int, Any]], source: str) -> Vectors:
    if not vectors or not all(vectors.values()):
        raise ValueError(f"{source} has no vectors")
    checked: Vectors = {}
    for name, layers in vectors.items():
        point = HookPoint.parse(name)
        if not point.has_layer:
            raise ValueError(
                f"{source} has vectors for {point}, which belongs to no layer; a module holds "
                "vectors of layers"
            )
        if str(point) in checked:
            raise ValueError(f"{source} names {point} twice, once by its alias")
        entries = {
            _layer(layer, source): _entry(entry, f"{source}: {point} of layer {layer}")
            for layer, entry in layers.items()
        }
        checked[str(point)] = dict(sorted(entries.items()))
    widths = {len(e["vector"]) for each in checked.values() for e in each.values()}
    if len(widths) > 1:
        raise ValueError(f"the vectors of {source} have different widths: {sorted(widths)}")
    # In the order of the forward pass, whatever order a file had.
    return {str(point): checked[str(point)] for point in HookPoint if str(point) in checked}


def _layer(layer: Any, source: str) -> int:
    if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)) or layer < 0:
        raise ValueError(
            f"{source} has a vector for layer {layer!r}; layers are whole numbers that count from 0"
        )
    return int(layer)


def is_finite(number: Any) -> bool:
    """Whether a number is one that a float holds."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _entry(entry: Any, where: str) -> VectorEntry:
    vector, scale = entry, 1.0
    if isinstance(entry, Mapping):
        if unknown := sorted(set(map(str, entry)) - {"vector", "scale"}):
            raise ValueError(f"{where} has the keys {unknown}; give 'vector' and 'scale'")
        if "vector" not in entry:
            raise ValueError(f"{where} has no 'vector'")
        vector, scale = entry["vector"], entry.get("scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, (int, float, np.number)):
        raise ValueError(f"{where}: the scale is {scale!r}; it must be a number")
    if not is_finite(scale):
        raise ValueError(f"{where}: the scale is {scale}; it must be finite")
    return {"vector": as_vector(vector, where), "scale": float(scale)}

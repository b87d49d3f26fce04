"""What a probe may be: how a row gets its score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tllm.spec.hooks import HookPoint
from tllm.spec.reading import FloatArray, float_array, require_one_of

SCORES = ("dot", "cosine", "cast")
"""What a probe gives a row `h` with its vector `p`: `p . h`, `cos(p, h)`, or `cos(h, tanh(P h))`
with `P = p pT / (p . p)` (CAST, arXiv 2409.05907); and the bias added to it."""

FEATURES = ("feature", "layer_norm_feature", "rescaled_feature", "centered_rescaled_feature")
"""What the feature of a sparse autoencoder gives a row: `s = p . h / n + bias` where that is above
its threshold, and else 0. The autoencoder normalises rows as the name says: `n` is 1; the standard
deviation of the row's numbers, and 1e-5; `|h| / sqrt(hidden)`; or the same of the row without its
mean."""

MLPS = ("relu_mlp", "gelu_mlp", "silu_mlp", "tanh_mlp")
"""Small MLPs, by what is between their layers; gelu with the error function."""

KINDS = (*SCORES, *FEATURES, *MLPS)
"""All formulas of scores, as taps number them."""

MAX_WIDTH, MAX_HIDDEN_LAYERS = 64, 4
"""Of a small MLP: the widest of its hidden layers, and how many it may have."""


@dataclass(frozen=True, eq=False)
class FeatureProbe:
    """The feature of a sparse autoencoder as a probe.

    Attributes:
        point, layer: where the autoencoder reads; the layer may be negative, from the end.
        vector: float32 `[hidden]`.
        bias: what is added to the product.
        threshold: the feature is 0 where the sum is not above it.
        kind: one of `FEATURES`.
    """

    point: HookPoint
    layer: int | None
    vector: FloatArray
    bias: float
    threshold: float
    kind: str


FindFeature = Callable[[str, int], FeatureProbe]
"""From the name of an autoencoder that is registered, and the number of a feature."""


@dataclass(frozen=True, eq=False)
class MlpProbe:
    """A small MLP that gives a row its score.

    Attributes:
        packed: float32 `[rows, inputs]`, filled up with zeros: the weight of the first hidden layer
            `[width, inputs]` and its bias, for each that follows a weight `[MAX_WIDTH, MAX_WIDTH]`
            and a bias, and the weight of the last layer. Biases and the last weight are
            `[MAX_WIDTH]`.
        bias: of the last layer.
        widths: of the hidden layers.
        kind: one of `MLPS`.
    """

    packed: FloatArray
    bias: float
    widths: tuple[int, ...]
    kind: str

    @classmethod
    def parse(cls, probe: Mapping[str, Any], name: str) -> MlpProbe:
        """From the keys `layers` and `activation` of a probe; `ValueError` naming what is wrong."""
        activation = probe.get("activation", "relu")
        known = [kind.removesuffix("_mlp") for kind in MLPS]
        require_one_of(f"{name}['activation']", activation, known)
        layers = _layers(probe["layers"], f"{name}['layers']")
        (first, bias), *squares, (last, end) = layers
        parts = [first.reshape(-1), _filled(bias)]
        for weight, each in squares:
            square = np.zeros((MAX_WIDTH, MAX_WIDTH), np.float32)
            square[: weight.shape[0], : weight.shape[1]] = weight
            parts += [square.reshape(-1), _filled(each)]
        flat = np.concatenate([*parts, _filled(last[0])])
        inputs = first.shape[1]
        packed = np.pad(flat, (0, -flat.size % inputs)).reshape(-1, inputs)
        packed.setflags(write=False)
        widths = tuple(len(each) for _, each in layers[:-1])
        return cls(packed, float(end[0]), widths, f"{activation}_mlp")


def _filled(numbers: FloatArray) -> FloatArray:
    return np.pad(numbers, (0, MAX_WIDTH - numbers.size))


def _layers(given: Any, name: str) -> list[tuple[FloatArray, FloatArray]]:
    """Weights and biases, of which each fits the next."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence) or len(given) < 2:
        raise ValueError(
            f"{name} is {given!r:.60}; give a list of at least two layers [weight, bias], weight "
            "[outputs, inputs]; one layer is a 'vector' with a 'bias'"
        )
    if len(given) - 1 > MAX_HIDDEN_LAYERS:
        raise ValueError(
            f"{name} has {len(given) - 1} hidden layers; a probe may have at most "
            f"{MAX_HIDDEN_LAYERS}"
        )
    layers: list[tuple[FloatArray, FloatArray]] = []
    for i, layer in enumerate(given):
        if isinstance(layer, (str, Mapping)) or not isinstance(layer, Sequence) or len(layer) != 2:
            raise ValueError(f"{name}[{i}] is {layer!r:.60}; give [weight, bias]")
        weight = float_array(layer[0], f"{name}[{i}][0]")
        bias = float_array(layer[1], f"{name}[{i}][1]")
        if weight.ndim != 2 or not weight.size or bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{name}[{i}] has shapes {list(weight.shape)} and {list(bias.shape)}; give a "
                "weight [outputs, inputs] and a bias [outputs]"
            )
        if layers and weight.shape[1] != len(layers[-1][1]):
            raise ValueError(
                f"{name}[{i}] takes {weight.shape[1]} numbers, and the layer before gives "
                f"{len(layers[-1][1])}"
            )
        if i + 1 < len(given) and len(bias) > MAX_WIDTH:
            raise ValueError(
                f"{name}[{i}] has {len(bias)} outputs; hidden layers of a probe may have at most "
                f"{MAX_WIDTH}"
            )
        layers.append((weight, bias))
    if len(layers[-1][1]) != 1:
        raise ValueError(
            f"{name}[{len(layers) - 1}] has {len(layers[-1][1])} outputs; the last layer of a "
            "probe has one, the score"
        )
    return layers

"""What a probe may be: how a row gets its score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tllm.spec.hooks import HookPoint
from tllm.spec.reading import FloatArray

SCORES = ("dot", "cosine", "cast")
"""What a probe gives a row `h` with its vector `p`: `p . h`, `cos(p, h)`, or `cos(h, tanh(P h))`
with `P = p pT / (p . p)` (CAST, arXiv 2409.05907); and the bias added to it."""

FEATURES = ("feature", "layer_norm_feature", "rescaled_feature", "centered_rescaled_feature")
"""What the feature of a sparse autoencoder gives a row: `s = p . h / n + bias` where that is above
its threshold, and else 0. The autoencoder normalises rows as the name says: `n` is 1; the standard
deviation of the row's numbers, and 1e-5; `|h| / sqrt(hidden)`; or the same of the row without its
mean."""

KINDS = (*SCORES, *FEATURES)
"""All formulas of scores, as taps number them."""


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

"""What differences rounding explains, by dtype and depth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

FLOAT32 = 2e-5
"""Of a stream in float32: tiny models of all families stay below it, with sums in any order. What
else there is gets more, as in `UNITS`."""

# The largest error to accept, as a multiple of the dtype's unit roundoff u (bfloat16: 2^-8), which
# is the error of rounding one value once. Errors are relative to the largest value of the tensor.
UNITS = {
    # A stream is a sum of rounded branches, rounded after each addition: an error grows with the
    # square root of the number of additions, at most six here, and by what the branches bring.
    "embed": 16.0,
    "pre_attn": 16.0,
    "post_attn": 16.0,
    "post_block": 16.0,
    # A norm rounds once more. What follows it sees the stream's error, relative to the stream's
    # typical value rather than to its largest.
    "attn_in": 20.0,
    "mlp_in": 20.0,
    "q": 24.0,
    "k": 24.0,
    "v": 24.0,
    "router": 24.0,
    "lm_head_in": 20.0,
    # A branch passes three matrix products whose inputs and outputs are rounded, a softmax or a
    # gate that magnifies what its input is off by, and here no stream hides it.
    "attn_heads": 32.0,
    "attn_out": 32.0,
    "mlp_out": 32.0,
    # One more product, of a state that is off already.
    "logits": 20.0,
}
"""Of models of `LAYERS` layers."""
LAYERS = 3


@dataclass(frozen=True)
class Tolerance:
    """The largest relative error to accept, by hook point and for `logits`.

    regret: how far below the likeliest token's the logit of a greedy token may lie in the
        reference, relative to the largest logit.
    """

    points: Mapping[str, float]
    regret: float = 0.0

    @classmethod
    def of(cls, dtype: torch.dtype, layers: int = LAYERS, given: float | None = None) -> Tolerance:
        """What to accept of an engine that computes in `dtype`.

        Errors of additions one after the other grow with the square root of their number, so with
        that of the layers.

        Args:
            given: what to accept at every point, instead.
        """
        depth = math.sqrt(max(layers, LAYERS) / LAYERS)
        if given is not None:
            points = dict.fromkeys(UNITS, given)
        elif dtype == torch.float32:
            least = min(UNITS.values())
            points = {point: depth * FLOAT32 * units / least for point, units in UNITS.items()}
        else:
            roundoff = torch.finfo(dtype).eps / 2
            points = {point: depth * units * roundoff for point, units in UNITS.items()}
        # Two logits are compared to find the likeliest token, and both may be off.
        return cls(points, regret=2 * points["logits"])

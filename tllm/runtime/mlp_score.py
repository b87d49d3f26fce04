"""Small MLPs as probes: what they say of rows in PyTorch, and where their numbers lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from tllm.spec.probes import KINDS, MAX_WIDTH, MLPS

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
}
BETWEEN = {f"{name}_mlp": function for name, function in _ACTIVATIONS.items()}
"""What stands between the layers, by kind of score."""

READS_ROW, READS_UNITS = len(KINDS), len(KINDS) + 1
"""Instead of the index of a score, in the records of a small MLP: one of its units, which reads the
row; or which reads the units of the layer before."""

assert set(BETWEEN) == set(MLPS)


class PackedLayer(NamedTuple):
    """Where a hidden layer lies in what `MlpProbe` packs, in numbers from its beginning.

    Attributes:
        weight, bias: where they begin.
        inputs: how many numbers a unit's weight has there.
    """

    weight: int
    bias: int
    width: int
    inputs: int


def packed_layers(hidden: int, widths: Sequence[int]) -> Iterator[PackedLayer]:
    """All hidden layers of a small MLP, and the last layer, whose bias lies elsewhere."""
    at, inputs, rows = 0, hidden, widths[0]
    for width in widths:
        bias = at + rows * inputs
        yield PackedLayer(at, bias, width, inputs)
        at, inputs, rows = bias + MAX_WIDTH, MAX_WIDTH, MAX_WIDTH
    yield PackedLayer(at, at + MAX_WIDTH, 1, MAX_WIDTH)


def mlp_score(
    rows: torch.Tensor, packed: torch.Tensor, widths: Sequence[int], kind: str
) -> torch.Tensor:
    """Scores of rows `[..., hidden]`, without the bias of the last layer."""
    flat, state = packed.reshape(-1), rows
    *layers, last = packed_layers(rows.shape[-1], widths)
    for weight, bias, width, inputs in layers:
        matrix = flat[weight : weight + width * inputs].view(width, inputs)
        state = BETWEEN[kind](state @ matrix.T + flat[bias : bias + width])
        state = torch.nn.functional.pad(state, (0, MAX_WIDTH - width))
    return state @ flat[last.weight : last.weight + MAX_WIDTH]

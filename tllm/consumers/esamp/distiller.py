"""One distiller, as mathematics: parameters, gate, gradients and AdamW.

`y = Norm(x + ((x A) * silu(x G + b)) B)` learns to predict a deep row from a shallow one
("Large Language Models Explore by Latent Distilling", arXiv 2604.24927). Every function takes
any leading dimensions, so a stack of distillers is the same code as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

#: Distillers start on a multiple of this many elements, so that matrix loads are aligned.
_ALIGNMENT = 64


class Parameters(NamedTuple):
    """Weights (or gradients) of a distiller.

    Attributes:
        project_in: `[..., hidden, 2 * rank]`, A and G side by side.
        project_out: `[..., rank, hidden]`, B.
        gate_bias: `[..., rank]`, b.
    """

    project_in: Tensor
    project_out: Tensor
    gate_bias: Tensor


@dataclass(frozen=True)
class Layout:
    """Where the parameters of one distiller lie in a flat row."""

    hidden: int
    rank: int

    @property
    def size(self) -> int:
        """Elements of a row, padding included."""
        used = 3 * self.hidden * self.rank + self.rank
        return -(-used // _ALIGNMENT) * _ALIGNMENT

    def views(self, flat: Tensor) -> Parameters:
        """The parameters inside `flat` `[..., size]`, sharing its memory."""
        leading = flat.shape[:-1]
        middle = 2 * self.hidden * self.rank
        end = 3 * self.hidden * self.rank
        return Parameters(
            flat[..., :middle].view(*leading, self.hidden, 2 * self.rank),
            flat[..., middle:end].view(*leading, self.rank, self.hidden),
            flat[..., end : end + self.rank],
        )

    def initial(self, seed: int) -> Tensor:
        """`[size]` float32: A and G are normal with variance 1 / hidden, B and b are zero.

        With B zero a new distiller says `Norm(x)`. Drawn on the CPU, so that every device and
        every rank starts from the same weights.
        """
        flat = torch.zeros(self.size)
        generator = torch.Generator().manual_seed(seed)
        self.views(flat).project_in.normal_(std=self.hidden**-0.5, generator=generator)
        return flat


def gate(projected: Tensor, gate_bias: Tensor) -> Tensor:
    """`(x A) * silu(x G + b)`: `[..., rows, rank]` of `projected` `[..., rows, 2 * rank]`."""
    value, gate_input = projected.chunk(2, dim=-1)
    return value * silu(gate_input + gate_bias.unsqueeze(-2))


def gate_backward(grad: Tensor, projected: Tensor, gate_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` with respect to `projected` and `gate_bias`."""
    value, gate_input = projected.chunk(2, dim=-1)
    gate_input = gate_input + gate_bias.unsqueeze(-2)
    sigmoid = torch.sigmoid(gate_input)
    grad_value = grad * gate_input * sigmoid
    grad_gate = grad * value * sigmoid * (1 + gate_input * (1 - sigmoid))
    return torch.cat((grad_value, grad_gate), dim=-1), grad_gate.sum(-2)


@dataclass(frozen=True)
class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def bias_corrections(self, previous: Tensor) -> Tensor:
        """`1 - beta ** t` from `1 - beta ** (t - 1)`: `[..., 2]`.

        The recurrence does not cancel, as `1 - beta ** t` does in float32 while t is small.
        """
        betas = torch.tensor(self.betas, dtype=previous.dtype, device=previous.device)
        rest = torch.tensor([1 - beta for beta in self.betas], dtype=previous.dtype)
        return betas * previous + rest.to(previous.device)

    def update(
        self, weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, corrections: Tensor
    ) -> None:
        """One step in place, for `[..., size]` tensors and `corrections` `[..., 2]`."""
        first, second = self.betas
        mean.mul_(first).add_(grad, alpha=1 - first)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        denominator = (square / corrections[..., 1:]).sqrt_().add_(self.eps)
        weight.mul_(1 - self.lr * self.weight_decay)
        weight.sub_(self.lr * (mean / corrections[..., :1]) / denominator)

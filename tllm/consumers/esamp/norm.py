"""The norm at the end of a distiller, with its derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Norm(Protocol):
    """A function of rows `[..., hidden]` that can be pulled back."""

    def forward(self, z: Tensor) -> Tensor:
        """Norm of each row, in z's dtype."""

    def backward(self, z: Tensor, grad: Tensor) -> Tensor:
        """Gradient with respect to z, given the one with respect to `forward(z)`."""


class Identity:
    """No norm: the target is a row of the residual stream itself."""

    def forward(self, z: Tensor) -> Tensor:
        return z

    def backward(self, z: Tensor, grad: Tensor) -> Tensor:
        return grad


class RmsNorm:
    """`z / rms(z) * weight` (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def _inverse_rms(self, z: Tensor) -> Tensor:
        return torch.rsqrt(z.square().mean(-1, keepdim=True) + self.eps)

    def forward(self, z: Tensor) -> Tensor:
        return z * self._inverse_rms(z) * self.weight

    def backward(self, z: Tensor, grad: Tensor) -> Tensor:
        inverse = self._inverse_rms(z)
        scaled = grad * self.weight
        return inverse * (scaled - z * inverse.square() * (scaled * z).mean(-1, keepdim=True))


class CallableNorm:
    """Any other norm (LayerNorm with a bias, for one), differentiated by autograd.

    Args:
        function: maps `[rows, hidden]` in `dtype`.
        dtype: what the model computes it in.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        self.function = function
        self.dtype = dtype

    def _call(self, z: Tensor) -> Tensor:
        rows = z.reshape(-1, z.shape[-1]).to(self.dtype)
        return self.function(rows).reshape(z.shape).to(z.dtype)

    def forward(self, z: Tensor) -> Tensor:
        return self._call(z)

    def backward(self, z: Tensor, grad: Tensor) -> Tensor:
        # The engine runs in inference mode, whose tensors autograd refuses: copies leave it.
        with torch.inference_mode(False), torch.enable_grad():
            leaf = z.clone().requires_grad_()
            (pulled,) = torch.autograd.grad(self._call(leaf), leaf, grad.clone())
        return pulled

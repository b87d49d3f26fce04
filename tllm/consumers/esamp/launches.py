"""What predictions and training enqueue, launch by launch: all that a recording replays."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from tllm.consumers.esamp import reference
from tllm.consumers.esamp.distiller import AdamW
from tllm.consumers.esamp.norm import CallableNorm, Norm
from tllm.consumers.esamp.passes import ForwardPass, TrainPass


class Launches:
    """The launches of a bank's passes. Arguments as of `DistillerBank`."""

    def __init__(
        self, ops: ModuleType, adamw: AdamW, predicted_norm: Norm, trained_norm: Norm
    ) -> None:
        self._ops = ops
        self._adamw = adamw
        self._predicted_norm = predicted_norm
        self._trained_norm = trained_norm

    def predict(self, rows: Tensor, passes: Sequence[ForwardPass], out: Tensor) -> None:
        """Gather rows, and scatter what the distillers make of them."""
        norm = self._predicted_norm
        for step in passes:
            self._ops.gather_rows(rows, step.index, step.x)
            self._forward(step)
            self._ops_for(norm).scatter_predictions(step.x, step.branch, norm, step.index, out)

    def _forward(self, step: ForwardPass) -> None:
        torch.bmm(step.x, step.weights.project_in, out=step.projected)
        self._ops.gate(step.projected, step.weights.gate_bias, step.gated)
        torch.bmm(step.gated, step.weights.project_out, out=step.branch)

    def train(self, source: Tensor, target: Tensor, passes: Sequence[TrainPass]) -> None:
        """One optimiser step of every distiller that has rows."""
        for step in passes:
            self._ops.gather_rows(source, step.index, step.x)
            self._ops.gather_rows(target, step.index, step.target)
            self._train_pass(step)

    def _train_pass(self, step: TrainPass) -> None:
        ops = self._ops
        self._forward(step)
        # The branch is not needed after its gradient: one buffer holds both.
        grad = step.branch
        self._ops_for(self._trained_norm).loss_backward(
            step.x, step.branch, step.target, step.counts, self._trained_norm, step.row_loss, grad
        )
        torch.bmm(grad, step.weights.project_out.mT, out=step.grad_gated)
        ops.gate_backward(
            step.grad_gated,
            step.projected,
            step.weights.gate_bias,
            step.grad_projected,
            step.grads.gate_bias,
        )
        torch.bmm(step.x.mT, step.grad_projected, out=step.grads.project_in)
        torch.bmm(step.gated.mT, grad, out=step.grads.project_out)
        ops.open_update(
            step.row_loss, step.counts, self._adamw, step.corrections, step.ledger, step.active
        )
        ops.update(
            step.master,
            step.flat_grads,
            step.mean,
            step.square,
            step.flat_shadow,
            step.active,
            step.corrections,
            self._adamw,
        )

    def _ops_for(self, norm: Norm) -> ModuleType:
        return reference if isinstance(norm, CallableNorm) else self._ops

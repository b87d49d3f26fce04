"""The steps of a distiller bank in plain PyTorch: what `kernels` must equal, and the CPU's path.

Shapes: a block has `slots` distillers with room for `width` rows each. Rows at or beyond
`counts[slot]` are padding and have no effect. Arithmetic is in float32 (float64 stays float64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.consumers.esamp import distiller
from tllm.consumers.esamp.distiller import AdamW
from tllm.consumers.esamp.norm import Norm

#: Columns of a bank's ledger, `[slots, 5]`.
LOSS_SUM, LOSS_LAST, STEPS, NON_FINITE, ROWS = range(5)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def gather_rows(rows: Tensor, index: Tensor, out: Tensor) -> None:
    """`out[i] = rows[index[i]]`, or zeros where the index is -1."""
    gathered = rows.index_select(0, index.flatten().clamp(min=0).long()).to(out.dtype)
    out.copy_(gathered.view_as(out).masked_fill_((index < 0).unsqueeze(-1), 0))


def gate(projected: Tensor, gate_bias: Tensor, out: Tensor) -> None:
    """`out = value * silu(gate + b)`; `projected` `[slots, width, 2 * rank]`."""
    out.copy_(distiller.gate(_wide(projected), _wide(gate_bias)))


def scatter_predictions(x: Tensor, branch: Tensor, norm: Norm, index: Tensor, out: Tensor) -> None:
    """`out[index[i]] = Norm(x[i] + branch[i])` for `x`, `branch` `[slots, width, hidden]`.

    The last row of `out` is for padding: its content is undefined.
    """
    # Index -1 is that last row, so nothing depends on how many rows are real.
    out[index.long()] = norm.forward(_wide(x) + _wide(branch)).to(out.dtype)


def loss_backward(
    x: Tensor,
    branch: Tensor,
    target: Tensor,
    counts: Tensor,
    norm: Norm,
    row_loss: Tensor,
    grad: Tensor,
) -> None:
    """Mean squared error of each row, and the gradient of a slot's mean with respect to branch.

    `row_loss` `[slots, width]` and `grad` `[slots, width, hidden]` are written; zero in padding.
    `grad` may be `branch` itself.
    """
    z = _wide(x) + _wide(branch)
    width, hidden = z.shape[-2:]
    real = (torch.arange(width, device=z.device) < counts.unsqueeze(-1)).unsqueeze(-1)
    error = (norm.forward(z) - _wide(target)).masked_fill(~real, 0)
    row_loss.copy_(error.square().mean(-1))
    grad_y = 2 * error / (hidden * counts.clamp(min=1)).view(-1, 1, 1)
    grad.copy_(norm.backward(z, grad_y).masked_fill(~real, 0))


def gate_backward(
    grad_hidden: Tensor,
    projected: Tensor,
    gate_bias: Tensor,
    grad_projected: Tensor,
    grad_bias: Tensor,
) -> None:
    """Gradients of `gate`; `grad_bias` `[slots, rank]` is summed over the slot's rows."""
    rows, bias = distiller.gate_backward(_wide(grad_hidden), _wide(projected), _wide(gate_bias))
    grad_projected.copy_(rows)
    grad_bias.copy_(bias)


def open_update(
    row_loss: Tensor,
    counts: Tensor,
    adamw: AdamW,
    corrections: Tensor,
    ledger: Tensor,
    active: Tensor,
) -> None:
    """Decide which slots are updated, and account for it.

    A slot is active when it has rows and their loss is finite. `corrections` `[slots, 2]`,
    `ledger` `[slots, 5]` and `active` `[slots]` int32 are written.
    """
    loss = row_loss.sum(-1) / counts.clamp(min=1)
    finite = torch.isfinite(loss)
    present = counts > 0
    chosen = present & finite
    active.copy_(chosen)
    corrections.copy_(
        torch.where(chosen.unsqueeze(-1), adamw.bias_corrections(corrections), corrections)
    )
    ledger[:, LOSS_SUM] += torch.where(chosen, loss, 0)
    ledger[:, LOSS_LAST] = torch.where(chosen, loss, ledger[:, LOSS_LAST])
    ledger[:, STEPS] += chosen
    ledger[:, NON_FINITE] += present & ~finite
    ledger[:, ROWS] += torch.where(chosen, counts, 0)


def update(
    weights: Tensor,
    grads: Tensor,
    mean: Tensor,
    square: Tensor,
    shadow: Tensor,
    active: Tensor,
    corrections: Tensor,
    adamw: AdamW,
) -> None:
    """AdamW on the active rows of `[slots, size]` tensors, and their low-precision shadow."""
    for slot in active.nonzero().flatten().tolist():
        adamw.update(weights[slot], _wide(grads[slot]), mean[slot], square[slot], corrections[slot])
        shadow[slot] = weights[slot].to(shadow.dtype)

"""The steps of a distiller bank as Triton kernels: one launch each, no host sync.

Every function stands beside the one of the same name in `reference`, which says what it does.
Norms are `RmsNorm` or `Identity`; accumulation is in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tllm.consumers.esamp.distiller import AdamW
from tllm.consumers.esamp.norm import Norm, RmsNorm
from tllm.kernel_launch import RepeatedLaunch

# Block sizes do not follow the number of rows: a new size would compile in mid-generation.
_UPDATE_BLOCK = 2048
_GATE_TILE = 16
_LOSS_TILE = 64


def _norm_arguments(norm: Norm, placeholder: Tensor) -> tuple[Tensor, float, bool]:
    """Scale, epsilon and whether there is a norm at all."""
    if isinstance(norm, RmsNorm):
        return norm.weight, norm.eps, True
    return placeholder, 0.0, False


def _row_warps(hidden: int) -> int:
    return 8 if hidden > 2048 else 4


@RepeatedLaunch
@triton.jit(do_not_specialize_on_alignment=["index"])
def _gather_rows(rows, row_stride, index, out, hidden, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    row = tl.load(index + place).to(tl.int64)
    readable = columns < tl.where(row < 0, 0, hidden)
    values = tl.load(rows + row * row_stride + columns, mask=readable, other=0.0)
    tl.store(out + place * hidden + columns, values.to(out.dtype.element_ty), mask=inside)


def gather_rows(rows: Tensor, index: Tensor, out: Tensor) -> None:
    """See `reference.gather_rows`. The columns of `rows` must be contiguous."""
    hidden = out.shape[-1]
    block = min(4096, triton.next_power_of_2(hidden))
    grid = (index.numel(), triton.cdiv(hidden, block))
    _gather_rows[grid](rows, rows.stride(0), index, out, hidden, BLOCK=block)


@RepeatedLaunch
@triton.jit(do_not_specialize=["width"])
def _gate(projected, bias, bias_stride, out, width, rank, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = row // width
    column = tl.arange(0, BLOCK)
    inside = column < rank
    value = tl.load(projected + row * 2 * rank + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(projected + (row * 2 + 1) * rank + column, mask=inside, other=0.0).to(tl.float32)
    gate += tl.load(bias + slot * bias_stride + column, mask=inside, other=0.0).to(tl.float32)
    hidden = value * gate * tl.sigmoid(gate)
    tl.store(out + row * rank + column, hidden.to(out.dtype.element_ty), mask=inside)


def gate(projected: Tensor, gate_bias: Tensor, out: Tensor) -> None:
    slots, width, rank = out.shape
    _gate[(slots * width,)](
        projected,
        gate_bias,
        gate_bias.stride(0),
        out,
        width,
        rank,
        BLOCK=triton.next_power_of_2(rank),
        num_warps=1,
    )


@RepeatedLaunch
@triton.jit(do_not_specialize_on_alignment=["index"])
def _scatter_predictions(
    x, branch, scale, eps, index, out, hidden, HAS_NORM: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(index + place).to(tl.int64)
    if row < 0:
        return
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    z = tl.load(x + place * hidden + column, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(branch + place * hidden + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        z *= tl.rsqrt(tl.sum(z * z, axis=0) / hidden + eps)
        z *= tl.load(scale + column, mask=inside, other=0.0)
    tl.store(out + row * hidden + column, z.to(out.dtype.element_ty), mask=inside)


def scatter_predictions(x: Tensor, branch: Tensor, norm: Norm, index: Tensor, out: Tensor) -> None:
    hidden = x.shape[-1]
    scale, eps, has_norm = _norm_arguments(norm, x)
    _scatter_predictions[(index.numel(),)](
        x,
        branch,
        scale,
        eps,
        index,
        out,
        hidden,
        HAS_NORM=has_norm,
        BLOCK=triton.next_power_of_2(hidden),
        num_warps=_row_warps(hidden),
    )


@RepeatedLaunch
@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["counts"])
def _loss_backward(
    x,
    branch,
    target,
    counts,
    scale,
    eps,
    row_loss,
    grad,
    width,
    hidden,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + place // width)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    start = place * hidden
    if place % width >= count:
        tl.store(row_loss + place, 0.0)
        zeros = tl.zeros((BLOCK,), tl.float32).to(grad.dtype.element_ty)
        tl.store(grad + start + column, zeros, mask=inside)
        return
    z = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(branch + start + column, mask=inside, other=0.0).to(tl.float32)
    wanted = tl.load(target + start + column, mask=inside, other=0.0).to(tl.float32)
    factor = 2.0 / (hidden * count.to(tl.float32))
    if HAS_NORM:
        weight = tl.load(scale + column, mask=inside, other=0.0)
        inverse = tl.rsqrt(tl.sum(z * z, axis=0) / hidden + eps)
        error = z * inverse * weight - wanted
        pulled = error * factor * weight
        along = tl.sum(pulled * z, axis=0) / hidden
        pulled = inverse * (pulled - z * inverse * inverse * along)
    else:
        error = z - wanted
        pulled = error * factor
    tl.store(row_loss + place, tl.sum(error * error, axis=0) / hidden)
    tl.store(grad + start + column, pulled.to(grad.dtype.element_ty), mask=inside)


def loss_backward(
    x: Tensor,
    branch: Tensor,
    target: Tensor,
    counts: Tensor,
    norm: Norm,
    row_loss: Tensor,
    grad: Tensor,
) -> None:
    slots, width, hidden = x.shape
    scale, eps, has_norm = _norm_arguments(norm, x)
    _loss_backward[(slots * width,)](
        x,
        branch,
        target,
        counts,
        scale,
        eps,
        row_loss,
        grad,
        width,
        hidden,
        HAS_NORM=has_norm,
        BLOCK=triton.next_power_of_2(hidden),
        num_warps=_row_warps(hidden),
    )


@RepeatedLaunch
@triton.jit(do_not_specialize=["width"])
def _gate_backward(
    grad_hidden,
    projected,
    bias,
    bias_stride,
    grad_projected,
    grad_bias,
    grad_bias_stride,
    width,
    rank,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < rank
    shift = tl.load(bias + slot * bias_stride + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, TILE):
        place = first + tl.arange(0, TILE)
        mask = (place < width)[:, None] & inside[None, :]
        row = (slot * width + place)[:, None]
        values = row * 2 * rank + column[None, :]
        gates = values + rank
        grad = tl.load(grad_hidden + row * rank + column[None, :], mask=mask, other=0.0)
        grad = grad.to(tl.float32)
        value = tl.load(projected + values, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(projected + gates, mask=mask, other=0.0).to(tl.float32) + shift[None, :]
        sigmoid = tl.sigmoid(gate)
        grad_value = grad * gate * sigmoid
        grad_gate = grad * value * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        element = grad_projected.dtype.element_ty
        tl.store(grad_projected + values, grad_value.to(element), mask=mask)
        tl.store(grad_projected + gates, grad_gate.to(element), mask=mask)
        total += tl.sum(grad_gate, axis=0)
    where = grad_bias + slot * grad_bias_stride + column
    tl.store(where, total.to(grad_bias.dtype.element_ty), mask=inside)


def gate_backward(
    grad_hidden: Tensor,
    projected: Tensor,
    gate_bias: Tensor,
    grad_projected: Tensor,
    grad_bias: Tensor,
) -> None:
    slots, width, rank = grad_hidden.shape
    _gate_backward[(slots,)](
        grad_hidden,
        projected,
        gate_bias,
        gate_bias.stride(0),
        grad_projected,
        grad_bias,
        grad_bias.stride(0),
        width,
        rank,
        TILE=_GATE_TILE,
        BLOCK=triton.next_power_of_2(rank),
    )


@RepeatedLaunch
@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["counts", "corrections", "ledger"],
)
def _open_update(
    row_loss,
    counts,
    corrections,
    ledger,
    active,
    width,
    first_beta,
    first_rest,
    second_beta,
    second_rest,
    TILE: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + slot)
    total = tl.zeros((TILE,), tl.float32)
    for first in range(0, width, TILE):
        place = first + tl.arange(0, TILE)
        total += tl.load(row_loss + slot * width + place, mask=place < width, other=0.0)
    rows = tl.maximum(count, 1).to(tl.float32)
    loss = tl.sum(total, axis=0) / rows
    # False for NaN and for both infinities.
    finite = tl.abs(loss) < float("inf")
    chosen = (count > 0) & finite
    tl.store(active + slot, chosen.to(tl.int32))
    book = ledger + slot * 5
    if chosen:
        correction = corrections + slot * 2
        tl.store(correction, first_beta * tl.load(correction) + first_rest)
        tl.store(correction + 1, second_beta * tl.load(correction + 1) + second_rest)
        tl.store(book, tl.load(book) + loss)
        tl.store(book + 1, loss)
        tl.store(book + 2, tl.load(book + 2) + 1.0)
        tl.store(book + 4, tl.load(book + 4) + rows)
    elif count > 0:
        tl.store(book + 3, tl.load(book + 3) + 1.0)


def open_update(
    row_loss: Tensor,
    counts: Tensor,
    adamw: AdamW,
    corrections: Tensor,
    ledger: Tensor,
    active: Tensor,
) -> None:
    slots, width = row_loss.shape
    first, second = adamw.betas
    _open_update[(slots,)](
        row_loss,
        counts,
        corrections,
        ledger,
        active,
        width,
        first,
        1 - first,
        second,
        1 - second,
        TILE=_LOSS_TILE,
        num_warps=1,
    )


@RepeatedLaunch
@triton.jit(do_not_specialize_on_alignment=["corrections"])
def _update(
    weights,
    grads,
    mean,
    square,
    shadow,
    active,
    corrections,
    size,
    lr,
    keep,
    first_beta,
    first_rest,
    second_beta,
    second_rest,
    eps,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(1).to(tl.int64)
    if tl.load(active + slot) == 0:
        return
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < size
    place = slot * size + element
    grad = tl.load(grads + place, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(mean + place, mask=inside, other=0.0) * first_beta + grad * first_rest
    second = tl.load(square + place, mask=inside, other=0.0) * second_beta
    second += grad * grad * second_rest
    tl.store(mean + place, first, mask=inside)
    tl.store(square + place, second, mask=inside)
    first /= tl.load(corrections + slot * 2)
    second /= tl.load(corrections + slot * 2 + 1)
    weight = tl.load(weights + place, mask=inside, other=0.0) * keep
    weight -= lr * first / (tl.sqrt(second) + eps)
    tl.store(weights + place, weight, mask=inside)
    tl.store(shadow + place, weight.to(shadow.dtype.element_ty), mask=inside)


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
    """See `reference.update`. All tensors must be contiguous."""
    slots, size = weights.shape
    first, second = adamw.betas
    _update[(triton.cdiv(size, _UPDATE_BLOCK), slots)](
        weights,
        grads,
        mean,
        square,
        shadow,
        active,
        corrections,
        size,
        adamw.lr,
        1 - adamw.lr * adamw.weight_decay,
        first,
        1 - first,
        second,
        1 - second,
        adamw.eps,
        BLOCK=_UPDATE_BLOCK,
        num_warps=8,
    )

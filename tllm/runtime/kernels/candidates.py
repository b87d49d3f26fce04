"""Candidates of sampling: collect what survived the filters, project states on it, edit it."""

from __future__ import annotations

import torch

from tllm.runtime.kernels.backend import HAS_TRITON, uses_triton

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _collect_kernel(
        logits_ptr,
        logits_stride,
        rows_ptr,
        ids_ptr,
        values_ptr,
        counts_ptr,
        vocab,
        width,
        SPAN: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        out = tl.program_id(0)
        row = tl.load(rows_ptr + out).to(tl.int64)
        logits = logits_ptr + row * logits_stride
        first = tl.program_id(1) * SPAN
        for start in range(first, min(first + SPAN, vocab), BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
            keep = value > float("-inf")
            found = tl.sum(keep.to(tl.int32), axis=0)
            if found > 0:
                base = tl.atomic_add(counts_ptr + out, found)
                place = base + tl.cumsum(keep.to(tl.int32), axis=0) - 1
                store = keep & (place < width)
                tl.store(ids_ptr + out * width + place, at, mask=store)
                tl.store(values_ptr + out * width + place, value, mask=store)

    @triton.jit
    def _project_kernel(
        hidden_ptr,
        hidden_stride,
        rows_ptr,
        weight_ptr,
        weight_stride,
        ids_ptr,
        counts_ptr,
        out_ptr,
        width,
        first_id,
        last_id,
        HIDDEN: tl.constexpr,
        BLOCK_C: tl.constexpr,
        BLOCK_H: tl.constexpr,
    ):
        out_row = tl.program_id(0)
        count = tl.load(counts_ptr + out_row)
        begin = tl.program_id(1) * BLOCK_C
        row = tl.load(rows_ptr + out_row).to(tl.int64)
        if (begin < count) & (row >= 0):
            c = begin + tl.arange(0, BLOCK_C)
            ids = tl.load(ids_ptr + out_row * width + c, mask=c < count, other=-1)
            here = (ids >= first_id) & (ids < last_id)
            local = tl.where(here, ids - first_id, 0).to(tl.int64)
            total = tl.zeros((BLOCK_C,), tl.float32)
            for start in range(0, HIDDEN, BLOCK_H):
                h = start + tl.arange(0, BLOCK_H)
                inside = h < HIDDEN
                state = tl.load(hidden_ptr + row * hidden_stride + h, mask=inside, other=0.0).to(
                    tl.float32
                )
                weight = tl.load(
                    weight_ptr + local[:, None] * weight_stride + h[None, :],
                    mask=here[:, None] & inside[None, :],
                    other=0.0,
                ).to(tl.float32)
                total += tl.sum(weight * state[None, :], axis=1)
            tl.store(out_ptr + out_row * width + c, total, mask=c < count)

    @triton.jit
    def _edit_kernel(
        logits_ptr,
        logits_stride,
        rows_ptr,
        ids_ptr,
        delta_ptr,
        counts_ptr,
        width,
        BLOCK: tl.constexpr,
    ):
        of = tl.program_id(0)
        count = tl.load(counts_ptr + of)
        begin = tl.program_id(1) * BLOCK
        if begin < count:
            row = tl.load(rows_ptr + of).to(tl.int64)
            c = begin + tl.arange(0, BLOCK)
            mask = c < count
            ids = tl.load(ids_ptr + of * width + c, mask=mask, other=0)
            at = logits_ptr + row * logits_stride + ids
            delta = tl.load(delta_ptr + of * width + c, mask=mask, other=0.0)
            tl.store(at, tl.load(at, mask=mask) + delta, mask=mask)


def collect(
    logits: torch.Tensor, rows: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The finite entries of some rows, in no particular order.

    Args:
        logits: float32 `[n, vocab]`, `-inf` where filtered.
        rows: int32 `[rows]`, which rows to look at.
        width: the most candidates kept of a row.

    Returns:
        Token ids int32 `[rows, width]`, their logits float32 `[rows, width]` (`-inf` beyond the
        count) and the number found int32 `[rows]`, which may exceed `width`.
    """
    count, vocab = len(rows), logits.shape[1]
    values = torch.full((count, width), float("-inf"), device=logits.device)
    ids = torch.zeros((count, width), dtype=torch.int32, device=logits.device)
    found = torch.zeros(count, dtype=torch.int32, device=logits.device)
    if not uses_triton(logits.device):
        _collect_reference(logits, rows, ids, values, found)
        return ids, values, found
    block = min(4096, triton.next_power_of_2(vocab))
    span = 4 * block
    _collect_kernel[(count, triton.cdiv(vocab, span))](
        logits,
        logits.stride(0),
        rows,
        ids,
        values,
        found,
        vocab,
        width,
        SPAN=span,
        BLOCK=block,
        num_warps=8,
    )
    return ids, values, found


def _collect_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    found: torch.Tensor,
) -> None:
    width = ids.shape[1]
    chosen = logits[rows.long()]
    keep = torch.isfinite(chosen)
    found.copy_(keep.sum(1))
    row, token = keep.nonzero(as_tuple=True)
    place = keep.long().cumsum(1)[row, token] - 1
    fits = place < width
    row, token, place = row[fits], token[fits], place[fits]
    ids[row, place] = token.int()
    values[row, place] = chosen[row, token]


def project(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    first_id: int,
    ids: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """`weight[ids] . hidden[rows]` for the candidates only.

    Args:
        hidden: `[n, hidden]`.
        rows: int32 `[rows]`, the row of `hidden` for each row of `ids`; -1 gives 0.
        weight: `[local vocab, hidden]`, the LM head's rows from token `first_id` on.
        ids, counts: as `collect` gives them, counts no larger than the width.

    Returns:
        float32 `[rows, width]`; 0 for tokens that other ranks hold, and beyond the count.
    """
    if not uses_triton(hidden.device):
        return _project_reference(hidden, rows, weight, first_id, ids, counts)
    out = torch.zeros(ids.shape, dtype=torch.float32, device=hidden.device)
    width, size = ids.shape[1], hidden.shape[1]
    block_c = 8
    _project_kernel[(len(rows), triton.cdiv(width, block_c))](
        hidden,
        hidden.stride(0),
        rows,
        weight,
        weight.stride(0),
        ids,
        counts,
        out,
        width,
        first_id,
        first_id + weight.shape[0],
        HIDDEN=size,
        BLOCK_C=block_c,
        BLOCK_H=min(512, triton.next_power_of_2(size)),
        num_warps=4,
    )
    return out


def _project_reference(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    first_id: int,
    ids: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    valid = torch.arange(ids.shape[1], device=ids.device) < counts[:, None]
    here = valid & (ids >= first_id) & (ids < first_id + weight.shape[0]) & (rows >= 0)[:, None]
    row, place = here.nonzero(as_tuple=True)
    out = torch.zeros(ids.shape, dtype=torch.float32, device=hidden.device)
    local = weight[(ids[row, place] - first_id).long()].float()
    out[row, place] = (local * hidden[rows[row].long()].float()).sum(1)
    return out


def edit(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    delta: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Add `delta` to the candidates' entries of `logits`, in place."""
    width = ids.shape[1]
    if not uses_triton(logits.device):
        valid = torch.arange(width, device=ids.device) < counts[:, None]
        row, place = valid.nonzero(as_tuple=True)
        logits[rows[row].long(), ids[row, place].long()] += delta[row, place]
        return
    block = 128
    _edit_kernel[(len(rows), triton.cdiv(width, block))](
        logits,
        logits.stride(0),
        rows,
        ids,
        delta.contiguous(),
        counts,
        width,
        BLOCK=block,
        num_warps=4,
    )

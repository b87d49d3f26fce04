"""The logits that an LM head gives candidates of other states than those they were sampled from."""

from __future__ import annotations

import torch

from tllm.kernel_launch import RepeatedLaunch
from tllm.runtime.kernels.backend import HAS_TRITON, uses_triton
from tllm.runtime.kernels.candidates import CandidateRows

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def capped(logits, soft_cap):
        """tanh, in a form that does not overflow."""
        e = tl.exp(-2.0 * tl.abs(logits / soft_cap))
        bounded = soft_cap * (1.0 - e) / (1.0 + e)
        return tl.where(logits < 0, -bounded, bounded)

    @RepeatedLaunch
    @triton.jit
    def _project_kernel(
        hidden_ptr,
        hidden_stride,
        rows_ptr,
        weight_ptr,
        weight_stride,
        bias_ptr,
        ids_ptr,
        counts_ptr,
        out_ptr,
        width,
        first_id,
        last_id,
        HIDDEN: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        BLOCK_H: tl.constexpr,
    ):
        out_row = tl.program_id(0)
        count = tl.load(counts_ptr + out_row)
        row = tl.load(rows_ptr + out_row).to(tl.int64)
        if row >= 0:
            # One candidate at a time, its whole row in flight at once: this is all latency.
            h = tl.arange(0, BLOCK_H)
            inside = h < HIDDEN
            state = tl.load(hidden_ptr + row * hidden_stride + h, mask=inside, other=0.0)
            for c in range(tl.program_id(1), count, tl.num_programs(1)):
                token = tl.load(ids_ptr + out_row * width + c)
                here = (token >= first_id) & (token < last_id)
                local = tl.where(here, token - first_id, 0).to(tl.int64)
                size = tl.where(here, HIDDEN, 0)
                weight = tl.load(weight_ptr + local * weight_stride + h, mask=h < size, other=0.0)
                total = tl.sum(weight.to(tl.float32) * state.to(tl.float32), axis=0)
                if HAS_BIAS:
                    total += tl.load(bias_ptr + local, mask=here, other=0.0)
                tl.store(out_ptr + out_row * width + c, total)

    @RepeatedLaunch
    @triton.jit
    def _finish_kernel(
        raw_ptr,
        rows_ptr,
        logits_ptr,
        counts_ptr,
        temperature_ptr,
        out_ptr,
        width,
        scale,
        soft_cap,
        HAS_CAP: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0)
        count = tl.where(tl.load(rows_ptr + row) >= 0, tl.load(counts_ptr + row), 0)
        temperature = tl.load(temperature_ptr + row)
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = c < width
        valid = c < count
        raw = tl.load(raw_ptr + row * width + c, mask=valid, other=0.0)
        if HAS_CAP:
            raw = capped(raw, soft_cap)
        logits = tl.load(logits_ptr + row * width + c, mask=inside, other=0.0)
        value = tl.where(valid, raw * scale / temperature, logits)
        tl.store(out_ptr + row * width + c, value, mask=inside)


def project(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    first_id: int,
    found: CandidateRows,
) -> torch.Tensor:
    """`weight[ids] . hidden[rows] + bias[ids]` for the candidates only.

    Args:
        hidden: `[n, hidden]`.
        rows: int32 `[rows]`, the row of `hidden` for each row of candidates; -1 for none.
        weight: `[local vocab, hidden]`, the LM head's rows from token `first_id` on.
        bias: float32 `[local vocab]` or None.

    Returns:
        float32 `[rows, width]`: 0 for tokens that other ranks hold; undefined beyond the count
        and for rows without a state.
    """
    ids, counts = found.ids, found.counts
    if not uses_triton(hidden.device):
        return _project_reference(hidden, rows, weight, bias, first_id, found)
    out = torch.empty(ids.shape, dtype=torch.float32, device=hidden.device)
    size = hidden.shape[1]
    _project_kernel[(len(rows), 16)](
        hidden,
        hidden.stride(0),
        rows,
        weight,
        weight.stride(0),
        bias if bias is not None else weight,
        ids,
        counts,
        out,
        ids.shape[1],
        first_id,
        first_id + weight.shape[0],
        HIDDEN=size,
        HAS_BIAS=bias is not None,
        BLOCK_H=triton.next_power_of_2(size),
        num_warps=4,
    )
    return out


def _project_reference(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    first_id: int,
    found: CandidateRows,
) -> torch.Tensor:
    ids = found.ids
    valid = torch.arange(ids.shape[1], device=ids.device) < found.counts[:, None]
    here = valid & (ids >= first_id) & (ids < first_id + weight.shape[0]) & (rows >= 0)[:, None]
    row, place = here.nonzero(as_tuple=True)
    out = torch.zeros(ids.shape, dtype=torch.float32, device=hidden.device)
    local = (ids[row, place] - first_id).long()
    out[row, place] = (weight[local].float() * hidden[rows[row].long()].float()).sum(1)
    if bias is not None:
        out[row, place] += bias[local]
    return out


def finish(
    raw: torch.Tensor,
    rows: torch.Tensor,
    found: CandidateRows,
    temperature: torch.Tensor,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """Projected logits as the sampler would hold them: capped, scaled, over the temperature.

    Args:
        raw: as `project` gives it.
        rows: int32 `[rows]`, -1 for rows without a state, which get the sampler's own logits.
        temperature: float32 `[rows]`.

    Returns:
        float32 `[rows, width]`, `-inf` beyond the count.
    """
    width = raw.shape[1]
    if not uses_triton(raw.device):
        if soft_cap is not None:
            raw = soft_cap * torch.tanh(raw / soft_cap)
        valid = torch.arange(width, device=raw.device) < found.counts[:, None]
        valid &= (rows >= 0)[:, None]
        return torch.where(valid, raw * scale / temperature[:, None], found.logits)
    out = torch.empty_like(raw)
    _finish_kernel[(len(rows), triton.cdiv(width, 1024))](
        raw,
        rows,
        found.logits,
        found.counts,
        temperature,
        out,
        width,
        scale,
        soft_cap if soft_cap is not None else 1.0,
        HAS_CAP=soft_cap is not None,
        BLOCK=1024,
        num_warps=4,
    )
    return out

"""Guidance over the whole vocabulary, for rows with more candidates than a compact row holds."""

from __future__ import annotations

from functools import lru_cache

import torch

from tllm.kernel_launch import RepeatedLaunch
from tllm.runtime.kernels.backend import HAS_TRITON, uses_triton
from tllm.runtime.kernels.candidates import CandidateRows

# Fixed, whatever the batch: another size would be compiled in mid-generation.
_BLOCK_ROWS = 64
_BLOCK_TOKENS = 128
_BLOCK_HIDDEN = 64

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _guided_rows(m, found_ptr, states_ptr, strength_ptr, num_rows, width):
        """Which of some rows are wide and have a state to be guided away from."""
        inside = m < num_rows
        found = tl.load(found_ptr + m, mask=inside, other=0)
        state = tl.load(states_ptr + m, mask=inside, other=-1)
        strength = tl.load(strength_ptr + m, mask=inside, other=0.0)
        return (found > width) & (state >= 0) & (strength != 0.0)

    @RepeatedLaunch
    @triton.jit(do_not_specialize=["num_rows"])
    def _contrast_kernel(
        hidden_ptr,
        hidden_stride,
        states_ptr,
        strength_ptr,
        weight_ptr,
        weight_stride,
        bias_ptr,
        logits_ptr,
        logits_stride,
        rows_ptr,
        found_ptr,
        temperature_ptr,
        tally_ptr,
        num_rows,
        vocab,
        width,
        scale,
        soft_cap,
        HIDDEN: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        HAS_CAP: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        lanes = tl.arange(0, BLOCK_M)
        guided = 0
        for first_row in range(0, num_rows, BLOCK_M):
            wide = _guided_rows(
                first_row + lanes, found_ptr, states_ptr, strength_ptr, num_rows, width
            )
            guided += tl.sum(wide.to(tl.int32), axis=0)
        if guided == 0:
            return
        k = tl.arange(0, BLOCK_K)
        row_tiles = tl.cdiv(num_rows, BLOCK_M)
        tiles = row_tiles * tl.cdiv(vocab, BLOCK_N)
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            # Tiles of the same tokens follow each other: the head is read from memory once.
            m = (tile % row_tiles) * BLOCK_M + lanes
            n = (tile // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
            token = n < vocab
            wide = _guided_rows(m, found_ptr, states_ptr, strength_ptr, num_rows, width)
            state = tl.load(states_ptr + m, mask=wide, other=0).to(tl.int64)
            state_ptrs = hidden_ptr + state[:, None] * hidden_stride + k[None, :]
            # Beyond the vocabulary the last token's row is read, and what it gives is not stored.
            safe = tl.minimum(n, vocab - 1).to(tl.int64)
            token_ptrs = weight_ptr + safe[None, :] * weight_stride + k[:, None]
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for first in range(0, HIDDEN, BLOCK_K):
                left = k < HIDDEN - first
                states = tl.load(state_ptrs + first, mask=left[None, :], other=0.0)
                weight = tl.load(token_ptrs + first, mask=left[:, None], other=0.0)
                total = tl.dot(states.to(weight.dtype), weight, acc=total, input_precision="ieee")
            if HAS_BIAS:
                total += tl.load(bias_ptr + safe)[None, :]
            if HAS_CAP:
                # tanh, in a form that does not overflow
                e = tl.exp(-2.0 * tl.abs(total / soft_cap))
                bounded = soft_cap * (1.0 - e) / (1.0 + e)
                total = tl.where(total < 0, -bounded, bounded)
            strength = tl.load(strength_ptr + m, mask=wide, other=0.0)
            temperature = tl.load(temperature_ptr + m, mask=wide, other=1.0)
            row = tl.load(rows_ptr + m, mask=wide, other=0).to(tl.int64)
            places = logits_ptr + row[:, None] * logits_stride + n[None, :]
            mask = wide[:, None] & token[None, :]
            logits = tl.load(places, mask=mask, other=float("-inf"))
            delta = strength[:, None] * (logits - total * scale / temperature[:, None])
            # Neither infinite nor NaN, which compares as false.
            changed = mask & (tl.abs(delta) < float("inf")) & (delta != 0.0)
            tl.store(places, logits + delta, mask=changed)
            if tile < row_tiles:
                found = tl.load(found_ptr + m, mask=wide, other=0)
                tl.atomic_add(tally_ptr, tl.sum(found.to(tl.int64), axis=0))
            tl.atomic_add(tally_ptr + 1, tl.sum(tl.sum(changed.to(tl.int64), axis=1), axis=0))


def contrast(
    logits: torch.Tensor,
    found: CandidateRows,
    hidden: torch.Tensor,
    states: torch.Tensor,
    strength: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
    temperature: torch.Tensor,
    tally: torch.Tensor,
) -> None:
    """`l' = l + strength (l - d)` in place, in rows that have more candidates than `width`.

    `d = cap(hidden . weight + bias) scale / temperature`. Where no row has that many, the kernel
    reads nothing but their number. A delta that is not finite counts as 0.

    Args:
        logits: float32 `[n, vocab]`.
        found: the candidates of some of its rows.
        hidden: `[m, hidden]`, final states.
        states: int32 `[rows]`, the row of `hidden` for each row of `found`; -1 for none.
        strength: float32 `[rows]`; 0 leaves a row alone.
        weight: `[vocab, hidden]`, the LM head.
        bias: float32 `[vocab]` or None.
        soft_cap: `c` of `c tanh(d / c)`, or None.
        temperature: float32 `[rows]`.
        tally: int64 `[2]`: the candidates of these rows, and how many were changed, are added.
    """
    if not uses_triton(logits.device):
        wide = is_wide(found) & (states >= 0) & (strength != 0)
        if not wide.any():
            return
        dots = dense_dots(hidden[states[wide].long()], weight, bias)[:, : logits.shape[1]]
        raw = dots if soft_cap is None else soft_cap * torch.tanh(dots / soft_cap)
        predicted = raw * scale / temperature[wide, None]
        add_contrast(logits, found.rows[wide], predicted, strength[wide], tally)
        return
    # The head may be padded beyond the vocabulary.
    vocab, size = min(weight.shape[0], logits.shape[1]), weight.shape[1]
    _contrast_kernel[(_programs(logits.device),)](
        hidden,
        hidden.stride(0),
        states,
        strength,
        weight,
        weight.stride(0),
        bias if bias is not None else weight,
        logits,
        logits.stride(0),
        found.rows,
        found.found,
        temperature,
        tally,
        len(found.rows),
        vocab,
        found.ids.shape[1],
        scale,
        soft_cap if soft_cap is not None else 1.0,
        HIDDEN=size,
        HAS_BIAS=bias is not None,
        HAS_CAP=soft_cap is not None,
        BLOCK_M=_BLOCK_ROWS,
        BLOCK_N=_BLOCK_TOKENS,
        BLOCK_K=_BLOCK_HIDDEN,
        num_warps=4,
        num_stages=4,
    )


@lru_cache(maxsize=16)
def _programs(device: torch.device) -> int:
    """Two programs for each multiprocessor."""
    if device.type != "cuda":
        return 2
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def is_wide(found: CandidateRows) -> torch.Tensor:
    """`[rows]` bool, whether a row has more candidates than a compact row holds."""
    return found.found > found.ids.shape[1]


def dense_dots(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """What an LM head gives whole rows, float32 `[rows, vocab]`."""
    if hidden.device.type == "cuda" and weight.dtype != torch.float32:
        dots = torch.mm(hidden.to(weight.dtype), weight.t(), out_dtype=torch.float32)
    else:
        dots = hidden.float() @ weight.float().t()
    return dots if bias is None else dots + bias


def add_contrast(
    logits: torch.Tensor,
    rows: torch.Tensor,
    predicted: torch.Tensor,
    strength: torch.Tensor,
    tally: torch.Tensor,
) -> None:
    """`l' = l + strength (l - d)` in place, in whole rows.

    Args:
        logits: float32 `[n, vocab]`.
        rows: int32 `[rows]`, which of them.
        predicted: float32 `[rows, vocab]`, d.
        strength: float32 `[rows]`; 0 leaves a row alone.
        tally: int64 `[2]`: the finite logits of these rows, and how many were changed, are added.
    """
    at = rows.long()
    own = logits[at]
    delta = strength[:, None] * (own - predicted)
    delta = torch.where(torch.isfinite(delta), delta, 0.0)
    logits[at] = own + delta
    tally[0] += (torch.isfinite(own) & (strength != 0)[:, None]).sum()
    tally[1] += (delta != 0).sum()

"""Guidance away from other final states: in compact rows, and over the whole vocabulary in rows
with more candidates than a compact row holds."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from tllm.kernel_launch import RepeatedLaunch
from tllm.runtime.kernels.backend import HAS_TRITON, uses_triton
from tllm.runtime.kernels.candidates import CandidateRows, edit
from tllm.runtime.kernels.projection import finish, project

# Fixed, whatever the batch: another size would be compiled in mid-generation.
_BLOCK_ROWS = 64
_BLOCK_TOKENS = 128
_BLOCK_HIDDEN = 64
_SPLITS = 16
"""Programs that share the candidates of a compact row."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    from tllm.runtime.kernels.projection import capped

    @triton.jit
    def _guided_rows(m, found_ptr, states_ptr, strength_ptr, num_rows, width):
        """Which of some rows are wide and have a state to be guided away from."""
        inside = m < num_rows
        found = tl.load(found_ptr + m, mask=inside, other=0)
        state = tl.load(states_ptr + m, mask=inside, other=-1)
        strength = tl.load(strength_ptr + m, mask=inside, other=0.0)
        return (found > width) & (state >= 0) & (strength != 0.0)

    @RepeatedLaunch
    @triton.jit
    def _narrow_kernel(
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
        ids_ptr,
        values_ptr,
        found_ptr,
        temperature_ptr,
        tally_ptr,
        width,
        scale,
        soft_cap,
        HIDDEN: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        HAS_CAP: tl.constexpr,
        BLOCK_H: tl.constexpr,
    ):
        of = tl.program_id(0)
        found = tl.load(found_ptr + of)
        state = tl.load(states_ptr + of).to(tl.int64)
        strength = tl.load(strength_ptr + of)
        any_here = (found <= width) & (tl.program_id(1) < found)
        if any_here & (state >= 0) & (strength != 0.0):
            # One candidate at a time, its whole row in flight at once: this is all latency.
            h = tl.arange(0, BLOCK_H)
            inside = h < HIDDEN
            own = tl.load(hidden_ptr + state * hidden_stride + h, mask=inside, other=0.0)
            temperature = tl.load(temperature_ptr + of)
            row = tl.load(rows_ptr + of).to(tl.int64)
            changed = tl.full([], 0, tl.int32)
            for c in range(tl.program_id(1), found, tl.num_programs(1)):
                token = tl.load(ids_ptr + of * width + c).to(tl.int64)
                # As collected: the logits themselves change here.
                value = tl.load(values_ptr + of * width + c)
                weight = tl.load(weight_ptr + token * weight_stride + h, mask=inside, other=0.0)
                total = tl.sum(weight.to(tl.float32) * own.to(tl.float32), axis=0)
                if HAS_BIAS:
                    total += tl.load(bias_ptr + token)
                if HAS_CAP:
                    total = capped(total, soft_cap)
                delta = strength * (value - total * scale / temperature)
                # Neither infinite nor NaN, which compares as false.
                counts = (tl.abs(delta) < float("inf")) & (delta != 0.0)
                at = logits_ptr + row * logits_stride + token
                tl.store(at, tl.load(at) + delta, mask=counts)
                changed += counts.to(tl.int32)
            if tl.program_id(1) == 0:
                tl.atomic_add(tally_ptr, found.to(tl.int64))
            tl.atomic_add(tally_ptr + 1, changed.to(tl.int64))

    @RepeatedLaunch
    @triton.jit
    def _edit_narrow_kernel(
        logits_ptr,
        logits_stride,
        predicted_ptr,
        rows_ptr,
        ids_ptr,
        values_ptr,
        found_ptr,
        strength_ptr,
        tally_ptr,
        width,
        BLOCK: tl.constexpr,
    ):
        of = tl.program_id(0)
        found = tl.load(found_ptr + of)
        strength = tl.load(strength_ptr + of)
        if (found <= width) & (strength != 0.0):
            row = tl.load(rows_ptr + of).to(tl.int64)
            changed = tl.zeros((BLOCK,), tl.int32)
            for first in range(0, found, BLOCK):
                c = first + tl.arange(0, BLOCK)
                inside = c < found
                value = tl.load(values_ptr + of * width + c, mask=inside, other=0.0)
                other = tl.load(predicted_ptr + of * width + c, mask=inside, other=0.0)
                delta = strength * (value - other)
                counts = inside & (tl.abs(delta) < float("inf")) & (delta != 0.0)
                token = tl.load(ids_ptr + of * width + c, mask=inside, other=0)
                at = logits_ptr + row * logits_stride + token
                tl.store(at, tl.load(at, mask=counts) + delta, mask=counts)
                changed += counts.to(tl.int32)
            tl.atomic_add(tally_ptr, found.to(tl.int64))
            tl.atomic_add(tally_ptr + 1, tl.sum(changed, axis=0).to(tl.int64))

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
                total = capped(total, soft_cap)
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
    """`l' = l + strength (l - d)` in place, for every candidate.

    `d = cap(hidden . weight + bias) scale / temperature`. Rows that have more candidates than
    `width` are worked on whole; where there are none, that kernel reads nothing but their number.
    A delta that is not finite counts as 0.

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
        tally: int64 `[2]`: the candidates of the guided rows, and how many were changed, are added.
    """
    if not uses_triton(logits.device):
        arguments = (logits, found, hidden, states, strength, weight, bias, scale, soft_cap)
        _contrast_reference(*arguments, temperature, tally)
        return
    size, width = weight.shape[1], found.width
    pair = hidden, hidden.stride(0), states, strength, weight, weight.stride(0)
    rows = bias if bias is not None else weight, logits, logits.stride(0), found.rows
    factors = scale, soft_cap if soft_cap is not None else 1.0
    has = {"HIDDEN": size, "HAS_BIAS": bias is not None, "HAS_CAP": soft_cap is not None}
    _narrow_kernel[(len(found.rows), _SPLITS)](
        *(*pair, *rows, found.ids, found.values, found.found, temperature, tally, width, *factors),
        **has,
        BLOCK_H=triton.next_power_of_2(size),
        num_warps=4,
    )
    if width < logits.shape[1]:
        # The head may be padded beyond the vocabulary.
        sizes = len(found.rows), min(weight.shape[0], logits.shape[1]), width
        _contrast_kernel[(_programs(logits.device),)](
            *(*pair, *rows, found.found, temperature, tally, *sizes, *factors),
            **has,
            BLOCK_M=_BLOCK_ROWS,
            BLOCK_N=_BLOCK_TOKENS,
            BLOCK_K=_BLOCK_HIDDEN,
            num_warps=4,
            num_stages=4,
        )


def _contrast_reference(
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
    # Wide rows are guided, too: they are no overflow, and no kernel counts them as such.
    found = replace(found, overflow=torch.zeros_like(found.overflow))
    strength = torch.where(states >= 0, strength, 0.0)
    dots = project(hidden, states, weight, bias, 0, found)
    predicted = finish(dots, states, found, temperature, scale, soft_cap)
    contrast_narrow(logits, found, predicted, strength, tally)
    wide = is_wide(found) & (strength != 0)
    if wide.any():
        dots = dense_dots(hidden[states[wide].long()], weight, bias)[:, : logits.shape[1]]
        raw = dots if soft_cap is None else soft_cap * torch.tanh(dots / soft_cap)
        predicted = raw * scale / temperature[wide, None]
        add_contrast(logits, found.rows[wide], predicted, strength[wide], tally)


def contrast_narrow(
    logits: torch.Tensor,
    found: CandidateRows,
    predicted: torch.Tensor,
    strength: torch.Tensor,
    tally: torch.Tensor,
) -> None:
    """`l' = l + strength (l - d)` in place, in the rows whose candidates fit `width`.

    Args:
        predicted: float32 `[rows, width]`, d; undefined beyond the count.
        logits, found, strength, tally: as in `contrast`.
    """
    if not uses_triton(logits.device):
        delta = strength[:, None] * (found.logits - predicted)
        delta = torch.where(torch.isfinite(delta), delta, 0.0)
        edit(logits, found, delta)
        tally[0] += torch.where(strength != 0, found.counts, 0).sum()
        tally[1] += (delta != 0).sum()
        return
    _edit_narrow_kernel[(len(found.rows),)](
        logits,
        logits.stride(0),
        predicted,
        found.rows,
        found.ids,
        found.values,
        found.found,
        strength,
        tally,
        found.width,
        BLOCK=1024,
        num_warps=4,
    )


@lru_cache(maxsize=16)
def _programs(device: torch.device) -> int:
    """Two programs for each multiprocessor."""
    if device.type != "cuda":
        return 2
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def is_wide(found: CandidateRows) -> torch.Tensor:
    """`[rows]` bool, whether a row has more candidates than a compact row holds."""
    return found.found > found.width


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

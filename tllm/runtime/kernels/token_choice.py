"""Steering rows that depend on the token: from the plan's choices to rows of the tables."""

from __future__ import annotations

import torch

from tllm.kernel_launch import RepeatedLaunch
from tllm.runtime.kernels.backend import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    @RepeatedLaunch
    @triton.jit
    def _token_choice_kernel(steer_ptr, ids_ptr, heads_ptr, entries_ptr, BLOCK: tl.constexpr):
        at = steer_ptr + tl.program_id(0)
        choice = tl.load(at)
        if choice < -1:
            head = heads_ptr + (-2 - choice) * 3
            start = tl.load(head)
            count = tl.load(head + 1)
            token = tl.load(ids_ptr + tl.program_id(0)).to(tl.int32)
            found = tl.full((BLOCK,), 0, tl.int32)
            for first in range(0, count, BLOCK):
                i = first + tl.arange(0, BLOCK)
                entry = entries_ptr + (start + i) * 2
                same = tl.load(entry, mask=i < count, other=-1) == token
                row = tl.load(entry + 1, mask=same, other=-2)
                found = tl.maximum(found, tl.where(same, row + 2, 0))
            best = tl.max(found, axis=0)
            tl.store(at, tl.where(best > 0, best - 2, tl.load(head + 2)))


def launch(
    steer: torch.Tensor, token_ids: torch.Tensor, heads: torch.Tensor, entries: torch.Tensor
) -> None:
    """Put the steering row of each token in the place of its choice.

    Args:
        steer: int32 `[tokens]`; `-2 - i` stands for choice i, anything else stays.
        token_ids: `[tokens]`.
        heads: int32 `[choices, 3]`: first entry, number of entries, row of tokens without one.
        entries: int32 `[entries, 2]`: token, row.
    """
    _token_choice_kernel[(len(steer),)](steer, token_ids, heads, entries, BLOCK=128)


def reference(
    steer: torch.Tensor, token_ids: torch.Tensor, heads: torch.Tensor, entries: torch.Tensor
) -> None:
    """The kernel in PyTorch."""
    for choice in steer[steer < -1].unique().tolist():
        start, count, others = heads[-2 - choice].tolist()
        tokens, rows = entries[start : start + count].unbind(1)
        at = (steer == choice).nonzero().squeeze(1)
        same = token_ids[at, None] == tokens
        row = rows[same.int().argmax(1)] if count else torch.full_like(at, others)
        steer[at] = torch.where(same.any(1), row, others).to(steer.dtype)

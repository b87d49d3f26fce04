"""What patch rows put in the place of rows at a tap."""

from __future__ import annotations

import torch

from tllm.runtime.columns import Column, IntArray
from tllm.runtime.descriptor import Replacement, stage_field
from tllm.runtime.kernels.addresses import view_at
from tllm.runtime.kernels.backend import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    from tllm.runtime.kernels.addresses import elements_at

    PATCHES = tl.constexpr(stage_field("PATCHES"))
    REPLACEMENTS = tl.constexpr(stage_field("REPLACEMENTS"))
    REPLACEMENT_WORDS = tl.constexpr(int(Replacement.SIZE))
    SOURCE = tl.constexpr(int(Replacement.SOURCE))
    CHOSEN = tl.constexpr(int(Replacement.MASK))
    KEEP = tl.constexpr(int(Replacement.KEEP))
    SCALE = tl.constexpr(int(Replacement.SCALE))
    COUNT = tl.constexpr(int(Replacement.COUNT))

    @triton.jit
    def patch(value, fields, patch_row, offsets, inside, HIDDEN: tl.constexpr, dtype: tl.constexpr):
        """What a patch row puts in the place of a row `[BLOCK]` at one stage; padding stays 0.

        Args:
            fields: the descriptor, one word on for the second stage.

        Returns the row, and whether it changed.
        """
        int_ptr = tl.pointer_type(tl.int32)
        long_ptr = tl.pointer_type(tl.int64)
        float_ptr = tl.pointer_type(tl.float32)
        row_ptr = tl.pointer_type(dtype)
        first = tl.load(tl.load(fields + PATCHES).to(int_ptr) + patch_row)
        changed = 0
        if first >= 0:
            changed = 1
            words = tl.load(fields + REPLACEMENTS).to(int_ptr) + first * REPLACEMENT_WORDS
            count = tl.load(words + COUNT)
            for i in range(count):
                replacement = words + i * REPLACEMENT_WORDS
                source = tl.load((replacement + SOURCE).to(long_ptr))
                chosen = tl.load((replacement + CHOSEN).to(long_ptr))
                keep = tl.load((replacement + KEEP).to(float_ptr))
                scale = tl.load((replacement + SCALE).to(float_ptr))
                row = tl.load(
                    elements_at(source.to(row_ptr), offsets, HIDDEN),
                    mask=tl.where(source != 0, inside, False),
                    other=0.0,
                )
                changes = tl.load(
                    elements_at(chosen.to(row_ptr), offsets, HIDDEN),
                    mask=tl.where(chosen != 0, inside, False),
                    other=1.0,
                )
                # A row that is not kept may hold anything: 0 times infinity is no number.
                kept = tl.where(keep != 0.0, keep * value, 0.0)
                patched = kept + scale * row.to(tl.float32)
                value = tl.where(changes.to(tl.float32) != 0.0, patched, value)
        return value, changed


def put_reference(
    value: torch.Tensor, planned: IntArray, at_stage: dict[str, int], dtype: torch.dtype
) -> list[int]:
    """Do what patch rows say; returns which rows have changed."""
    hidden, size = value.shape[1], int(Replacement.SIZE)
    changed = []
    for i, row in enumerate(planned[Column.PATCH.plan_row].tolist()):
        if row < 0:
            continue
        first = int(view_at(at_stage["PATCHES"] + 4 * row, torch.int32, 1))
        if first < 0:
            continue
        changed.append(i)
        begin = at_stage["REPLACEMENTS"] + 4 * size * first
        count = int(view_at(begin, torch.int32, size)[Replacement.COUNT])
        for words in view_at(begin, torch.int32, count, size):
            source, mask = words[: Replacement.KEEP].view(torch.int64).tolist()
            keep, scale = words[Replacement.KEEP : Replacement.COUNT].view(torch.float32).tolist()
            patched = keep * value[i] if keep else torch.zeros_like(value[i])
            if source:
                patched = patched + scale * view_at(source, dtype, hidden).float()
            stays = (
                view_at(mask, dtype, hidden) == 0 if mask else torch.zeros(hidden, dtype=torch.bool)
            )
            value[i] = torch.where(stays, value[i], patched)
    return changed

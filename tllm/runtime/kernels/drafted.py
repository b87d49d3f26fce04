"""What drafted rows made of the latches of their sequences, when their tokens were drawn."""

from __future__ import annotations

from enum import IntEnum

import torch

from tllm.kernel_launch import RepeatedLaunch
from tllm.runtime.kernels.backend import HAS_TRITON
from tllm.runtime.latches import NEVER
from tllm.spec.gates import MAX_GATES


class DraftedWord(IntEnum):
    """What the kernel is told of a sequence that has a latch, and drafts in this step.

    Attributes:
        SEQUENCE: its place in the batch.
        LATCH: its row of `Latches.tables`.
        FIRST: position of the last token that was its own before.
        DRAFTS: how many drafted tokens follow.
        NEXT: a bit for each of its gates of scope `next`.
    """

    SEQUENCE = 0
    LATCH = 1
    FIRST = 2
    DRAFTS = 3
    NEXT = 4


if HAS_TRITON:
    import triton
    import triton.language as tl

    GATES = tl.constexpr(MAX_GATES)
    NOWHERE = tl.constexpr(NEVER)
    WORDS = tl.constexpr(len(DraftedWord))
    SEQUENCE = tl.constexpr(int(DraftedWord.SEQUENCE))
    LATCH = tl.constexpr(int(DraftedWord.LATCH))
    FIRST = tl.constexpr(int(DraftedWord.FIRST))
    DRAFTS = tl.constexpr(int(DraftedWord.DRAFTS))
    NEXT = tl.constexpr(int(DraftedWord.NEXT))

    @RepeatedLaunch
    @triton.jit
    def _settle_kernel(words_ptr, drawn_ptr, cells_ptr, held_ptr):
        words = words_ptr + tl.program_id(0) * WORDS
        drawn_at = drawn_ptr + tl.load(words + SEQUENCE)
        low, drafts = tl.load(words + FIRST), tl.load(words + DRAFTS)
        numbers = tl.arange(0, GATES)
        of_next = ((tl.load(words + NEXT) >> numbers) & 1) != 0
        cells = cells_ptr + tl.load(words + LATCH).to(tl.int64) * (2 * GATES) + numbers
        held = held_ptr + tl.load(cells + GATES, mask=of_next, other=0)
        first = tl.load(cells)
        fired = tl.min(tl.where(first >= low, first, NOWHERE), axis=0)
        for position in range(low, low + drafts):
            bits = tl.load(held + position // 32, mask=of_next, other=0)
            holds = tl.max((bits >> (position % 32)) & 1, axis=0)
            fired = tl.minimum(fired, tl.where(holds != 0, position, NOWHERE))
        drawn = tl.load(drawn_at)
        drawn = tl.minimum(drawn, tl.where(fired == NOWHERE, drafts, fired - low) + 1)
        tl.store(drawn_at, drawn)
        end, one = low + drawn, tl.full((GATES,), 1, tl.int32)
        tl.store(cells, tl.where(first >= end, NOWHERE, first))
        for position in range(end, low + drafts + 1):
            bits = tl.load(held + position // 32, mask=of_next, other=0)
            tl.store(held + position // 32, bits & ~(one << (position % 32)), mask=of_next)


def launch(
    words: torch.Tensor, drawn: torch.Tensor, cells: torch.Tensor, held: torch.Tensor
) -> None:
    """Keep no token after the first row by which a latch changed, and forget what later rows did.

    Rows of one pass are computed together: those after that row have not seen what it found, so
    they are computed again. Those of rejected drafts are nobody's.

    Args:
        words: int32 `[sequences, DraftedWord]`, of those that have a latch and drafts.
        drawn: int32 `[sequences of the batch]`, how many tokens are drawn for each; changed.
        cells, held: what sequences remember (`Latches.tables`); changed.
    """
    _settle_kernel[(len(words),)](words, drawn, cells, held)


def reference(
    words: torch.Tensor, drawn: torch.Tensor, cells: torch.Tensor, held: torch.Tensor
) -> None:
    """The kernel in PyTorch, for host tensors."""
    flat = held.view(-1)
    for sequence, latch, low, drafts, following in words.tolist():
        firsts, starts = cells[latch]
        of_next = [int(starts[n]) for n in range(MAX_GATES) if following >> n & 1]
        fired = [first for first in firsts.tolist() if low <= first != NEVER]
        for position in range(low, low + drafts):
            words_at = (int(flat[start + position // 32]) for start in of_next)
            if any(word >> position % 32 & 1 for word in words_at):
                fired.append(position)
        kept = min(int(drawn[sequence]), min(fired, default=low + drafts) - low + 1)
        drawn[sequence] = kept
        firsts[firsts >= low + kept] = NEVER
        for position in range(low + kept, low + drafts + 1):
            bit = 1 << position % 32
            for start in of_next:
                flat[start + position // 32] &= ~(bit - (bit >> 31 << 32))

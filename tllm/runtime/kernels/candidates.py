"""Candidates of sampling: collect what survived the filters, and edit its logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from tllm.kernel_launch import RepeatedLaunch
from tllm.runtime.kernels.backend import HAS_TRITON, uses_triton

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _keep(value, at, row, ids_ptr, values_ptr, found_ptr, width):
        """Put what may be drawn of some logits behind what a compact row has, as far as it fits."""
        keep = value > float("-inf")
        found = tl.sum(keep.to(tl.int32), axis=0)
        if found > 0:
            base = tl.atomic_add(found_ptr + row, found)
            place = base + tl.cumsum(keep.to(tl.int32), axis=0) - 1
            store = keep & (place < width)
            tl.store(ids_ptr + row * width + place, at, mask=store)
            tl.store(values_ptr + row * width + place, value, mask=store)

    @RepeatedLaunch
    @triton.jit
    def _open_filter_kernel(
        logits_ptr,
        logits_stride,
        index_ptr,
        temperature_ptr,
        min_p_ptr,
        asked_ptr,
        found_ptr,
        max_ptr,
        vocab,
        SPAN: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        if tl.program_id(1) == 0:
            # Once for each row: the engine's tables may lie in the host's memory.
            entry = tl.load(index_ptr + row)
            tl.store(asked_ptr + row, tl.load(temperature_ptr + entry))
            tl.store(asked_ptr + tl.num_programs(0) + row, tl.load(min_p_ptr + entry))
            tl.store(found_ptr + row, 0)
        first = tl.program_id(1) * SPAN
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(first, min(first + SPAN, vocab), BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(
                logits_ptr + row * logits_stride + at, mask=at < vocab, other=float("-inf")
            )
            best = tl.maximum(best, value.to(tl.float32))
        tl.store(max_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.max(best, axis=0))

    @RepeatedLaunch
    @triton.jit
    def _filter_kernel(
        logits_ptr,
        logits_stride,
        out_ptr,
        out_stride,
        max_ptr,
        asked_ptr,
        ids_ptr,
        values_ptr,
        found_ptr,
        vocab,
        width,
        SPAN: tl.constexpr,
        BLOCK: tl.constexpr,
        MAX_BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        temperature = tl.load(asked_ptr + row)
        temperature = tl.where(temperature == 0.0, 1.0, temperature)
        min_p = tl.load(asked_ptr + tl.num_programs(0) + row)
        splits = tl.num_programs(1)
        m = tl.arange(0, MAX_BLOCK)
        maxima = tl.load(max_ptr + row * splits + m, mask=m < splits, other=float("-inf"))
        threshold = tl.max(maxima, axis=0) / temperature + tl.log(min_p)
        first = tl.program_id(1) * SPAN
        for start in range(first, min(first + SPAN, vocab), BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < vocab
            value = tl.load(
                logits_ptr + row * logits_stride + at, mask=inside, other=float("-inf")
            ).to(tl.float32)
            value = value / temperature
            value = tl.where(value < threshold, float("-inf"), value)
            tl.store(out_ptr + row * out_stride + at, value, mask=inside)
            _keep(value, at, row, ids_ptr, values_ptr, found_ptr, width)

    @RepeatedLaunch
    @triton.jit
    def _collect_kernel(
        logits_ptr,
        logits_stride,
        rows_ptr,
        ids_ptr,
        values_ptr,
        found_ptr,
        vocab,
        width,
        SPAN: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        out = tl.program_id(0)
        row = tl.load(rows_ptr + out).to(tl.int64)
        first = tl.program_id(1) * SPAN
        for start in range(first, min(first + SPAN, vocab), BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(
                logits_ptr + row * logits_stride + at, mask=at < vocab, other=float("-inf")
            )
            _keep(value, at, out, ids_ptr, values_ptr, found_ptr, width)

    @RepeatedLaunch
    @triton.jit
    def _limit_kernel(found_ptr, counts_ptr, overflow_ptr, values_ptr, width, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        found = tl.load(found_ptr + row)
        count = tl.where(found > width, 0, found)
        if tl.program_id(1) == 0:
            tl.store(counts_ptr + row, count)
            if found > width:
                tl.atomic_add(overflow_ptr, 1)
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(values_ptr + row * width + c, float("-inf"), mask=(c >= count) & (c < width))

    @RepeatedLaunch
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
        row = tl.load(rows_ptr + of).to(tl.int64)
        for begin in range(0, count, BLOCK):
            c = begin + tl.arange(0, BLOCK)
            mask = c < count
            ids = tl.load(ids_ptr + of * width + c, mask=mask, other=0)
            at = logits_ptr + row * logits_stride + ids
            delta = tl.load(delta_ptr + of * width + c, mask=mask, other=0.0)
            tl.store(at, tl.load(at, mask=mask) + delta, mask=mask)


@dataclass(eq=False)
class CandidateRows:
    """The finite entries of some rows of logits, in no particular order.

    Attributes:
        rows: int32 `[rows]`, the row of the logits that each row here is.
        ids: int32 `[rows, width]`, token ids; meaningless from `counts` on.
        values: float32 `[rows, width]`, as `logits`, but undefined from `counts` on.
        found: int32 `[rows]`, how many finite entries each row has.
        overflow: int32 `[1]`: rows that have more than `width` are counted here, when somebody
            asks for `counts` or `logits`.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor
    found: torch.Tensor
    overflow: torch.Tensor

    @property
    def width(self) -> int:
        """The most candidates that a row may have."""
        return self.ids.shape[1]

    @property
    def counts(self) -> torch.Tensor:
        """int32 `[rows]`; 0 for a row that has more than `width`."""
        return self._limited[0]

    @property
    def logits(self) -> torch.Tensor:
        """float32 `[rows, width]`, `-inf` from `counts` on."""
        return self._limited[1]

    @cached_property
    def _limited(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows with too many are given up, and what lies beyond the count is blanked."""
        width = self.width
        if not uses_triton(self.ids.device):
            wide = self.found > width
            self.overflow.add_(wide.sum())
            counts = self.found.masked_fill(wide, 0)
            valid = torch.arange(width, device=counts.device) < counts[:, None]
            return counts, self.values.masked_fill(~valid, float("-inf"))
        counts = torch.empty_like(self.found)
        _limit_kernel[(len(counts), triton.cdiv(width, 1024))](
            self.found, counts, self.overflow, self.values, width, BLOCK=1024, num_warps=4
        )
        return counts, self.values

    def select(self, rows: torch.Tensor) -> CandidateRows:
        """Some of the rows (int32 indices into these)."""
        at = rows.long()
        return CandidateRows(rows, self.ids[at], self.values[at], self.found[at], self.overflow)


def collect(
    logits: torch.Tensor, rows: torch.Tensor, width: int, overflow: torch.Tensor
) -> CandidateRows:
    """Gather the finite entries of some rows.

    Args:
        logits: float32 `[n, vocab]`, `-inf` where filtered.
        rows: int32 `[rows]`, which rows to look at.
        width: the most candidates a row may have.
        overflow: int32 `[1]`, counts rows that had more.
    """
    if not uses_triton(logits.device):
        return _collect_reference(logits, rows, width, overflow)
    ids, values, found = _buffers(len(rows), width, logits.device)
    found.zero_()
    block, splits = _blocks(logits.shape[1])
    _collect_kernel[(len(rows), splits)](
        logits,
        logits.stride(0),
        rows,
        ids,
        values,
        found,
        logits.shape[1],
        width,
        SPAN=_BLOCKS_PER_PROGRAM * block,
        BLOCK=block,
        num_warps=8,
    )
    return CandidateRows(rows, ids, values, found, overflow)


def filter_and_collect(
    logits: torch.Tensor,
    rows: torch.Tensor,
    index: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    width: int,
    overflow: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, CandidateRows]:
    """Temperature and min-p as vLLM applies them, gathering what is left in the same pass.

    `l' = l / T`, then `-inf` where `l' < max(l') + log(min_p)`.

    Args:
        logits: `[n, vocab]`, any float dtype; not changed.
        rows: int32 `[n]`, 0 to n - 1.
        index: int32 `[n]`, the entry of the following two that is each row's.
        temperature: float32; 0 (greedy) divides by nothing.
        min_p: float32; 0 filters nothing.
        width, overflow: as in `collect`.

    Returns:
        The processed logits, float32 `[n, vocab]`, the temperature of each row, and the
        candidates of all of them.
    """
    count, vocab = logits.shape
    if not uses_triton(logits.device):
        processed, temperature = _filter_reference(logits, temperature[index], min_p[index])
        return processed, temperature, _collect_reference(processed, rows, width, overflow)
    processed = torch.empty((count, vocab), dtype=torch.float32, device=logits.device)
    ids, values, found = _buffers(count, width, logits.device)
    block, splits = _blocks(vocab)
    span = _BLOCKS_PER_PROGRAM * block
    maxima = torch.empty((count, splits), dtype=torch.float32, device=logits.device)
    asked = torch.empty((2, count), dtype=torch.float32, device=logits.device)
    _open_filter_kernel[(count, splits)](
        logits,
        logits.stride(0),
        index,
        temperature,
        min_p,
        asked,
        found,
        maxima,
        vocab,
        SPAN=span,
        BLOCK=block,
        num_warps=8,
    )
    _filter_kernel[(count, splits)](
        logits,
        logits.stride(0),
        processed,
        processed.stride(0),
        maxima,
        asked,
        ids,
        values,
        found,
        vocab,
        width,
        SPAN=span,
        BLOCK=block,
        MAX_BLOCK=triton.next_power_of_2(splits),
        num_warps=8,
    )
    return processed, asked[0], CandidateRows(rows, ids, values, found, overflow)


def _filter_reference(
    logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    divisor = torch.where(temperature == 0.0, 1.0, temperature)
    processed = logits.float() / divisor[:, None]
    threshold = processed.max(dim=1).values + min_p.log()
    processed.masked_fill_(processed < threshold[:, None], float("-inf"))
    return processed, temperature


_BLOCKS_PER_PROGRAM = 4


def _blocks(vocab: int) -> tuple[int, int]:
    """Entries a program handles at a time, and the number of programs to a row."""
    block = min(4096, triton.next_power_of_2(vocab))
    return block, triton.cdiv(vocab, _BLOCKS_PER_PROGRAM * block)


def _buffers(
    count: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, values and number found, for kernels to fill."""
    return (
        torch.empty((count, width), dtype=torch.int32, device=device),
        torch.empty((count, width), dtype=torch.float32, device=device),
        torch.empty(count, dtype=torch.int32, device=device),
    )


def _collect_reference(
    logits: torch.Tensor, rows: torch.Tensor, width: int, overflow: torch.Tensor
) -> CandidateRows:
    chosen = logits[rows.long()]
    keep = torch.isfinite(chosen)
    row, token = keep.nonzero(as_tuple=True)
    place = keep.long().cumsum(1)[row, token] - 1
    row, token, place = (each[place < width] for each in (row, token, place))
    ids = torch.zeros((len(rows), width), dtype=torch.int32, device=logits.device)
    values = torch.zeros((len(rows), width), device=logits.device)
    ids[row, place] = token.int()
    values[row, place] = chosen[row, token]
    return CandidateRows(rows, ids, values, keep.sum(1).int(), overflow)


def edit(logits: torch.Tensor, found: CandidateRows, delta: torch.Tensor) -> None:
    """Add `delta` (float32 `[rows, width]`) to the candidates' entries of `logits`, in place."""
    width = found.ids.shape[1]
    if not uses_triton(logits.device):
        valid = torch.arange(width, device=logits.device) < found.counts[:, None]
        row, place = valid.nonzero(as_tuple=True)
        at = found.rows[row].long(), found.ids[row, place].long()
        logits[at] += delta[row, place]
        return
    _edit_kernel[(len(found.rows),)](
        logits,
        logits.stride(0),
        found.rows,
        found.ids,
        delta.contiguous(),
        found.counts,
        width,
        BLOCK=128,
        num_warps=4,
    )

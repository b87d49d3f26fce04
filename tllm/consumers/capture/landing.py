"""Where captured rows are put on the host: in memory for results, each sequence's together.

Rows that are results are needed by sequence, and arrive by step. Where memory of earlier results is
free again, a GPU puts them into their places by itself, and nobody copies them on the host. Where
it is not, the pages of new memory are allocated while the rows are computed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import is_

import numpy as np
import torch

from tllm.ports import RequestInfo, RowMeta
from tllm.result_memory import ResultMemory

_FEWEST, _MOST = 4, 64
"""Steps of a batch that share memory: as many as the batch has lasted for, within these."""

_LASTING = 2
"""Steps after which a batch is expected to go on: where many requests come and go, most batches do
not, and memory for steps that never come would be shared by rows that lie far apart."""

_SLAB_BYTES = 128 << 20
"""Bytes from which on they are fewer."""

_LEAST_BYTES = 4 << 20
"""Memory for rows of prompts that is worth an export of its own."""

_FILE_BYTES = 64 << 20
"""Rows of several sequences' prompts that share a file of results."""

_Run = tuple[int, int]
"""The first of some consecutive rows, and the one after the last."""


class Slab:
    """Memory for some steps of a batch in which each sequence has one row.

    Attributes:
        rows: `[sequences, steps, places, hidden]` on the host.
        steps: how many have their places.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.steps = 0

    @property
    def is_full(self) -> bool:
        return self.steps == self.rows.shape[1]


@dataclass(frozen=True, eq=False)
class Landed:
    """Rows lie where they stay.

    Attributes:
        slab: what they are a step of; None for rows that lie as they came.
        step: which one.
    """

    slab: Slab | None = None
    step: int = 0


@dataclass(frozen=True, eq=False)
class LandingPart:
    """Consecutive rows of a step.

    Attributes:
        first, stop: which of them.
        into: `[rows, places, hidden]` on the host; None where there is no memory for them.
        landed: how they lie there.
    """

    first: int
    stop: int
    into: torch.Tensor | None = None
    landed: Landed | None = None


@dataclass(eq=False)
class _Batch:
    """Steps of the same sequences, one row each.

    Attributes:
        lasted: how many there were.
        ask_at: when memory is asked for again.
    """

    requests: Sequence[RequestInfo]
    lasted: int = 0
    ask_at: int = _LASTING
    slab: Slab | None = None


class Landing:
    """Finds places for the rows of steps, on the thread that runs the engine.

    Args:
        device: where rows come from.
    """

    def __init__(self, memory: ResultMemory, device: torch.device) -> None:
        self._memory = memory
        self._device = device
        self._batches: dict[Hashable, _Batch] = {}

    def parts(self, kind: Hashable, meta: RowMeta, rows: torch.Tensor) -> Sequence[LandingPart]:
        """Where the rows of a step go, in their order; nothing where there is no memory for any.

        Args:
            kind: of hook points and dtype; the rows of a kind are alike.
            meta: who they belong to.
            rows: `[rows, places, hidden]`.
        """
        if len(rows) == len(meta.requests):
            return self._step(kind, meta.requests, rows)
        if len(rows) > 4 * len(meta.requests) and is_grouped(meta.request_index):
            parts = list(self._prompts(rows))
            if parts[-1].into is None:
                each = rows.nbytes // len(rows)
                runs = runs_by_file(meta.request_index[parts[-1].first :], each)
                self._memory.make_ready([(run[-1][1] - run[0][0]) * each for run in runs])
            return () if parts[0].into is None else parts
        return ()

    def forget(self) -> None:
        """The batch is another one: what is left of its memory goes back with its results."""
        self._batches.clear()

    def _step(
        self, kind: Hashable, requests: Sequence[RequestInfo], rows: torch.Tensor
    ) -> Sequence[LandingPart]:
        batch = self._batches.get(kind)
        if not (batch and (batch.requests is requests or _are_same(batch.requests, requests))):
            batch = self._batches[kind] = _Batch(requests)
        if batch.slab is None and batch.lasted >= batch.ask_at:
            batch.slab = self._slab(rows, batch.lasted)
            batch.ask_at = 2 * batch.lasted + 1
        batch.lasted += 1
        slab = batch.slab
        if slab is None:
            return ()
        step = slab.steps
        slab.steps += 1
        if slab.is_full:
            batch.slab, batch.ask_at = None, 0
        return (LandingPart(0, len(rows), slab.rows[:, step], Landed(slab, step)),)

    def _slab(self, rows: torch.Tensor, lasted: int) -> Slab | None:
        """Memory for as many steps again as there were, more or less."""
        step = rows.nbytes
        wanted = min(max(_FEWEST, lasted), _MOST, max(1, _SLAB_BYTES // step))
        raw = self._memory.used_before(step, 4 * wanted * step, self._device)
        if raw is None:
            return None
        steps = min(_MOST, len(raw) // step)
        own = raw[: steps * step].view(rows.dtype)
        return Slab(own.view(len(rows), steps, *rows.shape[1:]))

    def _prompts(self, rows: torch.Tensor) -> Iterator[LandingPart]:
        each = math.prod(rows.shape[1:]) * rows.element_size()
        first = 0
        while first < len(rows):
            left = (len(rows) - first) * each
            least = max(each, min(left, _LEAST_BYTES))
            raw = self._memory.used_before(least, max(2 * left, _LEAST_BYTES), self._device)
            if raw is None:
                yield LandingPart(first, len(rows))
                return
            stop = min(len(rows), first + len(raw) // each)
            own = raw[: (stop - first) * each].view(rows.dtype)
            into = own.view(stop - first, *rows.shape[1:])
            yield LandingPart(first, stop, into, Landed())
            first = stop


def _are_same(before: Sequence[RequestInfo], now: Sequence[RequestInfo]) -> bool:
    """Whether they are the same sequences, in the same order. Where a batch has several capture
    programs, they are joined anew in each step."""
    return len(before) == len(now) and all(map(is_, before, now))


def runs_by_file(index: np.ndarray, each: int) -> Iterator[list[_Run]]:
    """The rows of each sequence, as many sequences together as one file of results is for: few
    large files come back as memory that many rows land in.

    Args:
        index: which sequence a row belongs to; those of one lie together.
        each: bytes of a row.
    """
    runs: list[_Run] = []
    for low, high in runs_of(index):
        if runs and (high - runs[0][0]) * each > _FILE_BYTES:
            yield runs
            runs = []
        runs.append((low, high))
    yield runs


def runs_of(index: np.ndarray) -> list[_Run]:
    """Where the rows of each sequence lie, which lie together."""
    edges = [*np.flatnonzero(np.diff(index, prepend=-1)).tolist(), len(index)]
    return list(pairwise(edges))


def is_grouped(index: np.ndarray) -> bool:
    """Whether the rows of each sequence lie together."""
    changes = index[np.flatnonzero(np.diff(index, prepend=-1))]
    return len(changes) == len(set(changes.tolist()))

"""Reductions of the rows of each sequence, kept on the device while it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from tllm.ports import ConsumerContext, PortBundle, RequestInfo, RowMeta
from tllm.spec.capture import Reduction

IntArray = npt.NDArray[np.int32]

#: Steps whose generated rows wait before they are reduced. A token that the engine computed ahead
#: of a sequence's end is cut when the end is known; from a sum it could not be taken out again.
AHEAD = 8


@dataclass(eq=False)
class _Place:
    """Where a running sequence is reduced.

    Attributes:
        row: of the table, for the prompt; the generated tokens have the next.
        positions: of the rows that were reduced, by phase.
        last: position of the row that the table holds, by phase, of the reduction `last`. Of equal
            positions, the later row counts: a prompt that grows drops tokens.
    """

    row: int
    positions: tuple[list[IntArray], list[IntArray]] = field(default_factory=lambda: ([], []))
    last: list[int] = field(default_factory=lambda: [-1, -1])


@dataclass(eq=False)
class _Bundle:
    """Generated rows that wait. Of `meta.requests`, those in `ended` have taken theirs."""

    meta: RowMeta
    rows: torch.Tensor
    ended: set[int] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class Taken:
    """What is left of a sequence when it ends; the tensors are on the device.

    Attributes:
        positions: of the reduced rows of prompt and generation.
        totals: `[2, places, hidden]` float32.
        tail_positions: of the rows that were not reduced yet.
        tail: `[rows, places, hidden]`, or None.
    """

    positions: tuple[IntArray, IntArray]
    totals: torch.Tensor
    tail_positions: IntArray
    tail: torch.Tensor | None


class Reductions:
    """One reduction at the same places for any number of sequences.

    Every method enqueues work on the current stream, always the same, and waits for nothing.

    Args:
        how: what is done; `mean` sums.
        places, hidden, device: shape of a row, and where it lives.
    """

    def __init__(self, how: Reduction, places: int, hidden: int, device: torch.device) -> None:
        self._how = how
        self._shape = places, hidden
        self._device = device
        self._table = self._empty(16)
        self._free = list(range(14, -1, -2))
        self._places: dict[Hashable, _Place] = {}
        self._waiting: deque[_Bundle] = deque()

    def _empty(self, rows: int) -> torch.Tensor:
        return torch.empty((rows, *self._shape), dtype=torch.float32, device=self._device)

    @property
    def rows(self) -> int:
        """Of the table; two for each sequence that there was room for at once."""
        return len(self._table)

    @property
    def unused(self) -> bool:
        return not (self._places or self._waiting)

    def add(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Add the entry `rows` `[rows, places, hidden]` of one phase; it may be a view of the
        ring."""
        meta, rows = bundle.meta, bundle.entries["rows"]
        if bundle.key["phase"] == "prefill":
            self._fold(_Bundle(meta, rows), 0, ctx)
            return
        self._waiting.append(_Bundle(meta, rows.clone()))
        if len(self._waiting) > AHEAD:
            self._fold(self._waiting.popleft(), 1, ctx)

    def take(self, request: RequestInfo, ctx: ConsumerContext) -> Taken:
        """The sequence's reductions; its place in the table is free afterwards."""
        prompt_id, sample = request.prompt_id, request.sample_index
        tail, tail_positions = [], []
        for bundle in self._waiting:
            for index, other in enumerate(bundle.meta.requests):
                if other.prompt_id == prompt_id and other.sample_index == sample:
                    at = np.flatnonzero(bundle.meta.request_index == index)
                    tail.append(_rows(bundle.rows, at, ctx))
                    tail_positions.append(bundle.meta.positions[at])
                    bundle.ended.add(index)
        # What only ended sequences have would wait for rows that may never come.
        self._waiting = deque(b for b in self._waiting if len(b.ended) < len(b.meta.requests))
        place = self._places.pop(sequence_key(request), None)
        row = place.row if place else 0
        totals = self._table[row : row + 2].clone()
        if place is not None:
            self._free.append(place.row)
        positions = place.positions if place else ([], [])
        return Taken(
            (_sorted(positions[0]), _sorted(positions[1])),
            totals,
            np.concatenate([*tail_positions, _NONE]),
            torch.cat(tail) if tail else None,
        )

    def _place(self, request: RequestInfo) -> _Place:
        key = sequence_key(request)
        found = self._places.get(key)
        if found is None:
            if not self._free:
                size = len(self._table)
                table = self._empty(2 * size)
                table[:size].copy_(self._table)
                self._table = table
                self._free = list(range(2 * size - 2, size - 1, -2))
            row = self._free.pop()
            if self._how == "mean":
                self._table[row : row + 2].zero_()
            elif self._how == "max":
                self._table[row : row + 2].fill_(-torch.inf)
            found = self._places[key] = _Place(row)
        return found

    def _fold(self, bundle: _Bundle, phase: int, ctx: ConsumerContext) -> None:
        """Reduce the rows of the sequences that run."""
        meta, rows = bundle.meta, bundle.rows
        if len(meta.requests) == len(meta):
            self._fold_one_each(bundle, phase, ctx)
            return
        for index, request in enumerate(meta.requests):
            if index in bundle.ended:
                continue
            at, place = np.flatnonzero(meta.request_index == index), self._place(request)
            positions = meta.positions[at]
            place.positions[phase].append(positions)
            own, total = _rows(rows, at, ctx), self._table[place.row + phase]
            if self._how == "mean":
                total.add_(own.sum(0, dtype=torch.float32))
            elif self._how == "max":
                torch.maximum(total, own.amax(0).float(), out=total)
            else:
                latest = int(np.argsort(positions, kind="stable")[-1])
                if positions[latest] >= place.last[phase]:
                    place.last[phase] = int(positions[latest])
                    total.copy_(own[latest])

    def _fold_one_each(self, bundle: _Bundle, phase: int, ctx: ConsumerContext) -> None:
        """The same where each sequence has one row: all at once."""
        meta, rows = bundle.meta, bundle.rows
        at, into, last = [], [], self._how == "last"
        owners, positions = meta.request_index.tolist(), meta.positions.tolist()
        for row, (index, position) in enumerate(zip(owners, positions, strict=True)):
            if index in bundle.ended:
                continue
            place = self._place(meta.requests[index])
            place.positions[phase].append(meta.positions[row : row + 1])
            if last and position < place.last[phase]:
                continue
            place.last[phase] = position
            at.append(row)
            into.append(place.row + phase)
        if len(at) < len(meta):
            rows = rows[ctx.upload(np.array(at, np.int64))]
        places, rows = ctx.upload(np.array(into, np.int64)), rows.float()
        if self._how == "mean":
            self._table.index_add_(0, places, rows)
        elif self._how == "max":
            self._table[places] = torch.maximum(self._table[places], rows)
        else:
            self._table.index_copy_(0, places, rows)


_NONE = np.zeros(0, np.int32)


def _sorted(positions: list[IntArray]) -> IntArray:
    return np.sort(np.concatenate([*positions, _NONE]))


def _rows(rows: torch.Tensor, at: npt.NDArray[np.int64], ctx: ConsumerContext) -> torch.Tensor:
    """Some rows: a view where they lie together."""
    first = int(at[0])
    if int(at[-1]) - first + 1 == len(at):
        return rows[first : first + len(at)]
    return rows[ctx.upload(at)]


sequence_key: Callable[[RequestInfo], tuple[str, int]] = attrgetter("prompt_id", "sample_index")
"""What tells running sequences apart; slots have new owners too soon."""

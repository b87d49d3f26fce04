"""Reductions of the rows of each sequence, kept on the device while it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tllm.ports import RequestInfo, RowMeta
from tllm.spec.capture import Reduction

IntArray = npt.NDArray[np.int32]

#: Steps whose generated rows wait before they are reduced. A token that the engine computed ahead
#: of a sequence's end is cut when the end is known; from a sum it could not be taken out again.
AHEAD = 8


@dataclass(eq=False)
class _Sequence:
    prompt: int
    """Row of the table for the prompt; the generated tokens have the next."""
    positions: tuple[list[IntArray], list[IntArray]] = field(default_factory=lambda: ([], []))
    """Of the rows that were reduced, by phase."""


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
        self._sequences: dict[Hashable, _Sequence] = {}
        self._waiting: deque[tuple[RowMeta, torch.Tensor]] = deque()

    def _empty(self, rows: int) -> torch.Tensor:
        return torch.empty((rows, *self._shape), dtype=torch.float32, device=self._device)

    def add(self, meta: RowMeta, rows: torch.Tensor, prefill: bool) -> None:
        """Add rows `[rows, places, hidden]` of one phase; they may be a view of the ring."""
        if prefill:
            self._fold(meta, rows, 0)
            return
        self._waiting.append((meta, rows.clone()))
        if len(self._waiting) > AHEAD:
            self._fold(*self._waiting.popleft(), 1)

    def take(self, request: RequestInfo) -> Taken:
        """The sequence's reductions; its place in the table is free afterwards."""
        key = sequence_key(request)
        tail, tail_positions = [], []
        for meta, rows in self._waiting:
            for index, other in enumerate(meta.requests):
                if sequence_key(other) == key:
                    at = np.flatnonzero(meta.request_index == index)
                    tail.append(self._rows(rows, at))
                    tail_positions.append(meta.positions[at])
        sequence = self._sequences.pop(key, None)
        positions = tuple(
            np.concatenate([*(sequence.positions[phase] if sequence else ()), _NONE])
            for phase in (0, 1)
        )
        row = sequence.prompt if sequence else 0
        totals = self._table[row : row + 2].clone()
        if sequence is not None:
            self._free.append(sequence.prompt)
        return Taken(
            (positions[0], positions[1]),
            totals,
            np.concatenate([*tail_positions, _NONE]),
            torch.cat(tail) if tail else None,
        )

    def _place(self, request: RequestInfo) -> _Sequence:
        key = sequence_key(request)
        found = self._sequences.get(key)
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
            found = self._sequences[key] = _Sequence(row)
        return found

    def _fold(self, meta: RowMeta, rows: torch.Tensor, phase: int) -> None:
        sequences = [self._place(request) for request in meta.requests]
        if len(sequences) == len(meta):  # one row each
            for i, which in enumerate(meta.request_index.tolist()):
                sequences[which].positions[phase].append(meta.positions[i : i + 1])
            places = np.array([s.prompt for s in sequences], np.int64)[meta.request_index] + phase
            self._scatter(self._upload(places), rows.float())
            return
        for index, sequence in enumerate(sequences):
            at = np.flatnonzero(meta.request_index == index)
            sequence.positions[phase].append(meta.positions[at])
            own, total = self._rows(rows, at), self._table[sequence.prompt + phase]
            if self._how == "mean":
                total.add_(own.sum(0, dtype=torch.float32))
            elif self._how == "max":
                torch.maximum(total, own.amax(0).float(), out=total)
            else:
                total.copy_(own[-1])

    def _scatter(self, places: torch.Tensor, rows: torch.Tensor) -> None:
        if self._how == "mean":
            self._table.index_add_(0, places, rows)
        elif self._how == "max":
            self._table[places] = torch.maximum(self._table[places], rows)
        else:
            self._table.index_copy_(0, places, rows)

    def _rows(self, rows: torch.Tensor, at: npt.NDArray[np.int64]) -> torch.Tensor:
        """Some rows: a view where they lie together."""
        first = int(at[0])
        if int(at[-1]) - first + 1 == len(at):
            return rows[first : first + len(at)]
        return rows[self._upload(at)]

    def _upload(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


_NONE = np.zeros(0, np.int32)


def sequence_key(request: RequestInfo) -> tuple[str, int]:
    """What tells running sequences apart; slots have new owners too soon."""
    return request.prompt_id, request.sample_index

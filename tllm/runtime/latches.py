"""What sequences remember of their conditions: when each first held, and for which tokens."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from tllm.runtime.consecutive_places import ConsecutivePlaces
from tllm.runtime.staged import StagedTable, room
from tllm.spec.gates import MAX_GATES, Gate
from tllm.spec.memory import SCOPES

NEVER, BEFORE = 2**31 - 1, -1
"""Instead of a position, for a condition that has not held yet, and for one that held in an earlier
request of the conversation."""
REST, NEXT = SCOPES.index("rest"), SCOPES.index("next")
HOLDS = 0.5
"""A condition holds, as far as anybody remembers or is told, where its strength is above this."""
SUMMED = len(SCOPES)
"""Instead of a scope, in the record of a probe that is judged for the mean of a prompt: rows are
only added up."""
OF_A_PROBE = SUMMED + 1
"""Instead of a scope, in the record of a unit of a small MLP: it decides nothing itself."""

_BITS = 32


@dataclass(eq=False)
class Latch:
    """What one sequence remembers.

    Attributes:
        row: of the tables.
        held: by number of a gate of scope `next`, its row of the bits.
        sums: by number of a probe that is judged for the mean of the prompt, its row of the sums.
    """

    row: int
    held: dict[int, int] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)


class Latches:
    """The device memory of conditions that decide for other tokens than those they are judged for.

    Taps write there, with operations that give the same whatever their order is, and positions
    decide: so a sequence that is computed again after a preemption, many rows at once, finds what
    it found before. Nothing is allocated before the first such condition.

    Args:
        max_positions: the most tokens of a sequence.

    Attributes:
        gates_of_next: int32 `[latches]`, a bit for each gate of scope `next`.
    """

    def __init__(self, hidden_size: int, max_positions: int, device: torch.device) -> None:
        self._hidden = hidden_size
        self._words = max_positions // _BITS + 1
        self._rows, self._held_rows, self._sum_rows = (ConsecutivePlaces() for _ in range(3))
        self.gates_of_next = np.zeros(0, np.int32)
        self._cells = StagedTable((0, 2, MAX_GATES), 1, torch.int32, device, fill=NEVER)
        self._held = StagedTable((0, self._words), 1, torch.int32, device)
        self._sums = StagedTable((0, hidden_size), 1, torch.float32, device)

    def acquire(self, gates: Iterable[Gate], held: Container[int] = ()) -> Latch:
        """Memory for a sequence that has these gates; to be given back with `release`.

        Args:
            held: numbers of those that held before it began.
        """
        latch = Latch(self._rows.acquire(1))
        cells = np.full((2, MAX_GATES), NEVER, np.int32)
        following = np.uint32(0)
        for gate in gates:
            if gate.number in held:
                cells[0, gate.number] = BEFORE
            if gate.scope == NEXT:
                row = latch.held[gate.number] = self._held_rows.acquire(1)
                cells[1, gate.number] = row * self._words
                following |= np.uint32(1 << gate.number)
                self._held.stage(row, np.zeros(self._words, np.int32))
            elif gate.of_mean and gate.vector:
                row = latch.sums[gate.number] = self._sum_rows.acquire(1)
                cells[1, gate.number] = row
                self._sums.stage(row, np.zeros(self._hidden, np.float32))
        self._cells.stage(latch.row, cells)
        if latch.row >= len(self.gates_of_next):
            more = room(latch.row + 1, 8) - len(self.gates_of_next)
            self.gates_of_next = np.pad(self.gates_of_next, (0, more))
        self.gates_of_next[latch.row] = following.view(np.int32)
        return latch

    def release(self, latch: Latch) -> None:
        """A sequence has ended."""
        self._rows.release(latch.row, 1)
        for row in latch.held.values():
            self._held_rows.release(row, 1)
        for row in latch.sums.values():
            self._sum_rows.release(row, 1)

    def commit(self) -> bool:
        """Bring what changed to the device. On the compute stream, before a forward pass.

        Returns:
            Whether any table is another tensor now.
        """
        if not self._rows.end:
            return False
        moved = [self._cells.grow((room(self._rows.end, 8), 2, MAX_GATES))]
        if held := self._held_rows.end:
            moved.append(self._held.grow((room(held, 4), self._words)))
        if sums := self._sum_rows.end:
            moved.append(self._sums.grow((room(sums, 4), self._hidden)))
        for table in (self._cells, self._held, self._sums):
            table.commit()
        return any(moved)

    @property
    def any(self) -> bool:
        return self._rows.end > 0

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What taps read and write:

        - int32 `[latches, 2, MAX_GATES]`: the first position at which each gate held, or `NEVER`;
          and where in the second table, or which row of the third, its own memory is;
        - int32 `[rows, words]`: a bit for each position at which a gate held;
        - float32 `[rows, hidden]`: sums of rows.
        """
        return self._cells.tensor, self._held.tensor, self._sums.tensor

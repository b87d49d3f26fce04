"""Steering rows by token.

Where what is done to a generated token depends on which it is, the row plan holds a *choice* until
the tokens are known, and then a steering row in its place.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from tllm.runtime.consecutive_places import ConsecutivePlaces
from tllm.runtime.kernels import token_choice
from tllm.runtime.kernels.backend import uses_triton
from tllm.runtime.staged import StagedTable, room

Choice = tuple[tuple[tuple[int, int], ...], int]
"""`(token, steering row)` of the tokens that are named, and the row of all others."""


class TokenChoices:
    """Steering rows by token, for tokens that the host does not know when it plans a step.

    The row plan holds `-2 - i` for choice i; `apply` puts the row of the token in its place.
    """

    def __init__(self, device: torch.device) -> None:
        self._use_kernel = uses_triton(device)
        self._numbers: dict[Choice, int] = {}
        self._users: Counter[int] = Counter()
        self._free: list[int] = []
        self._runs = ConsecutivePlaces()
        self._starts: dict[int, int] = {}
        self._new: dict[int, Choice] = {}
        self._heads = StagedTable((0, 3), 1, torch.int32, device)
        self._entries = StagedTable((0, 2), 1, torch.int32, device)

    def acquire(self, choice: Choice) -> int:
        """What stands for a choice in the row plan; to be given back with `release`."""
        number = self._numbers.get(choice)
        if number is None:
            number = self._free.pop() if self._free else len(self._numbers)
            self._numbers[choice] = number
            self._starts[number] = self._runs.acquire(len(choice[0]))
            self._new[number] = choice
        self._users[number] += 1
        return -2 - number

    def release(self, choice: Choice) -> None:
        """A sequence does not need this choice any more."""
        number = self._numbers[choice]
        self._users[number] -= 1
        if not self._users[number]:
            del self._numbers[choice], self._users[number]
            self._runs.release(self._starts.pop(number), len(choice[0]))
            self._new.pop(number, None)
            self._free.append(number)

    def apply(self, steer: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Choose by token. On the compute stream, before a forward pass.

        Args:
            steer: int32 `[tokens]`, the plan's steering rows.
            token_ids: `[tokens]`, of the batch.
        """
        if self._new:
            self._commit()
        run = token_choice.launch if self._use_kernel else token_choice.reference
        run(steer, token_ids, self._heads.tensor, self._entries.tensor)

    def _commit(self) -> None:
        for number, (by_token, others) in self._new.items():
            start = self._starts[number]
            self._heads.stage(number, np.array([start, len(by_token), others], np.int32))
            for i, entry in enumerate(by_token):
                self._entries.stage(start + i, np.array(entry, np.int32))
        self._new.clear()
        self._heads.grow((room(len(self._numbers) + len(self._free), 16), 3))
        self._entries.grow((room(self._runs.end, 64), 2))
        self._heads.commit()
        self._entries.commit()

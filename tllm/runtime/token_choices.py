"""What is done to generated tokens where it depends on which they are: the device's tables."""

from __future__ import annotations

import numpy as np
import torch

from tllm.runtime.kernels import token_choice
from tllm.runtime.kernels.backend import uses_triton
from tllm.runtime.transfer import upload

Choice = tuple[tuple[tuple[int, int], ...], int]
"""`(token, steering row)` of the tokens that are named, and the row of all others."""


class TokenChoices:
    """Steering rows by token, for tokens that the host does not know when it plans a step.

    The row plan holds `-2 - i` for choice i; `apply` puts the row of the token in its place.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._use_kernel = uses_triton(device)
        self._numbers: dict[Choice, int] = {}
        self._users: dict[int, int] = {}
        self._free: list[int] = []
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def acquire(self, choice: Choice) -> int:
        """What stands for a choice in the row plan; to be given back with `release`."""
        number = self._numbers.get(choice)
        if number is None:
            number = self._free.pop() if self._free else len(self._numbers)
            self._numbers[choice] = number
            self._users[number] = 0
            self._tables = None
        self._users[number] += 1
        return -2 - number

    def release(self, choice: Choice) -> None:
        """A sequence does not need this choice any more."""
        number = self._numbers[choice]
        self._users[number] -= 1
        if not self._users[number]:
            del self._numbers[choice], self._users[number]
            self._free.append(number)

    def apply(self, steer: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Choose by token. On the compute stream, before a forward pass.

        Args:
            steer: int32 `[tokens]`, the plan's steering rows.
            token_ids: `[tokens]`, of the batch.
        """
        if self._tables is None:
            self._tables = self._made()
        run = token_choice.launch if self._use_kernel else token_choice.reference
        run(steer, token_ids, *self._tables)

    def _made(self) -> tuple[torch.Tensor, torch.Tensor]:
        heads = np.zeros((len(self._numbers) + len(self._free), 3), np.int32)
        entries: list[tuple[int, int]] = []
        for (by_token, others), number in self._numbers.items():
            heads[number] = len(entries), len(by_token), others
            entries += by_token
        made = np.array(entries, np.int32).reshape(-1, 2)
        return upload(heads, self._device), upload(made, self._device)

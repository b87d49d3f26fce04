"""How many blocks of the KV cache the kept requests hold."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class Holding:
    """Blocks of one kept request.

    Attributes:
        shared: keys of the blocks that were full when it was opened: the prefix cache gives them
            to every request with the same beginning.
        own: blocks that it filled itself, or has begun.
    """

    shared: list[Hashable]
    own: int


class BlockLedger:
    """An upper estimate, since vLLM does not preempt requests that wait for their next token.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._holders: dict[Hashable, int] = {}
        self._own = 0

    @property
    def used(self) -> int:
        """Blocks held by all."""
        return len(self._holders) + self._own

    def blocks(self, num_tokens: int) -> int:
        """Blocks of a sequence, and of the token after it."""
        return num_tokens // self._block_size + 1

    def open(self, root: Hashable, tokens: Sequence[int]) -> Holding:
        """A request begins with these tokens.

        Args:
            root: what else its blocks depend on (its adapter).
        """
        size = self._block_size
        shared: list[Hashable] = []
        key: Hashable = root
        for end in range(size, len(tokens) + 1, size):
            # A chain of hashes: equal keys mean equal beginnings.
            key = hash((key, tuple(tokens[end - size : end])))
            shared.append(key)
            self._holders[key] = self._holders.get(key, 0) + 1
        self._own += 1
        return Holding(shared, 1)

    def grow(self, holding: Holding, num_tokens: int) -> None:
        """It has so many tokens now."""
        own = self.blocks(num_tokens) - len(holding.shared)
        self._own += own - holding.own
        holding.own = own

    def close(self, holding: Holding) -> None:
        """It ended, or was parked."""
        for key in holding.shared:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
        self._own -= holding.own
        holding.shared, holding.own = [], 0

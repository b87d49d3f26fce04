"""What an engine has room for: sequences at once, blocks of its KV cache, adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.platforms import current_platform

from tllm.engine.seams import uses

uses(
    "vllm.config.CacheConfig",
    "num_gpu_blocks block_size",
    "requests that wait for their next token leave room in the KV cache",
)
uses(
    "vllm.config.CacheConfig",
    "kv_cache_size_tokens",
    "requests that wait leave room in the KV cache of layers with several windows",
)
uses(
    "vllm.config.SchedulerConfig",
    "max_num_seqs",
    "requests that wait for their next token leave places to others",
)
uses("vllm.config.LoRAConfig", "max_loras", "an adapter too many is refused")


@dataclass(frozen=True)
class Capacity:
    """Limits of an engine that has started.

    Attributes:
        sequences: that run at once.
        blocks: of the KV cache, by what a sequence has of them for its tokens; vLLM keeps one for
            itself.
        block_size: tokens of a block.
    """

    sequences: int
    blocks: int
    block_size: int

    @classmethod
    def of(cls, vllm_config: Any) -> Capacity:
        """As vLLM's own configuration says."""
        cache = vllm_config.cache_config
        blocks = (cache.num_gpu_blocks or 1) - 1
        # Where layers have other windows than others, a sequence has blocks for each kind of them.
        if (tokens := getattr(cache, "kv_cache_size_tokens", None)) is not None:
            blocks = min(blocks, tokens // cache.block_size)
        blocks = max(1, blocks)
        return cls(vllm_config.scheduler_config.max_num_seqs, blocks, cache.block_size)


def adapters_at_once(lora_config: Any) -> int:
    """How many adapters may be loaded. vLLM's CPU kernels give requests without an adapter the
    last place's weights, which are zero as long as no adapter is there."""
    return int(lora_config.max_loras) - current_platform.is_cpu()


@dataclass(frozen=True, eq=False)
class HeldBlocks:
    """Blocks of one request.

    Attributes:
        shared: keys of the blocks that were full before the last token that it began with: the
            prefix cache gives them to every request with the same beginning.
    """

    shared: tuple[Hashable, ...]


class BlockLedger:
    """How many blocks of the KV cache some requests hold; an upper estimate, since vLLM does not
    preempt requests that wait for their next token.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._sharing: Counter[Hashable] = Counter()
        self._own: dict[HeldBlocks, int] = {}  # filled by the request itself, or begun
        self._all_own = 0

    @property
    def used(self) -> int:
        return len(self._sharing) + self._all_own

    def blocks(self, num_tokens: int) -> int:
        """Blocks of a sequence, and of the token after it."""
        return num_tokens // self._block_size + 1

    def open(self, root: Hashable, tokens: Sequence[int]) -> HeldBlocks:
        """A request begins with these tokens.

        Args:
            root: what else its blocks depend on (its adapter).
        """
        size = self._block_size
        shared: list[Hashable] = []
        key: Hashable = root
        # vLLM computes the last token of every request itself, with all that is in its block.
        for end in range(size, len(tokens), size):
            # A chain of hashes: equal keys mean equal beginnings.
            key = hash((key, tuple(tokens[end - size : end])))
            shared.append(key)
        self._sharing.update(shared)
        held = HeldBlocks(tuple(shared))
        self._set_own(held, 1)
        return held

    def grow(self, held: HeldBlocks, num_tokens: int) -> None:
        self._set_own(held, self.blocks(num_tokens) - len(held.shared))

    def _set_own(self, held: HeldBlocks, count: int) -> None:
        self._all_own += count - self._own.get(held, 0)
        self._own[held] = count

    def close(self, held: HeldBlocks) -> None:
        """It ended, or was parked."""
        if held not in self._own:
            return
        self._all_own -= self._own.pop(held)
        self._sharing.subtract(held.shared)
        for key in held.shared:
            if not self._sharing[key]:
                del self._sharing[key]

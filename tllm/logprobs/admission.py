"""Which requests may stay in the engine between their tokens."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from tllm.llm import AsyncLLM
from tllm.logprobs.blocks import BlockLedger
from tllm.logprobs.kept_request import KeptRequest


class Admission:
    """A kept request holds one of the engine's `max_num_seqs` places, and blocks of the KV cache,
    while it computes nothing. Whenever others need them, the one that was idle longest is parked:
    it ends, and its lane will begin another, for which the prefix cache has nearly everything.

    The engine itself queues what is too much for it, so that nothing waits here.

    Args:
        idle_seconds: a kept request that is idle for so long is parked too, for the sake of
            requests that did not come through here.
    """

    def __init__(self, engine: AsyncLLM, idle_seconds: float) -> None:
        config = engine.vllm_config
        self._places = config.scheduler_config.max_num_seqs
        self._blocks = max(1, (config.cache_config.num_gpu_blocks or 1) - 1)
        self.ledger = BlockLedger(config.cache_config.block_size)
        self._passing = 0
        self._active = 0
        self._idle: OrderedDict[KeptRequest, None] = OrderedDict()
        self._idle_seconds = idle_seconds
        self._timer: asyncio.TimerHandle | None = None
        self.parked = 0

    @property
    def idle(self) -> int:
        """Kept requests between two turns."""
        return len(self._idle)

    def enter(self, num_tokens: int) -> int:
        """A request that is not kept begins; give what comes back to `leave`."""
        blocks = self.ledger.blocks(num_tokens)
        self._active += 1
        self._passing += blocks
        self._make_room()
        return blocks

    def leave(self, blocks: int) -> None:
        """It ended."""
        self._active -= 1
        self._passing -= blocks

    def keep(self, engine: AsyncLLM, root: Hashable, tokens: Sequence[int]) -> KeptRequest:
        """A request that will be kept."""
        return KeptRequest(engine, self.ledger.open(root, tokens))

    def begin_turn(self, request: KeptRequest, num_tokens: int) -> None:
        """A kept request has something to compute."""
        self._idle.pop(request, None)
        request.turns += 1
        self._active += 1
        self.ledger.grow(request.holding, num_tokens)
        self._make_room()

    def end_turn(self, request: KeptRequest) -> None:
        """It was computed."""
        request.turns -= 1
        self._active -= 1
        if not request.open:
            self.drop(request)
            return
        if request.turns:  # whoever asked for this one was cancelled, and has asked again
            return
        self._idle[request] = None
        self._make_room()
        self._watch()

    def drop(self, request: KeptRequest) -> None:
        """Nobody needs it any more."""
        self._idle.pop(request, None)
        self.ledger.close(request.holding)
        if request.open:
            request.close()

    def _make_room(self) -> None:
        while self._idle and (
            self._active + len(self._idle) > self._places
            or self.ledger.used + self._passing > self._blocks
        ):
            self._park()

    def _park(self) -> None:
        request, _ = self._idle.popitem(last=False)
        self.parked += 1
        self.drop(request)

    def _watch(self) -> None:
        if self._timer is None and self._idle:
            loop = asyncio.get_running_loop()
            oldest = next(iter(self._idle)).last_used
            delay = max(0.01, oldest + self._idle_seconds - loop.time())
            self._timer = loop.call_later(delay, self._park_idle)

    def _park_idle(self) -> None:
        self._timer = None
        limit = asyncio.get_running_loop().time() - self._idle_seconds
        while self._idle and next(iter(self._idle)).last_used <= limit:
            self._park()
        self._watch()

"""Collects what is asked on one event loop, and hands it over in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Collector(Generic[T]):
    """A batch is closed when nothing else can arrive: when the loop has run everything that was
    ready, and none of it has asked anything more. A loop that stays busy with other things closes
    it too. `timeout` and `batch_size` are upper bounds for one whose asking never ends.

    Args:
        hand_over: takes a batch.
        batch_size: a batch of so many waits for nobody who is not ready yet.
        timeout: seconds after which a batch is handed over in any case.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        hand_over: Callable[[list[T]], None],
        batch_size: int,
        timeout: float,
    ) -> None:
        self._loop = loop
        self._hand_over = hand_over
        self._batch_size = batch_size
        self._timeout = timeout
        self._batch: list[T] = []
        self._armed = False
        self._deadline = 0.0

    def add(self, item: T) -> None:
        """Ask."""
        self._batch.append(item)
        if not self._armed:
            self._armed = True
            self._deadline = self._loop.time() + self._timeout
            self._loop.call_soon(self._settle, 0)

    def flush(self) -> None:
        """Hand over what there is."""
        batch, self._batch = self._batch, []
        if batch:
            self._hand_over(batch)

    def drop(self) -> list[T]:
        """What was not handed over, and will not be."""
        batch, self._batch = self._batch, []
        return batch

    def _settle(self, seen: int) -> None:
        waits = len(self._batch) < self._batch_size and self._loop.time() < self._deadline
        if len(self._batch) > seen and waits:
            self._loop.call_soon(self._settle, len(self._batch))
            return
        self._armed = False
        self.flush()

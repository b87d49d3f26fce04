"""The bounded queue between those who submit records and the threads that write them."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from tllm.stores.error import StoreError, describe
from tllm.stores.publisher import Item
from tllm.stores.spill import Spilled, SpillFile

Overflow = Literal["block", "drop", "spill"]


@dataclass(eq=False)
class Barrier:
    """Asks a thread to publish all that came before; `stop` also to end."""

    stop: bool = False
    passed: threading.Event = field(default_factory=threading.Event)


class Intake:
    """One queue a thread, first in, first out, with one limit in bytes for all.

    An item's bytes count from `put` until `release`: also while a thread holds them back to write
    them in larger blocks. An item larger than the limit is let in when nothing else is there.

    Args:
        threads: number of queues.
        limit: bytes.
        overflow: what `put` does when there is no room: `block` waits, `drop` refuses, `spill`
            leaves the rows on disk until their turn comes, and refuses when the spill file is full.
        spill: for `spill`.
    """

    def __init__(self, threads: int, limit: int, overflow: Overflow, spill: SpillFile) -> None:
        self._limit = limit
        self._overflow = overflow
        self._spill = spill
        self._queues: list[deque[tuple[Item, Spilled | None] | Barrier]] = [
            deque() for _ in range(threads)
        ]
        self._loads = [0] * threads
        self._changed = threading.Condition()
        self._waiting = 0
        self._turn = -1
        self.used = 0
        self.peak = 0
        self.blocked_seconds = 0.0
        self.spilled_items = 0
        self.spilled_bytes = 0

    @property
    def room(self) -> int:
        """Bytes that are let in at once."""
        return self._limit - self.used

    @property
    def crowded(self) -> bool:
        """Whether somebody waits for room."""
        return self._waiting > 0

    def lightest(self) -> int:
        """The thread with the least to do; of several, each in turn."""
        with self._changed:
            count = len(self._loads)
            self._turn = (self._turn + 1) % count
            turns = [(self._turn + i) % count for i in range(count)]
            return min(turns, key=self._loads.__getitem__)

    def put(self, thread: int, item: Item) -> StoreError | None:
        """Queue an item; the error, and nothing queued, when there is no room for it."""
        nbytes = item.nbytes
        with self._changed:
            if nbytes and not self._fits(nbytes):
                if self._overflow == "block":
                    self._wait(nbytes)
                elif self._overflow == "drop":
                    return StoreError(
                        f"{item.recording.what}: {nbytes} bytes were dropped, the queue of "
                        f"{self._limit} bytes was full",
                        "dropped",
                    )
            if not nbytes or self._fits(nbytes):
                self._push(thread, item, None, nbytes)
                return None
        return self._put_on_disk(thread, item)

    def put_barrier(self, thread: int, barrier: Barrier) -> None:
        """Queue a barrier."""
        with self._changed:
            self._queues[thread].append(barrier)
            self._changed.notify_all()

    def take(self, thread: int, deadline: float | None, holding: bool) -> Item | Barrier | None:
        """The next item of a thread; None at the deadline, or when others wait for its memory.

        Args:
            deadline: by `time.monotonic`; None waits for ever.
            holding: the thread has rows that it could write to make room.
        """
        queue = self._queues[thread]
        with self._changed:
            while not queue:
                if holding and self._waiting:
                    return None
                timeout = None if deadline is None else deadline - time.monotonic()
                if timeout is not None and timeout <= 0:
                    return None
                self._changed.wait(timeout)
            entry = queue.popleft()
            if isinstance(entry, Barrier):
                return entry
            item, spilled = entry
            nbytes = item.nbytes
            self._loads[thread] -= nbytes
            if spilled is not None:
                # Rows that come back from disk may exceed the limit, by one item a thread.
                self.used += nbytes
                self.peak = max(self.peak, self.used)
        if spilled is not None:
            self._take_from_disk(item, spilled, nbytes)
        return item

    def release(self, nbytes: int) -> None:
        """Bytes of rows need no memory any more."""
        if nbytes:
            with self._changed:
                self.used -= nbytes
                self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        return self.used == 0 or self.used + nbytes <= self._limit

    def _wait(self, nbytes: int) -> None:
        start = time.monotonic()
        self._waiting += 1
        self._changed.notify_all()
        try:
            while not self._fits(nbytes):
                self._changed.wait()
        finally:
            self._waiting -= 1
            self.blocked_seconds += time.monotonic() - start

    def _push(self, thread: int, item: Item, spilled: Spilled | None, nbytes: int) -> None:
        self._queues[thread].append((item, spilled))
        self._loads[thread] += nbytes
        if spilled is None:
            self.used += nbytes
            self.peak = max(self.peak, self.used)
        self._changed.notify_all()

    def _put_on_disk(self, thread: int, item: Item) -> StoreError | None:
        """The rows go to the spill file, the item to its place in the queue."""
        nbytes = item.nbytes
        what = f"{item.recording.what}: {nbytes} bytes were dropped"
        try:
            spilled = self._spill.put(item.arrays)
        except OSError as error:
            return StoreError.from_os_error(f"{what}, spilling failed", error)
        if spilled is None:
            return StoreError(
                f"{what}, the queue was full and the spill file had its {self._spill.limit} bytes",
                "dropped",
            )
        item.arrays = spilled.arrays
        with self._changed:
            self.spilled_items += 1
            self.spilled_bytes += spilled.nbytes
            self._push(thread, item, spilled, nbytes)
        return None

    def _take_from_disk(self, item: Item, spilled: Spilled, nbytes: int) -> None:
        try:
            item.arrays = self._spill.take(spilled)
        except OSError as error:
            what = f"{item.recording.what}: spilled rows could not be read"
            failure = StoreError.from_os_error(what, error)
            item.lost = {**item.lost, f"spilled rows were lost: {describe(error)}": failure}
            item.arrays = ()
            self.release(nbytes)

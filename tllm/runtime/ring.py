"""The capture ring: where the rows of a forward pass wait until everyone has read them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Literal

import torch

Overflow = Literal["block", "drop"]

_START = attrgetter("start")


class Span:
    """Consecutive ring rows of one step, and who still reads them.

    Readers on the compute stream need not say so: the next forward pass is ordered behind them.

    Attributes:
        fences: recorded behind device work on other streams that reads the rows.
    """

    def __init__(self, start: int, rows: int) -> None:
        self.start = start
        self.rows = rows
        self.fences: list[torch.cuda.Event] = []
        self._holds = 0
        self._lock = threading.Lock()

    def hold(self) -> None:
        """One more reader has not enqueued its work yet."""
        with self._lock:
            self._holds += 1

    def release(self) -> None:
        """A reader has enqueued its work, and left a fence behind it."""
        with self._lock:
            self._holds -= 1

    @property
    def held(self) -> bool:
        """Whether a reader has not enqueued its work yet."""
        return self._holds > 0

    @property
    def free(self) -> bool:
        """Whether every reader is done, on the host and on the device. Never waits."""
        if self._holds > 0:
            return False
        for fence in self.fences:  # noqa: SIM110  # every step asks; this is the cheapest way
            if not fence.query():
                return False
        return True


class Ring:
    """A ring of rows `[capacity, hidden]` that never overwrites what somebody still reads.

    Spans are freed in the order they were taken. A request that does not fit is met by growing
    (up to `max_rows`, or to what one step needs), and then by the overflow policy.

    Args:
        rows: rows to begin with.
        max_rows: the most rows it grows to.
        overflow: `block` waits for readers, `drop` gives up the step's rows (the caller counts).
        on_move: told the new tensor whenever the ring is reallocated.
        make_progress: called while blocked, to let readers on the same thread finish.

    Attributes:
        capacity: rows that it holds now.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        rows: int,
        max_rows: int,
        overflow: Overflow,
        on_move: Callable[[torch.Tensor], None],
        make_progress: Callable[[], bool],
    ) -> None:
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._max_rows = max(rows, max_rows)
        self._overflow = overflow
        self._on_move = on_move
        self._make_progress = make_progress
        self._spans: deque[Span] = deque()
        self._retired: list[tuple[torch.Tensor, list[Span]]] = []
        self.arena: torch.Tensor
        self.capacity: int
        self._allocate(rows)

    def _allocate(self, rows: int) -> None:
        """Raises `torch.OutOfMemoryError`; the ring is then as it was."""
        arena = torch.empty((rows, self._hidden_size), dtype=self._dtype, device=self._device)
        if self._spans:
            self._retired.append((self.arena, list(self._spans)))
        self.arena, self.capacity = arena, rows
        self._spans.clear()
        self._on_move(self.arena)

    @property
    def in_use(self) -> int:
        """Rows that somebody may still read, those of outgrown tensors not counted."""
        return sum(span.rows for span in self._spans if not span.free)

    @property
    def row_bytes(self) -> int:
        return self._hidden_size * self._dtype.itemsize

    def reserve(self, rows: int) -> Span | None:
        """Rows for one step, consecutive; None when they were dropped."""
        if rows > self._max_rows and not self._outgrow(rows):
            return None
        if self._retired:
            self._free_retired()
        spans = self._spans
        start: int | None = None
        while spans and spans[0].free:
            spans.popleft()
        if not spans and rows <= self.capacity:
            start = 0  # of nearly every step
        while start is None and (start := self._find(rows)) is None:
            if self.capacity < self._max_rows:
                try:
                    self._allocate(min(self._max_rows, max(2 * self.capacity, 2 * rows)))
                except torch.OutOfMemoryError:
                    if self.capacity < rows:
                        return None
                    self._max_rows = self.capacity
            elif self._overflow == "drop" or not self._wait():
                return None
        span = Span(start, rows)
        self._spans.append(span)
        return span

    def _outgrow(self, rows: int) -> bool:
        """Make room beyond the limit for a step that needs more than it alone; whether there is.

        The limit is for what waits for slow readers. With `block`, a step's own rows are given
        up only when the device has no memory for them.
        """
        if self._overflow == "drop":
            return False
        if rows > self.capacity:
            try:
                self._allocate(rows)
            except torch.OutOfMemoryError:
                return False
        return True

    def free_spans(self) -> None:
        """Take back what all readers are done with, from the oldest on."""
        if self._retired:
            self._free_retired()
        while self._spans and self._spans[0].free:
            self._spans.popleft()

    def _free_retired(self) -> None:
        """An outgrown tensor lives on until its readers are done with it."""
        self._retired = [r for r in self._retired if not all(span.free for span in r[1])]

    def _find(self, rows: int) -> int | None:
        """The lowest place that is free: few rows, always the same, stay in the cache, and the row
        plan of a steady batch repeats."""
        self.free_spans()
        end = 0
        for span in sorted(self._spans, key=_START):
            if span.start - end >= rows:
                return end
            end = span.start + span.rows
        return end if self.capacity - end >= rows else None

    def _wait(self) -> bool:
        oldest = self._spans[0]
        while oldest.held:
            # Without anything to wait for, a reader may have ended between the two questions.
            if not self._make_progress() and oldest.held:
                return False
        for fence in oldest.fences:
            fence.synchronize()
        return True

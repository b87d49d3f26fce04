"""Shared rows that results arrive in, and which of them are free."""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import tempfile
import uuid
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tllm.consumers.next_token import HEADER
from tllm.consumers.shared_rows import SharedRows

logger = logging.getLogger(__name__)

_FIRST_ROWS = 16
_LEND_BYTES = 2**16
"""Results smaller than this are copied: that costs less than to follow who refers to them."""


@dataclass(frozen=True, order=True)
class Place:
    """A row that is reserved for one result.

    Attributes:
        file: index into the arena's files.
    """

    file: int
    row: int


class Arena:
    """Rows of one width. A large result is a view of its row, which is free again when nobody
    refers to the result any more. When half of the rows are held so, further results are copies.

    All methods are called on the engine's loop.

    Args:
        numbers: the most values a row holds.
        max_bytes: the most memory of all rows.
    """

    def __init__(self, numbers: int, max_bytes: int) -> None:
        self.width = HEADER + numbers
        self._max_rows = max(2, max_bytes // (4 * self.width))
        self._files: list[SharedRows] = []
        self._free: list[Place] = []  # a heap: neighbours are copied in one go
        # Filled by finalizers, which may run at any point of any thread: no lock, no counter.
        self._returned: deque[Place] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._rows = 0
        self._lent = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def free(self) -> int:
        """Rows that nobody uses."""
        self._collect()
        return len(self._free)

    def free_now(self) -> bool:
        """Whether `lease_now` has a row, and nobody waits for it. Raises `RuntimeError` when there
        is no memory for any row."""
        return self._has_free() and all(waiter.done() for waiter in self._waiting)

    def _has_free(self) -> bool:
        self._collect()
        return bool(self._free) or (self._rows < self._max_rows and self._grow())

    def lease_now(self) -> Place:
        """A free row, if `free_now`."""
        return heapq.heappop(self._free)

    async def lease(self) -> Place:
        """A free row; waits for one when there is no more memory."""
        while True:
            if self._has_free():
                return self.lease_now()
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter

    def option(self, place: Place) -> list[object]:
        """A place as `NextTokenConsumer` takes it."""
        return [str(self._files[place.file].path), self.width, place.row]

    def release(self, place: Place) -> None:
        """A row is free again."""
        heapq.heappush(self._free, place)
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def read(self, place: Place, ticket: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The values of a row, and the ids of a `top_k`; the row is given back in time.

        Raises `RuntimeError` when the row was not written for this ticket.
        """
        file = self._files[place.file]
        row = file.values[place.row]
        header = row[:HEADER].copy().view(np.int32)
        if int(header[:2].view(np.int64)[0]) != ticket:
            self.release(place)
            raise RuntimeError(
                "the worker sent no log-probabilities: its consumer 'next_token' has raised (see "
                "the log), or was unregistered"
            )
        file.unlink()  # the worker has it: nothing is left behind, however this process ends
        count, num_ids = int(header[2]), int(header[3])
        values = row[HEADER : HEADER + count]
        ids = row[HEADER + count : HEADER + count + num_ids].view(np.int32)
        if values.nbytes >= _LEND_BYTES and not num_ids and 2 * self._lent < self._max_rows - 1:
            self._lent += 1
            weakref.finalize(values, self._returned.append, place).atexit = False
            return torch.from_numpy(values), None
        copied = torch.from_numpy(values.copy())
        copied_ids = torch.from_numpy(ids.copy()) if num_ids else None
        self.release(place)
        return copied, copied_ids

    def close(self) -> None:
        """Remove the files; results keep what they refer to."""
        for file in self._files:
            file.unlink()
        for waiter in self._waiting:
            waiter.cancel()

    def _collect(self) -> None:
        """Take back the rows of results that nobody refers to any more."""
        while self._returned:
            self._lent -= 1
            heapq.heappush(self._free, self._returned.popleft())

    def _grow(self) -> bool:
        rows = min(max(_FIRST_ROWS, self._rows), self._max_rows - self._rows)
        path = _folder() / f"tllm-rows-{os.getpid()}-{uuid.uuid4().hex}"
        try:
            file = SharedRows.create(path, rows, self.width)
        except OSError as error:
            if not self._rows:
                raise RuntimeError(
                    f"no room for {rows * self.width * 4 / 2**20:.0f} MiB of shared rows in "
                    f"{path.parent}: {error}. Enlarge it (docker run --shm-size=...), or pass "
                    "transport='rpc'"
                ) from error
            logger.warning(
                "%s has no room for more than %d shared rows: results may wait for one",
                path.parent,
                self._rows,
            )
            self._max_rows = self._rows
            return False
        number = len(self._files)
        self._files.append(file)
        self._rows += rows
        for row in range(rows):
            heapq.heappush(self._free, Place(number, row))
        return True


def _folder() -> Path:
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())

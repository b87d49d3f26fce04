"""Captured rows that wait on disk because memory has no room for them."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from tllm.stores.dtype import as_bytes


@dataclass(frozen=True, eq=False)
class SpilledRows:
    """Rows in a spill file.

    Attributes:
        shape: `[rows, places, hidden]`.
        offset: of the first byte.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


class SpillFile:
    """A file without a name: it is gone when the process is. Used on one thread.

    Args:
        folder: where; the system's temporary folder by default.
        limit: bytes.

    Attributes:
        used: bytes of rows in it.
    """

    def __init__(self, folder: Path | None, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._fd = -1
        self._end = 0
        self.used = 0

    def put(self, rows: torch.Tensor) -> SpilledRows | None:
        """Write rows; None when there is no room for them. Raises `OSError`."""
        kept = SpilledRows(tuple(rows.shape), rows.dtype, self._end)
        if self.used + kept.nbytes > self._limit:
            return None
        if self._fd < 0:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                self._fd = os.dup(file.fileno())
        view = as_bytes(rows.contiguous())
        while len(view):
            view = view[os.pwrite(self._fd, view, kept.offset + kept.nbytes - len(view)) :]
        self._end += kept.nbytes
        self.used += kept.nbytes
        return kept

    def take(self, kept: SpilledRows) -> torch.Tensor:
        """Read rows back, once. Raises `OSError`."""
        data = bytearray(kept.nbytes)
        view = memoryview(data)
        try:
            while len(view):
                count = os.preadv(self._fd, [view], kept.offset + kept.nbytes - len(view))
                if not count:
                    raise OSError(f"the spill file ended {len(view)} bytes early")
                view = view[count:]
        finally:
            self.discard(kept)
        return torch.frombuffer(data, dtype=torch.uint8).view(kept.dtype).view(kept.shape)

    def discard(self, kept: SpilledRows) -> None:
        """Nobody will read these rows. An empty file gives its space back."""
        self.used -= kept.nbytes
        if not self.used:
            os.ftruncate(self._fd, 0)
            self._end = 0

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

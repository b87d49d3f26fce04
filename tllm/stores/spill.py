"""Rows that wait on disk because memory has no room for them."""

from __future__ import annotations

import math
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tllm.stores.dtype import TORCH_DTYPES, as_bytes
from tllm.stores.payload import write_all
from tllm.stores.record import CheckedRows, CheckedStack

_SEGMENT_BYTES = 256 << 20


@dataclass(eq=False)
class _Segment:
    """A file without a name: it is gone when the process is, however that ends."""

    fd: int
    size: int = 0
    unread: int = 0


@dataclass(frozen=True, eq=False)
class Spilled:
    """Rows on disk.

    Attributes:
        arrays: as they were, but without their tensors.
        shapes: the tensors' shapes.
        nbytes: of the tensors.
    """

    arrays: Sequence[CheckedRows | CheckedStack]
    shapes: Sequence[tuple[int, ...]]
    nbytes: int
    _segment: _Segment
    _offset: int


@dataclass(eq=False)
class SpillFile:
    """Takes rows out of memory and gives them back.

    Args:
        folder: where.
        limit: bytes that may lie there at a time.
    """

    folder: Path
    limit: int
    used: int = 0
    _segment: _Segment | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, arrays: Sequence[CheckedRows | CheckedStack]) -> Spilled | None:
        """Write rows; None when they do not fit below the limit. Raises `OSError`."""
        buffers = [as_bytes(rows.tensor) for rows in arrays]
        nbytes = sum(map(len, buffers))
        with self._lock:
            if self.used + nbytes > self.limit:
                return None
            segment = self._segment or _Segment(self._new_file())
            offset = segment.size
            try:
                os.lseek(segment.fd, offset, os.SEEK_SET)
                write_all(segment.fd, buffers)
            except OSError:
                if segment is not self._segment:
                    os.close(segment.fd)
                raise
            segment.size += nbytes
            segment.unread += 1
            self.used += nbytes
            self._segment = segment if segment.size < _SEGMENT_BYTES else None
        # Not a view of the rows: that would keep their memory.
        empty = [replace(rows, tensor=torch.empty(0)) for rows in arrays]
        shapes = [tuple(rows.tensor.shape) for rows in arrays]
        return Spilled(empty, shapes, nbytes, segment, offset)

    def take(self, spilled: Spilled) -> list[CheckedRows | CheckedStack]:
        """Read rows back, once. Raises `OSError`."""
        segment = spilled._segment
        data = bytearray(spilled.nbytes)
        view = memoryview(data)
        done = 0
        try:
            while done < spilled.nbytes:
                count = os.preadv(segment.fd, [view[done:]], spilled._offset + done)
                if not count:
                    raise OSError(f"the spill file ended {spilled.nbytes - done} bytes early")
                done += count
        finally:
            self._release(spilled)
        arrays: list[CheckedRows | CheckedStack] = []
        offset = 0
        for rows, shape in zip(spilled.arrays, spilled.shapes, strict=True):
            dtype = TORCH_DTYPES[rows.dtype]
            nbytes = math.prod(shape) * dtype.itemsize
            tensor = torch.empty(shape, dtype=dtype)
            if nbytes:
                raw = torch.frombuffer(data, dtype=torch.uint8, count=nbytes, offset=offset)
                tensor = raw.view(dtype).view(shape)
            arrays.append(replace(rows, tensor=tensor))
            offset += nbytes
        return arrays

    def close(self) -> None:
        """Close the file that is being filled, when all was taken back."""
        with self._lock:
            if self._segment is not None and not self._segment.unread:
                os.close(self._segment.fd)
                self._segment = None

    def _release(self, spilled: Spilled) -> None:
        segment = spilled._segment
        with self._lock:
            self.used -= spilled.nbytes
            segment.unread -= 1
            if segment.unread:
                return
            if segment is self._segment:
                # Nothing is left in it: its space is given back, and it is filled again.
                segment.size = 0
                os.ftruncate(segment.fd, 0)
            else:
                os.close(segment.fd)

    def _new_file(self) -> int:
        with tempfile.TemporaryFile(dir=self.folder) as file:
            return os.dup(file.fileno())

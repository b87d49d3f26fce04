"""Payload files in memory."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path

import torch

from tllm.stores.dtype import TORCH_DTYPES
from tllm.stores.error import StoreError
from tllm.stores.header import Header
from tllm.stores.volume import POSITIONS


class MappedPayload:
    """A published safetensors file, mapped.

    The mapping is private: tensors can be written to, which changes neither the file nor what
    others see.

    Raises:
        StoreError: there is no such file (`missing`), it cannot be read (`io`), or it is not
            safetensors (`damaged`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise StoreError(
                f"{path} is gone: its record was replaced or removed; Store.refresh() sees what is "
                "there now",
                "missing",
            ) from None
        except OSError as error:
            raise StoreError.from_os_error(f"{path} cannot be read", error) from None
        try:
            self._map = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
            self.header = Header.decode(memoryview(self._map))
        except ValueError as error:
            raise StoreError(f"{path} is damaged: {error}", "damaged") from None
        except OSError as error:
            raise StoreError.from_os_error(f"{path} cannot be mapped", error) from None
        finally:
            os.close(fd)

    def rows(self, name: str, start: int, count: int, dtype: str, width: int) -> torch.Tensor:
        """Rows `[count, width]` of a tensor, from row `start` on; shares memory with the file.

        Raises `StoreError` (`damaged`) unless there is such a tensor with that many rows.
        """
        return self._slice(name, start, count, dtype, (width,))

    def positions(self, start: int, count: int) -> torch.Tensor:
        """Positions `[count]` int32, from element `start` on."""
        return self._slice(POSITIONS, start, count, "I32", ())

    def _slice(
        self, name: str, start: int, count: int, dtype: str, tail: tuple[int, ...]
    ) -> torch.Tensor:
        entry = self.header.entries.get(name)
        if entry is None or (entry.dtype, entry.shape[1:]) != (dtype, tail):
            found = "none" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            raise StoreError(
                f"{self.path}: tensor {name!r} should be {dtype} [rows, *{list(tail)}] and is "
                f"{found}",
                "damaged",
            )
        if start + count > entry.shape[0]:
            raise StoreError(
                f"{self.path}: rows {start} to {start + count} of tensor {name!r} are asked for, "
                f"it has {entry.shape[0]}",
                "damaged",
            )
        width = tail[0] if tail else 1
        kind = TORCH_DTYPES[dtype]
        if not count:
            return torch.empty((0, *tail), dtype=kind)
        row_bytes = width * kind.itemsize
        flat = torch.frombuffer(
            self._map,
            dtype=torch.uint8,
            count=count * row_bytes,
            offset=self.header.data_start + entry.begin + start * row_bytes,
        )
        return flat.view(kind).view(count, *tail)


class PayloadCache:
    """Keeps the files that were used last mapped, for several threads.

    Args:
        capacity: files; tensors keep theirs mapped as long as they live.
    """

    def __init__(self, root: Path, capacity: int = 64) -> None:
        self._root = root
        self._capacity = capacity
        self._files: OrderedDict[str, MappedPayload] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, file: str) -> MappedPayload:
        """A payload by its path relative to the root; raises as `MappedPayload` does."""
        with self._lock:
            if found := self._files.get(file):
                self._files.move_to_end(file)
                return found
        opened = MappedPayload(self._root / file)
        with self._lock:
            self._files[file] = opened
            while len(self._files) > self._capacity:
                self._files.popitem(last=False)
        return opened

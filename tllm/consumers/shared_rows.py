"""Rows of float32 in a file that two processes of one host map."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class SharedRows:
    """`[rows, width]` float32, mapped by the process that made the file and by those that open it.

    Attributes:
        path: the file; it lives in memory when it is under `/dev/shm`.
        values: `[rows, width]`, a view of the mapping.
    """

    def __init__(self, path: Path, width: int) -> None:
        """Map a file.

        Raises `ValueError` when it is not there: another host made it, or it was removed.
        """
        self.path = path
        self.width = width
        self._linked = True
        try:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise ValueError(
                f"shared rows {path} cannot be opened: {error}. They are shared by processes of "
                "one host; across hosts, use transport='rpc'"
            ) from error
        flat = np.frombuffer(self._map, np.float32)
        self.values: npt.NDArray[np.float32] = flat.reshape(-1, width)

    @classmethod
    def create(cls, path: Path, rows: int, width: int) -> SharedRows:
        """Make the file. `OSError` when the file system has no room for it."""
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Reserved now: a page that cannot be had later would be a SIGBUS.
            os.posix_fallocate(descriptor, 0, 4 * rows * width)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        return cls(path, width)

    def __len__(self) -> int:
        return len(self.values)

    def pin(self) -> bool:
        """Let a GPU write into the rows without waiting for the host; False when it cannot."""
        address = self.values.ctypes.data
        status: Any = torch.cuda.cudart().cudaHostRegister(address, self.values.nbytes, 0)
        return int(status) == 0

    def unpin(self) -> None:
        """Undo `pin`."""
        torch.cuda.cudart().cudaHostUnregister(self.values.ctypes.data)

    def unlink(self) -> None:
        """Remove the file. Mappings of it stay valid until nobody refers to their rows."""
        if self._linked:
            self._linked = False
            self.path.unlink(missing_ok=True)

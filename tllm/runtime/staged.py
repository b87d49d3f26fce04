"""Tables on the device that the host writes a few entries at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from tllm.runtime.transfer import upload, uploaded

Index = int | tuple[int, ...]

_JOINED = 2**18
"""Bytes of entries, the most that are copied beside their places."""


class StagedTable:
    """A tensor on the device whose entries are written in `commit`, before a forward pass.

    What is staged until then goes over in one upload and is put in its place by one kernel, on the
    current stream, but what is large by one of its own, since to join it costs more than a call: a
    pass that is enqueued already sees none of it, the next one all. An entry that is staged twice
    has the later value.

    Args:
        indexed: how many of its leading dimensions an index has; what lies behind them is an entry.
        dtype: of integers, or of floats.
        fill: what entries hold that were never written.

    Attributes:
        tensor: the table. It is another one after `grow`; what reads the old one is enqueued, and
            keeps it alive.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        indexed: int,
        dtype: torch.dtype,
        device: torch.device,
        fill: int = 0,
    ) -> None:
        self._indexed = indexed
        self._fill = fill
        self._indices: list[npt.NDArray[np.int64]] = []
        self._entries: list[npt.NDArray[np.generic] | torch.Tensor] = []
        self.tensor = torch.full(shape, fill, dtype=dtype, device=device)

    def __bool__(self) -> bool:
        return bool(self._indices)

    def stage(self, index: Index, entry: npt.NDArray[np.generic] | torch.Tensor) -> None:
        """Write an entry with the next `commit`; it is not to be changed until then.

        Args:
            index: one number, or a tuple where there are several dimensions to index.
            entry: in the table's dtype, on the host.
        """
        self._indices.append(np.array(index, np.int64).reshape(1, -1))
        self._entries.append(entry.reshape(1, -1))

    def stage_all(
        self, indices: npt.NDArray[np.int64], entries: npt.NDArray[np.generic] | torch.Tensor
    ) -> None:
        """Write several entries, each another one, with the next `commit`.

        Args:
            indices: `[entries]`, or `[entries, dimensions]` where there are several to index.
            entries: `[entries, ...]`, in the table's dtype, on the host.
        """
        self._indices.append(indices.reshape(len(entries), -1))
        self._entries.append(entries.reshape(len(entries), -1))

    def grow(self, shape: tuple[int, ...]) -> bool:
        """Make the table at least this large; what it held stays where it was.

        Returns:
            Whether it is another tensor now.
        """
        old = self.tensor
        larger = tuple(map(max, old.shape, shape))
        if larger == tuple(old.shape):
            return False
        self.tensor = torch.full(larger, self._fill, dtype=old.dtype, device=old.device)
        if old.numel():
            self.tensor[tuple(slice(0, size) for size in old.shape)].copy_(old)
        return True

    def commit(self) -> bool:
        """Write what is staged; returns whether there was anything."""
        if not self._indices:
            return False
        staged = zip(self._indices, self._entries, strict=True)
        self._indices, self._entries = [], []
        for is_large, each in groupby(staged, lambda pair: pair[1].nbytes > _JOINED):
            if is_large:
                for index, entries in each:
                    self._write(index, _tensor(entries).contiguous())
            else:
                indices, small = zip(*each, strict=True)
                self._write(np.concatenate(indices), _joined(small))
        return True

    def _write(self, index: npt.NDArray[np.int64], entries: torch.Tensor) -> None:
        """Write entries `[entries, ...]` at an index `[entries, dimensions]`."""
        table, shape = self.tensor, self.tensor.shape
        rows = np.ravel_multi_index(tuple(index.T), shape[: self._indexed]).astype(np.int64)
        latest = len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1]
        if len(latest) < len(rows):
            rows, entries = rows[latest], entries[torch.from_numpy(latest)]
        at, content = _sent(rows, entries, table.device)
        flat = table.view(-1, *shape[self._indexed :])
        flat.index_copy_(0, at, content.view(len(rows), *flat.shape[1:]))


def _tensor(entries: npt.NDArray[np.generic] | torch.Tensor) -> torch.Tensor:
    return entries if isinstance(entries, torch.Tensor) else torch.from_numpy(entries)


def _joined(entries: Sequence[npt.NDArray[np.generic] | torch.Tensor]) -> torch.Tensor:
    arrays = [each for each in entries if isinstance(each, np.ndarray)]
    if len(arrays) == len(entries):  # numpy has them together in a tenth of the time
        return torch.from_numpy(np.concatenate(arrays))
    return torch.cat([_tensor(each) for each in entries])


def _sent(
    rows: npt.NDArray[np.int64], entries: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places and entries on the device: in one upload, unless to join them is the larger part."""
    if entries.nbytes > _JOINED:
        return upload(rows, device), uploaded(entries, device)
    both = torch.from_numpy(rows).view(torch.uint8), entries.reshape(-1).view(torch.uint8)
    sent = upload(torch.cat(both).numpy(), device)
    return sent[: rows.nbytes].view(torch.int64), sent[rows.nbytes :].view(entries.dtype)


def room(rows: int, least: int) -> int:
    """Rows to allocate so that growing is rare."""
    return max(least, 1 << (max(rows, 1) - 1).bit_length())

"""A least-recently-used cache of tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import torch


class OutputCache:
    """The `maxsize` tensors that were used last.

    What goes in and what comes out are copies: nobody can change what the cache holds.

    Args:
        maxsize: the most entries, 1 or more.
        move_to_cpu: keep them in host memory; they come back to the device they came from.
    """

    def __init__(self, maxsize: int, move_to_cpu: bool = False) -> None:
        if maxsize < 1:
            raise ValueError(f"maxsize={maxsize!r}; give 1 or more")
        self.maxsize = maxsize
        self.move_to_cpu = move_to_cpu
        self._entries: OrderedDict[Hashable, tuple[torch.device, torch.Tensor]] = OrderedDict()

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        """The tensor of a key, which is now the last used; `KeyError` when there is none."""
        device, tensor = self._entries[key]
        self._entries.move_to_end(key)
        return tensor.to(device, copy=True)

    def __setitem__(self, key: Hashable, value: torch.Tensor) -> None:
        place = torch.device("cpu") if self.move_to_cpu else value.device
        self._entries[key] = value.device, value.detach().to(place, copy=True)
        self._entries.move_to_end(key)
        while len(self._entries) > self.maxsize:
            self._entries.popitem(last=False)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()

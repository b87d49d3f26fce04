"""Answers that are remembered: the tensors that were used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from tllm.logprobs.query import Answer


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
        self._entries.clear()


class AnswerCache:
    """Answers by query, for callers on several threads.

    Args:
        size: how many; 0 for none.
        options: further arguments of `OutputCache`.

    Attributes:
        outputs: where they are, or None.
        epoch: grows when all are forgotten. What was asked before that is not remembered.
    """

    def __init__(self, size: int, options: Mapping[str, Any]) -> None:
        self.outputs = OutputCache(size, **options) if size > 0 else None
        self.epoch = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Answer | None:
        """What is remembered; it shares no memory with anything."""
        with self._lock:
            if self.outputs is None or key not in self.outputs:
                return None
            found = self.outputs[key]
        if found.dim() == 1:
            return Answer(found)
        return Answer(found[0].clone(), found[1].view(torch.int32).clone())

    def put(self, key: Hashable, answer: Answer, epoch: int) -> None:
        values = answer.values
        if answer.token_ids is not None:  # side by side, as one tensor
            values = torch.stack([values, answer.token_ids.view(torch.float32)])
        with self._lock:
            if self.outputs is not None and epoch == self.epoch:
                self.outputs[key] = values

    def clear(self) -> None:
        with self._lock:
            self.epoch += 1
            if self.outputs is not None:
                self.outputs.clear()

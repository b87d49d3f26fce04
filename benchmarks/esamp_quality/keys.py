"""Whose samples learn together, and their rows side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tllm.ports import ConsumerFlow, PortRead, RequestInfo, RowMeta, Sampler, TokenTarget


def key_of(request: RequestInfo) -> str:
    """The group that a request names, or its prompt."""
    return str(request.options.get("group") or request.prompt_id)


def guided_and_drawn(read: PortRead) -> list[ConsumerFlow]:
    """Rows before their tokens are drawn, to guide by, and again with the tokens, to learn from."""
    return [
        ConsumerFlow(
            reads=[read],
            writes=[Sampler.write(phase="decode")],
            window="same_step",
            delivery="device_lease",
        ),
        ConsumerFlow(
            reads=[read, TokenTarget.read(phase="decode")],
            window="same_step",
            delivery="device_lease",
        ),
    ]


class Keys:
    """A number for each key that was seen."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, meta: RowMeta) -> npt.NDArray[np.int64]:
        """`[rows]`."""
        found = [
            self._numbers.setdefault(key_of(request), len(self._numbers))
            for request in meta.requests
        ]
        return np.array(found, np.int64)[meta.request_index]


@dataclass(frozen=True)
class Blocks:
    """Rows by key, padded.

    Attributes:
        keys: `[blocks]`, the number of each block's key.
        rows: `[blocks, width]`, which row stands there; 0 where none does.
        there: `[blocks, width]`, whether one does.
    """

    keys: Tensor
    rows: Tensor
    there: Tensor

    @classmethod
    def of(cls, keys: npt.NDArray[np.int64], device: torch.device) -> Blocks:
        """Of rows with these keys, `[rows]`."""
        order = np.argsort(keys, kind="stable")
        found, counts = np.unique(keys, return_counts=True)
        place = np.arange(len(keys)) - np.repeat(np.cumsum(counts) - counts, counts)
        block = np.repeat(np.arange(len(found)), counts)
        rows = np.zeros((len(found), counts.max()), np.int64)
        there = np.zeros(rows.shape, bool)
        rows[block, place], there[block, place] = order, True
        return cls(*(torch.from_numpy(each).to(device) for each in (found, rows, there)))

    def spread(self, values: Tensor, count: int) -> Tensor:
        """`[count, ...]` in the order of the rows, of `values` `[blocks, width, ...]`."""
        rows = values.new_zeros(count, *values.shape[2:])
        rows[self.rows[self.there]] = values[self.there]
        return rows

"""The tensors of a forward or training pass over the blocks of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tllm.consumers.esamp.distiller import Layout, Parameters
from tllm.consumers.esamp.plan import Block, BlockShape


@dataclass(frozen=True, eq=False)
class DeviceBlocks:
    """`Block`s that follow each other, with their indices and counts on the bank's device.

    Attributes:
        index: int32 `[places of all blocks]`.
        counts: int32 `[distillers of all blocks]`.
    """

    shapes: tuple[BlockShape, ...]
    index: Tensor
    counts: Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host array on the device, without waiting for it."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def upload(blocks: Sequence[Block], device: torch.device) -> DeviceBlocks:
    """Blocks with their indices and counts on the device."""
    nothing = [np.zeros(0, np.int32)]
    index = np.concatenate(nothing + [block.index.ravel() for block in blocks])
    counts = np.concatenate(nothing + [block.counts for block in blocks])
    shapes = tuple(block.shape for block in blocks)
    return DeviceBlocks(shapes, to_device(index, device), to_device(counts, device))


@dataclass(frozen=True, eq=False)
class Weights:
    """What passes read and change of the distillers, one row for each."""

    master: Tensor
    mean: Tensor
    square: Tensor
    shadow: Tensor
    corrections: Tensor
    ledger: Tensor


class Workspace:
    """Memory for the passes of one stream, which use it one after the other. It stays where it is
    while no larger batch comes, so that recordings of passes can be replayed.

    Attributes:
        index, counts: of the batch that is computed now.
    """

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, training: bool
    ) -> None:
        self.layout = layout
        self.training = training
        self._dtype = dtype
        self._device = device
        self._rows = self._slots = self._places = self._distillers = 0

    def reserve(self, shapes: Sequence[BlockShape]) -> bool:
        """Make room for the blocks of a batch; whether buffers moved."""
        needed = (
            max(shape.rows for shape in shapes),
            max(shape.slots for shape in shapes),
            sum(shape.rows for shape in shapes),
            sum(shape.slots for shape in shapes),
        )
        present = self._rows, self._slots, self._places, self._distillers
        most = tuple(map(max, needed, present))
        if most == present:
            return False
        self._rows, self._slots, self._places, self._distillers = most
        hidden, rank = self.layout.hidden, self.layout.rank
        self.index = self._numbers(self._places)
        self.counts = self._numbers(self._distillers)
        self.x = self._empty(self._rows, hidden)
        self.projected = self._empty(self._rows, 2 * rank)
        self.gated = self._empty(self._rows, rank)
        self.branch = self._empty(self._rows, hidden)
        if self.training:
            self.target = self._empty(self._rows, hidden)
            self.grad_projected = self._empty(self._rows, 2 * rank)
            self.grad_gated = self._empty(self._rows, rank)
            self.grads = self._empty(self._slots, self.layout.size).zero_()
            self.row_loss = torch.empty(self._rows, dtype=torch.float32, device=self._device)
            self.active = self._numbers(self._slots)
        return True

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _numbers(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=self._device)


class ForwardPass:
    """The tensors of one block: the weights of its distillers and its share of the memory.

    Args:
        place, distiller: where its index and its counts begin among those of its batch.
    """

    def __init__(
        self, weights: Weights, memory: Workspace, shape: BlockShape, place: int, distiller: int
    ) -> None:
        def rows_of(buffer: Tensor) -> Tensor:
            return buffer[: shape.rows].view(shape.slots, shape.width, *buffer.shape[1:])

        chosen = slice(shape.first, shape.stop)
        self.index = memory.index[place : place + shape.rows].view(shape.slots, shape.width)
        self.counts = memory.counts[distiller : distiller + shape.slots]
        self.weights: Parameters = memory.layout.views(weights.shadow[chosen])
        self.x = rows_of(memory.x)
        self.projected = rows_of(memory.projected)
        self.gated = rows_of(memory.gated)
        self.branch = rows_of(memory.branch)


class TrainPass(ForwardPass):
    """A block that is trained on."""

    def __init__(
        self, weights: Weights, memory: Workspace, shape: BlockShape, place: int, distiller: int
    ) -> None:
        super().__init__(weights, memory, shape, place, distiller)
        chosen = slice(shape.first, shape.stop)
        self.target = memory.target[: shape.rows].view_as(self.x)
        self.grad_projected = memory.grad_projected[: shape.rows].view_as(self.projected)
        self.grad_gated = memory.grad_gated[: shape.rows].view_as(self.gated)
        self.row_loss = memory.row_loss[: shape.rows].view(shape.slots, shape.width)
        self.active = memory.active[: shape.slots]
        self.flat_grads = memory.grads[: shape.slots]
        self.grads: Parameters = memory.layout.views(self.flat_grads)
        self.flat_shadow = weights.shadow[chosen]
        self.master = weights.master[chosen]
        self.mean = weights.mean[chosen]
        self.square = weights.square[chosen]
        self.corrections = weights.corrections[chosen]
        self.ledger = weights.ledger[chosen]

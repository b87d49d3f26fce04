"""A bank of distillers that predict and learn together, a few launches for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tllm.consumers.esamp import reference
from tllm.consumers.esamp.distiller import AdamW, Layout
from tllm.consumers.esamp.graphs import Recorder, Replays
from tllm.consumers.esamp.launches import Launches
from tllm.consumers.esamp.norm import CallableNorm, Norm
from tllm.consumers.esamp.passes import (
    DeviceBlocks,
    ForwardPass,
    TrainPass,
    Weights,
    Workspace,
)
from tllm.consumers.esamp.plan import BlockShape

#: Shapes of batches whose passes are kept.
_MAX_SHAPES = 256

Pass = TypeVar("Pass", bound=ForwardPass)


class BlockPasses(Generic[Pass]):
    """The passes of the batches of one stream, by the shapes of their blocks.

    Args:
        recorder: records them; None for launch by launch.

    Attributes:
        loaded: the batch whose index and counts are in the memory.
        current: the passes of its blocks.
    """

    def __init__(self, kind: type[Pass], memory: Workspace, recorder: Recorder | None) -> None:
        self._kind = kind
        self._memory = memory
        self._passes: dict[tuple[BlockShape, ...], tuple[Pass, ...]] = {}
        self.loaded: DeviceBlocks | None = None
        self.current: tuple[Pass, ...] = ()
        self.replays = Replays(recorder)

    def load(self, blocks: DeviceBlocks, weights: Weights) -> None:
        """Make the passes those of a batch's blocks, with its index and its counts."""
        if self._memory.reserve(blocks.shapes) or len(self._passes) >= _MAX_SHAPES:
            self.forget()
        passes = self._passes.get(blocks.shapes)
        if passes is None:
            passes = self._passes[blocks.shapes] = self._make(blocks.shapes, weights)
        self._memory.index[: len(blocks.index)].copy_(blocks.index)
        self._memory.counts[: len(blocks.counts)].copy_(blocks.counts)
        self.loaded, self.current = blocks, passes

    def forget(self) -> None:
        """Memory that passes use is about to be freed, or has moved."""
        self.replays.forget()
        self._passes.clear()
        self.loaded = None

    def _make(self, shapes: Sequence[BlockShape], weights: Weights) -> tuple[Pass, ...]:
        found, place, distiller = [], 0, 0
        for shape in shapes:
            found.append(self._kind(weights, self._memory, shape, place, distiller))
            place += shape.rows
            distiller += shape.slots
        return tuple(found)


class DistillerBank:
    """`slots` distillers: float32 master weights and moments, and a shadow to compute with.

    The caller orders calls that touch the same slots: nothing here waits for another stream.
    Predictions, and training, are each enqueued on one stream at a time.

    Args:
        layout: sizes of one distiller.
        seed: of the initial weights, the same for all.
        predicted_norm: turns a distiller's state into what the LM head reads.
        trained_norm: turns it into what the target is compared with.
        dtype: of the shadow weights and of the rows inside (float32 or bfloat16).
        device: where everything lives.
        ops: `reference`, or `kernels` on CUDA.
        recorder: replays predictions and training where their norms have kernels; predictions and
            training must not run at the same time then. None for launch by launch.

    Attributes:
        ledger: `[slots, 5]` float32: sum of losses, last loss, steps, steps skipped because the
            loss was not finite, rows trained.
    """

    def __init__(
        self,
        layout: Layout,
        slots: int,
        adamw: AdamW,
        seed: int,
        predicted_norm: Norm,
        trained_norm: Norm,
        dtype: torch.dtype,
        device: torch.device,
        ops: ModuleType = reference,
        recorder: Recorder | None = None,
    ) -> None:
        self.device = device
        self._launches = Launches(ops, adamw, predicted_norm, trained_norm)
        self._initial = layout.initial(seed).to(device)
        master = self._initial.repeat(slots, 1)
        self.weights = Weights(
            master,
            mean=torch.zeros_like(master),
            square=torch.zeros_like(master),
            shadow=master if dtype == torch.float32 else master.to(dtype),
            corrections=torch.zeros(slots, 2, device=device),
            ledger=torch.zeros(slots, 5, device=device),
        )

        def memory(training: bool) -> Workspace:
            return Workspace(layout, dtype, device, training)

        def recorded(norm: Norm) -> Recorder | None:
            return None if isinstance(norm, CallableNorm) else recorder

        self._predicting = BlockPasses(ForwardPass, memory(False), recorded(predicted_norm))
        self._training = BlockPasses(TrainPass, memory(True), recorded(trained_norm))

    @property
    def slots(self) -> int:
        return len(self.weights.master)

    @property
    def ledger(self) -> Tensor:
        return self.weights.ledger

    @property
    def recorded(self) -> tuple[int, int]:
        """How many recordings of predictions and of training there are."""
        return len(self._predicting.replays), len(self._training.replays)

    def reset(self, slots: Sequence[int]) -> None:
        """Make distillers new: weights, moments, steps and ledger."""
        own = self.weights
        for first, stop in _runs(slots):
            own.master[first:stop] = self._initial
            own.shadow[first:stop] = self._initial.to(own.shadow.dtype)
            for tensor in (own.mean, own.square, own.corrections, own.ledger):
                tensor[first:stop].zero_()

    def grow(self, slots: int) -> None:
        """Add new distillers, `slots` in all; the others keep everything.

        `torch.OutOfMemoryError` leaves the bank as it was. No work on the bank may be under way.
        """
        own, added = self.weights, slots - self.slots
        master = torch.cat((own.master, self._initial.expand(added, -1)))
        mean, square, corrections, ledger = (
            torch.cat((tensor, tensor.new_zeros(added, tensor.shape[1])))
            for tensor in (own.mean, own.square, own.corrections, own.ledger)
        )
        shadow = master if own.shadow is own.master else master.to(own.shadow.dtype)
        # Recordings go before what they point to.
        self._predicting.forget()
        self._training.forget()
        self.weights = Weights(master, mean, square, shadow, corrections, ledger)

    def predict(self, rows: Tensor, blocks: DeviceBlocks, out: Tensor) -> None:
        """Write a prediction for every row that has a distiller; the others are left alone.

        Args:
            rows: `[rows, hidden]`, shallow rows.
            blocks: which distiller each belongs to.
            out: `[rows + 1 or more, hidden]`; the last row's content is undefined.
        """
        if not blocks.shapes:
            return
        if blocks is not self._predicting.loaded:  # of a steady batch they are the same
            self._predicting.load(blocks, self.weights)
        passes = self._predicting.current
        self._predicting.replays.run(
            (passes, rows.data_ptr(), rows.stride(0), rows.dtype, out.data_ptr()),
            lambda: self._launches.predict(rows, passes, out),
        )

    def train(self, source: Tensor, target: Tensor, blocks: DeviceBlocks) -> None:
        """One AdamW step of every distiller that has rows, on the mean over its rows.

        A distiller whose loss is not finite is left alone, and that is counted.

        Args:
            source, target: `[rows, hidden]`, shallow and deep rows.
            blocks: which distiller each belongs to.
        """
        if not blocks.shapes:
            return
        if blocks is not self._training.loaded:
            self._training.load(blocks, self.weights)
        passes = self._training.current
        at = source.data_ptr(), source.stride(0), target.data_ptr(), target.stride(0)
        self._training.replays.run(
            (passes, *at, source.dtype), lambda: self._launches.train(source, target, passes)
        )


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges `[first, stop)` of neighbouring numbers."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        else:
            runs.append((slot, slot + 1))
    return runs

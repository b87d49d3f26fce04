"""A bank of distillers that predict and learn together, a few launches for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from tllm.consumers.esamp import reference
from tllm.consumers.esamp.distiller import AdamW, Layout, Parameters
from tllm.consumers.esamp.norm import CallableNorm, Norm
from tllm.consumers.esamp.plan import Block, BlockShape

#: Shapes beyond this many run as single launches: a graph holds memory for ever.
_MAX_GRAPHS = 64


@dataclass(frozen=True, eq=False)
class DeviceBlock:
    """A `Block` whose index and counts are on the bank's device."""

    shape: BlockShape
    index: Tensor
    counts: Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host array on the device, without waiting for it."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def upload(block: Block, device: torch.device) -> DeviceBlock:
    """A block with its index and counts on the device."""
    return DeviceBlock(block.shape, to_device(block.index, device), to_device(block.counts, device))


class Workspace:
    """Scratch for the blocks of one stream, which use it one after the other."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self.rows = 0
        self.slots = 0
        self.counted: DeviceBlock | None = None  # whose counts are in `counts`

    def reserve(self, shape: BlockShape, training: bool) -> bool:
        """Make room for a block; True when buffers moved."""
        if shape.rows <= self.rows and shape.slots <= self.slots:
            return False
        self.counted = None
        self.rows = max(shape.rows, self.rows)
        self.slots = max(shape.slots, self.slots)
        hidden, rank = self._layout.hidden, self._layout.rank
        self.x = self._empty(self.rows, hidden)
        self.projected = self._empty(self.rows, 2 * rank)
        self.gated = self._empty(self.rows, rank)
        self.branch = self._empty(self.rows, hidden)
        if training:
            self.target = self._empty(self.rows, hidden)
            self.grad_projected = self._empty(self.rows, 2 * rank)
            self.grad_gated = self._empty(self.rows, rank)
            self.grads = self._empty(self.slots, self._layout.size).zero_()
            self.row_loss = torch.empty(self.rows, dtype=torch.float32, device=self._device)
            self.counts = torch.empty(self.slots, dtype=torch.int32, device=self._device)
            self.active = torch.empty(self.slots, dtype=torch.int32, device=self._device)
        return True

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


class _Pass:
    """The tensors of one block: the weights of its distillers and its share of the scratch."""

    def __init__(self, bank: DistillerBank, scratch: Workspace, shape: BlockShape) -> None:
        def rows_of(buffer: Tensor) -> Tensor:
            return buffer[: shape.rows].view(shape.slots, shape.width, *buffer.shape[1:])

        chosen = slice(shape.first, shape.stop)
        self.weights: Parameters = bank.layout.views(bank.shadow[chosen])
        self.x = rows_of(scratch.x)
        self.projected = rows_of(scratch.projected)
        self.gated = rows_of(scratch.gated)
        self.branch = rows_of(scratch.branch)


class _TrainPass(_Pass):
    """A block that is trained on.

    Attributes:
        warm: its kernels have run, so that a graph can be recorded.
        graph: replays it, once recorded.
    """

    def __init__(self, bank: DistillerBank, scratch: Workspace, shape: BlockShape) -> None:
        super().__init__(bank, scratch, shape)
        chosen = slice(shape.first, shape.stop)
        self.target = scratch.target[: shape.rows].view_as(self.x)
        self.grad_projected = scratch.grad_projected[: shape.rows].view_as(self.projected)
        self.grad_gated = scratch.grad_gated[: shape.rows].view_as(self.gated)
        self.row_loss = scratch.row_loss[: shape.rows].view(shape.slots, shape.width)
        self.counts = scratch.counts[: shape.slots]
        self.active = scratch.active[: shape.slots]
        self.flat_grads = scratch.grads[: shape.slots]
        self.grads: Parameters = bank.layout.views(self.flat_grads)
        self.flat_shadow = bank.shadow[chosen]
        self.master = bank.master[chosen]
        self.mean = bank.mean[chosen]
        self.square = bank.square[chosen]
        self.corrections = bank.corrections[chosen]
        self.ledger = bank.ledger[chosen]
        self.warm = False
        self.graph: torch.cuda.CUDAGraph | None = None


class DistillerBank:
    """`slots` distillers: float32 master weights and moments, and a shadow to compute with.

    The caller orders calls that touch the same slots: nothing here waits for another stream.

    Args:
        layout: sizes of one distiller.
        slots: number of distillers.
        adamw: how they learn.
        seed: of the initial weights, the same for all.
        predicted_norm: turns a distiller's state into what the LM head reads.
        trained_norm: turns it into what the target is compared with.
        dtype: of the shadow weights and of the rows inside (float32 or bfloat16).
        device: where everything lives.
        ops: `reference`, or `kernels` on CUDA.
        cuda_graph: replay training as CUDA graphs; needs CUDA and norms with kernels.

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
        cuda_graph: bool = False,
    ) -> None:
        self.layout = layout
        self.device = device
        self.adamw = adamw
        self.predicted_norm = predicted_norm
        self.trained_norm = trained_norm
        self._ops = ops
        self._cuda_graph = cuda_graph and not isinstance(trained_norm, CallableNorm)
        self._initial = layout.initial(seed).to(device)
        self.master = self._initial.repeat(slots, 1)
        self.mean = torch.zeros_like(self.master)
        self.square = torch.zeros_like(self.master)
        self.shadow = self.master if dtype == torch.float32 else self.master.to(dtype)
        self.corrections = torch.zeros(slots, 2, device=device)
        self.ledger = torch.zeros(slots, 5, device=device)
        self._predict_scratch = Workspace(layout, dtype, device)
        self._train_scratch = Workspace(layout, dtype, device)
        self._predict_passes: dict[BlockShape, _Pass] = {}
        self._train_passes: dict[BlockShape, _TrainPass] = {}

    @property
    def slots(self) -> int:
        """Number of distillers."""
        return len(self.master)

    def reset(self, slots: Sequence[int]) -> None:
        """Make distillers new: weights, moments, steps and ledger."""
        for first, stop in _runs(slots):
            self.master[first:stop] = self._initial
            self.shadow[first:stop] = self._initial.to(self.shadow.dtype)
            for tensor in (self.mean, self.square, self.corrections, self.ledger):
                tensor[first:stop].zero_()

    def grow(self, slots: int) -> None:
        """Add new distillers, `slots` in all; the others keep everything.

        `torch.OutOfMemoryError` leaves the bank as it was. No work on the bank may be under way.
        """
        added = slots - self.slots
        master = torch.cat((self.master, self._initial.expand(added, -1)))
        mean, square, corrections, ledger = (
            torch.cat((tensor, tensor.new_zeros(added, tensor.shape[1])))
            for tensor in (self.mean, self.square, self.corrections, self.ledger)
        )
        shadow = master if self.shadow is self.master else master.to(self.shadow.dtype)
        self.master, self.mean, self.square, self.shadow = master, mean, square, shadow
        self.corrections, self.ledger = corrections, ledger
        self._predict_passes.clear()
        self._forget_train_passes()

    def predict(self, rows: Tensor, blocks: Sequence[DeviceBlock], out: Tensor) -> None:
        """Write a prediction for every row that has a distiller; the others are left alone.

        Args:
            rows: `[rows, hidden]`, shallow rows.
            blocks: which distiller each belongs to.
            out: `[rows + 1, hidden]`; the last row's content is undefined.
        """
        for block in blocks:
            if self._predict_scratch.reserve(block.shape, training=False):
                self._predict_passes.clear()
            step = self._predict_passes.get(block.shape)
            if step is None:
                step = _Pass(self, self._predict_scratch, block.shape)
                self._predict_passes[block.shape] = step
            self._ops.gather_rows(rows, block.index, step.x)
            self._forward(step)
            self._ops_for(self.predicted_norm).scatter_predictions(
                step.x, step.branch, self.predicted_norm, block.index, out
            )

    def train(self, source: Tensor, target: Tensor, blocks: Sequence[DeviceBlock]) -> None:
        """One AdamW step of every distiller that has rows, on the mean over its rows.

        A distiller whose loss is not finite is left alone, and that is counted.

        Args:
            source, target: `[rows, hidden]`, shallow and deep rows.
            blocks: which distiller each belongs to.
        """
        for block in blocks:
            if self._train_scratch.reserve(block.shape, training=True):
                self._forget_train_passes()
            step = self._train_passes.get(block.shape)
            if step is None:
                step = _TrainPass(self, self._train_scratch, block.shape)
                self._train_passes[block.shape] = step
            self._ops.gather_rows(source, block.index, step.x)
            self._ops.gather_rows(target, block.index, step.target)
            if self._train_scratch.counted is not block:  # of a steady batch it is the same one
                self._train_scratch.counted = block
                step.counts.copy_(block.counts)
            self._run(step)

    def _forget_train_passes(self) -> None:
        if any(step.graph is not None for step in self._train_passes.values()):
            # A graph must not be destroyed while it runs. Buffers move rarely.
            torch.cuda.current_stream().synchronize()
        self._train_passes.clear()

    def _run(self, step: _TrainPass) -> None:
        """Run a training pass: launch by launch the first time, then as a graph."""
        if step.graph is None and step.warm and self._may_capture():
            step.graph = _capture(lambda: self._train_pass(step))
        if step.graph is None:
            self._train_pass(step)
            step.warm = True
        else:
            step.graph.replay()

    def _may_capture(self) -> bool:
        graphs = sum(step.graph is not None for step in self._train_passes.values())
        return self._cuda_graph and graphs < _MAX_GRAPHS

    def _forward(self, step: _Pass) -> None:
        torch.bmm(step.x, step.weights.project_in, out=step.projected)
        self._ops.gate(step.projected, step.weights.gate_bias, step.gated)
        torch.bmm(step.gated, step.weights.project_out, out=step.branch)

    def _train_pass(self, step: _TrainPass) -> None:
        ops = self._ops
        self._forward(step)
        # The branch is not needed after its gradient: one buffer holds both.
        grad = step.branch
        self._ops_for(self.trained_norm).loss_backward(
            step.x, step.branch, step.target, step.counts, self.trained_norm, step.row_loss, grad
        )
        torch.bmm(grad, step.weights.project_out.mT, out=step.grad_gated)
        ops.gate_backward(
            step.grad_gated,
            step.projected,
            step.weights.gate_bias,
            step.grad_projected,
            step.grads.gate_bias,
        )
        torch.bmm(step.x.mT, step.grad_projected, out=step.grads.project_in)
        torch.bmm(step.gated.mT, grad, out=step.grads.project_out)
        ops.open_update(
            step.row_loss, step.counts, self.adamw, step.corrections, step.ledger, step.active
        )
        ops.update(
            step.master,
            step.flat_grads,
            step.mean,
            step.square,
            step.flat_shadow,
            step.active,
            step.corrections,
            self.adamw,
        )

    def _ops_for(self, norm: Norm) -> ModuleType:
        return reference if isinstance(norm, CallableNorm) else self._ops


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges `[first, stop)` of neighbouring numbers."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        else:
            runs.append((slot, slot + 1))
    return runs


def _capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Record work on the current stream, which must not be the default one.

    `torch.cuda.graph` would wait for the whole device first; the work allocates nothing and its
    kernels have run before, so recording it needs no such pause. Other threads may go on using
    CUDA meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        work()
    finally:
        graph.capture_end()
    return graph

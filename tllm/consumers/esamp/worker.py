"""ESamp at work in one worker: predicts, guides, trains, and keeps the three in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tllm.consumers.esamp import reference
from tllm.consumers.esamp.bank import DistillerBank
from tllm.consumers.esamp.config import ESampConsumerConfig, RequestOptions
from tllm.consumers.esamp.distiller import AdamW, Layout
from tllm.consumers.esamp.fence import Fence
from tllm.consumers.esamp.graphs import CudaGraphs
from tllm.consumers.esamp.norm import CallableNorm, Identity, Norm, RmsNorm
from tllm.consumers.esamp.passes import DeviceBlocks, to_device, upload
from tllm.consumers.esamp.plan import Block, BlockShape, IntArray, plan_blocks
from tllm.consumers.esamp.slots import UNGUIDED, Lease, SlotTable
from tllm.consumers.esamp.stats import Statistics
from tllm.cuda_runtime import CurrentStream
from tllm.ports import Candidates, ConsumerContext, ModelView, PortBundle, RequestInfo, RowMeta


@dataclass(eq=False)
class _Planned:
    """What was planned for rows of certain sequences."""

    requests: tuple[RequestInfo, ...]
    request_index: IntArray

    def is_of(self, meta: RowMeta) -> bool:
        """Whether rows belong to the same sequences; those of a batch that goes on have the same
        objects in each step."""
        requests, index = meta.requests, meta.request_index
        if requests is self.requests and index is self.request_index:
            return True
        if requests != self.requests or not np.array_equal(index, self.request_index):
            return False
        self.requests, self.request_index = requests, index
        return True


@dataclass(eq=False)
class RowPlan(_Planned):
    """Where the rows of a bundle go. Decoding steps are alike, so it serves many of them.

    Attributes:
        version: of the distillers.
        blocks: the rows grouped by distiller.
        rows: rows with a distiller.
        distillers: `[bundle rows]`, the distiller of each, -1 for none.
        skipped: distillers whose rows do not train, by reason.
    """

    version: int
    blocks: DeviceBlocks
    rows: int
    distillers: IntArray
    skipped: dict[str, int]


@dataclass(eq=False)
class GuidePlan(_Planned):
    """Which prediction belongs to each candidate row, and how much it counts.

    Attributes:
        rows: `[candidate rows]` int32 on the device, or None when row i belongs to row i.
        beta: `[candidate rows]` float32 on the device, 0 where there is no prediction; None
            when no row is guided.
    """

    predicted: RowPlan
    rows: Tensor | None
    beta: Tensor | None


class ESampWorker:
    """The state behind an `ESampConsumer` in one worker."""

    def __init__(self, config: ESampConsumerConfig, ctx: ConsumerContext) -> None:
        model = ctx.model
        self._config = config
        self._device = model.device
        self._dtype = model.dtype
        side = ctx.side_stream()
        on_cuda = model.device.type == "cuda"
        if on_cuda:
            # Triton needs a GPU driver, or its interpreter, from its import on.
            from tllm.consumers.esamp import kernels

            self._ops: ModuleType = kernels
        else:
            self._ops = reference
        self._table = SlotTable(
            config.slots, config.on_full == "grow", config.scope, config.persist
        )
        self._norm = norm = _final_norm(model) if config.needs_final_norm else Identity()
        self._bank = DistillerBank(
            Layout(model.hidden_size, config.rank),
            config.slots,
            AdamW(config.lr, config.betas, config.eps, config.weight_decay),
            config.seed,
            predicted_norm=norm,
            trained_norm=norm if config.targets_lm_head else Identity(),
            # float16 has too little range for gradients.
            dtype=torch.float32 if model.dtype == torch.float32 else torch.bfloat16,
            device=model.device,
            ops=self._ops,
            recorder=CudaGraphs(side) if config.cuda_graph and side is not None else None,
        )
        self._fence = Fence(model.device)
        self._stats = Statistics(model.device)
        # For a row of each sequence, so that it seldom moves, and one for padding.
        self._predictions = torch.empty(
            model.max_requests + 1, model.hidden_size, dtype=model.dtype, device=self._device
        )
        self._predicted_step: int | None = None
        self._predict_plan: RowPlan | None = None
        self._train_plan: RowPlan | None = None
        self._guide_plan: GuidePlan | None = None
        if on_cuda:
            self._warm_up(ctx)

    def renew_norm(self, model: ModelView) -> None:
        """Take over the final norm of new weights, where CUDA graphs look for it."""
        if isinstance(self._norm, RmsNorm) and model.final_norm_weight is not None:
            self._norm.weight.copy_(model.final_norm_weight)
        if isinstance(self._norm, CallableNorm) and model.final_norm is not None:
            self._norm.function = model.final_norm

    def join(self, request: RequestInfo) -> None:
        """A sequence will need a distiller."""
        if RequestOptions.parse(request.options).enabled:
            self._table.join(request)

    def leave(self, request: RequestInfo) -> bool:
        """A sequence needs its distiller no longer; whether it had one, or never needed one."""
        return self._table.leave(request)

    def forget_group(self, name: str) -> bool:
        """Forget a group's distiller; whether there was one."""
        return self._table.forget_group(name)

    def predict(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Predict the deep row of every row of the bundle."""
        self._fence.wait_for_training()
        plan, meta = self._predict_plan, bundle.meta
        if plan is None or plan.version != self._table.version or not plan.is_of(meta):
            plan = self._predict_plan = self._plan(meta, training=False)
            if len(meta) >= len(self._predictions):
                self._predictions = self._predictions.new_empty(
                    2 * len(meta), self._predictions.shape[1]
                )
        self._bank.predict(bundle.entries["source"], plan.blocks, self._predictions)
        self._predicted_step = ctx.step
        self._stats.predictions += plan.rows

    def guide(self, candidates: Candidates, ctx: ConsumerContext) -> None:
        """Add `beta * (l - d)` to the candidates of rows predicted in this step."""
        predicted = self._predict_plan
        if predicted is None or self._predicted_step != ctx.step:
            return
        plan = self._guide_plan
        if plan is None or plan.predicted is not predicted or not plan.is_of(candidates.meta):
            plan = self._guide_plan = self._plan_guidance(candidates.meta, predicted)
        if plan.beta is not None:
            candidates.contrast(self._predictions, plan.beta, self._stats.candidates, plan.rows)

    def train(self, bundle: PortBundle) -> None:
        """One optimiser step of every distiller that has rows in the bundle."""
        plan, meta = self._train_plan, bundle.meta
        if plan is None or plan.version != self._table.version or not plan.is_of(meta):
            plan = self._train_plan = self._plan(meta, training=True)
        self._bank.train(bundle.entries["source"], bundle.entries["target"], plan.blocks)
        self._fence.trained()
        if plan.skipped:
            for reason, steps in plan.skipped.items():
                self._stats.steps_skipped[reason] += steps

    def synchronize(self) -> None:
        self._fence.synchronize()

    def read_stats(self) -> dict[str, Any]:
        """Counters and losses as plain data."""
        self.synchronize()
        return self._stats.read(self._bank.ledger) | {
            "slots": self._bank.slots,
            "slots_in_use": self._table.in_use,
            "distillers_refused": self._table.refused,
        }

    def _plan(self, meta: RowMeta, training: bool) -> RowPlan:
        leases = [self._table.join(request) for request in meta.requests]
        self._settle()
        allowed = [
            not training or RequestOptions.parse(request.options).train for request in meta.requests
        ]
        chosen = [
            lease.slot if may else UNGUIDED for lease, may in zip(leases, allowed, strict=True)
        ]
        distillers = np.array(chosen, np.int32)[meta.request_index]
        blocks = plan_blocks(distillers, self._bank.slots)
        return RowPlan(
            meta.requests,
            meta.request_index,
            self._table.version,
            upload(blocks, self._device),
            int(np.count_nonzero(distillers != UNGUIDED)),
            distillers,
            _skipped(leases, allowed),
        )

    def _plan_guidance(self, meta: RowMeta, predicted: RowPlan) -> GuidePlan:
        row_of_slot = {
            predicted.requests[request].slot: row
            for row, request in enumerate(predicted.request_index.tolist())
            if predicted.distillers[row] != UNGUIDED
        }
        rows = np.array([row_of_slot.get(slot, -1) for slot in meta.slots.tolist()], np.int32)
        asked = [RequestOptions.parse(request.options).beta for request in meta.requests]
        betas = [self._config.beta if beta is None else beta for beta in asked]
        beta = np.where(rows >= 0, np.array(betas, np.float32)[meta.request_index], 0)
        aligned = np.array_equal(rows, np.arange(len(predicted.distillers)))
        return GuidePlan(
            meta.requests,
            meta.request_index,
            predicted,
            None if aligned else to_device(rows, self._device),
            to_device(beta.astype(np.float32), self._device) if beta.any() else None,
        )

    def _settle(self) -> None:
        """Make the bank match the slots that were lent: room for all, and new ones reset."""
        if self._table.capacity > self._bank.slots:
            # The old tensors are freed: neither stream may be using them. This is rare.
            self._fence.synchronize()
            try:
                self._bank.grow(self._table.capacity)
            except torch.OutOfMemoryError:
                self._table.shrink_to(self._bank.slots)
        fresh, self._table.fresh = self._table.fresh, {}
        for slot, label in fresh.items():
            self._stats.assign(slot, label, self._bank.ledger)
        self._bank.reset(list(fresh))

    def _warm_up(self, ctx: ConsumerContext) -> None:
        """Compile every kernel now, on rows that belong to nobody."""
        shape = BlockShape(0, self._bank.slots, 16)
        nobody = Block(
            shape,
            np.full((shape.slots, shape.width), -1, np.int32),
            np.zeros(shape.slots, np.int32),
        )
        rows = torch.zeros(17, self._predictions.shape[1], dtype=self._dtype, device=self._device)
        blocks = upload([nobody], self._device)
        if self._config.guide:
            self._bank.predict(rows, blocks, torch.empty_like(rows))
        torch.cuda.synchronize(self._device)
        if self._config.train:
            with CurrentStream(ctx.side_stream()):
                self._bank.train(rows, rows, blocks)
        torch.cuda.synchronize(self._device)


def _final_norm(model: ModelView) -> Norm:
    if model.final_norm_weight is not None and model.final_norm_eps is not None:
        return RmsNorm(model.final_norm_weight.float().contiguous(), model.final_norm_eps)
    if model.final_norm is None:
        raise ValueError("a worker without the model's final norm cannot run ESamp")
    return CallableNorm(model.final_norm, model.dtype)


def _skipped(leases: Sequence[Lease], allowed: Sequence[bool]) -> dict[str, int]:
    """Distillers without a training step, by reason."""
    trained = {id(lease) for lease, may in zip(leases, allowed, strict=True) if may}
    unguided = {id(lease) for lease in leases if lease.slot == UNGUIDED}
    off = {id(lease) for lease in leases} - trained - unguided
    return {
        reason: len(who) for reason, who in (("no_free_slot", unguided), ("train_off", off)) if who
    }

"""The smallest engine that can drive a consumer: random rows, a random LM head, no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tllm.consumers.esamp import ESampConsumer, ESampConsumerConfig
from tllm.consumers.esamp.distiller import Parameters, gate
from tllm.consumers.esamp.norm import Norm
from tllm.ports import (
    Candidates,
    ConsumerContext,
    ModelView,
    PortBundle,
    RequestInfo,
    RequestResult,
    ResidualWriter,
    RowMeta,
)

HIDDEN, VOCAB, LAYERS = 12, 50, 4


def forward(x: Tensor, weights: Parameters, norm: Norm) -> Tensor:
    """What one distiller predicts of shallow rows x, `[..., rows, hidden]`, for autograd."""
    return norm.forward(x + gate(x @ weights.project_in, weights.gate_bias) @ weights.project_out)


class DriverContext(ConsumerContext):
    def __init__(self, model: ModelView) -> None:
        self.step = 0
        self.device = model.device
        self.stream = None
        self.model = model

    def writer(self, role: str) -> ResidualWriter:
        raise AssertionError("ESamp writes no residual rows")

    def export(self, channel, tensors, meta=None, attach=None) -> None:
        raise AssertionError("ESamp exports nothing")

    def upload(self, array):
        raise AssertionError("ESamp has its own uploads")

    def to_host(self, tensor):
        raise AssertionError("ESamp brings nothing to the host")

    def side_stream(self) -> None:
        return None


class DriverCandidates(Candidates):
    """Top-`width` candidates of random logits, projected by a plain matrix; `delta` is what a
    contrast adds to them."""

    delta: Tensor | None = None

    def __init__(self, meta: RowMeta, states: Tensor, head: Tensor, counts: Tensor) -> None:
        width = int(counts.max())
        self.meta = meta
        self.counts = counts.to(torch.int32)
        self.temperature = torch.full((len(meta),), 0.8)
        self._head = head
        logits, tokens = (states.float() @ head.T).topk(width, dim=-1)
        self._empty = torch.arange(width) >= counts.unsqueeze(-1)
        self.token_ids = tokens.to(torch.int32)
        self.logits = self._filtered(logits)

    def _filtered(self, logits: Tensor) -> Tensor:
        return (logits / self.temperature.unsqueeze(-1)).masked_fill(self._empty, -torch.inf)

    def project(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        if rows is None:
            rows = torch.arange(len(self.meta))
        states = hidden[rows.long().clamp(min=0)].float()
        logits = torch.einsum("rh,rwh->rw", states, self._head[self.token_ids.long()])
        return torch.where((rows < 0).unsqueeze(-1), self.logits, self._filtered(logits))

    def contrast(self, hidden, strength, tally, rows=None) -> None:
        """No row here has more candidates than the width."""
        delta = strength.unsqueeze(-1) * (self.logits - self.project(hidden, rows))
        self.delta = torch.where(delta.isfinite(), delta, 0)
        tally[0] += torch.where(strength != 0, self.counts, 0).sum()
        tally[1] += (self.delta != 0).sum()


def make_model(**changes) -> ModelView:
    weight = torch.linspace(0.5, 1.5, HIDDEN)
    model = ModelView(
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        vocab_size=VOCAB,
        dtype=torch.float32,
        device=torch.device("cpu"),
        final_norm=lambda z: z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-6) * weight,
        final_norm_weight=weight,
        final_norm_eps=1e-6,
        max_requests=64,
    )
    return replace(model, **changes)


def make_request(
    prompt: str, sample: int = 0, *, slot: int, n: int = 1, options: Mapping | None = None
) -> RequestInfo:
    return RequestInfo(f"req-{prompt}", prompt, sample, n, slot, 4, options or {})


def make_meta(requests: Sequence[RequestInfo], step: int = 0) -> RowMeta:
    """One decode row of each sequence."""
    rows = len(requests)
    return RowMeta(
        tuple(requests),
        np.arange(rows, dtype=np.int32),
        np.full(rows, 4 + step, np.int32),
        np.full(rows, step, np.int64),
    )


@dataclass
class StepResult:
    source: Tensor
    target: Tensor
    candidates: DriverCandidates
    delta: Tensor | None


class Driver:
    """Runs steps in the order in which the engine calls a consumer."""

    def __init__(self, config: ESampConsumerConfig, seed: int = 0, **model_changes) -> None:
        self.consumer = ESampConsumer(config)
        self.ctx = DriverContext(make_model(**model_changes))
        self.generator = torch.Generator().manual_seed(seed)
        self.head = torch.randn(VOCAB, HIDDEN, generator=self.generator)
        self.flows = self.consumer.flows()
        self.consumer.start(self.ctx)

    @property
    def stats(self):
        return self.consumer.read_stats()

    def begin(self, *requests: RequestInfo) -> None:
        for request in requests:
            self.consumer.on_request_started(request, self.ctx)

    def finish(self, *requests: RequestInfo) -> list[RequestResult | None]:
        return [self.consumer.on_request_finished(request, self.ctx) for request in requests]

    def rows(self, count: int) -> Tensor:
        return torch.randn(count, HIDDEN, generator=self.generator).to(self.ctx.model.dtype)

    def step(
        self,
        requests: Sequence[RequestInfo],
        *,
        source: Tensor | None = None,
        target: Tensor | None = None,
        sampled: Sequence[RequestInfo] | None = None,
    ) -> StepResult:
        """One decode step; `sampled` are the sequences with candidates, all by default."""
        self.ctx.step += 1
        meta = make_meta(requests, self.ctx.step)
        source = self.rows(len(requests)) if source is None else source
        target = self.rows(len(requests)) if target is None else target
        for number, flow in enumerate(self.flows):
            if flow.window == "same_step":
                bundle = PortBundle({"source": source}, meta, {}, number)
                self.consumer.consume_bundle(bundle, self.ctx)
        sampled_meta = make_meta(requests if sampled is None else sampled, self.ctx.step)
        counts = torch.randint(0, 9, (len(sampled_meta),), generator=self.generator)
        counts[0] = 8
        candidates = DriverCandidates(sampled_meta, self.rows(len(counts)), self.head, counts)
        if self.consumer.config.guide:
            assert self.consumer.guide(candidates, self.ctx) is None
        for number, flow in enumerate(self.flows):
            if flow.window == "out_of_band":
                bundle = PortBundle({"source": source, "target": target}, meta, {}, number)
                self.consumer.consume_bundle(bundle, self.ctx)
        return StepResult(source, target, candidates, candidates.delta)

"""Ways of guiding that ESamp is compared with, and one that is tried: ordinary consumers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.esamp_quality.drawn import DrawnESamp
from benchmarks.esamp_quality.memory import SampleMemory
from benchmarks.esamp_quality.settings import Setting
from benchmarks.esamp_quality.stratified import StratifiedSampling
from tllm.consumers.base import Consumer
from tllm.consumers.esamp import ESampConsumer, ESampConsumerConfig
from tllm.consumers.esamp.config import Scope
from tllm.ports import (
    Candidates,
    ConsumerContext,
    ConsumerFlow,
    PortBundle,
    ResidualStream,
    Sampler,
)


class _Deltas(Candidates):
    """Candidates that are told what a contrast would add to them, and stay as they are.

    Attributes:
        delta: `[rows, width]`, None if nothing was asked.
    """

    def __init__(self, candidates: Candidates) -> None:
        self.meta, self.token_ids = candidates.meta, candidates.token_ids
        self.logits, self.counts = candidates.logits, candidates.counts
        self.temperature = candidates.temperature
        self.delta: Tensor | None = None
        self._candidates = candidates

    def project(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        return self._candidates.project(hidden, rows)

    def contrast(
        self, hidden: Tensor, strength: Tensor, tally: Tensor, rows: Tensor | None = None
    ) -> None:
        delta = strength[:, None] * (self.logits - self.project(hidden, rows))
        self.delta = torch.where(delta.isfinite(), delta, 0)
        tally[0] += torch.where(strength != 0, self.counts, 0).sum()
        tally[1] += (self.delta != 0).sum()


class MatchedESamp(ESampConsumer):
    """ESamp without what only changes the temperature.

    Where the distiller is flatter than the model, `beta (l - d)` has a part that lies along `l`:
    it sharpens, as a lower temperature does. With p the distribution that would be drawn from, the
    part is `a (l - E_p[l])`, where `a = Cov_p(l, delta) / Var_p(l)`; here it is taken away.
    """

    consumer_id = "esamp"

    @torch.inference_mode()
    def guide(  # type: ignore[override]  # it returns what ESamp adds itself
        self, candidates: Candidates, ctx: ConsumerContext
    ) -> Tensor | None:
        told = _Deltas(candidates)
        super().guide(told, ctx)
        delta = told.delta
        if delta is None:
            return None
        logits = candidates.logits
        p = logits.softmax(-1)
        known = p > 0
        centred = torch.where(known, logits, 0)
        centred = centred - (p * centred).sum(-1, keepdim=True)
        covariance = (p * centred * delta).sum(-1, keepdim=True)
        variance = (p * centred.square()).sum(-1, keepdim=True)
        along = torch.where(variance > 1e-6, covariance / variance.clamp(min=1e-6), 0)
        return torch.where(known, delta - along * centred, 0)


class Noise(Consumer):
    """Contrast with the model's own state and a random error: `beta (l - d)`, as ESamp's, with
    errors that say nothing.

    Args:
        beta: strength.
        size: root of the mean square of an error's elements.
    """

    consumer_id = "noise"

    def __init__(self, beta: float, size: float) -> None:
        self.beta = beta
        self.size = size

    def flows(self) -> Sequence[ConsumerFlow]:
        return [
            ConsumerFlow(
                reads=[ResidualStream.read(site="lm_head_in", phase="decode", role="state")],
                writes=[Sampler.write(phase="decode")],
                window="same_step",
                delivery="device_lease",
            )
        ]

    def start(self, ctx: ConsumerContext) -> None:
        self._states: Tensor | None = None
        self._rows: dict[int, int] = {}
        self._generator = torch.Generator(ctx.device).manual_seed(0)

    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        self._states = bundle.entries["state"]
        self._rows = {slot: row for row, slot in enumerate(bundle.meta.slots.tolist())}

    @torch.inference_mode()
    def guide(self, candidates: Candidates, ctx: ConsumerContext) -> Tensor | None:
        states, self._states = self._states, None
        if states is None:
            return None
        error = torch.randn(
            states.shape, generator=self._generator, device=states.device, dtype=torch.float32
        )
        wrong = (states.float() + self.size * error).to(states.dtype)
        index = [self._rows.get(slot, -1) for slot in candidates.meta.slots.tolist()]
        rows = torch.tensor(index, dtype=torch.int32, device=states.device)
        delta = self.beta * (candidates.logits - candidates.project(wrong, rows))
        return torch.where(delta.isfinite(), delta, 0)


_SCOPES: dict[str, Scope] = {"shared": "shared", "own": "request"}


def consumer_of(setting: Setting, error: float, problems: int, tokens: int) -> Consumer | None:
    """What guides.

    Args:
        error: the mean square of the distiller's errors, where noise is to be as large.
        problems: how many there are.
        tokens: the most that all samples of one draw.
    """
    if setting.kind == "plain":
        return None
    if setting.kind == "noise":
        return Noise(setting.beta, error**0.5)
    if setting.kind == "stratified":
        return StratifiedSampling()
    if setting.kind == "memory":
        return SampleMemory(setting.beta, problems, tokens)
    if setting.kind in ("drawn", "drawn-near"):
        near = setting.kind == "drawn-near"
        known = setting.beta, setting.layer, setting.lr, setting.temperature
        return DrawnESamp(*known, problems, among_candidates=near)
    config = ESampConsumerConfig(
        beta=setting.beta,
        source_layer=setting.layer,
        lr=setting.lr,
        scope=_SCOPES.get(setting.kind, "prompt"),
        # An untrained distiller says what the final norm makes of its row.
        train=setting.kind != "lens",
        persist=setting.waves > 1,
        slots=1024 if setting.kind == "own" else 256,
    )
    return MatchedESamp(config) if setting.kind == "matched" else ESampConsumer(config)

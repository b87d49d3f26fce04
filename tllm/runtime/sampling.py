"""Guidance: consumers change the logits of the candidates that survived the filters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tllm.ports.request_meta import RowMeta
from tllm.ports.sampler import Candidates
from tllm.runtime.kernels import candidates as kernels


@dataclass(frozen=True, eq=False)
class LmHead:
    """The LM head as candidates need it.

    Attributes:
        weight: `[local vocab, hidden]`, this rank's rows.
        bias: `[local vocab]` or None.
        first_id: token of the first row.
        scale: factor on the logits.
        soft_cap: `c` of `c * tanh(logits / c)`, or None.
        reduce: sums a tensor over the ranks that share the vocabulary, in place of the identity.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    first_id: int
    scale: float
    soft_cap: float | None
    reduce: Callable[[torch.Tensor], torch.Tensor] | None

    def logits(
        self, hidden: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Raw logits of the candidates for `hidden[rows]`, float32 `[rows, width]`."""
        out = kernels.project(hidden, rows, self.weight, self.first_id, ids, counts)
        if self.bias is not None:
            local = ids.long() - self.first_id
            here = (local >= 0) & (local < len(self.bias))
            out += torch.where(here, self.bias[local.clamp(0, len(self.bias) - 1)], 0.0)
        if self.reduce is not None:
            out = self.reduce(out)
        if self.soft_cap is not None:
            out = self.soft_cap * torch.tanh(out / self.soft_cap)
        return out if self.scale == 1.0 else out * self.scale


class SamplerStep(ABC):
    """The engine's side of one step's sampling.

    Attributes:
        logits: float32 `[sequences, vocab]`, after penalties, temperature and filters; ours to
            change.
        temperature: float32 `[sequences]`, on the device.
    """

    logits: torch.Tensor
    temperature: torch.Tensor

    @abstractmethod
    def penalize(
        self, rows: torch.Tensor, ids: torch.Tensor, raw: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Raw candidate logits after the penalties that the engine applied to its own."""


class StepCandidates(Candidates):
    """The candidates of the rows one consumer guides."""

    def __init__(
        self,
        step: SamplerStep,
        head: LmHead,
        rows: torch.Tensor,
        meta: RowMeta,
        width: int,
    ) -> None:
        self.meta = meta
        self._step = step
        self._head = head
        self._rows = rows
        self.token_ids, self.logits, self.found = kernels.collect(step.logits, rows, width)
        fits = self.found <= width
        self.counts = self.found * fits
        self.logits.masked_fill_(~fits[:, None], float("-inf"))
        self.temperature = step.temperature[rows.long()]

    def project(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        if rows is None:
            rows = torch.arange(len(self._rows), dtype=torch.int32, device=hidden.device)
        raw = self._head.logits(hidden, rows, self.token_ids, self.counts)
        raw = self._step.penalize(self._rows, self.token_ids, raw, self.counts)
        scaled = raw / self.temperature[:, None]
        known = (rows >= 0)[:, None] & (self.logits > float("-inf"))
        return torch.where(known, scaled, self.logits)

    def apply(self, delta: torch.Tensor) -> None:
        """Add a consumer's deltas to the engine's logits."""
        if delta.shape != self.logits.shape:
            raise ValueError(
                f"guide() returned deltas of shape {list(delta.shape)}; it must be [rows, width] "
                f"= {list(self.logits.shape)}"
            )
        kernels.edit(self._step.logits, self._rows, self.token_ids, delta.float(), self.counts)

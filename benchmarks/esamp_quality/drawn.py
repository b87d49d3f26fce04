"""ESamp whose distiller learns which tokens were drawn, in place of the model's states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.esamp_quality.keys import Blocks, Keys, guided_and_drawn
from tllm.consumers.base import Consumer
from tllm.consumers.esamp.distiller import AdamW, Layout, gate
from tllm.ports import (
    Candidates,
    ConsumerContext,
    ConsumerFlow,
    PortBundle,
    ResidualStream,
    RowMeta,
)

RANK = 64


class DrawnESamp(Consumer):
    """The distiller is ESamp's, and so is the guidance, `beta (l - d)`; but its loss is the cross
    entropy of d with the tokens that the samples of its prompt drew. It could tell what was tried
    also where the states of all samples are one.

    Args:
        among_candidates: d is normalised over the tokens that could be drawn, and not over all:
            only their rows of the LM head are needed.
        temperature: that of all requests.
        keys: room for so many prompts.
    """

    consumer_id = "esamp"

    def __init__(
        self,
        beta: float,
        layer: int,
        lr: float,
        temperature: float,
        keys: int,
        among_candidates: bool,
    ) -> None:
        self.among_candidates = among_candidates
        self.beta, self.layer, self.temperature = beta, layer, temperature
        self._room = keys
        self._adamw = AdamW(lr, (0.9, 0.999), 1e-8, 0.01)

    def validate_options(self, options: Mapping[str, Any]) -> None:
        """`group`: who shares a distiller."""

    def flows(self) -> Sequence[ConsumerFlow]:
        source = ResidualStream.read(layer=self.layer, phase="decode", role="source")
        return guided_and_drawn(source)

    def start(self, ctx: ConsumerContext) -> None:
        model = ctx.model
        if model.lm_head is None or model.final_norm_weight is None or model.final_norm_eps is None:
            raise ValueError("a distiller of drawn tokens needs an RMS norm and the LM head")
        self._layout = Layout(model.hidden_size, RANK)
        self._norm = model.final_norm_weight.float(), model.final_norm_eps
        eye = torch.eye(model.hidden_size, device=ctx.device, dtype=model.dtype)
        self._head = model.lm_head(eye)  # `[hidden, vocab]`: this model's has no bias
        first = self._layout.initial(0).to(ctx.device)
        self._weights = first.repeat(self._room, 1)
        self._mean, self._square = (torch.zeros_like(self._weights) for _ in range(2))
        self._corrections = torch.zeros(self._room, 2, device=ctx.device)
        self._keys = Keys()
        self._source: tuple[Tensor, RowMeta] | None = None
        self._outside: Tensor | None = None
        self._losses: list[Tensor] = []
        self._rows_trained = 0
        self._changed = torch.zeros((), dtype=torch.int64, device=ctx.device)

    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        source = bundle.entries["source"]
        if bundle.flow == 0:
            self._source = source, bundle.meta
        else:
            self._train(source, bundle.entries["token_target"], bundle.meta)

    @torch.inference_mode()
    def guide(self, candidates: Candidates, ctx: ConsumerContext) -> Tensor | None:
        source, self._source = self._source, None
        if source is None:
            return None
        rows, meta = source
        blocks = Blocks.of(self._keys.of(meta), rows.device)
        states = self._predict(self._weights[blocks.keys], rows.float()[blocks.rows])
        states = blocks.spread(states, len(rows)).to(rows.dtype)
        row_of = {slot: row for row, slot in enumerate(meta.slots.tolist())}
        index = [row_of.get(slot, -1) for slot in candidates.meta.slots.tolist()]
        at = torch.tensor(index, dtype=torch.int32, device=rows.device)
        if self.among_candidates:
            self._outside = self._not_candidates(candidates, meta)
        delta = self.beta * (candidates.logits - candidates.project(states, at))
        delta = torch.where(delta.isfinite(), delta, 0)
        self._changed += (delta != 0).sum()
        return delta

    def _not_candidates(self, candidates: Candidates, meta: RowMeta) -> Tensor:
        """`[rows of meta, vocab]`: -inf for what could not be drawn, else 0."""
        logits = candidates.logits
        place = {slot: row for row, slot in enumerate(candidates.meta.slots.tolist())}
        at = torch.tensor([place[slot] for slot in meta.slots.tolist()], device=logits.device)
        outside = torch.full(
            (len(logits), self._head.shape[1] + 1), -torch.inf, device=logits.device
        )
        # What lies beyond a row's candidates is put behind the vocabulary.
        ids = torch.where(logits.isfinite(), candidates.token_ids.long(), self._head.shape[1])
        return outside.scatter(1, ids, 0.0)[at, :-1]

    def _predict(self, weights: Tensor, rows: Tensor) -> Tensor:
        """Final states `[blocks, width, hidden]`, of `rows` of that shape."""
        parts = self._layout.views(weights)
        inner = gate(rows @ parts.project_in, parts.gate_bias)
        scale, eps = self._norm
        return torch.rms_norm(rows + inner @ parts.project_out, rows.shape[-1:], scale, eps)

    def _train(self, rows: Tensor, tokens: Tensor, meta: RowMeta) -> None:
        blocks = Blocks.of(self._keys.of(meta), rows.device)
        with torch.inference_mode(False), torch.enable_grad():
            there, index, keys = blocks.there, blocks.rows, blocks.keys
            weights = self._weights[keys].clone().requires_grad_()
            states = self._predict(weights, rows.float()[index].clone())
            logits = states @ self._head.clone() / self.temperature
            if self._outside is not None:
                logits = logits + self._outside[index]
            wanted = torch.where(there, tokens[index], -100)
            losses = cross_entropy(logits.transpose(1, 2), wanted, reduction="none").sum(1)
            losses = losses / there.sum(1)
            [grad] = torch.autograd.grad(losses.sum(), weights)
        with torch.inference_mode():
            weights, mean, square = (
                each[keys] for each in (self._weights, self._mean, self._square)
            )
            corrections = self._adamw.bias_corrections(self._corrections[keys])
            self._adamw.update(weights, grad, mean, square, corrections)
            self._weights[keys], self._mean[keys], self._square[keys] = weights, mean, square
            self._corrections[keys] = corrections
            self._losses.append(losses.detach().mean())
            self._rows_trained += len(rows)

    @torch.inference_mode()
    def read_stats(self) -> Mapping[str, Any]:
        losses = torch.stack(self._losses) if self._losses else torch.zeros(1)
        return {
            "loss_mean": float(losses.mean()),
            "loss_last": float(losses[-100:].mean()),
            "rows_trained": self._rows_trained,
            "candidates_changed": int(self._changed),
        }

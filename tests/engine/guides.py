"""Consumers that guide sampling, and what the candidates must be."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.recorder import Recorder
from tllm.ports import (
    Candidates,
    ConsumerContext,
    ConsumerFlow,
    PortBundle,
    ResidualStream,
    RowMeta,
    Sampler,
)


@dataclass
class Seen:
    """One row of candidates: who, and after which position; token ids and values in no order."""

    request_id: str
    sample_index: int
    position: int
    token_ids: list[int]
    logits: torch.Tensor
    projected: torch.Tensor
    temperature: float


@dataclass
class GuideLog:
    rows: list[Seen] = field(default_factory=list)
    projected_unknown: list[bool] = field(default_factory=list)


GUIDES: dict[str, GuideLog] = {}


class Guide(Recorder):
    """Adds `boost` to the least likely candidate, and notes what it saw.

    It also projects the states that the LM head reads: they must give the candidates' own logits.
    """

    def __init__(
        self,
        boost: float | None = None,
        *,
        phase: str = "any",
        width: int = 1024,
        consumer_id: str = "guide",
    ) -> None:
        states = ResidualStream.read(site="lm_head_in", role="state")
        flow = ConsumerFlow(
            reads=[states],
            writes=[Sampler.write(phase=phase, width=width)],
            bundle_key=("engine_step_id",),
        )
        super().__init__(flow, consumer_id=consumer_id)
        self._boost = boost
        self._states: tuple[torch.Tensor, RowMeta] | None = None
        GUIDES[consumer_id] = GuideLog()

    @property
    def seen(self) -> list[Seen]:
        return GUIDES[self.consumer_id].rows

    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        self._states = (bundle.entries["state"], bundle.meta)

    def guide(self, candidates: Candidates, ctx: ConsumerContext) -> torch.Tensor | None:
        hidden, meta = self._states
        last = {
            (meta.requests[index].slot, int(position)): row
            for row, (index, position) in enumerate(
                zip(meta.request_index, meta.positions, strict=True)
            )
        }
        wanted = candidates.meta
        numbers = [
            last[wanted.requests[index].slot, int(position)]
            for index, position in zip(wanted.request_index, wanted.positions, strict=True)
        ]
        rows = ctx.upload(np.array(numbers, np.int32))
        projected = candidates.project(hidden, rows)
        nobody = candidates.project(hidden, torch.full_like(rows, -1))
        GUIDES[self.consumer_id].projected_unknown.append(torch.equal(nobody, candidates.logits))
        for i in range(len(wanted)):
            info, count = wanted.requests[wanted.request_index[i]], int(candidates.counts[i])
            self.seen.append(
                Seen(
                    info.request_id,
                    info.sample_index,
                    int(wanted.positions[i]),
                    candidates.token_ids[i, :count].tolist(),
                    candidates.logits[i, :count].to("cpu", copy=True),
                    projected[i, :count].to("cpu", copy=True),
                    float(candidates.temperature[i]),
                )
            )
        if self._boost is None:
            return None
        delta = torch.zeros_like(candidates.logits)
        least = candidates.logits.masked_fill(candidates.logits.isinf(), torch.inf).argmin(1)
        return delta.scatter_(1, least[:, None], self._boost)


class Contrasting(Recorder):
    """Puts the logits of one fixed state in the place of the model's: `l' = l - (l - d) = d`."""

    def __init__(self, state: torch.Tensor, *, width: int) -> None:
        super().__init__(
            ConsumerFlow(writes=[Sampler.write(phase="any", width=width)]), consumer_id="contrast"
        )
        self._state = state

    def start(self, ctx: ConsumerContext) -> None:
        self._state = self._state.to(ctx.device)
        self._tally = torch.zeros(2, dtype=torch.int64, device=ctx.device)

    def guide(self, candidates: Candidates, ctx: ConsumerContext) -> torch.Tensor | None:
        count = len(candidates.meta)
        rows = torch.zeros(count, dtype=torch.int32, device=ctx.device)
        weights = -torch.ones(count, device=ctx.device)
        candidates.contrast(self._state[None], weights, self._tally, rows)
        return None

    def read_stats(self):
        return {"tally": self._tally.tolist()}


def processed(logits: torch.Tensor, params, prompt: list[int], generated: list[int]):
    """Logits `[vocab]` after bias, penalties, temperature and filters; `-inf` where filtered.

    Written down from vLLM's documentation of `SamplingParams`, one token at a time.
    """
    out = logits.clone()
    for token, bias in (params.logit_bias or {}).items():
        out[int(token)] += bias
    for token in set(prompt + generated):
        out[token] = (
            out[token] / params.repetition_penalty
            if out[token] > 0
            else out[token] * params.repetition_penalty
        )
    for token in set(generated):
        out[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    out /= params.temperature
    if params.min_p > 0:
        probabilities = out.softmax(0)
        out[probabilities < params.min_p * probabilities.max()] = -torch.inf
    if 0 < params.top_k < len(out):
        out[out < out.topk(params.top_k).values[-1]] = -torch.inf
    if params.top_p < 1:
        probabilities, order = out.softmax(0).sort()
        dropped = probabilities.cumsum(0) <= 1 - params.top_p
        dropped[-1] = False
        out[order[dropped]] = -torch.inf
    return out

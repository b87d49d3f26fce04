"""Samples of a prompt that share its distribution out among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tllm.consumers.base import Consumer
from tllm.ports import Candidates, ConsumerContext, ConsumerFlow, RequestInfo, Sampler


def draw_within(logits: Tensor, token_ids: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Whose part of the distribution a code is in.

    Args:
        logits: `[rows, width]`, -inf where there is no candidate.
        token_ids: `[rows, width]` int64: parts follow each other in the order of the tokens, so
            that samples in one state divide it in one way.
        codes: `[rows, 1]` float64, from 0 to below 1.

    Returns:
        The place of the token in its row, `[rows, 1]`, and where in its part the code lies.
    """
    order = torch.where(logits.isfinite(), token_ids, 2**40).argsort(1)
    ends = logits.double().softmax(-1).gather(1, order).cumsum(1)
    ends = ends / ends[:, -1:]
    last = logits.isfinite().sum(1, keepdim=True) - 1
    chosen = torch.searchsorted(ends, codes, right=True).minimum(last.clamp(min=0))
    begin = torch.where(chosen > 0, ends.gather(1, (chosen - 1).clamp(min=0)), 0)
    part = (ends.gather(1, chosen) - begin).clamp(min=1e-300)
    return order.gather(1, chosen), ((codes - begin) / part).clamp(0, 1 - 2**-53)


class StratifiedSampling(Consumer):
    """Arithmetic sampling ("Arithmetic Sampling: Parallel Diverse Decoding for Large Language
    Models", arXiv 2210.15458): sample i of n draws the answer whose place in the distribution of
    all answers is `(i + u) / n`, u being one random number for the prompt. Each sample alone is
    drawn as ever; together they cover the distribution evenly."""

    consumer_id = "esamp"

    def flows(self) -> Sequence[ConsumerFlow]:
        write = Sampler.write(phase="any")
        return [ConsumerFlow(reads=[], writes=[write], window="same_step")]

    def start(self, ctx: ConsumerContext) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._offsets: dict[str, float] = {}
        self._codes = torch.zeros(ctx.model.max_requests, dtype=torch.float64, device=ctx.device)
        self._rows = torch.zeros((), dtype=torch.int64, device=ctx.device)

    def on_request_started(self, request: RequestInfo, ctx: ConsumerContext) -> None:
        offset = self._offsets.get(request.prompt_id)
        if offset is None:
            offset = torch.rand((), generator=self._generator, dtype=torch.float64).item()
            self._offsets[request.prompt_id] = offset
        self._codes[request.slot] = (request.sample_index + offset) / request.num_samples

    @torch.inference_mode()
    def guide(self, candidates: Candidates, ctx: ConsumerContext) -> Tensor | None:
        logits = candidates.logits
        slots = torch.from_numpy(candidates.meta.slots).long().to(logits.device)
        place, codes = draw_within(logits, candidates.token_ids.long(), self._codes[slots][:, None])
        self._codes[slots] = codes[:, 0]
        self._rows += (candidates.counts > 1).sum()
        return torch.full_like(logits, -torch.inf).scatter(1, place, 0.0)

    @torch.inference_mode()
    def read_stats(self) -> Mapping[str, Any]:
        return {"rows_trained": 0, "candidates_changed": int(self._rows)}

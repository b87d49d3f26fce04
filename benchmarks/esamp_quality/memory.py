"""A memory of what each sample drew and in which state, in place of a distiller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from benchmarks.esamp_quality.keys import Blocks, Keys, guided_and_drawn
from tllm.consumers.base import Consumer
from tllm.ports import (
    Candidates,
    ConsumerContext,
    ConsumerFlow,
    PortBundle,
    ResidualStream,
    RowMeta,
)

NEARNESS = 0.02
"""A state counts `exp((cosine - 1) / NEARNESS)`."""


class SampleMemory(Consumer):
    """Each token loses `beta log(1 + c)`, where c is how often the other samples of the prompt drew
    it in a state like this one, as the LM head reads it.

    Args:
        keys, rows: room for so many prompts, and tokens of each.
    """

    consumer_id = "esamp"

    def __init__(self, beta: float, keys: int, rows: int) -> None:
        self.beta, self.room = beta, (keys, rows)

    def validate_options(self, options: Mapping[str, Any]) -> None:
        """`group`: whose samples remember together."""

    def flows(self) -> Sequence[ConsumerFlow]:
        state = ResidualStream.read(site="lm_head_in", phase="decode", role="state")
        return guided_and_drawn(state)

    @torch.inference_mode()
    def start(self, ctx: ConsumerContext) -> None:
        keys, rows = self.room
        sizes = {"dtype": ctx.model.dtype, "device": ctx.device}
        self._states = torch.zeros(keys, rows, ctx.model.hidden_size, **sizes)
        self._tokens = torch.zeros(keys, rows, dtype=torch.int64, device=ctx.device)
        self._samples = torch.full((keys, rows), -1, dtype=torch.int64, device=ctx.device)
        self._filled = np.zeros(keys, np.int64)
        self._vocabulary = ctx.model.vocab_size
        self._keys, self._numbers = Keys(), dict[tuple[str, int], int]()
        self._now: tuple[Tensor, RowMeta] | None = None
        self._changed = torch.zeros((), dtype=torch.int64, device=ctx.device)

    @torch.inference_mode()
    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        states, meta = bundle.entries["state"], bundle.meta
        if bundle.flow == 0:
            self._now = states, meta
            return
        keys = self._keys.of(meta)
        order = np.argsort(keys, kind="stable")
        found, counts = np.unique(keys, return_counts=True)
        within = np.arange(len(keys)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = self._filled[keys[order]] + within
        self._filled[found] += counts
        at, key, place = (
            torch.from_numpy(e).to(states.device) for e in (order, keys[order], places)
        )
        self._states[key, place] = normalize(states[at].float(), dim=-1).to(states.dtype)
        self._tokens[key, place] = bundle.entries["token_target"][at]
        self._samples[key, place] = self._sample_numbers(meta, states.device)[at]

    def _sample_numbers(self, meta: RowMeta, device: torch.device) -> Tensor:
        """A number for each sequence that ever ran, `[rows]`."""
        found = [
            self._numbers.setdefault((r.prompt_id, r.sample_index), len(self._numbers))
            for r in meta.requests
        ]
        return torch.from_numpy(np.array(found, np.int64)[meta.request_index]).to(device)

    @torch.inference_mode()
    def guide(self, candidates: Candidates, ctx: ConsumerContext) -> Tensor | None:
        now, self._now = self._now, None
        if now is None:
            return None
        states, meta = now
        keys = self._keys.of(meta)
        longest = int(self._filled[np.unique(keys)].max())
        if not longest:
            return None
        blocks = Blocks.of(keys, states.device)
        asked = normalize(states.float(), dim=-1).to(states.dtype)[blocks.rows]
        known = self._states[blocks.keys, :longest]
        cosine = (asked @ known.transpose(1, 2)).float()
        near = torch.exp((cosine - 1) / NEARNESS)
        samples = self._samples[blocks.keys, :longest]
        own = self._sample_numbers(meta, states.device)[blocks.rows]
        near = torch.where((own[..., None] != samples[:, None]) & (samples >= 0)[:, None], near, 0)
        drawn = one_hot(self._tokens[blocks.keys, :longest], self._vocabulary).to(states.dtype)
        counts = (near.to(states.dtype) @ drawn).float()
        lost = self.beta * blocks.spread(counts, len(states)).log1p()
        row_of = {slot: row for row, slot in enumerate(meta.slots.tolist())}
        index = torch.tensor(
            [row_of[slot] for slot in candidates.meta.slots.tolist()], device=states.device
        )
        there = candidates.logits.isfinite()
        ids = torch.where(there, candidates.token_ids.long(), 0)
        delta = torch.where(there, -lost[index].gather(1, ids), 0)
        self._changed += (delta != 0).sum()
        return delta

    @torch.inference_mode()
    def read_stats(self) -> Mapping[str, Any]:
        return {
            "rows_trained": int(self._filled.sum()),
            "candidates_changed": int(self._changed),
        }

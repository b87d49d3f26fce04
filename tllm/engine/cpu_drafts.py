"""Drafted tokens on a CPU: the distributions that they are verified with."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from tllm.engine.seams import overrides, uses

uses(
    "vllm.v1.sample.metadata.SamplingMetadata",
    "all_greedy temperature top_k top_p",
    "the distributions that drafted tokens are verified with",
)

_GREEDY = 0.0


class DraftConstraints:
    """Temperature, top-k and top-p of the requests, for each of their drafted tokens.

    vLLM 0.32 writes them into a copy that it throws away, and reads memory that nobody wrote: on a
    CPU, sampled requests were verified at any temperature, and one with `top_k` ended the engine.
    """

    @classmethod
    def install(cls) -> None:
        """Let vLLM's verification of this process use them."""
        rejection_sampler.apply_sampling_constraints = cls().apply

    @overrides(
        "vllm.v1.sample.rejection_sampler.apply_sampling_constraints",
        "the distributions that drafted tokens are verified with, on a CPU",
    )
    def apply(
        self, logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: Any
    ) -> torch.Tensor:
        """As vLLM's.

        Args:
            logits: `[drafted tokens, vocab]`, changed.
            cu_num_draft_tokens: `[sequences]`, drafted tokens up to the end of each.
        """
        if sampling_metadata.all_greedy or not len(logits):
            return logits
        counts = torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1))

        def of_drafts(asked: torch.Tensor | None) -> torch.Tensor | None:
            return None if asked is None else asked.repeat_interleave(counts.long())

        asked = sampling_metadata.temperature
        greedy = asked == _GREEDY
        temperature = torch.where(greedy, 1.0, asked).repeat_interleave(counts.long())
        logits.div_(temperature[:, None])
        return apply_top_k_top_p(
            logits, of_drafts(sampling_metadata.top_k), of_drafts(sampling_metadata.top_p)
        )

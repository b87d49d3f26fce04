"""A sequence as the engine gave it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tllm.verify.batches import Ask
from tllm.verify.certificate import Difference


@dataclass(frozen=True)
class Served:
    """A sequence as the engine gave it.

    log_probabilities: of its generated tokens.
    first: how many of its tokens are the prompt's.
    cached: how many of these the prefix cache served.
    """

    batch: str
    request: int
    ask: Ask
    completion: Any
    first: int
    cached: int = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated."""
        return [*self.ask.prompt, *self.completion.token_ids]

    @property
    def passed(self) -> list[int]:
        """Those that passed the model: the last one never does."""
        return self.tokens[:-1]

    @property
    def log_probabilities(self) -> Tensor:
        """Of the generated tokens."""
        given = zip(self.completion.token_ids, self.completion.logprobs or (), strict=True)
        return torch.tensor([found[token].logprob for token, found in given])

    @property
    def computed_from(self) -> int:
        """The first position whose row the engine computed. Where rows of the prompt are read, all
        are."""
        return min(self.cached, self.first) if self.ask.reads in (None, "decode") else 0

    def difference(self, where: str, what: str, **more: Any) -> Difference:
        """Something that is wrong with it."""
        index = self.completion.index
        return Difference(self.batch, self.request, index, str(self.ask), where, what, **more)

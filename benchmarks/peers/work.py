"""What every peer is asked: the same prompts, vectors and sizes, drawn from a seed.

Imported in each peer's own environment, so it needs nothing but numpy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

LAYERS, HIDDEN = 28, 256
_STRENGTH = 8.0
"""Length of a steering vector; a row has about 12 after the first layer and 83 after the last."""


@dataclass(frozen=True)
class Work:
    """Requests of one row of the table.

    Attributes:
        doing: what a peer's method is called.
        layers: steered ones; the middle one, or all.
        configurations: distinct ways of steering, dealt out to the prompts in turn.
        fresh: whether those of each round are new ones.
        steps: tokens that each particle is fed, for next-token queries.
    """

    name: str
    doing: str
    prompts: int
    prompt_tokens: int
    max_tokens: int = 1
    layers: int = 0
    configurations: int = 1
    fresh: bool = False
    steps: int = 0

    @property
    def steered_layers(self) -> list[int]:
        """Numbers of the layers that are steered."""
        return [LAYERS // 2] if self.layers == 1 else [*range(self.layers)]

    def tokens(self, vocab: int, number: int) -> list[list[int]]:
        """The prompts of a round."""
        generator = np.random.default_rng([number, self.prompts, self.prompt_tokens])
        shape = self.prompts, self.prompt_tokens
        found: list[list[int]] = generator.integers(2, vocab, shape).tolist()
        return found

    def fed(self, vocab: int, number: int) -> list[list[int]]:
        """What each particle is fed, after a prompt that they share: the first of them differ."""
        generator = np.random.default_rng([number, 7])
        fed = generator.integers(2, vocab, (self.prompts, self.steps))
        fed[:, 0] = generator.permutation(np.arange(2, vocab))[: self.prompts]
        found: list[list[int]] = fed.tolist()
        return found

    def vectors(self, prompt: int, number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """`[steered layers, hidden]` that are added to a prompt's rows, prompt and answer alike, in
        a round."""
        seed = [11, prompt % self.configurations, *([number] if self.fresh else [])]
        generator = np.random.default_rng(seed)
        drawn = generator.standard_normal((len(self.steered_layers), HIDDEN), dtype=np.float32)
        unit = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
        return (_STRENGTH * unit).astype(np.float32)

    def described(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


WORKS = (
    Work("plain", "plain", 8, 16, 16),
    Work("steer 1 layer", "steer", 8, 16, 16, layers=1),
    Work("steer 28 layers", "steer", 8, 16, 16, layers=LAYERS),
    Work("256 configurations", "steer", 256, 8, 4, layers=LAYERS, configurations=256),
    Work("256 fresh ones", "steer", 256, 8, 4, layers=LAYERS, configurations=256, fresh=True),
    Work("capture 28 layers", "capture", 8, 64),
    Work("next-token queries", "query", 16, 32, steps=8),
)

"""What every peer is asked: the same model, prompts and vectors, drawn from a seed.

Imported in each peer's own environment, so it needs nothing but numpy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.workload import SHAPES, Shape

LAYERS = 28
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
        hidden: width of the model.
        checked: prompts, the first ones, whose answers are compared.
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
    hidden: int = 256
    checked: int = 256

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

    def draw(self, number: int) -> None:
        """Draw the vectors of a round, before its time is taken."""
        _drawn.cache_clear()
        for prompt in range(self.prompts if self.doing == "steer" else 0):
            self.vectors(prompt, number)

    def vectors(self, prompt: int, number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """`[steered layers, hidden]` that are added to a prompt's rows, prompt and answer alike, in
        a round."""
        seed = 11, prompt % self.configurations, *((number,) if self.fresh else ())
        return _drawn(seed, len(self.steered_layers), self.hidden)

    def described(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


@cache
def _drawn(
    seed: tuple[int, ...], layers: int, hidden: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    drawn = np.random.default_rng(seed).standard_normal((layers, hidden), dtype=np.float32)
    unit = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return (_STRENGTH * unit).astype(np.float32)


@dataclass(frozen=True)
class Size:
    """A model, and how much it is asked.

    Attributes:
        device: `cpu` or `cuda`.
        spread: standard deviation of the weights.
        kv_bytes: KV cache of an engine.
    """

    name: str
    shape: Shape
    device: str
    spread: float
    kv_bytes: int
    works: tuple[Work, ...]

    @property
    def positions(self) -> int:
        """Tokens of the longest sequence that is asked for, and some room."""
        return 64 + max(w.prompt_tokens + w.max_tokens + w.steps for w in self.works)

    def config(self) -> dict[str, Any]:
        """As a Hugging Face config."""
        own = {"max_position_embeddings": self.positions, "initializer_range": self.spread}
        return self.shape.config() | own


_SMALL = (
    Work("plain", "plain", 8, 16, 16),
    Work("steer 1 layer", "steer", 8, 16, 16, layers=1),
    Work("steer 28 layers", "steer", 8, 16, 16, layers=LAYERS),
    Work("256 configurations", "steer", 256, 8, 4, layers=LAYERS, configurations=256),
    Work("256 fresh ones", "steer", 256, 8, 4, layers=LAYERS, configurations=256, fresh=True),
    Work("capture 28 layers", "capture", 8, 64),
    Work("next-token queries", "query", 16, 32, steps=8),
)
_LARGE = (
    Work("plain", "plain", 32, 128, 64),
    Work("steer 1 layer", "steer", 32, 128, 64, layers=1),
    Work("steer 28 layers", "steer", 32, 128, 64, layers=LAYERS),
    Work("256 configurations", "steer", 256, 64, 32, layers=LAYERS, configurations=256),
    Work("256 fresh ones", "steer", 256, 64, 32, layers=LAYERS, configurations=256, fresh=True),
    Work("capture 28 layers", "capture", 32, 256),
    Work("next-token queries", "query", 64, 64, steps=16),
)
_7B = SHAPES["7b"]

SIZES = {
    size.name: size
    for size in (
        Size(
            "small",
            Shape("small", 256, 512, LAYERS, 4, 2, vocab=1348, dtype="float32"),
            "cpu",
            spread=0.06,
            kv_bytes=2**29,
            works=_SMALL,
        ),
        Size(
            "7b",
            _7B,
            "cuda",
            spread=0.02,
            kv_bytes=8 * 2**30,
            works=tuple(replace(work, hidden=_7B.hidden, checked=8) for work in _LARGE),
        ),
    )
}

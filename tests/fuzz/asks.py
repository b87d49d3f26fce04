"""One drawn request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import Any, Literal

import numpy as np
from capture.truth import POINTS

from tllm import SamplingParams


@dataclass
class Ask:
    """A request, as it is drawn feature by feature.

    Attributes:
        prompt: token ids.
        options: arguments of `tllm.SamplingParams`.
        priority: smaller is served first.
        abort_after: engine steps, or outputs, after which it is cancelled; None for never.
        cancel: how: by `abort`, by leaving its stream, or by cancelling the task that reads it.
        parts: in how many its prompt arrives; 0 for one that is no stream.
        points: the hook points that its engine has.
        guided: ESamp may change its tokens, so that only its rows can be compared.
        selections: of tokens, that its steering names.
        drawn: names of the features that it has.
    """

    prompt: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    abort_after: int | None = None
    cancel: Literal["abort", "leave", "task"] = "abort"
    parts: int = 0
    points: Sequence[str] = POINTS
    guided: bool = False
    selections: list[Any] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)

    def params(self, **changes: Any) -> SamplingParams:
        """Its sampling parameters; options that are changed to None are left out."""
        options = {**self.options, **changes}
        return SamplingParams(**{k: v for k, v in options.items() if v is not None})

    @cached_property
    def same(self) -> SamplingParams:
        """Its parameters, the same object each time it runs, and for its twins."""
        return self.params()

    def twin(self, pick: Random) -> Ask:
        """A request that is given the same object for its parameters, and another prompt."""
        found = replace(self, prompt=pick.sample(self.prompt, len(self.prompt)))
        found.same = self.same
        return found

    @property
    def captures(self) -> dict[str, dict[str, Any]]:
        """What it captures, by consumer."""
        return self.options.get("capture", {})

    @property
    def consumers(self) -> dict[str, dict[str, Any]]:
        """Its options for consumers."""
        return self.options.setdefault("consumers", {})

    @property
    def steered(self) -> bool:
        """Whether it asks to be steered itself."""
        return any("steering" in name for name in self.options)

    @property
    def patched(self) -> bool:
        """Whether it asks for rows in the place of its own."""
        return "patch" in self.options

    @property
    def judged(self) -> bool:
        """Whether conditions may end it."""
        return bool(self.options.keys() & {"stop_when", "abort_when"})

    def __str__(self) -> str:
        with np.printoptions(threshold=4, precision=4):
            return (
                f"{' '.join(self.drawn)}: prompt={self.prompt}, priority={self.priority}, "
                f"abort_after={self.abort_after}, options={self.options}"
            )

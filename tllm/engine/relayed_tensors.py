"""What conditions made of rows travels with them, from one pipeline stage to the next."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from vllm.sequence import IntermediateTensors

from tllm.engine.seams import overrides, uses

uses(
    "vllm.sequence",
    "IntermediateTensors",
    "what conditions made of rows goes to the next pipeline stage with them",
    takes="tensors",
)
uses(
    "vllm.sequence.IntermediateTensors",
    "tensors",
    "what conditions made of rows is taken from what a pipeline stage is given",
)

_SCORES = "tllm_scores"


class RelayedTensors(IntermediateTensors):
    """What a pipeline stage is given, as vLLM knows it: its own tensors.

    Nothing is waited for before it is looked at.

    Args:
        given: of the stage before, with what it said of conditions.
    """

    def __init__(self, given: IntermediateTensors) -> None:
        self._given = given

    @cached_property
    def _parts(self) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        own = dict(self._given.tensors)
        return own, own.pop(_SCORES, None)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return self._parts[0]

    @property
    def scores(self) -> torch.Tensor | None:
        """See `ScoreRelay`; None where no condition of the step is needed here."""
        return self._parts[1]

    @overrides(
        "vllm.sequence.IntermediateTensors.__getitem__",
        "a part of what a pipeline stage is given is vLLM's own",
    )
    def __getitem__(self, key: Any) -> Any:
        return IntermediateTensors(self.tensors)[key]


def with_scores(output: Any, scores: torch.Tensor | None) -> Any:
    """What a pipeline stage gives to the next, with what is to be said of conditions."""
    if scores is None or not isinstance(output, IntermediateTensors):
        return output
    return IntermediateTensors({**output.tensors, _SCORES: scores})

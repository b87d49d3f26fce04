"""Turns: how sequences whose tokens the user chooses go on, as the workers hear of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class StepTurns(NamedTuple):
    """One more token of each of some prompts that arrive in parts, of sequences that the workers
    still have. What is of one sequence stands at one place of each list.

    Attributes:
        tokens: stand where the last drawn ones did, which are dropped.
        prompt_lens: with them.
        num_computed: tokens that the step does not compute.
        consumers: of those that ask otherwise than before, by engine id: options by consumer id, in
            the place of those before.
    """

    engine_ids: Sequence[str]
    tokens: Sequence[int]
    prompt_lens: Sequence[int]
    num_computed: Sequence[int]
    consumers: Mapping[str, Mapping[str, Mapping[str, Any]]]

"""Turns: how a sequence whose tokens the user chooses goes on, as the workers hear of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """One more token of a prompt that arrives in parts, of a sequence that the workers still have.

    Attributes:
        engine_id: the sequence's.
        token: stands where the last drawn one did, which is dropped.
        prompt_len: with it.
        num_computed: tokens that the step does not compute.
        consumers: options by consumer id, in the place of those before.
    """

    engine_id: str
    token: int
    prompt_len: int
    num_computed: int
    consumers: Mapping[str, Mapping[str, Any]]

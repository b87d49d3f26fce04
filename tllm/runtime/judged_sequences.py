"""The sequences that have conditions, and who hears in each step what was made of their tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tllm.runtime.drafted_latches import DraftedLatches
from tllm.runtime.score_relay import ScoreRelay
from tllm.runtime.slots import RunningSequence, Slots
from tllm.runtime.steering import Steering
from tllm.runtime.verdicts import Verdicts
from tllm.spec.groups import STEERING
from tllm.spec.request import RequestSpec


class JudgedSequences:
    """Tells those that must know of a sequence's conditions when it comes and goes.

    Args:
        num_stages: pipeline stages of the engine.
        max_sequences: the most that are expected at once.
        agree: see `Session`.

    Attributes:
        verdicts: what the engine hears.
        relay: what the next pipeline stage hears.
        drafted: what is taken back of drafted tokens.
        means: what is judged of whole prompts.
    """

    def __init__(
        self,
        slots: Slots,
        steering: Steering,
        *,
        num_stages: int,
        is_last: bool,
        max_sequences: int,
        device: torch.device,
        agree: Callable[[torch.Tensor], object] | None,
    ) -> None:
        gates = steering.gates
        self.verdicts = Verdicts(gates, max_sequences)
        self.relay = ScoreRelay(steering, num_stages, is_last=is_last, max_sequences=max_sequences)
        self.drafted = DraftedLatches(slots, gates.latches, device, agree)
        self.means = gates.means

    @property
    def by_position(self) -> bool:
        """Whether any running sequence is judged as its positions, or what it was before, say."""
        return self.verdicts.asked or self.drafted.remembers or not self.relay.alone

    def start(self, sequence: RunningSequence, spec: RequestSpec) -> None:
        """A sequence begins, and has its steering rows."""
        # Of rows that have no steering row nothing is judged: what stands there is another's.
        if not spec.steering or STEERING in sequence.errors:
            return
        info = sequence.info
        self.relay.ask(info.slot, (use.digest for use in spec.steering))
        asked = spec.judged_in_prompt, spec.judged_generated
        if any(asked) and self.relay.is_last:  # the engine hears that stage
            each = spec.conversation is None
            self.verdicts.ask(info.slot, info.prompt_len, *asked, each=each)

    def forget(self, slot: int) -> None:
        """A sequence has ended."""
        self.verdicts.forget(slot)
        self.relay.forget(slot)

    def skip(self) -> None:
        """Nothing is judged in the next forward pass."""
        self.verdicts.skip()
        self.relay.skip()
        self.drafted.words = None

"""How sequences come, grow and end, and what their ends give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tllm.ports import RequestInfo
from tllm.runtime.assignments import Assignments
from tllm.runtime.judged_sequences import JudgedSequences
from tllm.runtime.registered import RegisteredConsumers
from tllm.runtime.results import PENDING, PromptResults
from tllm.runtime.slots import RunningSequence, Slots
from tllm.spec.request import RequestSpec
from tllm.spec.turns import StepTurns

_NONE_KNOWN: Mapping[str, Mapping[int, list[int]] | None] = {}
_NOBODY = RequestInfo("", "", 0, 1, slot=-1, prompt_len=0)


class RunningSequences:
    """The sequences that the engine computes, for the worker that hears of them.

    Args:
        drafts: whether tokens are drafted (speculative decoding).
    """

    def __init__(
        self,
        slots: Slots,
        consumers: RegisteredConsumers,
        assignments: Assignments,
        judged: JudgedSequences,
        *,
        drafts: bool,
    ) -> None:
        self.slots = slots
        self._consumers = consumers
        self._assignments = assignments
        self._judged = judged
        self._drafts = drafts
        self._dispatcher = consumers.dispatcher
        self._results = consumers.results
        self._controllers = consumers.controllers

    def may_begin(self, engine_ids: Sequence[str]) -> bool:
        """Whether sequences may begin before others that have ended are concluded."""
        if not engine_ids:
            return True
        known = any(self.slots.get(engine_id) is not None for engine_id in engine_ids)
        return not (known or self._consumers.failed or self._assignments.crowded)

    def start(
        self,
        engine_id: str,
        prompt_token_ids: list[int] | None,
        prompt_len: int,
        spec: RequestSpec,
        sample_index: int,
        num_computed: int = 0,
        adapter: str = "",
        head_adapter: str = "",
    ) -> None:
        """The engine scheduled a sequence, for the first time or again after a preemption.

        Args:
            num_computed: tokens that it will not compute now. When a prompt has grown, that can be
                less than was computed: tokens that had been scheduled ahead of a stop are dropped,
                and others take their positions.
            adapter: the name of its LoRA adapter; empty for none.
            head_adapter: the same, where that changes the LM head for it; empty for none.
        """
        known = self.slots.get(engine_id)
        if known is not None:
            # The engine keeps it in another place now, and may draw its tokens in another way.
            self.slots.invalidate()
            if known.info.prompt_len != prompt_len:
                self._go_on(known, prompt_token_ids, prompt_len, spec, num_computed)
            return
        self._consumers.detach_failed()
        info = _NOBODY.having(
            request_id=spec.request_id or engine_id,
            prompt_id=spec.prompt_id or engine_id,
            sample_index=sample_index,
            num_samples=spec.num_samples,
            slot=self.slots.pop_slot(),
            prompt_len=prompt_len,
            adapter=adapter,
        )
        sequence = RunningSequence(
            engine_id,
            info,
            spec.consumers,
            bool(spec.prompt_id),
            prompt_token_ids,
            spec.steering,
            spec.patch,
            () if spec.conversation is None else spec.conversation.held,
            registrations=spec.registrations,
            isolated=spec.isolated,
            drafted=self._drafts and not spec.guided,
            head_adapter=head_adapter,
        )
        self.slots.add_sequence(sequence)
        self._note_absent(sequence)
        if spec.acted:
            tokens = prompt_token_ids or ()
            self._controllers.start(sequence, spec.steered_from(prompt_len, tokens))
        for owner in self._consumers:
            if sequence.registrations and owner.is_of_another(sequence):
                sequence.replaced.add(owner.id)
            self._consumers.ask(sequence, owner)
        served = self._assignments.assign(sequence)
        self._judged.start(sequence, spec)
        self._consumers.introduce(sequence, served)

    def _go_on(
        self,
        sequence: RunningSequence,
        prompt_token_ids: list[int] | None,
        prompt_len: int,
        spec: RequestSpec,
        num_computed: int,
    ) -> None:
        """The prompt of a sequence has grown (streaming input), and brings options of its own."""
        # Consumers that the last input asked for still wait for its rows.
        self._dispatcher.before_forward()
        # One that was preempted is computed again; its own rows were delivered.
        own = max(num_computed, sequence.info.prompt_len)
        self.slots.grow([sequence.info.slot], [prompt_len], [own])
        sequence.info = sequence.info.having(prompt_len=prompt_len)
        sequence.prompt_token_ids = prompt_token_ids
        sequence.drafted = sequence.drafted and not spec.guided
        self._ask_anew(sequence, spec.consumers)

    def take_turns(self, turns: StepTurns) -> None:
        """Prompts have grown by a token each; some bring options of their own."""
        self._dispatcher.before_forward()
        lengths = turns.prompt_lens
        known = [self.slots.get(each) for each in turns.engine_ids]
        sequences = [sequence for sequence in known if sequence is not None]
        assert len(sequences) == len(known), "a turn of a sequence that did not begin"
        slots = [sequence.info.slot for sequence in sequences]
        before = [sequence.info.prompt_len for sequence in sequences]
        self.slots.grow(slots, lengths, np.maximum(turns.num_computed, before))
        for owner in self._consumers:
            owner.forget_all(slots)
        for sequence, token, length in zip(sequences, turns.tokens, lengths, strict=True):
            sequence.info = sequence.info.having(prompt_len=length)
            tokens = sequence.prompt_token_ids
            # Whoever else has this list may have appended to it.
            if tokens is not None and len(tokens) < length:
                tokens.append(token)
        consumers = turns.consumers
        for sequence in sequences:
            if sequence.laid_out is None or sequence.engine_id in consumers:
                asked = consumers.get(sequence.engine_id, sequence.consumers)
                if self._asks_as_before(sequence, asked):
                    sequence.consumers = asked
                else:
                    self._ask_anew(sequence, asked)

    def _asks_as_before(
        self, sequence: RunningSequence, consumers: Mapping[str, Mapping[str, Any]]
    ) -> bool:
        """Whether with these options, and a longer prompt, the same is done to its rows."""
        before = sequence.consumers
        if sequence.laid_out is None or before.keys() != consumers.keys():
            return False
        for name, options in consumers.items():
            old, owner = before[name], self._consumers.by_id.get(name)
            enabled = options.get("enabled", True) == old.get("enabled", True)
            if owner is not None and (owner.consumer.has_request_flows or not enabled):
                return False
        return True

    def _ask_anew(
        self, sequence: RunningSequence, consumers: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """The prompt of a sequence has grown: find out what is done to its rows now."""
        slot, owners = sequence.info.slot, list(self._consumers)
        served = {o: o.info(sequence).options for o in owners if o.serves(sequence)}
        sequence.consumers = consumers
        self._note_absent(sequence)
        for owner in owners:
            owner.forget(slot)
            self._consumers.ask(sequence, owner)
            if owner in served and not owner.serves(sequence):
                self._consumers.forget_writes(slot, owner)
                sequence.let_go[owner.id] = served[owner]
            elif owner.serves(sequence):
                sequence.let_go.pop(owner.id, None)
        self._assignments.assign(sequence)
        self._consumers.introduce(sequence, [owner for owner in owners if owner not in served])

    def _note_absent(self, sequence: RunningSequence) -> None:
        """Consumers that it names and that are not here may come: rows until then are missing."""
        for name in sequence.consumers.keys() - self._consumers.by_id.keys():
            if sequence.uses(name):
                sequence.left.add(name)

    def finish(self, engine_id: str, token_ids: tuple[int, ...] | None = None) -> None:
        """The engine let go of a sequence, whatever ended it.

        Args:
            token_ids: all its tokens, where the engine knows them to be those of the output.
        """
        sequence = self.slots.get(engine_id)
        if sequence is not None:
            sequence.token_ids = sequence.token_ids or token_ids
            self._conclude(sequence)
            self._assignments.release(sequence)
            self._controllers.finish(sequence)
            self._judged.forget(sequence.info.slot)
            self.slots.remove(engine_id)

    def _conclude(self, sequence: RunningSequence) -> None:
        """Make the results of a sequence. The engine may still compute it: nobody is told."""
        if sequence.ended:
            return
        self._dispatcher.before_forward()
        if sequence.controlled is not None:
            # What a thread has still to decide may raise, and that is to be heard, too.
            for owner in self._consumers:
                if owner.serves(sequence):
                    self._dispatcher.flush(owner)
            self._controllers.note_failures(sequence)
        self._results.conclude(sequence, self._consumers.step)
        self._consumers.additions.forget(sequence.info.slot)
        sequence.ended = True
        self._assignments.end(sequence)

    def pop_results(
        self,
        prompt_ids: list[str],
        tokens: Mapping[str, Mapping[int, list[int]] | None] = _NONE_KNOWN,
        wait_s: float = 0.0,
    ) -> PromptResults:
        """The results of finished prompts, by prompt, sample and consumer; each is given once.

        What consumers have not made after `wait_s` seconds is `pending`, and can be taken again.

        Args:
            tokens: all tokens of each sample, by prompt, where the caller knows them; None where
                only the engine does, whose word is waited for.
        """
        wanted = set(prompt_ids)
        waiting: PromptResults = {}
        for sequence in list(self.slots):
            info = sequence.info
            if info.prompt_id not in wanted or sequence.ended:
                continue
            by_sample = tokens.get(info.prompt_id, {})
            if by_sample is None:
                users = [o.id for o in self._consumers if o.has_served(sequence)]
                waiting[info.prompt_id] = {info.sample_index: dict.fromkeys(users, PENDING)}
                continue
            known = by_sample.get(info.sample_index)
            sequence.token_ids = tuple(known) if known is not None else sequence.token_ids
            self._conclude(sequence)
        asked = [prompt_id for prompt_id in prompt_ids if prompt_id not in waiting]
        for prompt_id in asked:
            self._results.conclude_late(
                prompt_id, tokens.get(prompt_id) or {}, self._consumers.step
            )
        return self._results.pop(asked, wait_s) | waiting

    def discard_results(self, prompt_ids: list[str]) -> None:
        """Nobody will come for what consumers say of prompts, which were given up."""
        wanted = set(prompt_ids)
        for sequence in list(self.slots):
            if sequence.info.prompt_id in wanted:
                self._conclude(sequence)
        for prompt_id in prompt_ids:
            self._results.conclude_late(prompt_id, {}, self._consumers.step)
        self._results.discard(prompt_ids)

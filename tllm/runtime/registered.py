"""The consumers that are registered in a worker: how they come, take part and leave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from tllm.ports import ModelView
from tllm.ports.payload import reason_of
from tllm.result_memory import ResultMemory
from tllm.runtime.assignments import Assignments
from tllm.runtime.batch import StepBatch
from tllm.runtime.binder import Binder
from tllm.runtime.columns import IntArray
from tllm.runtime.controllers import Controllers
from tllm.runtime.dispatch import Dispatcher, ends_process
from tllm.runtime.flows import PHASES, BoundConsumer, ConsumerProtocol
from tllm.runtime.results import Results
from tllm.runtime.sampling import Guidance, LmHead
from tllm.runtime.slots import RunningSequence, Slots
from tllm.runtime.writer import AbsentWriter, Additions, TapWriter


class RegisteredConsumers:
    """Binds consumers to what this rank has, and asks them what they want of each sequence.

    Args:
        by_id: those that are registered; kept true here, and read by others.
        binder: finds the taps of flows.
        lm_head: see `Session`.

    Attributes:
        model: what consumers may know of the model.
        additions: what they write to rows.
        guidance: what they guide when tokens are drawn.
        results: what they say of sequences that have ended.
        result_memory: for rows that the user is given.
        step: number of the step that runs.
        failed: those that raised and are not detached yet.
    """

    def __init__(
        self,
        by_id: dict[str, BoundConsumer],
        slots: Slots,
        model: ModelView,
        *,
        binder: Binder,
        additions: Additions,
        assignments: Assignments,
        controllers: Controllers,
        lm_head: LmHead | str | None,
    ) -> None:
        self.by_id = by_id
        self.model = model
        self.additions = additions
        self.controllers = controllers
        self.dispatcher = Dispatcher(slots, model.device, self.note_failure, controllers)
        self.guidance = Guidance(lm_head, model, slots, self.dispatcher)
        self.results = Results(self.dispatcher, by_id, slots, payloads=model.first_rank)
        self.result_memory = ResultMemory()
        self.step = 0
        self.failed: list[BoundConsumer] = []
        self._slots = slots
        self._binder = binder
        self._assignments = assignments
        #: Not by id: one that raised is detached when the next step begins, and by then another may
        #: have its id.
        self._writers: dict[BoundConsumer, list[TapWriter]] = {}

    def __iter__(self) -> Iterator[BoundConsumer]:
        return iter(self.by_id.values())

    @property
    def observe(self) -> bool:
        """Whether any takes part in the steps of the sequences that run."""
        if not self.by_id:
            return False
        return bool(self._assignments.served) or any(
            owner.alive and not owner.consumer.on_request_only for owner in self
        )

    def register(self, consumer: ConsumerProtocol, registration: str = "") -> None:
        """Add a consumer; it sees rows from the next forward pass on.

        Args:
            registration: tells it from others of its id.

        Raises `ValueError` when a flow asks for what this engine does not have.
        """
        if consumer.consumer_id in self.by_id:
            raise ValueError(
                f"a consumer with consumer_id={consumer.consumer_id!r} is registered; unregister "
                "it first, or give this one another consumer_id"
            )
        flows = list(consumer.flows())
        reads = [self._binder.reads_here(flow) for flow in flows]
        writes = [w for flow in flows for w in flow.writes if w.port == "residual_stream"]
        places = [(write, self._binder.tap(write.site, write.layer)) for write in writes]
        own = {
            write.role: self.additions.add_writer(tap, PHASES[write.phase])
            for write, tap in places
            if tap is not None
        }
        elsewhere = {write.role: AbsentWriter() for write, tap in places if tap is None}
        owner = BoundConsumer(
            consumer,
            self.model,
            {**own, **elsewhere},
            self.result_memory,
            self.dispatcher.call,
            registration,
        )
        owner.flows = [
            self._binder.bound(owner, number, flow, here)
            for number, (flow, here) in enumerate(zip(flows, reads, strict=True))
            if here is not None
        ]
        self.by_id[owner.id] = owner
        self._writers[owner] = list(own.values())
        try:
            # What is made in inference mode can never be trained.
            with torch.inference_mode(False), torch.no_grad():
                consumer.start(owner.context)
        except BaseException as error:
            self.remove(owner.id)
            if isinstance(error, Exception) or ends_process(error):
                raise
            raise RuntimeError(f"consumer {owner.id!r} raised {error!r} in start") from error
        for sequence in self._slots:
            if owner.is_of_another(sequence):  # rows before are missing, whether that had any
                sequence.left.add(owner.id)
            self.ask(sequence, owner)
        self.reassign()
        for sequence in self._slots:
            self.introduce(sequence, [owner])

    def weights_changed(self, model: ModelView) -> None:
        self.model = model
        for owner in self:
            owner.context.model = model
            context = owner.context.at(self.step)
            self.dispatcher.call(owner, owner.consumer.on_weights_changed, context)

    def get(self, consumer_id: str) -> BoundConsumer:
        """The consumer of that id; raises `ValueError` with those that there are."""
        owner = self.by_id.get(consumer_id)
        if owner is None:
            raise ValueError(
                f"no consumer {consumer_id!r} is registered; registered are "
                f"{sorted(self.by_id) or 'none'}"
            )
        return owner

    def remove(self, consumer_id: str) -> None:
        """Remove a consumer whose rows were handed out; `reassign` then captures no more for it."""
        owner = self.get(consumer_id)
        self.results.give_up_waiting(owner.id, self.step)
        owner.thread.drain()
        owner.export_thread.drain()
        self.dispatcher.stop(owner)
        owner.thread.close()
        owner.export_thread.close()
        self.results.break_promises(owner.id, _LEFT_FIRST)
        self._remove_writers(owner)
        for sequence in self._slots:
            if owner.has_served(sequence):
                sequence.left.add(consumer_id)
            sequence.let_go.pop(consumer_id, None)
        del self.by_id[consumer_id]
        self.controllers.end_steering_of(consumer_id)
        self.controllers.forget(consumer_id)

    def _remove_writers(self, owner: BoundConsumer) -> None:
        """Add nothing more in a consumer's name."""
        for writer in self._writers.pop(owner, ()):
            self.additions.remove_writer(writer)

    def reassign(self) -> None:
        """Capture for the consumers that are there and did not raise, and for no other."""
        alive = [owner for owner in self if owner.alive]
        flows = [flow for owner in alive for flow in owner.flows]
        self.guidance.set_flows(flows)
        self._assignments.change(flows)

    def note_failure(self, owner: BoundConsumer) -> None:
        """A consumer raised, on any thread: note it where its users will look."""
        for sequence in self._slots.snapshot():
            if owner.serves(sequence):
                sequence.errors[owner.id] = owner.error or ""
        self.failed.append(owner)

    def detach_failed(self) -> None:
        """Stop capturing and adding for consumers that raised."""
        if not self.failed:
            return
        self.dispatcher.before_forward()
        failed, self.failed = self.failed, []
        for owner in failed:
            self._remove_writers(owner)
            self.controllers.end_steering_of(owner.id)
        self.reassign()

    def let_act(self, engine_ids: list[str], starts: IntArray) -> None:
        """Let what consumers decided act on the step that begins; sequences for which `decide`
        raised go on without the consumer."""
        for engine_id, consumer, error in self.controllers.act(engine_ids, starts, self.step):
            sequence, owner = self._slots.get(engine_id), self.by_id.get(consumer)
            if sequence is not None and owner is not None and not sequence.ended:
                self.give_up(owner, sequence, error)

    def give_up(self, owner: BoundConsumer, sequence: RunningSequence, error: str) -> None:
        """Let a sequence go on without a consumer; its result says why."""
        if not owner.serves(sequence):
            return
        info, context = owner.info(sequence), owner.context.at(self.step)
        self.dispatcher.call(owner, owner.consumer.on_request_finished, info, context)
        sequence.errors[owner.id] = error
        sequence.refused.add(owner.id)
        owner.forget(sequence.info.slot)
        self.forget_writes(sequence.info.slot, owner)
        self._assignments.assign(sequence)

    # -- what they want of a sequence

    def ask(self, sequence: RunningSequence, owner: BoundConsumer) -> None:
        """Find the flows that only this sequence asks for."""
        if not (owner.alive and owner.serves(sequence)):
            return
        if sequence.head_adapter and owner.consumer.uses_lm_head:
            sequence.errors[owner.id] = (
                f"the adapter {sequence.head_adapter!r} changes the LM head, and {owner.id!r} "
                "looks through the model's own; ask without the adapter, or with one that leaves "
                "lm_head alone"
            )
            sequence.refused.add(owner.id)
            return
        options = sequence.consumers.get(owner.id, {})
        if owner.is_of_another(sequence) and (refusal := _refusal_of(owner, options)):
            sequence.errors[owner.id] = refusal
            sequence.refused.add(owner.id)
            return
        try:
            flows = owner.consumer.request_flows(options, self.model.num_layers)
            asked = []
            for flow in flows:
                bound = owner.interned(flow, partial(self._binder.for_request, owner))
                if bound is not None:
                    asked.append((bound, flow.selection))
        except ValueError as error:  # as in the user's process: this request is at fault
            sequence.errors[owner.id] = str(error)
            sequence.refused.add(owner.id)
            return
        except BaseException as error:
            if ends_process(error):
                raise
            self.dispatcher.fail(owner, error)
            return
        if asked:
            owner.asked[sequence.info.slot] = asked

    def introduce(self, sequence: RunningSequence, owners: Iterable[BoundConsumer]) -> None:
        """Tell consumers of a sequence that they serve."""
        for owner in owners:
            if not owner.serves(sequence):
                continue
            self.dispatcher.call(
                owner,
                owner.consumer.on_request_started,
                owner.info(sequence),
                owner.context.at(self.step),
            )
            if owner.error:
                sequence.errors[owner.id] = owner.error

    def note_computed_again(self, batch: StepBatch, delivered: IntArray) -> None:
        """A step computes rows of sequences that were preempted: where another vector is added to
        them than before, their results say so.

        Args:
            delivered: `[sequences]`, positions below which all were computed before.
        """
        for i in np.flatnonzero(batch.starts < delivered).tolist():
            sequence = self._slots.by_slot[batch.slots[i]]
            if sequence is None:
                continue
            info, start = sequence.info, int(batch.starts[i])
            last = int(min(batch.ends[i], delivered[i])) - 1
            phases = range(int(start >= info.prompt_len), int(last >= info.prompt_len) + 1)
            for owner, writers in self._writers.items():
                if owner.serves(sequence) and self.additions.renewed(writers, info.slot, phases):
                    sequence.rewritten.add(owner.id)

    def forget_writes(self, slot: int, owner: BoundConsumer) -> None:
        """Add nothing more to a sequence in a consumer's name."""
        self.additions.forget(slot, self._writers.get(owner, ()))


_LEFT_FIRST = "the consumer was unregistered before it had made this result"


def _refusal_of(owner: BoundConsumer, options: Mapping[str, Any]) -> str:
    """Why a consumer cannot do what another of its id was asked for; empty where it can."""
    try:
        own = {option: value for option, value in options.items() if option != "enabled"}
        owner.consumer.validate_options(own)
    except BaseException as error:  # the options were never meant for it: no fault of its own
        if ends_process(error):
            raise
        return (
            f"another consumer was registered under the id {owner.id!r} after the request was "
            f"added, and cannot do what it asks: {reason_of(error)}"
        )
    return ""

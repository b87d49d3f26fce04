"""What runs in a worker: the running sequences, the registered consumers, and each step of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from tllm.ports import ModelView, RequestInfo, ResultMemory, RowMeta
from tllm.runtime.assignments import Assignments
from tllm.runtime.batch import Frame, RowPlanner, StepBatch
from tllm.runtime.binder import Binder
from tllm.runtime.descriptor import PlanRow
from tllm.runtime.dispatch import PHASES, BoundConsumer, BoundFlow, Consumer, Context, Dispatcher
from tllm.runtime.endings import Endings
from tllm.runtime.kernels.candidates import Collected
from tllm.runtime.programs import Programs
from tllm.runtime.results import PENDING, Answer
from tllm.runtime.ring import Overflow, Ring
from tllm.runtime.sampling import Guidance, LmHead, SamplerStep
from tllm.runtime.slots import Sequence, Slots
from tllm.runtime.steering import Steering
from tllm.runtime.taps import TapKey, Taps
from tllm.runtime.token_choices import TokenChoices
from tllm.runtime.transfer import HostCopy, upload
from tllm.runtime.writer import AbsentWriter, Additions, TapWriter
from tllm.spec.request import RequestSpec


class Session:
    """The worker's half of tLLM. All methods run on the engine's thread.

    Args:
        taps: the installed taps.
        resolve: from a hook point's name and a layer to the tap that serves it; raises
            `ValueError` with what the model has.
        model: what consumers may know of the model.
        lm_head: None on a pipeline rank without it, or a string that says why candidates
            cannot be projected on it.
        samples: whether this rank samples tokens.
        max_sequences: the most that run at once.
        steering_rows, steering_vectors: distinct steering configurations, and vectors, to make room
            for; more can be had.
        ring_rows, max_ring_rows, overflow: see `Ring`.
    """

    def __init__(
        self,
        taps: Taps,
        resolve: Callable[[str, int | None], TapKey],
        model: ModelView,
        *,
        lm_head: LmHead | str | None,
        samples: bool,
        max_sequences: int,
        max_programs: int,
        steering_rows: int,
        steering_vectors: int,
        ring_rows: int,
        max_ring_rows: int,
        overflow: Overflow,
    ) -> None:
        self._taps = taps
        self._model = model
        self._consumers: dict[str, BoundConsumer] = {}
        self._slots = Slots(max_sequences)
        self._programs = Programs(taps, max_programs)
        self._additions = Additions(taps, self._slots)
        self.steering = Steering(taps, resolve, steering_rows, steering_vectors)
        self._choices = TokenChoices(taps.device)
        self._assignments = Assignments(
            self._slots, self._programs, self.steering, self._choices, self._consumers
        )
        self._writers: dict[str, list[TapWriter]] = {}
        self._dispatcher = Dispatcher(self._slots, model.device, self._note_failure)
        self._guidance = Guidance(lm_head, model, self._slots, self._dispatcher)
        self._binder = Binder(taps, resolve, model, samples=samples, refusal=self._guidance.refusal)
        self._endings = Endings(self._dispatcher, self._consumers, payloads=model.first_rank)
        self._failed: list[BoundConsumer] = []
        ring = Ring(
            hidden_size=taps.hidden_size,
            dtype=taps.dtype,
            device=taps.device,
            rows=ring_rows,
            max_rows=max_ring_rows,
            overflow=overflow,
            on_move=taps.set_arena,
            make_progress=self._make_progress,
        )
        self._ring = ring
        self._planner = RowPlanner(self._slots, taps, self._programs, ring)
        self._at_rest = False
        self._frame: Frame | None = None
        self._frame_flows: list[BoundFlow] = []
        self._bundled = False
        self._step = 0
        #: Of the consumers, for rows that the user is given.
        self.result_memory = ResultMemory()
        self.rows_captured = 0
        self.rows_dropped = 0
        self.rows_steered = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return self._taps.dtype

    # -- consumers -----------------------------------------------------------------------------

    def register(self, consumer: Consumer) -> None:
        """Add a consumer; it sees rows from the next forward pass on.

        Raises `ValueError` when a flow asks for what this engine does not have.
        """
        if consumer.consumer_id in self._consumers:
            raise ValueError(
                f"a consumer with consumer_id={consumer.consumer_id!r} is registered; unregister "
                "it first, or give this one another consumer_id"
            )
        flows = list(consumer.flows())
        reads = [self._binder.reads_here(flow) for flow in flows]
        writes = [w for flow in flows for w in flow.writes if w.port == "residual_stream"]
        places = [(write, self._binder.tap(write.site, write.layer)) for write in writes]
        own = {
            write.role: self._additions.add_writer(tap, PHASES[write.phase])
            for write, tap in places
            if tap is not None
        }
        elsewhere = {write.role: AbsentWriter() for write, tap in places if tap is None}
        context = Context(
            self._model, {**own, **elsewhere}, self._exporter(consumer), self.result_memory
        )
        owner = BoundConsumer(consumer, context)
        owner.flows = [
            self._binder.bound(owner, number, flow, here)
            for number, (flow, here) in enumerate(zip(flows, reads, strict=True))
            if here is not None
        ]
        self._consumers[owner.id] = owner
        self._writers[owner.id] = list(own.values())
        try:
            consumer.start(context)
        except Exception:
            self._remove(owner.id)
            raise
        for sequence in self._slots:
            self._ask(sequence, owner)
        self._follow_consumers()
        for sequence in self._slots:
            self._introduce(sequence, [owner])

    def unregister(self, consumer_id: str | None = None) -> None:
        """Remove a consumer, or all of them, after its pending rows were handed out."""
        self.flush()
        for name in [consumer_id] if consumer_id is not None else list(self._consumers):
            self._remove(self._registered(name).id)
        self._follow_consumers()

    def _registered(self, consumer_id: str) -> BoundConsumer:
        owner = self._consumers.get(consumer_id)
        if owner is None:
            raise ValueError(
                f"no consumer {consumer_id!r} is registered; registered are "
                f"{sorted(self._consumers) or 'none'}"
            )
        return owner

    def _remove(self, consumer_id: str) -> None:
        owner = self._consumers[consumer_id]
        self._endings.give_up_waiting(owner.id, self._step)
        owner.thread.drain()
        owner.export_thread.drain()
        self._dispatcher.stop(owner)
        owner.thread.close()
        owner.export_thread.close()
        self._remove_writers(owner)
        del self._consumers[consumer_id]

    def _remove_writers(self, owner: BoundConsumer) -> None:
        """Add nothing more in a consumer's name."""
        for writer in self._writers.pop(owner.id, ()):
            self._additions.remove_writer(writer)

    def _follow_consumers(self) -> None:
        """Capture for the consumers that are there and did not raise, and for no other."""
        alive = [owner for owner in self._consumers.values() if owner.alive]
        flows = [flow for owner in alive for flow in owner.flows]
        self._guidance.set_flows(flows)
        self._assignments.change(flows)

    def _exporter(
        self, consumer: Consumer
    ) -> Callable[[str, Mapping[str, torch.Tensor], RowMeta | None], None]:
        channels = {
            write.options["channel"]
            for flow in consumer.flows()
            for write in flow.writes
            if write.port == "cpu_export"
        }

        def export(channel: str, tensors: Mapping[str, torch.Tensor], meta: RowMeta | None) -> None:
            if channel not in channels:
                raise ValueError(
                    f"channel={channel!r} was not declared with CpuExport.write; declared are "
                    f"{sorted(map(str, channels)) or 'none'}"
                )
            owner = self._consumers[consumer.consumer_id]
            copy = HostCopy(tensors)
            owner.export_thread.submit(
                lambda: self._dispatcher.call(
                    owner, lambda: owner.consumer.on_export(channel, copy.wait(), meta)
                )
            )

        return export

    def _note_failure(self, owner: BoundConsumer) -> None:
        """A consumer raised, on any thread: note it where its users will look."""
        for sequence in self._slots.snapshot():
            if owner.serves(sequence):
                sequence.errors[owner.id] = owner.error or ""
        self._failed.append(owner)

    def _detach_failed(self) -> None:
        """Stop capturing and adding for consumers that raised."""
        if not self._failed:
            return
        self._dispatcher.before_forward()
        failed, self._failed = self._failed, []
        for owner in failed:
            self._remove_writers(owner)
        self._follow_consumers()

    # -- sequences -----------------------------------------------------------------------------

    def start_sequence(
        self,
        engine_id: str,
        prompt_token_ids: list[int] | None,
        prompt_len: int,
        spec: RequestSpec,
        sample_index: int,
        num_computed: int = 0,
    ) -> None:
        """The engine scheduled a sequence, for the first time or again after a preemption.

        Args:
            num_computed: tokens that it will not compute now. When a prompt has grown, that can be
                less than was computed: tokens that had been scheduled ahead of a stop are dropped,
                and others take their positions.
        """
        known = self._slots.get(engine_id)
        if known is not None:
            if known.info.prompt_len != prompt_len:
                self._go_on(known, prompt_token_ids, prompt_len, spec, num_computed)
            return
        self._detach_failed()
        info = RequestInfo(
            request_id=spec.request_id or engine_id,
            prompt_id=spec.prompt_id or engine_id,
            sample_index=sample_index,
            num_samples=spec.num_samples,
            slot=self._slots.take_slot(),
            prompt_len=prompt_len,
        )
        sequence = Sequence(
            engine_id,
            info,
            spec.consumers,
            bool(spec.prompt_id),
            prompt_token_ids,
            spec.steering,
        )
        self._slots.add_sequence(sequence)
        for owner in self._consumers.values():
            self._ask(sequence, owner)
        self._assignments.follow(sequence)
        self._introduce(sequence, list(self._consumers.values()))

    def _go_on(
        self,
        sequence: Sequence,
        prompt_token_ids: list[int] | None,
        prompt_len: int,
        spec: RequestSpec,
        num_computed: int,
    ) -> None:
        """The prompt of a sequence has grown (streaming input), and brings options of its own."""
        self._dispatcher.before_forward()  # of the last input, whomever this one asks
        slot, owners = sequence.info.slot, list(self._consumers.values())
        served = [owner for owner in owners if owner.serves(sequence)]
        sequence.info = replace(sequence.info, prompt_len=prompt_len)
        sequence.prompt_token_ids = prompt_token_ids
        sequence.consumers = spec.consumers
        self._slots.set_prompt_len(slot, prompt_len)
        self._slots.withdraw(slot, num_computed)
        for owner in owners:
            owner.forget(slot)
            owner.asked.pop(slot, None)
            self._ask(sequence, owner)
            if owner in served and not owner.serves(sequence):
                self._additions.forget(slot, self._writers.get(owner.id, ()))
        self._assignments.follow(sequence)
        self._introduce(sequence, [owner for owner in owners if owner not in served])

    def _ask(self, sequence: Sequence, owner: BoundConsumer) -> None:
        """Find the flows that only this sequence asks for."""
        if not (owner.alive and owner.serves(sequence)):
            return
        options = sequence.consumers.get(owner.id, {})
        try:
            flows = owner.consumer.request_flows(options, self._model.num_layers)
            asked = []
            for flow in flows:
                bound = owner.interned(flow, partial(self._binder.for_request, owner))
                if bound is not None:
                    asked.append((bound, flow.selection))
        except ValueError as error:  # as in the user's process: this request is at fault
            sequence.errors[owner.id] = str(error)
            sequence.refused.add(owner.id)
            return
        except Exception as error:
            self._dispatcher.fail(owner, error)
            return
        if asked:
            owner.asked[sequence.info.slot] = asked

    def _introduce(self, sequence: Sequence, owners: list[BoundConsumer]) -> None:
        for owner in owners:
            if not owner.serves(sequence):
                continue
            self._dispatcher.call(
                owner,
                owner.consumer.on_request_started,
                owner.info(sequence),
                owner.context.at(self._step),
            )
            if owner.error:
                sequence.errors[owner.id] = owner.error

    def finish_sequence(self, engine_id: str, token_ids: tuple[int, ...] | None = None) -> None:
        """The engine let go of a sequence, whatever ended it.

        Args:
            token_ids: all its tokens, where the engine knows them to be those of the output.
        """
        sequence = self._slots.get(engine_id)
        if sequence is not None:
            sequence.token_ids = sequence.token_ids or token_ids
            self._conclude(sequence)
            self._assignments.release(sequence)
            self._slots.remove(engine_id)

    def _conclude(self, sequence: Sequence) -> None:
        """Make the results of a sequence. If the engine still computes it, nobody looks."""
        if sequence.ended:
            return
        self._dispatcher.before_forward()
        self._endings.conclude(sequence, self._step)
        self._additions.forget(sequence.info.slot)
        sequence.ended = True
        self._assignments.end(sequence)

    def take_results(
        self,
        prompt_ids: list[str],
        tokens: Mapping[str, Mapping[int, list[int]] | None],
        wait_s: float = 0.0,
    ) -> Answer:
        """The results of finished prompts, by prompt, sample and consumer; each is given once.

        What consumers have not made after `wait_s` seconds is `pending`, and can be taken again.

        Args:
            tokens: all tokens of each sample, by prompt, where the caller knows them; None where
                only the engine does, whose word is waited for.
        """
        self.end_step()
        wanted = set(prompt_ids)
        waiting: Answer = {}
        for sequence in list(self._slots):
            info = sequence.info
            if info.prompt_id not in wanted or sequence.ended:
                continue
            by_sample = tokens.get(info.prompt_id, {})
            if by_sample is None:
                users = [o.id for o in self._consumers.values() if o.serves(sequence)]
                waiting[info.prompt_id] = {info.sample_index: dict.fromkeys(users, PENDING)}
                continue
            known = by_sample.get(info.sample_index)
            sequence.token_ids = tuple(known) if known is not None else sequence.token_ids
            self._conclude(sequence)
        asked = [prompt_id for prompt_id in prompt_ids if prompt_id not in waiting]
        for prompt_id in asked:
            self._endings.conclude_late(prompt_id, tokens.get(prompt_id) or {}, self._step)
        return self._endings.take(asked, wait_s) | waiting

    def not_steered(self, prompt_ids: list[str]) -> list[str]:
        """Which of these prompts were to be steered and could not be; each is told once."""
        failed = self._assignments.failed
        told = [prompt_id for prompt_id in prompt_ids if prompt_id in failed] if failed else []
        for prompt_id in told:
            del failed[prompt_id]
        return told

    # -- steps ---------------------------------------------------------------------------------

    @property
    def rests(self) -> bool:
        """Whether nothing is done to any row of the sequences that run."""
        return not self.steering.users and not self._watched

    @property
    def _watched(self) -> bool:
        """Whether any consumer is there for the sequences that run."""
        if not self._consumers:
            return False
        return bool(self._assignments.served) or any(
            owner.alive and not owner.consumer.on_request_only for owner in self._consumers.values()
        )

    @property
    def looks_on(self) -> bool:
        """Whether the step that runs must be told of its logits and tokens."""
        return self._frame is not None

    def rest_step(self) -> bool:
        """Begin a step, if nothing is done to any row of it; else nothing is begun."""
        self.end_step()
        self._detach_failed()
        if not self.rests:
            return False
        self._step += 1
        if not self._at_rest:
            self._planner.clear()
            self.steering.commit()  # taps that steered nobody's rows any more rest again
            self._taps.commit()
            self._at_rest = True
        return True

    def begin_step(
        self,
        engine_ids: list[str],
        starts: Any,
        counts: Any,
        sampled_from: Any,
        token_ids: torch.Tensor,
    ) -> None:
        """Before the forward pass, where `rest_step` began none: what waited for it, and the row
        plan.

        Args:
            engine_ids: in batch order; arrays as in `StepBatch`.
            token_ids: `[tokens or more]`, of the batch, on the device.
        """
        self._at_rest = False
        self._step += 1
        watched = self._watched
        if watched:
            self._dispatcher.before_forward()
            self._detach_failed()
            self._additions.commit()
        self.steering.commit()
        slots, frame = self._slots.of(engine_ids), None
        if watched or not self._planner.keep(slots, starts, counts):
            batch = StepBatch(slots, starts, counts, sampled_from)
            frame = self._planner.plan(self._step, batch)
            if frame.chooses:
                tokens = int(counts.sum())
                self._choices.apply(self._taps.plan[PlanRow.STEER, :tokens], token_ids[:tokens])
        self._taps.commit()
        self._taps.settle()
        self.rows_steered += self._planner.steered
        if frame is None or not watched:
            return
        self._frame = frame
        self._frame_flows = self._dispatcher.flows_of(frame, self._assignments.flows)
        self._bundled = False
        self.rows_captured += sum(rows.total for rows in frame.rows)
        self._note_dropped(frame)

    def _note_dropped(self, frame: Frame) -> None:
        """Rows of this step found no place: the results of their sequences will say so."""
        for rows in frame.lost:
            owners = {flow.owner for flow in rows.program.flows}
            self.rows_dropped += rows.total
            for owner in owners:
                owner.rows_dropped += rows.total
            for slot, lost in zip(rows.slots.tolist(), rows.counts.tolist(), strict=True):
                sequence = self._slots.by_slot[slot]
                if sequence is not None:
                    for owner in owners:
                        sequence.dropped[owner.id] = sequence.dropped.get(owner.id, 0) + lost

    def skip_step(self) -> None:
        """Before a forward pass that belongs to no request (profiling, warm-up, DP padding)."""
        self._planner.clear()

    def before_sampling(self, logits: torch.Tensor | None) -> None:
        """After the forward pass, before its tokens are drawn.

        Args:
            logits: `[sequences, vocab]` as the LM head gave them, or None when there are none.
        """
        frame = self._frame
        if frame is None or self._bundled:
            return
        self._bundled = True
        if logits is not None and any(flow.keeps_logits for flow in self._frame_flows):
            logits = logits.clone()
        frame.logits = logits
        self._dispatcher.before_sampling(self._frame_flows, frame)

    @property
    def guidance_width(self) -> int:
        """The widest candidate rows that this step's guides ask for; 0 when nothing is guided."""
        return self._guidance.width(self._frame)

    def filter(
        self, logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, Collected]:
        """The engine's temperature and min-p, gathering the candidates in the same pass."""
        return self._guidance.filter(logits, temperature, min_p, width)

    def guide(self, step: SamplerStep, greedy: np.ndarray) -> None:
        """Let consumers edit the candidates of this step.

        Args:
            step: the engine's processed logits.
            greedy: `[sequences]` bool; these are not touched.
        """
        if self._frame is not None:
            self._guidance.run(step, self._frame, greedy)

    def after_sampling(self, sampled: torch.Tensor | None, input_ids: torch.Tensor | None) -> None:
        """The step's tokens are drawn.

        Args:
            sampled: int64 `[sequences]` on the device, None when nothing was sampled here.
            input_ids: `[tokens]` of the forward pass, on the device.
        """
        frame = self._frame
        if frame is None:
            return
        self.before_sampling(None)
        frame.sampled = sampled
        wanted = any(flow.after_sampling for flow in self._frame_flows)
        if wanted and sampled is not None and input_ids is not None:
            frame.targets = self._targets(frame, sampled, input_ids)

    def _targets(
        self, frame: Frame, sampled: torch.Tensor, input_ids: torch.Tensor
    ) -> torch.Tensor:
        """The token after each token of the batch."""
        batch = frame.batch
        tokens = int(batch.counts.sum())
        targets = torch.empty(tokens, dtype=torch.int64, device=sampled.device)
        targets[:-1] = input_ids[1:tokens]
        following = np.full(len(batch.slots), -1, np.int64)
        for i in np.flatnonzero(~batch.samples):
            owner = self._slots.by_slot[batch.slots[i]]
            if owner is not None and owner.prompt_token_ids is not None:
                end = int(batch.ends[i])
                if end < len(owner.prompt_token_ids):
                    following[i] = owner.prompt_token_ids[end]
        known = upload(following, sampled.device)
        last = upload(batch.last_rows.astype(np.int64), sampled.device)
        targets[last] = torch.where(known >= 0, known, sampled.view(-1).long())
        return targets

    def end_step(self) -> None:
        """Everything of the step is enqueued: hand out the rest. Safe to call again."""
        frame = self._frame
        if frame is None:
            return
        self._complete(frame)

    @torch.inference_mode()
    def _complete(self, frame: Frame) -> None:
        self.before_sampling(None)
        self._frame = None
        flows = [f for f in self._frame_flows if frame.targets is not None or not f.after_sampling]
        self._dispatcher.after_sampling(flows, frame)
        for owner in self._consumers.values():
            context = owner.context.at(frame.step)
            self._dispatcher.call(owner, owner.consumer.on_step_end, context)

    # -- from outside --------------------------------------------------------------------------

    def flush(self) -> None:
        """Hand out all rows there are, and wait for the delivery threads."""
        self.end_step()
        self._dispatcher.before_forward()
        for owner in self._consumers.values():
            self._dispatcher.flush(owner)

    def close(self) -> None:
        """The engine ends."""
        self.unregister()

    def synchronize(self) -> None:
        """Wait until every consumer is done with what it was given."""
        self.flush()
        for owner in self._consumers.values():
            self._dispatcher.call(owner, owner.consumer.synchronize)
            owner.export_thread.drain()
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def call_consumer(self, consumer_id: str, method: str, *args: Any) -> Any:
        """Call one of a consumer's `remote_methods`, after the rows of the step before.

        Raises `ValueError` for a consumer or method that is not there, and `RuntimeError` for a
        consumer that raised: it is detached then.
        """
        owner = self._registered(consumer_id)
        if method not in owner.consumer.remote_methods:
            raise ValueError(
                f"consumer {consumer_id!r} has no remote method {method!r}; its remote_methods "
                f"are {', '.join(owner.consumer.remote_methods) or 'none'}"
            )
        self.end_step()
        answer = self._dispatcher.call(owner, getattr(owner.consumer, method), *args)
        if owner.error is not None:
            raise RuntimeError(f"consumer {consumer_id!r} raised and is detached: {owner.error}")
        return answer

    def consumer_stats(self, consumer_id: str) -> dict[str, Any]:
        """A consumer's own statistics, with the runtime's under `runtime`."""
        owner = self._registered(consumer_id)
        stats = dict(self._dispatcher.call(owner, owner.consumer.read_stats) or {})
        stats["runtime"] = {
            "calls": owner.calls,
            "rows": owner.rows,
            "rows_dropped": owner.rows_dropped,
            "rows_with_too_many_candidates": int(self._guidance.overflow),
            "error": owner.error,
        }
        return stats

    def stats(self) -> dict[str, Any]:
        """Counters of this worker."""
        return {
            "consumers": {name: owner.error or "ok" for name, owner in self._consumers.items()},
            "hook_points": [f"{p}" if n is None else f"{p}:{n}" for p, n in self._taps.index],
            "norms_fused": self._taps.norms_fused,
            "rows_captured": self.rows_captured,
            "rows_dropped": self.rows_dropped,
            "rows_steered": self.rows_steered,
            "sequences_not_steered": self._assignments.not_steered,
            "ring_rows": self._ring.capacity,
            "results_forgotten": self._endings.forgotten,
            "steering_configurations": self.steering.rows_in_use,
            "steering_mib": self.steering.vector_bytes / 2**20,
            "running_sequences": sum(not sequence.ended for sequence in self._slots),
        }

    def _make_progress(self) -> bool:
        """Let a delivery thread finish a job; False when none has one."""
        return any(owner.thread.wait_for_one() for owner in self._consumers.values())

"""What runs in a worker: the running sequences, the registered consumers, and each step of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tllm.ports import ModelView
from tllm.runtime.assignments import Assignments
from tllm.runtime.binder import Binder
from tllm.runtime.broken_sequences import BrokenSequences
from tllm.runtime.controllers import Controllers
from tllm.runtime.decided_steering import DecidedGroups
from tllm.runtime.flows import BoundConsumer
from tllm.runtime.judged_sequences import JudgedSequences
from tllm.runtime.patching import Patching
from tllm.runtime.planner import RowPlanner
from tllm.runtime.programs import Programs
from tllm.runtime.registered import RegisteredConsumers
from tllm.runtime.ring import Overflow, Ring
from tllm.runtime.sampling import LmHead
from tllm.runtime.sequences import RunningSequences
from tllm.runtime.slots import Slots
from tllm.runtime.steering import Steering
from tllm.runtime.steps import Steps
from tllm.runtime.taps import TapKey, Taps
from tllm.runtime.writer import Additions


class Session:
    """The worker's half of tLLM, put together. All methods run on the engine's thread, between
    steps that have ended (`Steps.end`).

    Args:
        resolve: from a hook point's name and a layer to the tap that serves it; raises
            `ValueError` with what the model has.
        model: what consumers may know of the model.
        lm_head: None on a pipeline rank without it, or a string that says why candidates
            cannot be projected on it.
        samples: whether this rank samples tokens.
        drafts: whether tokens are drafted (speculative decoding).
        max_sequences: the most that run at once.
        max_positions: the most tokens of a sequence.
        steering_rows, steering_vectors: distinct steering configurations, and vectors, to make room
            for; more can be had.
        max_patch_bytes, max_patch_host_bytes: the most memory for rows that are kept to be put
            elsewhere, on the device and on the host.
        ring_rows, max_ring_rows, overflow: see `Ring`.
        share: see `Controllers`.
        agree: puts the first tensor-parallel rank's values into every rank's tensor, on the
            current stream; to be called by all of them. None where there is only one.

    Attributes:
        consumers, sequences: what is there.
        steps: what is done with them.
        steering, patching: what tokens can be steered and patched with.
        requests_held_back: those that wait for room in the steering tables, as the scheduler says.
        requests_preempted: how often the scheduler said that it took a running one from the device.
    """

    requests_held_back = 0
    requests_preempted = 0

    def __init__(
        self,
        taps: Taps,
        resolve: Callable[[str, int | None], TapKey],
        model: ModelView,
        *,
        lm_head: LmHead | str | None,
        samples: bool,
        drafts: bool,
        max_sequences: int,
        max_positions: int,
        max_programs: int,
        steering_rows: int,
        steering_vectors: int,
        max_patch_bytes: int,
        max_patch_host_bytes: int,
        ring_rows: int,
        max_ring_rows: int,
        overflow: Overflow,
        share: Callable[[Any], Any] | None = None,
        agree: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        self._taps = taps
        self._slots = slots = Slots(max_sequences)
        by_id: dict[str, BoundConsumer] = {}
        # What can be done to rows.
        self.steering = Steering(
            taps, resolve, steering_rows, steering_vectors, max_positions, agree
        )
        self.patching = Patching(taps, resolve, max_patch_bytes, max_patch_host_bytes)
        self._programs = Programs(taps, max_programs)
        broken = BrokenSequences(slots, taps)
        self._assignments = Assignments(
            slots, self._programs, self.steering, self.patching, by_id, broken
        )
        # Who asks for it.
        decided = DecidedGroups(
            self.steering,
            resolve,
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            dtype=taps.dtype,
            enabled=steering_rows > 0,
        )
        refusal = lm_head if isinstance(lm_head, str) else None
        self.consumers = RegisteredConsumers(
            by_id,
            slots,
            model,
            binder=Binder(taps, resolve, model, samples=samples, refusal=refusal),
            additions=Additions(taps, slots),
            assignments=self._assignments,
            controllers=Controllers(slots, decided, self._assignments, share),
            lm_head=lm_head,
        )
        judged = JudgedSequences(
            slots,
            self.steering,
            num_stages=model.num_stages,
            is_last=samples,
            max_sequences=max_sequences,
            device=model.device,
            agree=agree,
        )
        self.sequences = RunningSequences(
            slots, self.consumers, self._assignments, judged, drafts=drafts
        )
        # When it is done.
        self._ring = Ring(
            hidden_size=taps.hidden_size,
            dtype=taps.dtype,
            device=taps.device,
            rows=ring_rows,
            max_rows=max_ring_rows,
            overflow=overflow,
            on_move=taps.set_arena,
            make_progress=self._make_progress,
        )
        self._planner = RowPlanner(slots, taps, self._programs, self._ring, model.num_stages)
        self._planner.warm_up()
        self.steps = Steps(slots, self._planner, self._assignments, self.consumers, judged, broken)

    # -- between steps -----------------------------------------------------------------------------

    def unregister(self, consumer_id: str | None = None) -> None:
        """Remove a consumer, or all of them, after its pending rows were handed out."""
        self.flush()
        for name in (
            [consumer_id] if consumer_id is not None else [owner.id for owner in self.consumers]
        ):
            self.consumers.remove(name)
        self.consumers.reassign()

    def not_steered(self, prompt_ids: list[str]) -> list[str]:
        """Which of these prompts were to be steered or patched and could not be, told once."""
        failed = self._assignments.failed
        told = [prompt_id for prompt_id in prompt_ids if prompt_id in failed] if failed else []
        for prompt_id in told:
            del failed[prompt_id]
        return told

    def flush(self) -> None:
        """Hand out all rows there are, and wait for the delivery threads."""
        self.steps.end()
        self.consumers.dispatcher.before_forward()
        for owner in self.consumers:
            self.consumers.dispatcher.flush(owner)

    def weights_changed(self, model: ModelView, lm_head: LmHead | str | None) -> None:
        """The model has other weights. What was computed with the old ones was handed out.

        Args:
            model, lm_head: of the new ones.
        """
        self.consumers.guidance.set_head(lm_head)
        self.consumers.weights_changed(model)

    def close(self) -> None:
        self.unregister()
        self.consumers.result_memory.trim()

    def synchronize(self) -> dict[str, str]:
        """Wait until every consumer is done with what it was given; by consumer, what those raised
        that could not be waited for."""
        self.flush()
        raised = {}
        for owner in self.consumers:
            before = owner.error
            self.consumers.dispatcher.call(owner, owner.consumer.synchronize)
            if owner.error is not None and before is None:
                raised[owner.id] = owner.error
            owner.export_thread.drain()
        if self.consumers.model.device.type == "cuda":
            torch.cuda.synchronize(self.consumers.model.device)
        self._ring.free_spans()
        return raised

    def call_consumer(self, consumer_id: str, method: str, *args: Any) -> Any:
        """Call one of a consumer's `remote_methods`, after the rows of the step before.

        Raises `ValueError` for a consumer or method that is not there, or that does not take these
        arguments, and `RuntimeError` for a consumer that raised: it is detached then.
        """
        owner = self.consumers.get(consumer_id)
        if method not in owner.consumer.remote_methods:
            raise ValueError(
                f"consumer {consumer_id!r} has no remote method {method!r}; its remote_methods "
                f"are {', '.join(owner.consumer.remote_methods) or 'none'}"
            )
        called = getattr(owner.consumer, method)
        try:
            signature = inspect.signature(called)
            signature.bind(*args)
        except TypeError as error:
            raise ValueError(
                f"consumer {consumer_id!r} has {method}{signature}, called with {len(args)} "
                f"arguments: {error}"
            ) from None
        answer = self.consumers.dispatcher.call(owner, called, *args)
        if owner.error is not None:
            raise RuntimeError(f"consumer {consumer_id!r} raised and is detached: {owner.error}")
        return answer

    def consumer_stats(self, consumer_id: str) -> dict[str, Any]:
        """A consumer's own statistics, with the runtime's under `runtime`."""
        owner = self.consumers.get(consumer_id)
        given = self.consumers.dispatcher.call(owner, owner.consumer.read_stats)
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                f"read_stats() of consumer {consumer_id!r} returned {given!r:.100}; let it return "
                "a mapping"
            )
        stats = dict(given or {})
        stats["runtime"] = {
            **owner.counters(),
            **self._decided_by(owner),
            "rows_with_too_many_candidates": int(self.consumers.guidance.overflow),
        }
        return stats

    def stats(self) -> dict[str, Any]:
        """Counters of this worker."""
        self.steps.count_all_drafts()
        return {
            "consumers": {owner.id: owner.error or "ok" for owner in self.consumers},
            "hook_points": [f"{p}" if n is None else f"{p}:{n}" for p, n in self._taps.index],
            "norms_fused": self._taps.norms_fused,
            "rows_captured": self.steps.rows_captured,
            "rows_dropped": self.steps.rows_dropped,
            "rows_steered": self.steps.rows_steered,
            "rows_patched": self.steps.rows_patched,
            "tokens_drafted": self.steps.tokens_drafted,
            "tokens_accepted": self.steps.tokens_accepted,
            "sequences_not_steered": self._assignments.not_steered,
            "sequences_not_patched": self._assignments.not_patched,
            "sequences_not_finite": self._assignments.not_finite,
            "bytes_captured": self.steps.ring_rows_taken * self._ring.row_bytes,
            "ring_rows": self._ring.capacity,
            "ring_rows_in_use": self._ring.in_use,
            "results_forgotten": self.consumers.results.forgotten,
            "results_kept": self.consumers.results.num_kept,
            "steering_configurations": self.steering.rows_in_use,
            "steering_mib": self.steering.vector_bytes / 2**20,
            "patch_mib": self.patching.kept_bytes() / 2**20,
            "patch_host_mib": self.patching.kept_bytes(on_host=True) / 2**20,
            "running_sequences": sum(not sequence.ended for sequence in self._slots),
            "requests_held_back": self.requests_held_back,
            "requests_preempted": self.requests_preempted,
            "by_consumer": {
                owner.id: owner.counters() | self._decided_by(owner) for owner in self.consumers
            },
        }

    def _decided_by(self, owner: BoundConsumer) -> dict[str, Any]:
        """Counters of a consumer's actions, where it has decided anything."""
        counters = self.consumers.controllers.counters(owner.id)
        return {} if counters is None else {"actions": counters}

    def _make_progress(self) -> bool:
        """Let a delivery thread finish a job; False when none has one."""
        return any(owner.thread.wait_for_one() for owner in self.consumers)

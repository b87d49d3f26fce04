"""What runs in a worker: the running sequences, the registered consumers, and each step of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tllm.ports import ModelView
from tllm.result_memory import ResultMemory
from tllm.runtime.assignments import Assignments
from tllm.runtime.binder import Binder
from tllm.runtime.controllers import Controllers
from tllm.runtime.decided_steering import DecidedGroups
from tllm.runtime.dispatch import Dispatcher
from tllm.runtime.drafted_latches import DraftedLatches
from tllm.runtime.flows import BoundConsumer, ConsumerProtocol
from tllm.runtime.patching import Patching
from tllm.runtime.planner import RowPlanner
from tllm.runtime.programs import Programs
from tllm.runtime.registered import RegisteredConsumers
from tllm.runtime.results import PromptResults, Results
from tllm.runtime.ring import Overflow, Ring
from tllm.runtime.sampling import Guidance, LmHead
from tllm.runtime.score_relay import ScoreRelay
from tllm.runtime.sequences import RunningSequences
from tllm.runtime.slots import Slots
from tllm.runtime.steering import Steering
from tllm.runtime.steps import Steps
from tllm.runtime.taps import TapKey, Taps
from tllm.runtime.verdicts import Verdicts
from tllm.runtime.writer import Additions


class Session:
    """The worker's half of tLLM, put together. All methods run on the engine's thread.

    Args:
        taps: the installed taps.
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
    """

    requests_held_back = 0

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
        self._model = model
        self._slots = slots = Slots(max_sequences)
        self._programs = Programs(taps, max_programs)
        self._consumers: dict[str, BoundConsumer] = {}
        #: Of the consumers, for rows that the user is given.
        self.result_memory = ResultMemory()
        self.steering = Steering(
            taps, resolve, steering_rows, steering_vectors, max_positions, agree
        )
        self.patching = Patching(taps, resolve, max_patch_bytes, max_patch_host_bytes)
        self._additions = Additions(taps, slots)
        self._assignments = Assignments(
            slots, self._programs, self.steering, self.patching, self._consumers
        )
        self._controllers = Controllers(
            slots, self._decided_groups(resolve, steering_rows), self._assignments, share
        )
        self._dispatcher = Dispatcher(
            slots,
            model.device,
            lambda owner: self.consumers.note_failure(owner),
            self._controllers,
        )
        self._guidance = Guidance(lm_head, model, slots, self._dispatcher)
        self._results = Results(self._dispatcher, self._consumers, payloads=model.first_rank)
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
        self._planner = RowPlanner(slots, taps, self._programs, self._ring)
        refusal = lm_head if isinstance(lm_head, str) else None
        self.consumers = self._registered(
            Binder(taps, resolve, model, samples=samples, refusal=refusal, drafts=drafts)
        )
        verdicts = Verdicts(self.steering.gates, max_sequences)
        relay = ScoreRelay(
            self.steering, model.num_stages, is_last=samples, max_sequences=max_sequences
        )
        latches = DraftedLatches(slots, self.steering.gates.latches, model.device, agree)
        self.sequences = self._running(verdicts, relay)
        self.steps = self._steps(verdicts, relay, latches)

    def _decided_groups(
        self, resolve: Callable[[str, int | None], TapKey], steering_rows: int
    ) -> DecidedGroups:
        """What controllers may steer with."""
        return DecidedGroups(
            self.steering,
            resolve,
            num_layers=self._model.num_layers,
            hidden_size=self._model.hidden_size,
            max_value=torch.finfo(self._taps.dtype).max,
            enabled=steering_rows > 0,
        )

    def _registered(self, binder: Binder) -> RegisteredConsumers:
        return RegisteredConsumers(
            self._consumers,
            self._slots,
            self._model,
            binder,
            self._additions,
            self._dispatcher,
            self._guidance,
            self._assignments,
            self._results,
            self.result_memory,
            self._controllers,
        )

    def _running(self, verdicts: Verdicts, relay: ScoreRelay) -> RunningSequences:
        return RunningSequences(
            self._slots,
            self.consumers,
            self._assignments,
            self._additions,
            self._dispatcher,
            self._results,
            verdicts,
            relay,
            self._controllers,
        )

    def _steps(self, verdicts: Verdicts, relay: ScoreRelay, latches: DraftedLatches) -> Steps:
        return Steps(
            self._slots,
            self._taps,
            self._planner,
            self.steering,
            self.patching,
            self._additions,
            self._assignments,
            self.consumers,
            self._dispatcher,
            self._guidance,
            verdicts,
            self.steering.gates.means,
            latches,
            relay,
            self._controllers,
        )

    # -- between steps -----------------------------------------------------------------------------

    def register(self, consumer: ConsumerProtocol) -> None:
        """Add a consumer; see `RegisteredConsumers.register`."""
        self.consumers.register(consumer)

    def unregister(self, consumer_id: str | None = None) -> None:
        """Remove a consumer, or all of them, after its pending rows were handed out."""
        self.flush()
        for name in (
            [consumer_id] if consumer_id is not None else [owner.id for owner in self.consumers]
        ):
            self.consumers.remove(name)
        self.consumers.reassign()

    def pop_results(
        self,
        prompt_ids: list[str],
        tokens: Mapping[str, Mapping[int, list[int]] | None],
        wait_s: float = 0.0,
    ) -> PromptResults:
        """The results of finished prompts; see `RunningSequences.pop_results`."""
        self.steps.end()
        return self.sequences.pop_results(prompt_ids, tokens, wait_s)

    def discard_results(self, prompt_ids: list[str]) -> None:
        """Nobody will come for the results of prompts; see `RunningSequences.discard_results`."""
        self.steps.end()
        self.sequences.discard_results(prompt_ids)

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
        self._dispatcher.before_forward()
        for owner in self.consumers:
            self._dispatcher.flush(owner)

    def weights_changed(self, model: ModelView, lm_head: LmHead | str | None) -> None:
        """The model has other weights. What was computed with the old ones was handed out.

        Args:
            model, lm_head: of the new ones.
        """
        self._model = model
        self._guidance.set_head(lm_head)
        self.consumers.weights_changed(model)

    def close(self) -> None:
        """The engine ends."""
        self.unregister()
        self.result_memory.trim()

    def synchronize(self) -> dict[str, str]:
        """Wait until every consumer is done with what it was given; by consumer, what those raised
        that could not be waited for."""
        self.flush()
        raised = {}
        for owner in self.consumers:
            before = owner.error
            self._dispatcher.call(owner, owner.consumer.synchronize)
            if owner.error is not None and before is None:
                raised[owner.id] = owner.error
            owner.export_thread.drain()
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
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
        self.steps.end()
        answer = self._dispatcher.call(owner, called, *args)
        if owner.error is not None:
            raise RuntimeError(f"consumer {consumer_id!r} raised and is detached: {owner.error}")
        return answer

    def consumer_stats(self, consumer_id: str) -> dict[str, Any]:
        """A consumer's own statistics, with the runtime's under `runtime`."""
        owner = self.consumers.get(consumer_id)
        given = self._dispatcher.call(owner, owner.consumer.read_stats)
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                f"read_stats() of consumer {consumer_id!r} returned {given!r:.100}; let it return "
                "a mapping"
            )
        stats = dict(given or {})
        stats["runtime"] = {
            **owner.counters(),
            **self._decided_by(owner),
            "rows_with_too_many_candidates": int(self._guidance.overflow),
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
            "bytes_captured": self.steps.ring_rows_taken * self._ring.row_bytes,
            "ring_rows": self._ring.capacity,
            "ring_rows_in_use": self._ring.in_use,
            "results_forgotten": self._results.forgotten,
            "results_kept": self._results.num_kept,
            "steering_configurations": self.steering.rows_in_use,
            "steering_mib": self.steering.vector_bytes / 2**20,
            "patch_mib": self.patching.kept_bytes() / 2**20,
            "patch_host_mib": self.patching.kept_bytes(on_host=True) / 2**20,
            "running_sequences": sum(not sequence.ended for sequence in self._slots),
            "requests_held_back": self.requests_held_back,
            "by_consumer": {
                owner.id: owner.counters() | self._decided_by(owner) for owner in self.consumers
            },
        }

    def _decided_by(self, owner: BoundConsumer) -> dict[str, Any]:
        """Counters of a consumer's actions, where it has decided anything."""
        counters = self._controllers.counters(owner.id)
        return {} if counters is None else {"actions": counters}

    def _make_progress(self) -> bool:
        """Let a delivery thread finish a job; False when none has one."""
        return any(owner.thread.wait_for_one() for owner in self.consumers)

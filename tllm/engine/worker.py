"""The worker: vLLM's own, with a session of tLLM's runtime attached to its model runner."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import cloudpickle
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

from tllm.answers import AnswerWriter
from tllm.engine import limits, model_view, quantized_norms
from tllm.engine.adapters import Adapters
from tllm.engine.drafts import check_drafter, reads_between_blocks
from tllm.engine.media import prompt_len, tokens_of
from tllm.engine.options import EngineOptions
from tllm.engine.runner import RunnerAttachment
from tllm.engine.runner_v1 import V1Attachment
from tllm.engine.runner_v2 import V2Attachment
from tllm.engine.seams import overrides, uses
from tllm.engine.verdicts import with_verdicts
from tllm.engine.worker_calls import WorkerCalls
from tllm.models.resolver import resolve
from tllm.models.sites import ModelSites, Site
from tllm.ports import ModelView
from tllm.ports.payload import reason_of
from tllm.runtime.kernels.backend import uses_triton
from tllm.runtime.results import sendable
from tllm.runtime.sampling import LmHead
from tllm.runtime.session import Session
from tllm.runtime.tap_hooks import can_check
from tllm.runtime.taps import AddedNorm, TapKey, Taps, compile_digest
from tllm.spec.hooks import HookPoint
from tllm.spec.request import RequestSpec
from tllm.spec.turns import StepTurns

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu_worker import Worker as _Base
else:
    _Base = object

logger = init_logger(__name__)

_DIGEST_KEY = "tllm_digest"
_MAX_PROGRAMS = 1024

_OLD_WEIGHTS = "what was made of the old weights goes with them"
uses(
    "vllm.v1.worker.gpu_worker.Worker",
    "vllm_config device model_runner use_v2_model_runner",
    "the session is attached to the model runner",
)
uses("vllm.config.VllmConfig", "additional_config", "options travel in it to the workers")
uses("vllm.config.CompilationConfig", "mode", "whether the model is compiled")
uses(
    "vllm.v1.core.sched.output.SchedulerOutput",
    "scheduled_new_reqs finished_req_ids total_num_scheduled_tokens num_scheduled_tokens",
    "which sequences begin and end with a step",
)
uses(
    "vllm.v1.core.sched.output.NewRequestData",
    "req_id prompt_token_ids prompt_embeds sampling_params pooling_params num_computed_tokens",
    "what is asked of a sequence that begins",
)


uses(
    "vllm.distributed.parallel_state",
    "get_tp_group",
    "what is decided on the first rank is told to all",
)
_OTHER_ENGINE = "an engine goes on when another one of its process has ended"
uses("vllm.distributed.parallel_state", "model_parallel_is_initialized", _OTHER_ENGINE)
uses("vllm.config", "set_current_vllm_config", _OTHER_ENGINE)
uses("vllm.platforms", "current_platform", _OTHER_ENGINE)
uses(
    "vllm.v1.worker.gpu_worker",
    "init_worker_distributed_environment",
    _OTHER_ENGINE,
    takes="vllm_config rank distributed_init_method local_rank backend",
)
uses("vllm.v1.worker.gpu_worker.Worker", "rank distributed_init_method local_rank", _OTHER_ENGINE)
uses(
    "vllm.distributed.parallel_state.GroupCoordinator",
    "broadcast_object",
    "what controllers decide on the first rank is told to all",
    takes="obj",
)
uses(
    "vllm.distributed.parallel_state.GroupCoordinator",
    "broadcast",
    "what conditions on the first rank made of a prompt, and of drafts, counts for all",
    takes="input_",
)

uses(
    "vllm.model_executor.models.llama.LlamaForCausalLM",
    "load_weights",
    "what was made of the old weights goes with them, whoever loads others; as of every model",
    takes="weights",
)

_Begun: TypeAlias = "tuple[NewRequestData, RequestSpec]"


def _collect_engines_that_were_let_go() -> None:
    """Free what is left of the engines that this process had before.

    Otherwise Python does at any time, the compilation that comes included: vLLM's linear layers of
    a CPU read a tensor as they end, and PyTorch would trace that, without an end.
    """
    gc.unfreeze()  # an engine freezes what it made as it starts
    for _ in range(2):  # an engine that is part of a cycle ends with it, and then has let go
        gc.collect()


class InterventionWorker(_Base):
    """Mixed into the platform's worker. Everything it changes is on instances it owns.

    Order of a worker's life: `init_device` puts the digest of our taps into the compile-cache
    key; `load_model` installs the taps before the model is compiled and attaches the session to
    the model runner; `execute_model` tells the session which sequences come and go.
    """

    session: Session
    _note: Path | None
    _attachment: RunnerAttachment
    _guidance_refusal: str | None
    _sites: ModelSites
    _options: EngineOptions
    _answers: AnswerWriter
    _calls: WorkerCalls
    _adapters: Adapters
    _weights_are_other = False

    @overrides(
        "vllm.v1.worker.gpu_worker.Worker.init_device",
        "the taps are part of the compile-cache key",
    )
    def init_device(self) -> None:
        config = self.vllm_config
        if config.compilation_config.mode:
            _collect_engines_that_were_let_go()
        self._note = limits.pop_note(config)
        with limits.reported(self._note):
            limits.check(config)
            self._options = EngineOptions.of(config)
        points = [point.value for point in self._options.points]
        digest = compile_digest(points, config.model_config.dtype, self._options.fuse_norms)
        config.additional_config = {**config.additional_config, _DIGEST_KEY: digest}
        super().init_device()
        if self._fuses_norms and quantized_norms.can_fuse(config):
            quantized_norms.fuse(config)

    @overrides(
        "vllm.v1.worker.gpu_worker.Worker.load_model",
        "taps are installed after the weights are loaded and before the model is compiled",
    )
    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        with limits.reported(self._note), torch.inference_mode():
            model = self.model_runner.get_model()
            tensor_parallel = self.vllm_config.parallel_config.tensor_parallel_size
            self._sites = resolve(
                model,
                tensor_parallel,
                tapped=self._options.points,
                config=self.vllm_config.model_config.hf_text_config,
            )
            check_drafter(self.model_runner.get_draft_model(), self._sites)
            attachment = V2Attachment if self.use_v2_model_runner else V1Attachment
            self._guidance_refusal = attachment.guidance_refusal(self.model_runner)
            self.session = self._session(model, self._taps())
        self._answers = AnswerWriter(self.session.consumers.result_memory)
        self._calls = WorkerCalls(self.session, self._sites, self._options, self.rank)
        self._adapters = Adapters()
        self._watch_weights(model)
        self._attachment = attachment(self.model_runner, self.session)

    def _watch_weights(self, model: torch.nn.Module) -> None:
        """Hear of weights that are loaded into the model by whoever has it, as trainers do that
        share its process: part by part, so that nothing is made of them before the next step."""
        load: Callable[..., Any] = model.load_weights  # type: ignore[assignment]

        @wraps(load)
        def load_weights(*args: Any, **kwargs: Any) -> Any:
            if not self._weights_are_other:
                self.session.synchronize()
                self._weights_are_other = True
            return load(*args, **kwargs)

        model.load_weights = load_weights  # type: ignore[assignment]

    def _taps(self) -> Taps:
        """Taps at the hook points that were asked for, installed in the model."""
        sites, checked = self._sites, self._checked()
        installed = {
            key: site
            for key, site in sites.sites.items()
            if key in checked or sites.points.is_needed(key)
        }
        taps = Taps(
            installed,
            second={key: second for key, second in sites.second.items() if key in installed},
            hidden_size=sites.hidden_size,
            dtype=self.vllm_config.model_config.dtype,
            device=self.device,
            max_tokens=model_view.max_batch_tokens(self.vllm_config),
            max_programs=_MAX_PROGRAMS,
            add_rows=2 * self.vllm_config.scheduler_config.max_num_seqs,
            checked=checked,
            embeds=model_view.embeds_tokens(self.vllm_config),
        )
        taps.install(self._norms(installed))
        return taps

    def _checked(self) -> tuple[TapKey, ...]:
        """Where rows are checked to be finite: before the last norm, and where the LM head reads
        them."""
        if not model_view.is_last_stage():
            return ()
        sites = self._sites.sites
        last = HookPoint.POST_BLOCK, self._sites.points.num_layers - 1
        points: tuple[TapKey, ...] = last, (HookPoint.LM_HEAD_IN, None)
        return tuple(key for key in points if key in sites and can_check(sites[key]))

    def _session(self, model: torch.nn.Module, taps: Taps) -> Session:
        config, sites, options = self.vllm_config, self._sites, self._options
        row_bytes = sites.hidden_size * config.model_config.dtype.itemsize
        ranks = get_tp_group() if config.parallel_config.tensor_parallel_size > 1 else None
        described, head = self._described(model)
        return Session(
            taps,
            lambda site, layer: sites.points.check(HookPoint.parse(site), layer),
            described,
            lm_head=head,
            samples=model_view.is_last_stage(),
            drafts=config.speculative_config is not None,
            max_sequences=config.scheduler_config.max_num_seqs,
            max_positions=config.model_config.max_model_len,
            max_programs=_MAX_PROGRAMS,
            steering_rows=options.max_steering_configs,
            steering_vectors=options.max_steering_mib * 2**20 // row_bytes,
            max_patch_bytes=options.max_patch_mib * 2**20,
            max_patch_host_bytes=options.max_patch_host_mib * 2**20,
            ring_rows=max(64, options.first_capture_bytes // row_bytes),
            max_ring_rows=options.most_capture_bytes(_memory_of(self.device)) // row_bytes,
            overflow=options.overflow,
            share=ranks and ranks.broadcast_object,
            agree=ranks and ranks.broadcast,
        )

    def _described(self, model: torch.nn.Module) -> tuple[ModelView, LmHead | str | None]:
        """What consumers may know of the model, and its LM head as `Session` takes it."""
        head = model_view.lm_head(self.vllm_config, model, self._sites, self.device)
        described = model_view.describe(self.vllm_config, self._sites, self.device, head)
        return described, head if head is None else self._guidance_refusal or head

    @property
    def _fuses_norms(self) -> bool:
        return self._options.fuse_norms and uses_triton(self.device)

    def _norms(self, installed: Mapping[TapKey, Site]) -> dict[TapKey, AddedNorm]:
        """The norms that are computed together with the tap before them."""
        if not self._fuses_norms:
            return {}
        between = reads_between_blocks(self.vllm_config)
        found = {
            key: model_view.added_norm(self.vllm_config, site.norm)
            for key, site in installed.items()
            if site.norm is not None and not (between and site.point is HookPoint.POST_BLOCK)
        }
        return {key: norm for key, norm in found.items() if norm is not None}

    @overrides(
        "vllm.v1.worker.gpu_worker.Worker.execute_model",
        "sequences that begin and end with a step; what is left of a step without sampling",
    )
    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if not model_parallel_is_initialized():
            self._join_groups()
        if self._weights_are_other:
            self._note_weights()
        later = self._track(scheduler_output)
        output = super().execute_model(scheduler_output)
        if later:
            self._start_sequences(later)
        if output is not None:  # nothing is left for `sample_tokens`
            self._end_step(output)
        return output

    def _join_groups(self) -> None:
        """Make the process groups anew: an engine that ends takes along those of its process, which
        has this engine, too."""
        with set_current_vllm_config(self.vllm_config):
            init_worker_distributed_environment(
                self.vllm_config,
                self.rank,
                self.distributed_init_method,
                self.local_rank,
                current_platform.dist_backend,
            )

    @overrides(
        "vllm.v1.worker.gpu_worker.Worker.sample_tokens",
        "what is left to do when a step is over",
    )
    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        verdicts = self.session.steps.take_verdicts()
        self._end_step(output)
        return output if verdicts is None else with_verdicts(output, verdicts)

    def _end_step(self, output: Any) -> None:
        self._attachment.end_step(output)
        self.session.steps.end(wait=False)

    def _track(self, scheduler_output: SchedulerOutput) -> Sequence[_Begun]:
        """Tell the session of the sequences that end and begin, and the attachment of the step.

        Returns:
            Sequences that begin and that the session may hear of when the device is at work:
            nothing is done to any row of this step.
        """
        has_tokens = scheduler_output.total_num_scheduled_tokens > 0
        turns = vars(scheduler_output).get("tllm_turns")
        takes_turns = turns is not None and bool(turns.engine_ids)
        preempted = scheduler_output.preempted_req_ids
        others = scheduler_output.finished_req_ids or scheduler_output.scheduled_new_reqs
        others = others or takes_turns or preempted
        if drawn_anew := vars(scheduler_output).get("tllm_drawn_anew"):
            self._attachment.draw_anew(drawn_anew)
        steps = self.session.steps
        steps.end(wait=bool(others) and (takes_turns or self._waits_for_drafts(scheduler_output)))
        self._attachment.track(scheduler_output)
        self._attachment.scheduler_output = scheduler_output if has_tokens else None
        if preempted:
            self.session.requests_preempted += len(preempted)
        held_back = vars(scheduler_output).get("tllm_held_back")
        if held_back is not None:
            self.session.requests_held_back = held_back
        if scheduler_output.finished_req_ids:
            steps.when_decided(partial(self._finish_sequences, scheduler_output))
        if takes_turns:
            self._take_turns(turns)
        if not scheduler_output.scheduled_new_reqs:
            return ()
        begin = [(new, RequestSpec.of(new)) for new in scheduler_output.scheduled_new_reqs]
        if self.session.steps.idle and all(spec.is_plain for _, spec in begin):
            return begin
        self._start_sequences(begin)
        return ()

    def _waits_for_drafts(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether it must be known which drafts of the steps before were accepted when this one is
        prepared. Else sequences that have ended are had until it is known."""
        return self.session.steps.undecided and not (
            scheduler_output.total_num_scheduled_tokens
            and not scheduler_output.preempted_req_ids
            and self._attachment.may_finish(scheduler_output.finished_req_ids)
            and self.session.sequences.may_begin(
                [new.req_id for new in scheduler_output.scheduled_new_reqs]
            )
        )

    @torch.inference_mode()
    def _finish_sequences(self, scheduler_output: SchedulerOutput) -> None:
        tokens: dict[str, tuple[int, ...]] = vars(scheduler_output).get("tllm_ended", {})
        for request_id in scheduler_output.finished_req_ids:
            self.session.sequences.finish(request_id, tokens.get(request_id))
        if not self.session.sequences.slots:
            self.session.steps.rest()

    @torch.inference_mode()
    def _take_turns(self, turns: StepTurns) -> None:
        self._attachment.feed(turns)
        self.session.sequences.take_turns(turns)

    @torch.inference_mode()
    def _start_sequences(self, begin: Sequence[_Begun]) -> None:
        for new, spec in begin:
            self.session.sequences.start(
                new.req_id,
                tokens_of(new),
                prompt_len(new) - spec.generated,
                spec,
                spec.sample_index(new.req_id),
                new.num_computed_tokens,
                "" if new.lora_request is None else str(new.lora_request.lora_name),
                self._adapters.of_head(new.lora_request),
            )

    @overrides("vllm.v1.worker.gpu_worker.Worker.reload_weights", _OLD_WEIGHTS)
    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.session.synchronize()
        super().reload_weights(*args, **kwargs)
        self._note_weights()

    @overrides(
        "vllm.v1.worker.gpu_worker.Worker.start_weight_update",
        "consumers are done with the old weights before they go",
    )
    def start_weight_update(self) -> None:
        self.session.synchronize()
        super().start_weight_update()

    @overrides("vllm.v1.worker.gpu_worker.Worker.finish_weight_update", _OLD_WEIGHTS)
    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._note_weights()

    @overrides(
        "vllm.v1.worker.gpu_worker.Worker.sleep",
        "consumers are done with the model before its memory is taken away",
    )
    def sleep(self, level: int = 1) -> None:
        self.session.synchronize()
        super().sleep(level)

    @torch.inference_mode()
    def _note_weights(self) -> None:
        """The model has other weights: what was made of the old ones is made anew, or dropped."""
        self._weights_are_other = False
        self.session.weights_changed(*self._described(self.model_runner.get_model()))
        if dropped := self._calls.drop_runs():
            logger.warning(
                "the model's weights were replaced: %d runs that were kept for patches are dropped",
                dropped,
            )

    @overrides(
        "vllm.v1.worker.gpu_worker.Worker.shutdown",
        "consumers are closed before the worker ends",
    )
    def shutdown(self) -> None:
        if "session" in vars(self):
            self.session.close()
            self._calls.close()
        super().shutdown()

    # -- remote calls --------------------------------------------------------------------------

    @torch.inference_mode()
    def tllm(self, method: str, payload: bytes, token: str = "") -> bytes:
        """Run a method of `WorkerCalls` for the user's process; never raises.

        Args:
            token: of the user's `SharedFolder`, for large answers.
        """
        try:
            if self._weights_are_other:
                self._note_weights()
            self.session.steps.end()
            answer = getattr(self._calls, method)(*cloudpickle.loads(payload))
            if method == "take_results":  # they were popped, and each must reach its user
                answer = sendable(answer)
            return self._answers.encode(("ok", answer), token)
        except Exception as error:
            if not isinstance(error, ValueError):
                logger.exception("tLLM call %r failed", method)
            return self._answers.encode(("error", _as_told(error)), "")


def _as_told(error: Exception) -> Exception:
    """What the user's process raises, which need not know the error's class."""
    # Imported by whoever raises its errors: with pyarrow, which few workers need, and for which no
    # refusal should make a step wait.
    stores = sys.modules.get("tllm.stores")
    if stores is not None and isinstance(error, stores.WriterInUseError):
        return error
    if isinstance(error, ValueError):
        return ValueError(str(error))
    return RuntimeError(str(error) if type(error) is RuntimeError else reason_of(error))


def _memory_of(device: torch.device) -> int:
    """Bytes of a GPU's memory; 0 of a CPU, which has its host's."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)

"""The worker: vLLM's own, with a session of tLLM's runtime attached to its model runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from vllm.logger import init_logger

from tllm.engine import limits, model_view, versions
from tllm.engine.options import EngineOptions
from tllm.engine.runner import RunnerAttachment
from tllm.models.resolver import resolve
from tllm.models.sites import ModelSites, Site
from tllm.runtime.answers import AnswerWriter
from tllm.runtime.kernels.backend import uses_triton
from tllm.runtime.session import Session
from tllm.runtime.taps import AddedNorm, TapKey, Taps, compile_digest
from tllm.spec.hooks import HookPoint
from tllm.spec.request import RequestSpec

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu_worker import Worker as _Base
else:
    _Base = object

logger = init_logger(__name__)

_DIGEST_KEY = "tllm_digest"
_MAX_PROGRAMS = 1024


class InterventionWorker(_Base):
    """Mixed into the platform's worker. Everything it changes is on instances it owns.

    Order of a worker's life: `init_device` puts the digest of our taps into the compile-cache
    key; `load_model` installs the taps before the model is compiled and attaches the session to
    the model runner; `execute_model` tells the session which sequences come and go.
    """

    session: Session
    _attachment: RunnerAttachment
    _sites: ModelSites
    _options: EngineOptions
    _answers: AnswerWriter

    def init_device(self) -> None:
        limits.check(self.vllm_config)
        self._options = EngineOptions.from_config(self.vllm_config.additional_config)
        points = [point.value for point in self._options.points]
        digest = compile_digest(
            points, self.vllm_config.model_config.dtype, self._options.fuse_norms
        )
        self.vllm_config.additional_config = {
            **(self.vllm_config.additional_config or {}),
            _DIGEST_KEY: digest,
        }
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        model = self.model_runner.get_model()
        parallel = self.vllm_config.parallel_config
        scheduler = self.vllm_config.scheduler_config
        self._sites = resolve(model, tensor_parallel_size=parallel.tensor_parallel_size)
        wanted = set(self._options.points)
        dtype = self.vllm_config.model_config.dtype
        row_bytes = self._sites.hidden_size * dtype.itemsize
        with torch.inference_mode():
            installed = {
                key: site
                for key, site in self._sites.sites.items()
                if _serves(key, wanted, self._sites.num_layers)
            }
            taps = Taps(
                installed,
                second={k: second for k, second in self._sites.second.items() if k in installed},
                hidden_size=self._sites.hidden_size,
                dtype=dtype,
                device=self.device,
                max_tokens=max_batch_tokens(self.vllm_config),
                max_programs=_MAX_PROGRAMS,
                add_rows=2 * scheduler.max_num_seqs,
            )
            taps.install(self._norms(installed))
            self.session = Session(
                taps,
                self._resolve_tap,
                model_view.describe(self.vllm_config, model, self._sites, self.device),
                lm_head=model_view.lm_head(
                    self.vllm_config,
                    model,
                    self._sites,
                    self.device,
                    refusal=versions.guidance_refusal(
                        self.model_runner, v2=self.use_v2_model_runner
                    ),
                ),
                samples=model_view.is_last_stage(),
                max_sequences=scheduler.max_num_seqs,
                max_programs=_MAX_PROGRAMS,
                steering_rows=self._options.max_steering_configs,
                steering_vectors=self._options.max_steering_mib * 2**20 // row_bytes,
                ring_rows=max(64, self._options.capture_mib * 2**20 // row_bytes),
                max_ring_rows=self._options.max_capture_mib * 2**20 // row_bytes,
                overflow=self._options.overflow,
            )
        self._answers = AnswerWriter(self.session.result_memory)
        self._attachment = RunnerAttachment.attach(
            self.model_runner, self.session, v2=self.use_v2_model_runner
        )

    def _norms(self, installed: Mapping[TapKey, Site]) -> dict[TapKey, AddedNorm]:
        """The norms that are computed together with the tap before them."""
        if not self._options.fuse_norms or not uses_triton(self.device):
            return {}
        found = {
            key: model_view.added_norm(self.vllm_config, site.norm)
            for key, site in installed.items()
            if site.norm is not None
        }
        return {key: norm for key, norm in found.items() if norm is not None}

    def _resolve_tap(self, site: str, layer: int | None) -> TapKey:
        """The hook point as the taps know it; `ValueError` when no tap serves it."""
        point = HookPoint.parse(site)
        key = self._sites.locate(point, layer)
        installed = set(self._options.points)
        tap = self._sites.canonical(point, layer)
        if not _serves(tap, installed, self._sites.num_layers):
            has = ", ".join(p.value for p in self._sites.points if p in installed)
            raise ValueError(
                f"hook point {point} has no tap in this engine (it has {has}); start it with "
                f"hook_points=[..., {point.value!r}] or hook_points='all', or register the "
                "consumer before the engine starts"
            )
        return key

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        later = self._track(scheduler_output)
        output = super().execute_model(scheduler_output)
        if later:
            self._start_sequences(later)
        if output is not None:  # nothing is left for `sample_tokens`
            self.session.end_step()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        self.session.end_step()
        return output

    def _track(self, scheduler_output: SchedulerOutput) -> Sequence[NewRequestData]:
        """Tell the session of the sequences that end and begin, and the attachment of the step.

        Returns:
            Sequences that begin and that the session may hear of when the device is at work:
            nothing is done to any row of this step.
        """
        has_tokens = scheduler_output.total_num_scheduled_tokens > 0
        self._attachment.scheduler_output = scheduler_output if has_tokens else None
        self.session.end_step()
        if scheduler_output.finished_req_ids:
            self._finish_sequences(scheduler_output)
        begin = scheduler_output.scheduled_new_reqs
        if begin and self.session.rests and all(_spec(new).is_plain for new in begin):
            return begin
        if begin:
            self._start_sequences(begin)
        return ()

    @torch.inference_mode()
    def _finish_sequences(self, scheduler_output: SchedulerOutput) -> None:
        tokens: dict[str, tuple[int, ...]] = vars(scheduler_output).get("tllm_ended", {})
        for request_id in scheduler_output.finished_req_ids:
            self.session.finish_sequence(request_id, tokens.get(request_id))

    @torch.inference_mode()
    def _start_sequences(self, begin: Sequence[NewRequestData]) -> None:
        for new in begin:
            spec = _spec(new)
            self.session.start_sequence(
                new.req_id,
                new.prompt_token_ids,
                _prompt_len(new),
                spec,
                spec.sample_index(new.req_id),
                new.num_computed_tokens,
            )

    def shutdown(self) -> None:
        if "session" in vars(self):
            self.session.close()
        super().shutdown()

    # -- remote calls --------------------------------------------------------------------------

    @torch.inference_mode()
    def tllm(self, method: str, payload: bytes, token: str = "") -> bytes:
        """Run a method of `WorkerCalls` for the user's process; never raises.

        Args:
            token: of the user's `SharedFolder`, for large answers.
        """
        try:
            calls = WorkerCalls(self.session, self._sites, self._options)
            answer = getattr(calls, method)(*cloudpickle.loads(payload))
            return self._answers.encode(("ok", answer), token)
        except Exception as error:
            if not isinstance(error, ValueError):
                logger.exception("tLLM call %r failed", method)
            return self._answers.encode(("error", isinstance(error, ValueError), str(error)), "")


class WorkerCalls:
    """What the user's process may ask of a worker."""

    def __init__(self, session: Session, sites: ModelSites, options: EngineOptions) -> None:
        self._session = session
        self._sites = sites
        self._options = options

    def register(self, consumer: Any) -> None:
        """Add a consumer (a copy made for this worker)."""
        self._session.register(consumer)

    def unregister(self, consumer_id: str | None) -> None:
        """Remove a consumer, or all."""
        self._session.unregister(consumer_id)

    def take_results(self, prompt_ids: list[str], tokens: Any = None, wait_s: float = 0.0) -> Any:
        """Results of finished prompts; those not made within `wait_s` seconds are pending."""
        return self._session.take_results(prompt_ids, tokens or {}, wait_s)

    def not_steered(self, prompt_ids: list[str]) -> list[str]:
        """Which prompts were to be steered and could not be; each is told once."""
        return self._session.not_steered(prompt_ids)

    def synchronize(self) -> None:
        """Wait for all consumers."""
        self._session.synchronize()

    def call_consumer(self, consumer_id: str, method: str, *args: Any) -> Any:
        """Call a remote method of a consumer."""
        return self._session.call_consumer(consumer_id, method, *args)

    def consumer_stats(self, consumer_id: str) -> dict[str, Any]:
        """Statistics of one consumer."""
        return self._session.consumer_stats(consumer_id)

    def update_steering(
        self,
        vectors: Any,
        groups: Any,
        forgotten_groups: list[str],
        forgotten_vectors: list[str],
    ) -> None:
        """Forget steering groups and vectors, then keep new ones, by digest."""
        self._session.steering.drop(forgotten_groups, forgotten_vectors)
        self._session.steering.put(vectors, groups)

    def steering_facts(self) -> dict[str, Any]:
        """What may be steered in this engine (`tllm.steering_state.Facts`)."""
        dtype = self._session.dtype
        return {
            "num_layers": self._sites.num_layers,
            "hidden_size": self._sites.hidden_size,
            "points": [p.value for p in self._sites.points if p in self._options.points],
            "missing": {p.value: why for p, why in self._sites.missing.items()},
            "row_bytes": self._sites.hidden_size * dtype.itemsize,
            "max_value": torch.finfo(dtype).max,
            "max_configs": self._options.max_steering_configs,
            "max_mib": self._options.max_steering_mib,
        }

    def stats(self) -> dict[str, Any]:
        """Counters of the worker, and what its model has."""
        return {
            **self._session.stats(),
            "family": self._sites.family,
            "num_layers": self._sites.num_layers,
            "hidden_size": self._sites.hidden_size,
            "points": [point.value for point in self._sites.points],
            "missing": {p.value: why for p, why in self._sites.missing.items()},
        }


def _serves(key: TapKey, wanted: set[HookPoint], num_layers: int) -> bool:
    """Whether a tap is needed for any of the wanted points."""
    point, layer = key
    if point is HookPoint.POST_BLOCK and HookPoint.PRE_ATTN in wanted:
        return layer != num_layers - 1 or point in wanted
    return point in wanted


def max_batch_tokens(vllm_config: Any) -> int:
    """The most rows a forward pass has, padding included."""
    scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
    captured = max(compilation.cudagraph_capture_sizes or [0])
    tokens = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, captured)
    return -(-tokens // 256) * 256 + 256


def _spec(new: NewRequestData) -> RequestSpec:
    params = new.sampling_params
    return RequestSpec.from_extra_args(params.extra_args if params else None)


def _prompt_len(new: NewRequestData) -> int:
    if new.prompt_token_ids is not None:
        return len(new.prompt_token_ids)
    assert new.prompt_embeds is not None
    return int(new.prompt_embeds.shape[0])

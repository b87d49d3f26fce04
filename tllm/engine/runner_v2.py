"""Attachment to vLLM's V2 model runner (`v1/worker/gpu/model_runner.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from tllm.cuda_runtime import current_stream
from tllm.engine.device_drafts import DeviceDrafts
from tllm.engine.runner import RunnerAttachment
from tllm.engine.seams import overrides, uses
from tllm.runtime.kernels.candidates import CandidateRows
from tllm.runtime.sampling import SamplerStep
from tllm.runtime.transfer import upload
from tllm.spec.turns import StepTurns

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_CHOSEN = "tokens that the user chose, in the place of drawn ones"
_LEFT = "candidates that are left to draw from"
_PENALTIES = "penalties of candidates"
_COMPARED = "consumers see the logits that drafts are compared with"
_ALL_APPLIED = "whether temperature and min-p are all that a sampler applies"
uses(
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
    "model_state sampler get_model batch_sharder",
    "what a step computes, and its sampler",
)
uses("vllm.v1.worker.gpu.model_runner.GPUModelRunner", "req_states device", _CHOSEN)
uses("vllm.v1.worker.gpu.states.RequestState", "req_id_to_index last_sampled_tokens", _CHOSEN)
uses("vllm.v1.worker.gpu.model_runner.GPUModelRunner", "rejection_sampler", _COMPARED)
uses(
    "vllm.v1.worker.gpu.sample.output.SamplerOutput",
    "sampled_token_ids num_sampled num_rejected",
    "the tokens that were drawn, and those whose rows have to be computed again",
)
uses(
    "vllm.v1.worker.gpu.input_batch.InputBatch",
    "num_reqs req_ids num_computed_tokens_np num_scheduled_tokens prefill_len_np input_ids",
    "which tokens of which sequences a step computes",
)
uses("vllm.v1.worker.gpu.sample.sampler.Sampler", "sampling_states penalties_state", _LEFT)
uses("vllm.v1.worker.gpu.sample.states.SamplingStates", "temperature min_p", _LEFT)
uses("vllm.v1.worker.gpu.sample.penalties.PenaltiesState", "use_penalty", _PENALTIES)
uses("vllm.v1.worker.gpu.sample.logit_bias.LogitBiasState", "use_logit_bias", "bias of candidates")


uses(
    "vllm.v1.worker.gpu.sample.sampler.Sampler",
    "logits_processors thinking_budget_state",
    _ALL_APPLIED,
    since="0.31",
)
uses("vllm.v1.worker.gpu.sample.bad_words.BadWordsState", "num_bad_words", _ALL_APPLIED)
uses(
    "vllm.v1.worker.gpu.sample.logits_processor.interface",
    "LogitsContext",
    _PENALTIES,
    since="0.31",
)
uses("vllm.v1.worker.gpu.sample.sampler.Sampler", "logit_bias_state", _PENALTIES, until="0.31")

try:  # since 0.31 the sampler's stages are processors, and take one context object
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
except ImportError:
    LogitsContext = None


class V2Attachment(RunnerAttachment):
    """`model_state.prepare_inputs` before the forward pass, `sample` around sampling."""

    _collected: CandidateRows | None = None
    _temperature: torch.Tensor | None = None  # of each row, where the filter has gathered them
    _known_sampling: _AskedSamplingV2 | None = None

    @staticmethod
    def guidance_refusal(runner: Any) -> str | None:
        if runner.sampler is None:
            return None
        if runner.batch_sharder is not None:
            return "this engine samples each sequence on one tensor-parallel rank only"
        if type(runner.sampler).__name__ != "Sampler":
            return (
                f"this engine samples with {type(runner.sampler).__name__}, and how that draws is "
                "not known; leave out watermark_config, if it was given"
            )
        return None

    def override(self) -> None:
        runner, sampler = self.runner, self.runner.sampler
        self._drafts: DeviceDrafts | None = None
        if runner.speculative_config is not None:
            self._drafts = DeviceDrafts(runner, self.session.steps)
            self.session.steps.count_all_drafts = self._drafts.settle
        self._prepare_inputs = runner.model_state.prepare_inputs
        runner.model_state.prepare_inputs = self._on_prepare_inputs
        self._sample = self._override_when_observed(runner, "sample", self._on_sample)
        if sampler is not None:
            self._sampler_sample = self._override_when_observed(
                sampler, "sample", self._on_sampler_sample
            )
            self._sample_random = self._override_when_observed(
                sampler, "_sample_random", self._on_sample_random
            )
            self._apply_sampling_params = self._override_when_observed(
                sampler, "apply_sampling_params", self._on_apply_sampling_params
            )
        if self._drafts is not None and runner.rejection_sampler is not None:
            self._compare_drafts = self._override_when_observed(
                runner, "rejection_sampler", self._on_compare_drafts
            )

    def track(self, scheduler_output: SchedulerOutput) -> None:
        if self._drafts is not None:
            self._drafts.track(scheduler_output)

    def draw_anew(self, request_ids: Sequence[str]) -> None:
        if self._drafts is not None:
            self._drafts.draw_anew(request_ids)

    def may_finish(self, request_ids: Iterable[str]) -> bool:
        return self._drafts is None or self._drafts.may_finish(request_ids)

    def feed(self, turns: StepTurns) -> None:
        # vLLM takes a decoded token from here, on the device; all other tokens were computed.
        states = self.runner.req_states
        rows = map(states.req_id_to_index.__getitem__, turns.engine_ids)
        places = np.fromiter(rows, np.int64, len(turns.engine_ids))
        at, tokens = upload(np.stack((places, np.array(turns.tokens))), self.runner.device)
        states.last_sampled_tokens[at, 0] = tokens

    def end_step(self, output: Any) -> None:
        if self._drafts is None or (decide := self._drafts.end(output)) is None:
            return
        steps = self.session.steps
        steps.accept_later(decide)
        if steps.hands_out_before_tokens:
            steps.end()
            if self.runner.device.type == "cuda":  # what this event has passed is told
                output.copy_event.record(current_stream(self.runner.device))

    @overrides(
        "vllm.v1.worker.gpu.model_states.interface.ModelState.prepare_inputs",
        "the row plan of a step is made before its forward pass",
    )
    def _on_prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
        scheduled = self.scheduler_output
        if scheduled is None:  # a dummy batch, with request ids of its own
            self.session.steps.skip()
        else:
            self.scheduler_output = None
            self._begin(input_batch)
            self._switch_overrides()
        return self._prepare_inputs(input_batch, req_states)

    def _begin(self, input_batch: Any) -> None:
        if self._drafts is not None and self._drafts.begin_undecided(input_batch):
            return
        if self.session.steps.begin_idle():
            if self._drafts is not None:
                self._drafts.begin_idle(input_batch)
            return
        count = input_batch.num_reqs
        counts = input_batch.num_scheduled_tokens[:count].astype(np.int32, copy=False)
        if self._drafts is None:
            starts = input_batch.num_computed_tokens_np[:count].astype(np.int32, copy=False)
            drafts = None
        else:
            starts, drafts = self._drafts.begin(input_batch, counts)
        self.session.steps.begin(
            input_batch.req_ids[:count],
            starts,
            counts,
            input_batch.prefill_len_np[:count],
            input_batch.input_ids,
            drafts,
            arrived=self.arrived,
        )
        if not self.session.steps.goes_on:
            self._known_sampling = None

    def _asked_sampling(self, logits: torch.Tensor, idx_mapping_np: np.ndarray) -> _AskedSamplingV2:
        if self._known_sampling is None:
            self._known_sampling = _AskedSamplingV2(
                self.runner.sampler, idx_mapping_np, logits.shape[1]
            )
        return self._known_sampling

    @overrides(
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.sample",
        "consumers see the tokens that were drawn",
    )
    def _on_sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        output = self._sample(hidden_states, input_batch, grammar_output)
        if input_batch.num_draft_tokens and self.session.steps.drafts_remember:
            _, drawn, rejected = output
            before = drawn.clone()
            self.session.steps.drafted.settle(drawn)
            rejected += before - drawn
        sampled = output[0].sampled_token_ids
        if not input_batch.num_draft_tokens:
            sampled = sampled.view(-1)
        self.session.steps.after_sampling(sampled, input_batch.input_ids)
        return output

    @overrides(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler.__call__", _COMPARED
    )
    def _on_compare_drafts(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.session.steps.before_sampling(logits)
        return self._compare_drafts(logits, *args, **kwargs)

    @overrides(
        "vllm.v1.worker.gpu.sample.sampler.Sampler.sample",
        "sampler consumers take part in sampling",
        takes="expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos",
    )
    def _on_sampler_sample(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.session.steps.before_sampling(logits)
        self._raw_logits = logits
        self._sample_args = args
        try:
            return self._sampler_sample(logits, *args, **kwargs)
        finally:
            del self._raw_logits, self._sample_args
            self._collected = self._temperature = None

    @overrides(
        "vllm.v1.worker.gpu.sample.sampler.Sampler.apply_sampling_params",
        "candidates are collected together with temperature and min-p",
    )
    def _on_apply_sampling_params(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """With nothing but temperature and min-p to apply, do it together with the collection of
        candidates: two passes over the logits instead of six."""
        sampler, width = self.runner.sampler, self.session.steps.guidance_width
        if not width or not self._asked_sampling(logits, idx_mapping_np).only_temperature_and_min_p:
            return self._apply_sampling_params(
                logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, *args, **kwargs
            )
        states = sampler.sampling_states
        processed, self._temperature, self._collected = self.session.steps.guidance.filter(
            logits, expanded_idx_mapping, states.temperature.gpu, states.min_p.gpu, width
        )
        return processed

    @overrides(
        "vllm.v1.worker.gpu.sample.sampler.Sampler._sample_random",
        "candidates that are left to draw from are guided",
    )
    def _on_sample_random(
        self,
        processed_logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        *rest: Any,
    ) -> Any:
        if self.session.steps.guidance_width:
            if processed_logits.data_ptr() == self._raw_logits.data_ptr():
                processed_logits = processed_logits.to(torch.float32, copy=True)
            if top_k is not None or top_p is not None:
                processed_logits = apply_top_k_top_p(processed_logits, top_k, top_p)
                self._collected = None
            top_k = top_p = None
            # The last argument chooses the fused sampler, which would filter again.
            rest = (*rest[:-1], False)
            asked = self._asked_sampling(processed_logits, idx_mapping_np)
            step = _V2Step(
                asked, processed_logits, self._sample_args, self._collected, self._temperature
            )
            self.session.steps.guide(step, asked.greedy)
        return self._sample_random(
            processed_logits, expanded_idx_mapping, idx_mapping_np, pos, top_k, top_p, *rest
        )


def _logit_bias_state(sampler: Any) -> Any:
    return sampler.logit_bias_state if LogitsContext is None else sampler.logits_processors[0]


_BUILT_IN = 3
"""Logits processors of the sampler that are vLLM's own: bias, penalties, bad words."""


def _processors_of_user(sampler: Any) -> Sequence[Any]:
    """The logits processors that are not vLLM's own, which come after those."""
    return () if LogitsContext is None else sampler.logits_processors[_BUILT_IN:]


class _AskedSamplingV2:
    """What the requests of a batch ask of the sampler: the same while the batch goes on, since a
    request keeps its parameters and its row of the sampler's tables.

    Args:
        rows: of the tables, `[sequences]`.
    """

    def __init__(self, sampler: Any, rows: np.ndarray, vocab: int) -> None:
        self.sampler = sampler
        self._vocab = vocab
        self._rows = rows.copy()

    @cached_property
    def only_temperature_and_min_p(self) -> bool:
        """Whether the sampler has nothing else to apply before top-k and top-p.

        Never said of a sampler whose stages are not the known ones.
        """
        sampler, at = self.sampler, self._rows
        if LogitsContext is None or len(sampler.logits_processors) != _BUILT_IN:
            return False
        bias, penalties, bad_words = sampler.logits_processors
        return not (
            sampler.thinking_budget_state.enabled
            or bias.use_logit_bias[at].any()
            or penalties.use_penalty[at].any()
            or bad_words.num_bad_words.np[at].any()
        )

    @cached_property
    def greedy(self) -> np.ndarray:
        """`[sequences]`, whether the likeliest token is drawn."""
        return np.asarray(self.sampler.sampling_states.temperature.np[self._rows] == 0.0)

    @cached_property
    def penalizes(self) -> bool:
        """Whether penalties or biases are applied to any row, or whatever processors of the user's
        apply."""
        if _processors_of_user(self.sampler):
            return True
        bias = _logit_bias_state(self.sampler)
        active = self.sampler.penalties_state.use_penalty | bias.use_logit_bias
        return bool(active[self._rows].any())

    @cached_property
    def unfiltered(self) -> np.ndarray:
        """`[sequences]`, as `SamplerStep.unfiltered`."""
        states, at = self.sampler.sampling_states, self._rows
        off = (states.top_k.np[at] >= self._vocab) & (states.top_p.np[at] == 1.0)
        return np.asarray(off & (states.min_p.np[at] == 0.0))


class _V2Step(SamplerStep):
    def __init__(
        self,
        asked: _AskedSamplingV2,
        logits: torch.Tensor,
        args: tuple[Any, ...],
        collected: CandidateRows | None,
        temperature: torch.Tensor | None,
    ) -> None:
        self.logits = logits
        self.collected = collected
        self.penalizes = asked.penalizes
        self.unfiltered = asked.unfiltered
        self._sampler = sampler = asked.sampler
        # The order of `Sampler.sample`'s arguments after the logits.
        self._expanded_idx_mapping, self._idx_mapping, self._idx_mapping_np = args[:3]
        self._pos, self._input_ids, self._local_pos = args[3:6]
        self._more = args[6:]
        if temperature is None:
            temperature = sampler.sampling_states.temperature.gpu[self._expanded_idx_mapping]
        self.temperature = temperature

    def penalize(self, full: torch.Tensor) -> torch.Tensor:
        """Bias, then penalties, then processors of the user's, as the sampler applies them."""
        penalties = self._sampler.penalties_state
        bias = _logit_bias_state(self._sampler)
        if LogitsContext is not None:
            context = LogitsContext(
                expanded_idx_mapping=self._expanded_idx_mapping,
                idx_mapping=self._idx_mapping,
                idx_mapping_np=self._idx_mapping_np,
                expanded_local_pos=self._local_pos,
                input_ids=self._input_ids,
                pos=self._pos,
                seq_lens_upper_bound_np=self._more[0],
            )
            for processor in (bias, penalties, *_processors_of_user(self._sampler)):
                full = processor.apply(full, context)
            return full
        bias.apply_logit_bias(full, self._expanded_idx_mapping, self._idx_mapping_np, self._pos)
        penalties.apply_penalties(
            full,
            self._expanded_idx_mapping,
            self._idx_mapping_np,
            self._input_ids,
            self._local_pos,
        )
        return full

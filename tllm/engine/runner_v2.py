"""Attachment to vLLM's V2 model runner (`v1/worker/gpu/model_runner.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from tllm.engine import versions
from tllm.engine.runner import RunnerAttachment, penalized
from tllm.runtime.kernels.candidates import Collected
from tllm.runtime.sampling import SamplerStep


class V2Attachment(RunnerAttachment):
    """`model_state.prepare_inputs` before the forward pass, `sample` around sampling."""

    _collected: Collected | None = None

    def override(self) -> None:
        runner, sampler = self.runner, self.runner.sampler
        self._prepare_inputs = runner.model_state.prepare_inputs
        runner.model_state.prepare_inputs = self._on_prepare_inputs
        self._sample = self.during_sampling(runner, "sample", self._on_sample)
        if sampler is not None:
            self._sampler_sample = self.during_sampling(sampler, "sample", self._on_sampler_sample)
            self._sample_random = self.during_sampling(
                sampler, "_sample_random", self._on_sample_random
            )
            self._apply_sampling_params = self.during_sampling(
                sampler, "apply_sampling_params", self._on_apply_sampling_params
            )

    def _on_prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
        scheduled = self.scheduler_output
        if scheduled is None:  # a dummy batch, with request ids of its own
            self.session.skip_step()
        else:
            self.scheduler_output = None
            if not self.session.rest_step():
                count = input_batch.num_reqs
                self.session.begin_step(
                    input_batch.req_ids[:count],
                    input_batch.num_computed_tokens_np[:count].astype(np.int32, copy=False),
                    input_batch.num_scheduled_tokens[:count].astype(np.int32, copy=False),
                    input_batch.prefill_len_np[:count],
                    input_batch.input_ids,
                )
            self.stand_in()
        return self._prepare_inputs(input_batch, req_states)

    def _on_sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        output = self._sample(hidden_states, input_batch, grammar_output)
        self.session.after_sampling(output[0].sampled_token_ids.view(-1), input_batch.input_ids)
        return output

    def _on_sampler_sample(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.session.before_sampling(logits)
        self._raw_logits = logits
        self._sample_args = args
        try:
            return self._sampler_sample(logits, *args, **kwargs)
        finally:
            del self._raw_logits, self._sample_args
            self._collected = None

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
        sampler, width = self.runner.sampler, self.session.guidance_width
        if not width or not versions.only_temperature_and_min_p(sampler, idx_mapping_np):
            return self._apply_sampling_params(
                logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, *args, **kwargs
            )
        states = sampler.sampling_states
        processed, self._collected = self.session.filter(
            logits,
            states.temperature.gpu[expanded_idx_mapping],
            states.min_p.gpu[expanded_idx_mapping],
            width,
        )
        return processed

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
        if self.session.guidance_width:
            if processed_logits.data_ptr() == self._raw_logits.data_ptr():
                processed_logits = processed_logits.to(torch.float32, copy=True)
            if top_k is not None or top_p is not None:
                processed_logits = apply_top_k_top_p(processed_logits, top_k, top_p)
                self._collected = None
            top_k = top_p = None
            # The last argument chooses the fused sampler, which would filter again.
            rest = (*rest[:-1], False)
            step = _V2Step(self.runner.sampler, processed_logits, self._sample_args)
            step.collected = self._collected
            greedy = self.runner.sampler.sampling_states.temperature.np[idx_mapping_np] == 0.0
            self.session.guide(step, greedy)
        return self._sample_random(
            processed_logits, expanded_idx_mapping, idx_mapping_np, pos, top_k, top_p, *rest
        )


class _V2Step(SamplerStep):
    def __init__(self, sampler: Any, logits: torch.Tensor, args: tuple[Any, ...]) -> None:
        self.logits = logits
        self._sampler = sampler
        # The order of `Sampler.sample`'s arguments after the logits.
        self._expanded_idx_mapping, self._idx_mapping, self._idx_mapping_np = args[:3]
        self._pos, self._input_ids, self._local_pos = args[3:6]
        self._more = args[6:]
        self.temperature = sampler.sampling_states.temperature.gpu[self._expanded_idx_mapping]

    @property
    def penalizes(self) -> bool:
        penalties = self._sampler.penalties_state
        bias = versions.logit_bias_state(self._sampler)
        active = penalties.use_penalty | bias.use_logit_bias
        return bool(active[self._idx_mapping_np].any())

    def penalize(self, raw: torch.Tensor, found: Collected) -> torch.Tensor:
        return penalized(raw, found, self.logits.shape, self._apply)

    def _apply(self, full: torch.Tensor) -> torch.Tensor:
        """Bias, then penalties, as the sampler applies them."""
        penalties = self._sampler.penalties_state
        bias = versions.logit_bias_state(self._sampler)
        if versions.HAS_LOGITS_CONTEXT:
            context = versions.logits_context(
                expanded_idx_mapping=self._expanded_idx_mapping,
                idx_mapping=self._idx_mapping,
                idx_mapping_np=self._idx_mapping_np,
                expanded_local_pos=self._local_pos,
                input_ids=self._input_ids,
                pos=self._pos,
                seq_lens_upper_bound_np=self._more[0],
            )
            return penalties.apply(bias.apply(full, context), context)
        bias.apply_logit_bias(full, self._expanded_idx_mapping, self._idx_mapping_np, self._pos)
        penalties.apply_penalties(
            full,
            self._expanded_idx_mapping,
            self._idx_mapping_np,
            self._input_ids,
            self._local_pos,
        )
        return full

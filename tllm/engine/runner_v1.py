"""Attachment to vLLM's V1 model runner (`v1/worker/gpu_model_runner.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from tllm.engine.runner import RunnerAttachment, penalized
from tllm.runtime.kernels.candidates import Collected
from tllm.runtime.sampling import SamplerStep
from tllm.spec.selection import END

_GREEDY = 1e-5


class V1Attachment(RunnerAttachment):
    """`_model_forward` before the forward pass, `_sample` around sampling, `_dummy_run` aside."""

    def override(self) -> None:
        runner = self.runner
        self._model_forward = runner._model_forward
        self._dummy_run = runner._dummy_run
        runner._model_forward = self._on_model_forward
        runner._dummy_run = self._on_dummy_run
        self._sample = self.during_sampling(runner, "_sample", self._on_sample)
        if runner.sampler is not None:
            self._filter_and_draw = self.during_sampling(
                runner.sampler.topk_topp_sampler, "forward", self._on_filter_and_draw
            )

    def _on_model_forward(self, *args: Any, **kwargs: Any) -> Any:
        runner, scheduled = self.runner, self.scheduler_output
        if scheduled is None:
            self.session.skip_step()
            return self._model_forward(*args, **kwargs)
        self.scheduler_output = None
        if not self.session.rest_step():
            batch = runner.input_batch
            count = batch.num_reqs
            ids = batch.req_ids[:count]
            tokens = scheduled.num_scheduled_tokens
            self.session.begin_step(
                ids,
                batch.num_computed_tokens_cpu[:count].astype(np.int32),
                np.fromiter(map(tokens.__getitem__, ids), np.int32, count),
                np.where(runner.discard_request_mask.np[:count], END, 0),
                runner.input_ids.gpu,
            )
        self.stand_in()
        return self._model_forward(*args, **kwargs)

    def _on_dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        self.session.skip_step()
        return self._dummy_run(*args, **kwargs)

    def _on_sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        self.session.before_sampling(logits)
        output = self._sample(logits, spec_decode_metadata)
        self.session.after_sampling(output.sampled_token_ids.view(-1), self.runner.input_ids.gpu)
        return output

    def _on_filter_and_draw(
        self, logits: torch.Tensor, generators: Any, k: Any, p: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.session.guidance_width:
            logits = apply_top_k_top_p(logits, k, p)
            k = p = None
            batch = self.runner.input_batch
            greedy = batch.temperature_cpu[: batch.num_reqs] < _GREEDY
            self.session.guide(_V1Step(self.runner, logits, greedy), greedy)
        return self._filter_and_draw(logits, generators, k, p, *args, **kwargs)


class _V1Step(SamplerStep):
    def __init__(self, runner: Any, logits: torch.Tensor, greedy: np.ndarray) -> None:
        self.logits = logits
        self._runner = runner
        self._metadata = runner.input_batch.sampling_metadata
        temperature = self._metadata.temperature
        if greedy.any():
            temperature = torch.where(temperature < _GREEDY, 1.0, temperature)
        self.temperature = temperature

    @property
    def penalizes(self) -> bool:
        runner = self._runner
        return not self._metadata.no_penalties or any(
            runner.requests[i].sampling_params.logit_bias for i in runner.input_batch.req_ids
        )

    def penalize(self, raw: torch.Tensor, found: Collected) -> torch.Tensor:
        sampler = self._runner.sampler
        return penalized(
            raw,
            found,
            self.logits.shape,
            lambda full: sampler.apply_logits_processors(full, self._metadata, False),
        )

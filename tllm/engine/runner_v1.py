"""Attachment to vLLM's V1 model runner (`v1/worker/gpu_model_runner.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

from tllm.cuda_runtime import current_stream
from tllm.engine.cpu_drafts import DraftConstraints
from tllm.engine.drafts import StepDrafts, drafted_and_accepted
from tllm.engine.runner import RunnerAttachment
from tllm.engine.seams import overrides, uses
from tllm.runtime.sampling import SamplerStep
from tllm.spec.selection import END
from tllm.spec.turns import StepTurns

_GREEDY = 1e-5

_PENALTIES = "penalties of candidates"
_LEFT = "candidates that are left to draw from"
uses(
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "input_batch requests discard_request_mask input_ids sampler device get_model max_model_len "
    "speculative_config",
    "which tokens of which sequences a step computes, and its sampler",
)
uses(
    "vllm.v1.worker.gpu_input_batch.InputBatch",
    "num_reqs req_ids num_computed_tokens_cpu temperature_cpu sampling_metadata generators",
    "which tokens of which sequences a step computes, and how they are drawn",
)
uses("vllm.v1.worker.gpu_input_batch.CachedRequestState", "sampling_params", "logit bias")
uses(
    "vllm.v1.worker.gpu_input_batch.CachedRequestState",
    "prompt_token_ids output_token_ids num_prompt_tokens",
    "tokens that the user chose, in the place of drawn ones",
)
uses(
    "vllm.v1.worker.gpu_input_batch.InputBatch",
    "req_id_to_index token_ids_cpu num_prompt_tokens num_tokens_no_spec",
    "tokens that the user chose, in the place of drawn ones",
)
uses("vllm.v1.sample.metadata.SamplingMetadata", "no_penalties logitsprocs", _PENALTIES)
uses("vllm.v1.sample.logits_processor", "BUILTIN_LOGITS_PROCESSORS", _PENALTIES)
uses("vllm.v1.sample.logits_processor.state.LogitsProcessors", "non_argmax_invariant", _PENALTIES)
uses("vllm.v1.sample.sampler.Sampler", "topk_topp_sampler", _LEFT)
uses(
    "vllm.v1.sample.sampler.Sampler",
    "apply_logits_processors",
    _PENALTIES,
    takes="logits sampling_metadata predict_bonus_token",
)
uses(
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler",
    "forward",
    "candidates that are left to draw from; an attribute of the instance",
)
uses(
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler",
    "forward_native forward_cpu",
    "what `forward` may be",
    takes="logits generators k p",
)
uses("vllm.v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p", _LEFT, takes="logits k p")
uses("vllm.v1.outputs.SamplerOutput", "sampled_token_ids", "the tokens that were drawn")
uses(
    "vllm.v1.sample.rejection_sampler",
    "PLACEHOLDER_TOKEN_ID",
    "tokens that are not drawn, whose rows have to be computed again",
)


class V1Attachment(RunnerAttachment):
    """`_model_forward` before the forward pass, `_sample` around sampling, `_dummy_run` aside."""

    def override(self) -> None:
        runner = self.runner
        self._drafted: Mapping[str, Sequence[int]] = {}
        self._drafts: StepDrafts | None = None
        self._hidden_generators: dict[int, torch.Generator] = {}
        self._asked = _AskedSamplingV1(runner, None)
        self._model_forward = runner._model_forward
        self._dummy_run = runner._dummy_run
        runner._model_forward = self._on_model_forward
        runner._dummy_run = self._on_dummy_run
        self._sample = self._override_when_observed(runner, "_sample", self._on_sample)
        if runner.speculative_config is not None and runner.device.type == "cpu":
            DraftConstraints.install()
        if runner.sampler is not None:
            self._filter_and_draw = self._override_when_observed(
                runner.sampler.topk_topp_sampler, "forward", self._on_filter_and_draw
            )

    def feed(self, turns: StepTurns) -> None:
        batch, requests = self.runner.input_batch, self.runner.requests
        lengths = turns.prompt_lens
        for engine_id, token, length in zip(turns.engine_ids, turns.tokens, lengths, strict=True):
            state = requests[engine_id]
            # In one process the scheduler's list may be this one.
            if len(state.prompt_token_ids) < length:
                state.prompt_token_ids.append(token)
            state.output_token_ids.clear()
            state.num_prompt_tokens = length
        found = [batch.req_id_to_index.get(engine_id) for engine_id in turns.engine_ids]
        kept = [place for place, row in enumerate(found) if row is not None]
        rows = [row for row in found if row is not None]
        length_of = np.array(lengths)[kept]
        batch.token_ids_cpu[rows, length_of - 1] = np.array(turns.tokens)[kept]
        batch.num_prompt_tokens[rows] = batch.num_tokens_no_spec[rows] = length_of

    @overrides(
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner._model_forward",
        "the row plan of a step is made before its forward pass",
    )
    def _on_model_forward(self, *args: Any, **kwargs: Any) -> Any:
        runner, scheduled = self.runner, self.scheduler_output
        if scheduled is None:
            self.session.steps.skip()
            return self._model_forward(*args, **kwargs)
        self.scheduler_output = None
        self._drafted, self._drafts = scheduled.scheduled_spec_decode_tokens, None
        if not self.session.steps.begin_idle():
            batch = runner.input_batch
            count = batch.num_reqs
            ids = batch.req_ids[:count]
            tokens = scheduled.num_scheduled_tokens
            counts = np.fromiter(map(tokens.__getitem__, ids), np.int32, count)
            drafts = StepDrafts(self._drafted, ids, counts) if self._drafted else None
            self._drafts = drafts
            self.session.steps.begin(
                ids,
                batch.num_computed_tokens_cpu[:count].astype(np.int32),
                counts,
                np.where(runner.discard_request_mask.np[:count], END, 0),
                runner.input_ids.gpu,
                None if drafts is None else drafts.counts,
                self.arrived,
            )
        self._switch_overrides()
        self._hide_generators()
        return self._model_forward(*args, **kwargs)

    def _hide_generators(self) -> None:
        """Draw for prompts that are not complete without their own generators, until `end_step`.

        vLLM throws away what it draws for them and turns their generators back, which raises for a
        CPU's: one seeded request whose prompt is computed in chunks would end the engine.
        """
        generators = self.runner.input_batch.generators
        if generators and self.runner.device.type == "cpu":
            incomplete = self.runner.discard_request_mask.np
            hidden = [index for index in generators if incomplete[index]]
            self._hidden_generators = {index: generators.pop(index) for index in hidden}

    def end_step(self, output: Any) -> None:
        if self._drafted:
            self.session.steps.count_drafts(*drafted_and_accepted(self._drafted, output))
            self._drafted = {}
        if self._drafts is not None:
            runner = self.runner
            kept = self._drafts.kept(output, runner.requests, runner.max_model_len)
            self._drafts = None
            steps = self.session.steps
            steps.accept(kept)
            if steps.hands_out_before_tokens:
                steps.end()
                if runner.device.type == "cuda":  # the tokens are on the host already
                    current_stream(runner.device).synchronize()
        if self._hidden_generators:
            self.runner.input_batch.generators.update(self._hidden_generators)
            self._hidden_generators = {}

    @overrides(
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner._dummy_run",
        "a forward pass that belongs to no request does nothing",
    )
    def _on_dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        self.session.steps.skip()
        return self._dummy_run(*args, **kwargs)

    @overrides(
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample",
        "sampler consumers take part in sampling",
    )
    def _on_sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        self.session.steps.before_sampling(logits)
        output = self._sample(logits, spec_decode_metadata)
        sampled = output.sampled_token_ids
        if spec_decode_metadata is None:
            sampled = sampled.view(-1)
        elif self.session.steps.drafts_remember:
            self._settle_drafts(sampled)
        self.session.steps.after_sampling(sampled, self.runner.input_ids.gpu)
        return output

    def _settle_drafts(self, sampled: torch.Tensor) -> None:
        """Leave out tokens whose rows have to be computed again.

        Args:
            sampled: `[sequences, tokens]`, changed.
        """
        drawn = (sampled != PLACEHOLDER_TOKEN_ID).sum(1, dtype=torch.int32)
        self.session.steps.drafted.settle(drawn)
        places = torch.arange(sampled.shape[1], device=sampled.device)
        sampled.masked_fill_(places >= drawn[:, None], PLACEHOLDER_TOKEN_ID)

    def _on_filter_and_draw(
        self, logits: torch.Tensor, generators: Any, k: Any, p: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.session.steps.guidance_width:
            logits = apply_top_k_top_p(logits, k, p)
            k = p = None
            batch = self.runner.input_batch
            if self._asked.metadata is not batch.sampling_metadata:
                self._asked = _AskedSamplingV1(self.runner, batch.sampling_metadata)
            self.session.steps.guide(_V1Step(self._asked, logits), self._asked.greedy)
        return self._filter_and_draw(logits, generators, k, p, *args, **kwargs)


class _AskedSamplingV1:
    """What the requests of a batch ask of the sampler: the same until vLLM makes the batch's
    metadata anew, which it does when a request comes or goes."""

    def __init__(self, runner: Any, metadata: Any) -> None:
        self.runner = runner
        self.metadata = metadata

    @cached_property
    def greedy(self) -> np.ndarray:
        """`[sequences]`, whether the likeliest token is drawn."""
        batch = self.runner.input_batch
        return np.asarray(batch.temperature_cpu[: batch.num_reqs] < _GREEDY)

    @cached_property
    def temperature(self) -> torch.Tensor:
        """`[sequences]` on the device, as `SamplerStep.temperature`."""
        temperature: torch.Tensor = self.metadata.temperature
        if self.greedy.any():
            return torch.where(temperature < _GREEDY, 1.0, temperature)
        return temperature

    @cached_property
    def penalizes(self) -> bool:
        """Whether penalties or biases are applied to any row, or whatever processors of the user's
        apply."""
        processors = self.metadata.logitsprocs.non_argmax_invariant
        return (
            not self.metadata.no_penalties
            or any(params.logit_bias for params in self._parameters())
            or any(type(each) not in BUILTIN_LOGITS_PROCESSORS for each in processors)
        )

    @cached_property
    def unfiltered(self) -> np.ndarray:
        """`[sequences]`, as `SamplerStep.unfiltered`."""
        asked = self._parameters()
        return np.array([p.top_k <= 0 and p.top_p == 1.0 and p.min_p == 0.0 for p in asked])

    def _parameters(self) -> list[Any]:
        requests = self.runner.requests
        return [requests[i].sampling_params for i in self.runner.input_batch.req_ids]


class _V1Step(SamplerStep):
    def __init__(self, asked: _AskedSamplingV1, logits: torch.Tensor) -> None:
        self.logits = logits
        self._asked = asked
        self.temperature = asked.temperature
        self.penalizes = asked.penalizes
        self.unfiltered = asked.unfiltered

    def penalize(self, full: torch.Tensor) -> torch.Tensor:
        asked = self._asked
        return asked.runner.sampler.apply_logits_processors(full, asked.metadata, False)

"""What does not work together with interventions is refused, and the user hears why."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_engines import TINY_ENGINE
from torch import nn
from vllm import envs
from vllm.config import DiffusionConfig, ECTransferConfig, ParallelConfig

from tllm import LLM, AsyncLLM
from tllm.client import llm
from tllm.engine import limits
from tllm.engine.drafts import check_drafter
from tllm.engine.runner_v2 import V2Attachment
from tllm.engine.worker_cpu import InterventionCPUWorker
from tllm.models.sites import ModelSites, Site
from tllm.runtime.taps import Taps
from tllm.spec.hooks import HookPoint, ModelPoints


def _config(**parallel: Any) -> Any:
    """A `VllmConfig`, as far as limits look at it."""
    return SimpleNamespace(
        speculative_config=None,
        scheduler_config=SimpleNamespace(async_scheduling=False),
        observability_config=SimpleNamespace(jit_monitor_mode="warn"),
        kv_transfer_config=None,
        ec_transfer_config=None,
        model_config=SimpleNamespace(multimodal_config=None, is_diffusion=False),
        diffusion_config=None,
        parallel_config=ParallelConfig(**parallel),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False)),
        additional_config={},
        use_v2_model_runner=False,
    )


def test_an_ordinary_configuration_is_not_refused() -> None:
    limits.check(_config())
    limits.check(_config(enable_expert_parallel=True))
    drafting = _config()
    _speculative(drafting)
    limits.check(drafting)
    limits.check_arguments({"speculative_config": None, "ubatch_size": 1, "dtype": "float32"})


def _speculative(config: Any) -> None:
    config.speculative_config = SimpleNamespace(method="ngram", enable_adaptive_verification=False)


def _medusa(config: Any) -> None:
    config.speculative_config = SimpleNamespace(method="medusa", enable_adaptive_verification=False)


def _adaptive(config: Any) -> None:
    _speculative(config)
    config.speculative_config.enable_adaptive_verification = True


def _speculative_ahead(config: Any) -> None:
    _speculative(config)
    config.scheduler_config.async_scheduling = True


def _speculative_in_stages(config: Any) -> None:
    _speculative(config)
    config.parallel_config.pipeline_parallel_size = 2


def _loads_blocks(config: Any) -> None:
    config.kv_transfer_config = object()


def _moves_images(role: str) -> Any:
    transfer = ECTransferConfig(ec_connector="ECExampleConnector", ec_role=role)
    return lambda config: setattr(config, "ec_transfer_config", transfer)


def _encodes(config: Any) -> None:
    config.model_config.multimodal_config = SimpleNamespace(mm_encoder_only=True)


def _diffuses(config: Any) -> None:
    config.model_config.is_diffusion = True


def _decodes_by_diffusion(config: Any) -> None:
    config.diffusion_config = DiffusionConfig(canvas_length=8)


@pytest.mark.parametrize("role", ["ec_both", "ec_consumer"])
def test_what_an_encoder_gave_may_come_from_elsewhere(role: str) -> None:
    config = _config()
    _moves_images(role)(config)
    limits.check(config)
    limits.check_arguments({"ec_transfer_config": {"ec_role": role}})


def _sequence_parallel(config: Any) -> None:
    config.compilation_config.pass_config.enable_sp = True


def _context_parallel(kind: str) -> Any:
    return lambda config: setattr(config.parallel_config, f"{kind}_context_parallel_size", 2)


def _overlap(config: Any) -> None:
    config.parallel_config.enable_dbo = True


def _ubatches(config: Any) -> None:
    config.parallel_config.ubatch_size = 4


def _sharded_sampling(config: Any) -> None:
    config.parallel_config.enable_batch_sharded_sampling = True


def _ends_at_compilations(config: Any) -> None:
    config.observability_config.jit_monitor_mode = "error"


def _launched(config: Any) -> None:
    parallel = config.parallel_config
    parallel.distributed_executor_backend = "external_launcher"
    parallel.tensor_parallel_size = 2


def test_replicas_of_one_rank_may_be_launched_by_others() -> None:
    config = _config()
    _launched(config)
    config.parallel_config.tensor_parallel_size = 1
    limits.check(config)
    limits.check_arguments({"distributed_executor_backend": "external_launcher"})


def _split_experts(config: Any) -> None:
    parallel = config.parallel_config
    parallel.enable_expert_parallel = True
    parallel.tensor_parallel_size = parallel.data_parallel_size = 2


@pytest.mark.parametrize(
    ("change", "what", "remedy"),
    [
        (_medusa, "speculative decoding by this method", "ngram, eagle, eagle3, mtp"),
        (_speculative_ahead, "speculative decoding and async", "set async_scheduling=False or"),
        (_adaptive, "adaptive verification of drafts", "set enable_adaptive_verification=False"),
        (_speculative_in_stages, "speculative decoding over", "set pipeline_parallel_size=1"),
        (_overlap, "dual batch overlap", "leave out enable_dbo"),
        (_ubatches, "dual batch overlap", "ubatch_size"),
        (_context_parallel("decode"), "context", "set decode_context_parallel_size=1"),
        (_context_parallel("prefill"), "context", "set prefill_context_parallel_size=1"),
        (_loads_blocks, "KV connectors", "leave out kv_transfer_config and kv_offloading_size"),
        (_moves_images("ec_producer"), "an engine that encodes", "set ec_role='ec_both'"),
        (_encodes, "an engine that encodes", "leave out mm_encoder_only"),
        (_diffuses, "a diffusion language model", "start it with vLLM's own classes"),
        (_decodes_by_diffusion, "a diffusion language model", "leave out diffusion_config"),
        (_sequence_parallel, "sequence parallelism", "enable_sp=False"),
        (_split_experts, "experts on several", "leave out enable_expert_parallel"),
        (_sharded_sampling, "batch-sharded", "set enable_batch_sharded_sampling=False"),
        (_ends_at_compilations, "kernels whose compilation", "set jit_monitor_mode='warn'"),
        (_launched, "several ranks of one replica", "set distributed_executor_backend='mp'"),
    ],
)
def test_a_configuration_that_splits_rows_is_refused(change: Any, what: str, remedy: str) -> None:
    config = _config()
    change(config)
    with pytest.raises(ValueError, match=f"^tLLM does not run with {what}.*{remedy}"):
        limits.check(config)


def test_the_v2_runner_drafts_a_step_ahead() -> None:
    config = _config()
    _speculative_ahead(config)
    config.use_v2_model_runner = True
    limits.check(config)


def test_a_drafter_that_runs_tapped_modules_is_refused() -> None:
    norm, other = nn.Linear(4, 4), nn.Linear(4, 4)
    key = (HookPoint.LM_HEAD_IN, None)
    points = ModelPoints("tiny", 1, {}, frozenset({HookPoint.LM_HEAD_IN}))
    sites = ModelSites(points, 4, {key: Site(*key, norm, "output", 0)})
    check_drafter(None, sites)
    check_drafter(nn.Sequential(other), sites)
    with pytest.raises(ValueError, match=r"Sequential.*lm_head_in can be read: leave out these"):
        check_drafter(nn.Sequential(other, norm), sites)


def test_a_sampler_that_is_not_known_is_no_place_for_a_guide() -> None:
    """It is said what has brought it."""
    sampler = type("GPUWatermarkSampler", (), {})()
    refusal = V2Attachment.guidance_refusal(SimpleNamespace(sampler=sampler, batch_sharder=None))
    assert refusal is not None
    assert "GPUWatermarkSampler" in refusal and "leave out watermark_config" in refusal


def test_the_front_end_in_rust_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "VLLM_USE_RUST_FRONTEND", True, raising=False)
    with pytest.raises(ValueError, match="set VLLM_USE_RUST_FRONTEND=0"):
        limits.check(_config())


def test_all_that_is_refused_is_in_one_sentence() -> None:
    config = _config()
    _medusa(config)
    _overlap(config)
    with pytest.raises(ValueError, match=r"speculative decoding.*; nor with dual batch overlap"):
        limits.check(config)


@pytest.mark.parametrize(
    "arguments",
    [
        {"speculative_config": {"method": "medusa"}},
        {"speculative_config": {"method": "eagle3", "enable_adaptive_verification": True}},
        {"speculative_config": {"method": "ngram"}, "pipeline_parallel_size": 2},
        {"kv_offloading_size": 1.0},
        {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_producer"}},
        {"mm_encoder_only": True},
        {"diffusion_config": {"canvas_length": 8}},
        {"enable_dbo": True},
        {"ubatch_size": 2},
        {"decode_context_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
        {"enable_batch_sharded_sampling": True},
        {"jit_monitor_mode": "error"},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
    ],
)
def test_engine_arguments_are_refused_before_an_engine_starts(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^tLLM does not run with .*\b{next(iter(arguments))}\b"):
        LLM("no such model", **arguments)


def test_an_async_engine_is_refused_before_it_starts() -> None:
    config = _config()
    _overlap(config)
    with pytest.raises(ValueError, match="dual batch overlap"):
        AsyncLLM(config, executor_class=None, log_stats=False)


def test_a_reason_is_told_once_and_leaves_nothing_behind() -> None:
    config: dict[str, Any] = {"mine": 1}
    with pytest.raises(ValueError, match=r"^too big$") as refusal, limits.told(config):
        worker = SimpleNamespace(additional_config=dict(config))
        note = limits.pop_note(worker)
        assert worker.additional_config == {"mine": 1}
        with pytest.raises(ValueError, match="too big"), limits.reported(note):
            raise ValueError("too big")
        raise RuntimeError("Engine core initialization failed.")
    assert isinstance(refusal.value.__cause__, RuntimeError)
    assert config == {"mine": 1}


def test_without_a_reason_vllm_s_own_exception_is_raised() -> None:
    with pytest.raises(RuntimeError, match="failed"), limits.told({}):
        raise RuntimeError("Engine core initialization failed.")
    with pytest.raises(ValueError, match="no note"), limits.reported(None):
        raise ValueError("no note")


class RefusingWorker(InterventionCPUWorker):
    """A worker that does not find what it needs."""

    def _taps(self) -> Taps:
        raise ValueError("this model has no layers: use another")


@pytest.mark.skipif(
    os.environ["TLLM_TEST_RUNNER"] != "v1", reason="the worker refuses before it has a runner"
)
@pytest.mark.usefixtures("forked_processes")
def test_what_only_a_worker_finds_out_reaches_the_user(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_refusing_worker(*args: Any) -> dict[str, Any]:
        return {**engine_arguments(*args), "worker_cls": "engine.test_limits.RefusingWorker"}

    engine_arguments = llm.engine_arguments
    monkeypatch.setattr(llm, "engine_arguments", with_refusing_worker)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match=r"^this model has no layers: use another$") as refusal:
        LLM(tiny_model, **TINY_ENGINE)
    assert "initialization failed" in str(refusal.value.__cause__)

"""What is refused when an engine starts, and that a plain vLLM is left alone."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny_engines import TINY_ENGINE
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from engine.asking import generate, greedy, prompts_of, tokens_of
from tllm import LLM
from tllm.engine import model_view


def test_a_plain_vllm_beside_tllm_is_untouched(plain_engine, reference):
    core = plain_engine.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    assert type(worker).__module__.startswith("vllm.")
    assert type(core.scheduler).__module__.startswith("vllm.")
    model = worker.model_runner.get_model()
    assert not any(name.split(".")[-1].startswith("tllm") for name, _ in model.named_buffers())
    prompts = prompts_of([5, 40])
    expected = [reference.greedy(prompt, 5) for prompt in prompts]
    assert tokens_of(generate(plain_engine, prompts, greedy(5))) == expected


def test_norms_that_vllm_computes_in_another_way_are_left_to_it(llm, monkeypatch):
    config = llm.llm_engine.vllm_config
    worker = llm.llm_engine.model_executor.driver_worker.worker
    norm = worker.model_runner.get_model().model.norm
    preferred = config.kernel_config.ir_op_priority
    # An engine without a compiler prefers them on a GPU.
    monkeypatch.setattr(preferred, "fused_add_rms_norm", ["vllm_c", "native"])
    assert model_view.added_norm(config, norm) is None
    monkeypatch.setattr(preferred, "fused_add_rms_norm", ["native"])
    ours = model_view.added_norm(config, norm)
    assert (ours.module, ours.eps) == (norm, norm.variance_epsilon)
    with set_current_vllm_config(config):
        others = RMSNorm(16, has_weight=False), RMSNorm(16, var_hidden_size=8)
        gemma = GemmaRMSNorm(16)
    assert [model_view.added_norm(config, other) for other in others] == [None] * 2
    gemma.weight.data = gemma.weight.data.to(config.model_config.dtype)
    assert model_view.added_norm(config, gemma).plus_one and not ours.plus_one
    half = RMSNorm.__new__(RMSNorm)
    vars(half).update(vars(norm) | {"_parameters": {"weight": norm.weight.detach().half()}})
    assert model_view.added_norm(config, half) is None
    unknown = SimpleNamespace(get_name=lambda: "unknown")
    quantized = SimpleNamespace(**{**vars(config), "quant_config": unknown})
    assert model_view.added_norm(quantized, norm) is None
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert model_view.added_norm(config, norm) is None


def test_a_head_of_another_width_is_given_no_rows(llm, monkeypatch):
    """The LM head of `facebook/opt-350m` reads 512 numbers, and its blocks return 1024."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model = worker.model_runner.get_model()
    asked = llm.llm_engine.vllm_config, model, worker._sites, worker.device
    assert isinstance(model_view.lm_head(*asked), model_view.LmHead)

    def corrupting(*_: object) -> None:
        raise AssertionError("a kernel of a CPU writes beyond its rows where widths differ")

    monkeypatch.setattr(model, "compute_logits", corrupting)
    wider = replace(worker._sites, hidden_size=2 * worker._sites.hidden_size)
    why = model_view.lm_head(*asked[:2], wider, worker.device)
    assert isinstance(why, str) and "LM head is quantized or of a form" in why


@pytest.mark.parametrize("name", ["worker_cls", "scheduler_cls"])
def test_another_worker_or_scheduler_is_refused_by_name(tiny_model, name):
    with pytest.raises(ValueError, match=f"{name}='mine.Own'.*vllm.LLM"):
        LLM(tiny_model, **{name: "mine.Own"}, **TINY_ENGINE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overflow": "spill"}, r"overflow='spill'.*block, drop"),
        ({"capture_mib": 0}, r"capture_mib=0 must be 1 or more"),
        ({"capture_mib": "64"}, r"capture_mib='64' is not a whole number"),
        ({"max_steering_configs": 2.5}, r"max_steering_configs=2.5 is not a whole number"),
        ({"fuse_norms": "no"}, r"fuse_norms='no' must be True or False"),
        ({"enable_steering": "no"}, r"enable_steering='no' must be True or False"),
        ({"hook_points": ["middle"]}, r"'middle'.*post_block"),
        ({"hook_points": 3}, r"3.*post_block"),
    ],
)
def test_a_wrong_engine_option_is_refused_by_name(tiny_model, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(tiny_model, **TINY_ENGINE | options)

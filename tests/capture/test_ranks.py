"""Captures are the same from two tensor-parallel ranks and from two pipeline stages."""

from __future__ import annotations

import pytest
import torch
from engine.asking import error_of, generate, greedy
from two_workers import needs_two_workers
from vllm import envs

import tllm.stores
from capture import ranks
from capture.truth import located, meant, reduced
from tllm import LLM


def writers_of(saved, root, truth):
    """Check all captures against `transformers`; names of the writers of the last."""
    store = tllm.stores.open(root)
    for number, (spec, got) in enumerate(zip(ranks.ASKED, saved, strict=False)):
        assert got["results"] == {"memory": ("ok", None), "filesystem": ("ok", None)}
        passed = got["tokens"][:-1]
        positions = meant(spec.get("positions", "all"), len(ranks.PROMPTS[number]), passed)
        assert set(got["rows"]) == set(located(spec["hooks"]))
        record = store.record(str(number))
        for place, (tensor, where) in got["rows"].items():
            assert where == positions
            expected = truth.states(passed)[place][positions]
            if "reduction" in spec:
                expected = reduced(expected, spec["reduction"])
            for mine, theirs in zip(tensor, expected, strict=True):
                assert error_of(mine, theirs) < 2e-5
            assert torch.equal(record.tensor(*place), tensor)
    return {path.split("/writers/")[1].split("/")[0] for path in got["paths"]}


def _read_environment_again():
    """An engine that was in this process before made vLLM remember its environment variables."""
    remembered = getattr(vars(envs)["__getattr__"], "cache_clear", None)
    if remembered is not None:
        remembered()


def test_of_two_tensor_parallel_ranks_one_writes(served, truth):
    found, root = served
    assert writers_of(found["ranks"], root, truth) == {"dp0-pp0-tp0-filesystem-sharded"}


@needs_two_workers
@pytest.mark.usefixtures("forked_processes")
def test_two_pipeline_stages_write_their_own_layers(tiny_model, truth, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        _read_environment_again()
        # vLLM's stages on a CPU need the traced model; compiling it is the engine's tests'.
        llm = LLM(
            tiny_model,
            capture_consumers=[f"filesystem:root={tmp_path},publish_interval=0.1"],
            pipeline_parallel_size=2,
            compilation_config={"backend": "eager"},
            **ranks.ENGINE,
        )
    _read_environment_again()
    try:
        prompts, captures = zip(*ranks.captures(), strict=True)
        params = [greedy(5, capture=capture) for capture in captures]
        saved = ranks.saved(generate(llm, prompts, params))
        assert writers_of(saved[:1], tmp_path, truth) == {
            "dp0-pp0-tp0-filesystem-sharded",
            "dp0-pp1-tp0-filesystem-sharded",
        }
        writers_of(saved, tmp_path, truth)
    finally:
        llm.llm_engine.engine_core.shutdown()

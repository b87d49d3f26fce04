"""Captures, steering and a consumer are the same where the workers are Ray's."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from child_process import run_script
from engine.asking import RELATIVE, error_of
from engine.reference import Addition, Reference
from two_workers import needs_two_workers

import tllm.stores
from capture.truth import located, meant, reduced
from tllm.engine import limits

MODES = {
    "two tensor-parallel ranks": (
        {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
        {"dp0-pp0-tp0"},
    ),
    "two data-parallel replicas": (
        {"data_parallel_size": 2, "data_parallel_backend": "ray"},
        {"dp0-pp0-tp0", "dp1-pp0-tp0"},
    ),
}
TESTS = Path(__file__).parents[1]

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: pip install 'ray>=2.48'"
)


def serve(model, root, folder, options):
    """What the user of an engine on Ray saw."""
    from capture import on_ray, ray_platform

    if not torch.cuda.is_available():
        ray_platform.install(folder)
    path = [str(folder), str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    output = folder / "saved.pt"
    run_script(
        on_ray,
        *(model, root, output, json.dumps(options)),
        log=folder / "log",
        environment={
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "RAY_AUTH_MODE": "disabled",  # it would write a token into the user's home
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        },
        timeout=300,
    )
    # Ray's handler would end the engine before its workers hear what has finished.
    assert "SIGTERM received" not in (folder / "log").read_text()
    return torch.load(output, weights_only=False)


@needs_ray
@needs_two_workers
@pytest.mark.parametrize("mode", MODES)
def test_rows_files_and_steering_are_those_of_transformers(mode, tiny_model, tmp_path):
    from capture import on_ray

    options, workers = MODES[mode]
    root = tmp_path / "store"
    saved = serve(tiny_model, root, tmp_path, options)
    store, reference = tllm.stores.open(root), Reference(tiny_model)
    assert store.verify().ok
    steered = {
        "consumer": [Addition(("post_block", 2), on_ray.VECTOR)],
        "vector": [Addition(("post_block", 0), on_ray.VECTOR)],
    }
    writers = set()
    for (prompt, capture, _), got, late in zip(
        on_ray.requests(), saved["outputs"], saved["late"], strict=True
    ):
        spec, name = capture["memory"], capture["filesystem"]["request_id"]
        additions = steered.get(name, [])
        assert got["results"] == {"memory": ("ok", None), "filesystem": ("ok", None)}
        assert got["tokens"] == [*prompt, *reference.greedy(prompt, 5, additions)]
        passed = got["tokens"][:-1]
        places = [*located(spec["hooks"]), ("lm_head_in", None)]
        states = reference.run(passed, list(dict.fromkeys(places)), additions)[1]
        positions = meant(spec.get("positions", "all"), len(prompt), passed)
        record = store.record(name)
        assert set(got["rows"]) == set(located(spec["hooks"]))
        for place, (tensor, where) in got["rows"].items():
            assert where == positions
            expected = states[place][positions]
            if "reduction" in spec:
                expected = reduced(expected, spec["reduction"])
            for mine, theirs in zip(tensor, expected, strict=True):
                assert error_of(mine, theirs) < RELATIVE
            assert torch.equal(record.tensor(*place), tensor)
        assert late.positions.tolist() == list(range(len(passed)))
        for mine, theirs in zip(late.values, states["lm_head_in", None], strict=True):
            assert error_of(mine, theirs) < RELATIVE
        writers |= {path.split("/writers/")[1].split("/")[0] for path in got["paths"]}
    layouts = [f"{worker}-filesystem-" for worker in workers]
    assert writers <= {prefix + layout for prefix in layouts for layout in on_ray.LAYOUTS}
    assert {writer.partition("-filesystem-")[0] for writer in writers} == workers
    assert all(worker["running_sequences"] == 0 for worker in saved["stats"])
    if len(workers) == 1:
        # Ray's workers are killed; before that, they have closed. Replicas are killed as a whole.
        assert len(store) == len(saved["outputs"]) + on_ray.UNATTENDED


@pytest.mark.skipif(
    find_spec("vllm.v1.executor.ray_executor") is None, reason="vLLM 0.33 has no older Ray executor"
)
def test_the_older_ray_executor_is_refused_with_what_to_set():
    from vllm.v1.executor.ray_executor import RayDistributedExecutor

    parallel = SimpleNamespace(
        distributed_executor_backend=RayDistributedExecutor,
        use_ray=True,
        use_ubatching=False,
        use_sequence_parallel_moe=False,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )
    config = SimpleNamespace(
        speculative_config=None,
        observability_config=SimpleNamespace(jit_monitor_mode="warn"),
        kv_transfer_config=None,
        ec_transfer_config=None,
        model_config=SimpleNamespace(multimodal_config=None, is_diffusion=False),
        diffusion_config=None,
        parallel_config=parallel,
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace()),
    )
    with pytest.raises(ValueError, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1"):
        limits.check(config)

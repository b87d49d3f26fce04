"""Captures are the same from two tensor-parallel ranks and from two pipeline stages."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from engine.asking import error_of

import tllm.stores
from capture import ranks
from capture.truth import located, meant, reduced

MODES = {
    "two tensor-parallel ranks": {"tensor_parallel_size": 2, "enforce_eager": True},
    # vLLM's stages on a CPU need the compiled model.
    "two pipeline stages": {"pipeline_parallel_size": 2},
}

pytestmark = pytest.mark.skipif(
    os.environ["TLLM_TEST_RUNNER"] != "v1",
    reason="the interpreted V2 runner is set up in this process only",
)


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_gives_each_layer(mode, tiny_model, truth, tmp_path):
    options = {"distributed_executor_backend": "mp", **MODES[mode]}
    root, output = tmp_path / "store", tmp_path / "saved.pt"
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    done = subprocess.run(
        [sys.executable, ranks.__file__, tiny_model, root, output, json.dumps(options)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    store = tllm.stores.open(root)
    assert len(store) == len(ranks.ASKED)
    for number, (spec, got) in enumerate(
        zip(ranks.ASKED, torch.load(output, weights_only=False), strict=True)
    ):
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
    writers = {path.split("/writers/")[1].split("/")[0] for path in got["paths"]}
    assert writers == {"dp0-pp0-tp0-filesystem-sharded"} or mode == "two pipeline stages"

"""The same answers from two ranks, without shared memory, and compiled."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from logprobs import served
from logprobs.asking import ENGINE, OTHER_ENGINE, agrees, prompts

pytestmark = pytest.mark.skipif(
    os.environ["TLLM_TEST_RUNNER"] != "v1",
    reason="the interpreted V2 runner is set up in this process only",
)

MODES = {
    "two ranks": (
        {"engine_opts": ENGINE | {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}},
        {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ),
    "rpc, compiled": ({"engine_opts": ENGINE | {"enforce_eager": False}, "transport": "rpc"}, {}),
}


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_those_of_transformers(mode, reference, tmp_path):
    options, environment = MODES[mode]
    output = tmp_path / "saved.pt"
    done = subprocess.run(
        [sys.executable, served.__file__, str(output), json.dumps(options)],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(Path(served.__file__).parents[1]), *sys.path])}
        | environment,
        cwd=Path(served.__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    saved = torch.load(output, weights_only=False)
    asked = prompts(served.COUNT)
    expected = reference.batch_next_token_logprobs_sync(asked)
    assert agrees(saved["full"], expected, OTHER_ENGINE)
    assert torch.equal(saved["top"][1].long(), saved["full"].topk(5).indices)
    assert torch.allclose(saved["top"][0], saved["full"].topk(5).values, atol=1e-4)
    assert torch.allclose(saved["some"], saved["full"][:, [7, 70]], atol=1e-4)
    longer = reference.batch_next_token_logprobs_sync([p + served.FED for p in asked])
    assert agrees(saved["lanes"], longer, OTHER_ENGINE)
    assert saved["sample"] == asyncio.run(reference.sample(asked[0], 6, [], temperature=0))
    assert all(worker["running_sequences"] == 0 for worker in saved["workers"])
    assert saved["stats"]["in_flight"] == saved["stats"]["kept"] == 0
    assert saved["consumer"]["kept"] == 0

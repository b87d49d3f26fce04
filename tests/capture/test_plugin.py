"""The example plugin, installed as a package of its own."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine.asking import generate, greedy, prompts_of

from tllm.registry import consumer_from_spec

PACKAGE = Path(__file__).parents[2] / "examples" / "capture_plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The plugin in a folder that is on the path, with its entry point."""
    target, source = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("source")
    subprocess.run(["cp", "-r", f"{PACKAGE}/.", str(source)], check=True)
    command = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, *command, "--target", str(target), str(source)], check=True)
    sys.path.insert(0, str(target))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(target))


def test_a_plugin_of_another_package(installed, llm, truth):
    consumer = llm.register_consumer(consumer_from_spec("sketch:dims=8,seed=3"))
    capture = {"sketch": {"layers": "0,-2", "positions": {"exclude": {"positions": [0]}}}}
    outputs = generate(llm, prompts_of([30, 5]), [greedy(4, capture=capture), greedy(4)])
    result = outputs[0].capture_results["sketch"]
    assert result.status == "ok"
    assert result.payload.positions.tolist() == list(range(1, 33))
    matrix = torch.randn(128, 8, generator=torch.Generator().manual_seed(3)) / 8**0.5
    states = truth.states([*outputs[0].prompt_token_ids, *outputs[0].outputs[0].token_ids][:-1])
    for column, layer in enumerate([0, 2]):
        expected = states["post_block", layer][1:] @ matrix
        got = torch.from_numpy(result.payload.values[:, column])
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-3)
    assert outputs[1].capture_results == {}
    assert consumer.received == 32
    with pytest.raises(ValueError, match=r"capture\['sketch'\] has unknown options"):
        generate(llm, prompts_of([5]), greedy(2, capture={"sketch": {"hooks": "post_block:1"}}))

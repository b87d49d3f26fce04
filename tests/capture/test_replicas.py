"""Two data-parallel replicas: every result arrives, wherever its request was computed."""

from __future__ import annotations

import asyncio

import pytest
import torch
from engine.asking import prompts_of
from two_workers import needs_two_workers
from vllm.sampling_params import RequestOutputKind

import tllm.stores
from capture.ranks import ENGINE
from tllm import AsyncLLM, SamplingParams

SPEC = {"hooks": {"post_block": [1, 3], "lm_head_in": "all"}}
VECTOR = torch.linspace(-3, 3, 128)

pytestmark = needs_two_workers


async def last(engine, number, prompt, **asked):
    params = SamplingParams(
        max_tokens=4,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
        capture={"memory": SPEC, "filesystem": {**SPEC, "request_id": str(number)}},
        **asked,
    )
    async for output in engine.generate({"prompt_token_ids": prompt}, params, f"r{number}"):
        found = output
    return found


async def serve(model, root):
    engine = await AsyncLLM.create(
        model,
        capture_consumers=[f"filesystem:root={root},publish_interval=0.1"],
        data_parallel_size=2,
        enforce_eager=True,
        **ENGINE,
    )
    try:
        prompts = prompts_of([9, 40, 12, 30, 5, 20])
        outputs = await asyncio.gather(
            *(last(engine, i, p, temperature=0) for i, p in enumerate(prompts)),
            last(engine, "two", prompts[0], n=2),
        )
        steering = {"steering_vectors": {"post_block": {0: VECTOR}}}
        steered = await asyncio.gather(
            *(last(engine, f"s{i}", prompts[0], temperature=0, **steering) for i in range(2))
        )
        stats = await engine.read_stats(engine.consumers["filesystem"])
        return outputs, steered, stats, await engine.intervention_stats()
    finally:
        engine.shutdown()


@pytest.mark.usefixtures("forked_processes")
def test_replicas_serve_capture_and_steer_as_one(tiny_model, truth, tmp_path):
    outputs, steered, stats, workers = asyncio.run(serve(tiny_model, tmp_path))
    assert [len(output.outputs) for output in outputs] == [1, 1, 1, 1, 1, 1, 2]
    for output in outputs:
        truth.check(output, SPEC)
        for completion in output.outputs:
            result = completion.capture_results["filesystem"]
            assert result.status == "ok", result.error
    # Each replica served one: their rows are those of one model, and not those without steering.
    rows, same = (output.activations["post_block"][1].tensor for output in steered)
    plain = outputs[0].activations["post_block"][1].tensor
    assert torch.equal(rows, same)
    assert (rows - plain)[:9].norm() > plain[:9].norm() / 10
    store = tllm.stores.open(tmp_path)
    assert store.verify().ok
    assert len(store) == stats["records"] == 10
    # Both wrote, and neither into the other's folder.
    assert len(list((tmp_path / "writers").iterdir())) == 2
    assert all(worker["running_sequences"] == 0 for worker in workers)
    assert (
        stats["rows"]
        == sum(record.shape("post_block", 1)[0] for record in store)
        == stats["runtime"]["rows"]
    )
    assert stats["writers"]["sharded"].published == 10

"""An engine sleeps, which takes weights and cache from the GPU, and wakes up as it was."""

from __future__ import annotations

import pytest
import torch
from tiny_engines import TINY_ENGINE

from engine.asking import generate, greedy, prompts_of
from engine.reference import HIDDEN, Addition, PatchedRow
from engine.test_weights import assert_of
from tllm.consumers.lens import LensConsumer
from tllm.consumers.probe import ProbeConsumer

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="sleep mode gives memory of a GPU back; none is here"
)


@pytest.fixture(scope="module")
def sleeper(tiny_model):
    """With CUDA graphs, which hold addresses of what goes away."""
    from tllm import LLM

    return LLM(
        tiny_model,
        max_num_batched_tokens=24,
        enable_sleep_mode=True,
        **TINY_ENGINE | {"enforce_eager": False},
    )


@pytest.mark.parametrize("level", [1, 2])
def test_what_was_registered_learned_and_kept_is_there_after_it(sleeper, reference, level):
    llm, probe, vector = sleeper, torch.linspace(-1, 1, HIDDEN), 3 * torch.linspace(1, -1, HIDDEN)
    llm.clear_consumers()
    llm.register_consumer(ProbeConsumer(probe))
    llm.register_consumer(LensConsumer([2, 3], top_k=2))
    llm.steering.register_module("mood", {"post_block": {1: vector}})
    prompts = prompts_of([6, 40, 35, 30], seed=11)
    mean = llm.patching.register_mean("flat", {"post_block": {1: torch.ones(HIDDEN)}})
    run = llm.patching.run(prompts[0], hooks="post_block", layers=1)
    asked = {
        "capture": {"memory": {"hooks": {"post_block": [2]}, "positions": {"phase": "generation"}}},
        "consumers": {"lens": {}},
    }
    place = {"hook": "post_block", "layer": 1, "positions": [2]}
    params = [
        greedy(5, **asked),
        greedy(5, **asked, steering_vectors={"post_block": {1: vector}}),
        greedy(5, **asked, steering_module_ref="mood"),
        greedy(5, patch=[{**place, "source": {"mean": "flat"}}]),
    ]
    latched = {
        "steering_vectors": {
            "post_block": {
                1: {
                    "vector": vector,
                    "when": {
                        "probe": {"hook": "post_block", "layer": 0, "vector": vector},
                        "above": -1e9,
                        "scope": "conversation",
                    },
                }
            }
        },
        "conversation": {"id": f"slept {level}", "key": "secret of the sleeper"},
    }
    replaced = PatchedRow(("post_block", 1), 2, torch.ones(HIDDEN))
    patched = reference.greedy(prompts[3], 5, patches=[replaced])

    def check():
        *outputs, last = generate(llm, prompts, params)
        for output, steered in zip(outputs, [None, vector, vector], strict=True):
            assert_of(output, reference, steered, probe)
        assert list(last.outputs[0].token_ids) == patched

    check()
    generate(llm, [prompts[1]], greedy(2, **latched))
    free = torch.cuda.mem_get_info()[0]
    llm.sleep(level=level)
    assert torch.cuda.mem_get_info()[0] > free
    llm.wake_up()
    if level == 2:
        llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()
    assert set(llm.patching.kept()) == ({mean.name, run.name} if level == 1 else {mean.name})
    [output] = generate(llm, [prompts[1]], greedy(5, **latched))
    held = reference.greedy(prompts[1], 5, [Addition(("post_block", 1), vector)])
    assert list(output.outputs[0].token_ids) == held
    check()
    for name in llm.patching.kept():
        llm.patching.drop(name)
    llm.steering.unregister_module("mood")

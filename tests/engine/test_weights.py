"""Weights that are replaced while an engine lives: what was made of the old ones goes with them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from engine.asking import RELATIVE, error_of, generate, greedy, prompts_of
from engine.reference import HIDDEN, Addition, Reference
from tllm.consumers.base import Consumer
from tllm.consumers.lens import LensConsumer
from tllm.consumers.probe import ProbeConsumer


class Weights(Consumer):
    """Counts how often it hears of other weights."""

    consumer_id = "weights"
    times = 0

    def flows(self):
        return []

    def on_weights_changed(self, ctx):
        self.times += 1

    def read_stats(self):
        return {"times": self.times}


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    """The tiny model with other weights everywhere, as training leaves them; norms and head too."""
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    path = tmp_path_factory.mktemp("trained")
    model.save_pretrained(path)
    return path


@pytest.fixture
def replace(llm, tiny_model):
    """`replace(path)`: other weights; the first ones are back afterwards."""

    def reload(path):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        llm.reset_prefix_cache()

    yield reload
    reload(tiny_model)


def assert_of(output, truth, vector, probe):
    """Tokens, captured rows, scores and the lens are those of a model."""
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    prompt = len(output.prompt_token_ids)
    steered = [Addition(("post_block", 1), vector)] if vector is not None else []
    assert truth.would_generate(tokens[:prompt], tokens[prompt:], steered)
    places = [("post_block", 2), ("post_block", 3)]
    _, states = truth.run(tokens[:-1], places, steered)
    rows = output.activations["post_block"][2]
    for position, row in zip(rows.positions, rows.tensor, strict=True):
        assert error_of(row, states["post_block", 2][position]) < RELATIVE
    assert len(rows.positions) == 4  # the window that was asked for
    results = output.consumer_results
    scores = torch.from_numpy(results["probe"].payload.values)
    torch.testing.assert_close(scores, states["post_block", 3] @ probe, rtol=1e-4, atol=1e-3)
    model = truth.model
    with torch.no_grad():
        said = torch.stack([states[place] for place in places], 1)
        best = model.lm_head(model.model.norm(said)).log_softmax(-1).topk(2)
    found = torch.from_numpy(results["lens"].payload["logprobs"].values)
    torch.testing.assert_close(found, best.values, rtol=1e-4, atol=3e-4)
    assert results["lens"].payload["token_ids"].values.tolist() == best.indices.tolist()


def test_everything_is_of_the_weights_that_there_are(llm, reference, trained, replace):
    probe, vector = torch.linspace(-1, 1, HIDDEN), 3 * torch.linspace(1, -1, HIDDEN)
    llm.register_consumer(ProbeConsumer(probe))
    llm.register_consumer(LensConsumer([2, 3], top_k=2))
    prompts = prompts_of([6, 40, 35], seed=11)
    asked = {
        # A window of the rollout, keyed to its sample.
        "capture": {"memory": {"hooks": {"post_block": [2]}, "positions": {"phase": "generation"}}},
        "consumers": {"lens": {}},
    }
    params = [
        greedy(5, **asked),
        greedy(5, **asked, steering_vectors={"post_block": {1: vector}}),
        greedy(5, **asked),
    ]
    vectors = [None, vector, None]

    def check(truth):
        for output, steered in zip(generate(llm, prompts, params), vectors, strict=True):
            assert_of(output, truth, steered, probe)

    check(reference)
    run = llm.patching.run(prompts[0], hooks="post_block", layers=1)
    mean = llm.patching.register_mean("flat", {"post_block": {1: torch.ones(HIDDEN)}})
    replace(trained)
    truth = Reference(trained)
    assert truth.greedy(prompts[0], 5) != reference.greedy(prompts[0], 5)
    check(truth)
    assert set(llm.patching.kept()) == {mean.name}, "rows of a run are of the old weights"
    patch = [{"hook": "post_block", "layer": 1, "positions": [2], "source": {"run": run}}]
    with pytest.raises(ValueError, match=f"nothing is kept under the name '{run.name}'"):
        generate(llm, prompts[:1], greedy(2, patch=patch))
    llm.patching.drop(mean)
    assert sum(worker["patch_mib"] for worker in llm.intervention_stats()) == 0


def test_rows_that_wait_are_handed_out_before_the_weights_go(llm, reference, trained, replace):
    """A lens in another window than the step's, of a request that has just ended."""
    llm.register_consumer(LensConsumer([3], top_k=1))
    [prompt] = prompts_of([5], seed=13)
    request = {"prompt_token_ids": prompt}
    llm.llm_engine.add_request("one", request, greedy(8, consumers={"lens": {}}))
    for _ in range(4):
        llm.llm_engine.step()
    replace(trained)
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    [final] = [output for output in outputs if output.finished]
    payload = final.consumer_results["lens"].payload
    assert payload["token_ids"].positions.tolist() == list(range(len(prompt) + 7))
    _, states = reference.run(prompt, [("post_block", 3)])
    model = reference.model
    with torch.no_grad():
        before = model.lm_head(model.model.norm(states["post_block", 3])).log_softmax(-1)
    found = torch.from_numpy(payload["logprobs"].values[: len(prompt), 0, 0])
    torch.testing.assert_close(found, before.max(-1).values, rtol=1e-4, atol=3e-4)


def test_a_conversation_remembers_what_held_with_the_old_weights(llm, trained, replace):
    [prompt] = prompts_of([12], seed=14)
    vector = 3 * torch.linspace(1, -1, HIDDEN)
    for edge in (-1e9, 1e9):  # one that held, and one that did not
        probe = {"hook": "post_block", "layer": 0, "vector": vector}
        when = {"probe": probe, "above": edge, "scope": "conversation"}
        asked = {
            "steering_vectors": {"post_block": {1: {"vector": vector, "when": when}}},
            "conversation": {"id": f"trained {edge}", "key": "secret of the weights"},
        }
        generate(llm, [prompt], greedy(2, **asked))
        replace(trained)
        steered = [Addition(("post_block", 1), vector)] if edge < 0 else []
        [output] = generate(llm, [prompt], greedy(5, **asked))
        expected = Reference(trained).greedy(prompt, 5, steered)
        assert list(output.outputs[0].token_ids) == expected
        llm.steering.forget_conversation(f"trained {edge}")


def _load_norms(model, factor):
    """As trainers do that have the model itself: parameter by parameter, past the worker. Of what a
    CPU has not packed."""
    for name, parameter in dict(model.named_parameters()).items():
        if name.endswith("norm.weight"):
            model.load_weights([(name, factor * parameter.detach().clone())])


def test_weights_that_a_trainer_loads_into_the_model_itself_are_heard_of(llm, tiny_model):
    probe, truth = torch.linspace(-1, 1, HIDDEN), Reference(tiny_model)
    norms = [m for n, m in truth.model.named_modules() if n.endswith("norm")]
    for norm in norms:
        norm.weight.data *= 1.5
    llm.register_consumer(ProbeConsumer(probe))
    llm.register_consumer(LensConsumer([2, 3], top_k=2))
    heard = llm.register_consumer(Weights())
    prompts = prompts_of([6, 40], seed=12)
    run = llm.patching.run(prompts[0], hooks="post_block", layers=1)
    llm.apply_model(partial(_load_norms, factor=1.5))
    llm.reset_prefix_cache()
    try:
        capture = {"hooks": {"post_block": [2]}, "positions": {"phase": "generation"}}
        asked = greedy(5, capture={"memory": capture}, consumers={"lens": {}})
        for output in generate(llm, prompts, asked):
            assert_of(output, truth, None, probe)
        assert heard.read_stats()["times"] == 1, "once, however many parts there were"
        assert not llm.patching.kept()
        patch = [{"hook": "post_block", "layer": 1, "positions": [2], "source": {"run": run}}]
        with pytest.raises(ValueError, match=f"nothing is kept under the name '{run.name}'"):
            generate(llm, prompts[:1], greedy(2, patch=patch))
    finally:
        llm.apply_model(partial(_load_norms, factor=1 / 1.5))
        llm.reset_prefix_cache()

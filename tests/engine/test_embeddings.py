"""Prompts that are given as embeddings: as steered and captured as the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_engines import TINY_ENGINE

from engine.asking import generate, greedy, prompts_of
from engine.reference import HIDDEN
from tllm import LLM

[PROMPT] = prompts_of([30])
VECTOR = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(0)) * 4


@pytest.fixture(scope="module")
def embedding(tiny_model):
    """An engine that takes embeddings, and those of the prompt."""
    weights = load_file(Path(tiny_model) / "model.safetensors")
    llm = LLM(tiny_model, enable_prompt_embeds=True, max_num_batched_tokens=24, **TINY_ENGINE)
    return llm, weights["model.embed_tokens.weight"][PROMPT]


def asked(positions="all", steered=None):
    vectors = {"post_block": {1: {"vector": VECTOR, "positions": steered or "all"}}}
    return greedy(
        5,
        capture={"memory": {"hooks": {"post_block": [2]}, "positions": positions}},
        steering_vectors=vectors if steered else None,
    )


@pytest.mark.parametrize("steered", [None, "all", "last_prompt", {"ranges": [[3, 9]]}])
@pytest.mark.parametrize("positions", ["all", "last_prompt", [0, -1, 31]])
def test_a_prompt_of_embeddings_is_as_its_tokens(embedding, positions, steered):
    llm, embeddings = embedding
    [told] = generate(llm, [PROMPT], asked(positions, steered))
    [given] = llm.generate([{"prompt_embeds": embeddings}], asked(positions, steered))
    assert given.outputs[0].token_ids == told.outputs[0].token_ids
    expected, rows = (each.activations["post_block"][2] for each in (told, given))
    assert rows.positions.tolist() == expected.positions.tolist()
    assert torch.allclose(rows.tensor, expected.tensor, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("position", [100, -31])
def test_positions_that_a_prompt_of_embeddings_cannot_have_are_refused(embedding, position):
    """As those of a prompt of tokens: they were captured as no rows, with status `ok`."""
    llm, embeddings = embedding
    with pytest.raises(ValueError, match=f"position {position} is out of range for a prompt of 30"):
        llm.generate([{"prompt_embeds": embeddings}], asked([0, position]))


def test_tokens_that_nobody_knows_are_no_places(embedding):
    llm, embeddings = embedding
    for params in (asked({"token_ids": PROMPT[:3]}), asked(steered={"token_ids": PROMPT[:3]})):
        [given] = llm.generate([{"prompt_embeds": embeddings}], params)
        result = given.capture_results["memory"]
        assert result.status == "error"
        assert "token_ids" in result.error and "given as embeddings" in result.error
    assert llm.intervention_stats()[0]["running_sequences"] == 0


def test_a_condition_beside_tokens_that_nobody_knows_is_refused(embedding):
    """The worker could not steer the request, and would judge none of its rows."""
    llm, embeddings = embedding
    probe = {"hook": "post_block", "layer": 2, "vector": VECTOR}
    ends = {"probe": probe, "above": -1e9, "name": "always"}
    unknown = {"post_block": {1: {"vector": VECTOR, "positions": {"token_ids": PROMPT[:3]}}}}
    for name in ("stop_when", "abort_when"):
        params = greedy(3, steering_vectors=unknown, **{name: ends})
        with pytest.raises(ValueError, match=f"{name} was given with steering by token_ids"):
            llm.generate([{"prompt_embeds": embeddings}], params)
        [told] = llm.generate([{"prompt_embeds": embeddings}], greedy(3, **{name: ends}))
        assert told.outputs[0].stop_reason == "always"


@pytest.mark.parametrize("placeholder", [0, PROMPT[1]])
def test_embeddings_among_tokens_are_no_tokens(embedding, placeholder):
    """What stands among the tokens of a prompt in the place of an embedding was found there."""
    llm, embeddings = embedding
    told = [place % 3 != 0 for place in range(len(PROMPT))]
    ids = [token if is_told else placeholder for token, is_told in zip(PROMPT, told, strict=True)]
    mixed = {
        "prompt_embeds": embeddings,
        "prompt_token_ids": ids,
        "prompt_is_token_ids": told,
    }
    wanted = [placeholder, PROMPT[4]]
    places = [i for i, token in enumerate(PROMPT) if told[i] and token in wanted]
    params = asked({"phase": "prompt", "token_ids": wanted})
    [given] = llm.generate([mixed], params, use_tqdm=False)
    assert given.activations["post_block"][2].positions.tolist() == places
    by_token = asked(steered={"phase": "prompt", "token_ids": wanted})
    [found] = llm.generate([mixed], by_token, use_tqdm=False)
    [expected] = generate(llm, [PROMPT], asked(steered=places))
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    rows, known = (each.activations["post_block"][2].tensor for each in (found, expected))
    assert torch.allclose(rows, known, rtol=1e-4, atol=1e-3)

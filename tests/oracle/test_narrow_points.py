"""Points narrower than the stream: the router of a mixture of experts, queries, keys, values."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tllm import SamplingParams
from tllm.verify.reference import Reference, Steers

from .differential import Engine, serving
from .reference_process import ReferenceProcess

TOKENS = [3, 17, 40, 8, 25]
WANTED = [0.0, -3.0, 30.0, 0.0]
"""For each expert, what is added to its logit."""


@pytest.fixture(scope="module")
def engine(reference: ReferenceProcess) -> Iterator[Engine]:
    with serving(
        "mixtral",
        reference,
        reference.checkpoint("mixtral"),
        seeded=os.environ["TLLM_TEST_RUNNER"] == "v2",
        dtype="float32",
        enforce_eager=True,
    ) as served:
        yield served


def test_experts_are_chosen_with_a_number_for_each(
    engine: Engine, reference: ReferenceProcess
) -> None:
    checked = Reference(str(reference.checkpoint("mixtral")))
    everywhere = torch.ones(len(TOKENS), dtype=torch.bool)
    second = torch.arange(len(TOKENS)) == 1
    row = torch.nn.functional.pad(torch.tensor(WANTED), (0, checked.hidden - len(WANTED)))
    patch = {"hook": "router", "layer": 1, "positions": [1], "source": {"tensor": WANTED}}
    patched = {"alpha": 1.0, "dimensions": torch.ones(checked.hidden, dtype=torch.bool)}
    cases: list[tuple[dict[str, object], Steers]] = [
        ({}, {}),
        (
            {"steering_vectors": {"router": {1: WANTED}}},
            {("router", 1): [("add", row, {"scale": 1.0}, everywhere)]},
        ),
        ({"patch": [patch]}, {("router", 1): [("patch", row, patched, second)]}),
    ]
    found = []
    for asked, steers in cases:
        hooks = {"router": "all", "mlp_out": "all", "post_block": "all"}
        capture = {"memory": {"hooks": hooks, "positions": "all_prompt"}}
        params = SamplingParams(max_tokens=1, temperature=0, capture=capture, **asked)
        [output] = engine.llm.generate([{"prompt_token_ids": TOKENS}], params, use_tqdm=False)
        states, _ = checked.run(TOKENS, steers)
        for point in hooks:
            for layer, expected in states[point].items():
                rows = output.activations[point][layer].tensor
                torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
        assert not output.activations["router"][0].tensor[:, len(WANTED) :].any()
        found.append(output.activations["mlp_out"][1].tensor)
    assert not torch.allclose(found[0], found[1], atol=1e-3)
    assert not torch.allclose(found[0][1], found[2][1], atol=1e-3)
    assert torch.allclose(found[0][0], found[2][0], atol=1e-5)


def test_other_numbers_of_experts_are_refused(engine: Engine) -> None:
    assert engine.llm.steering.layers()["experts"] == dict.fromkeys(range(3), len(WANTED))
    asked = {"router": {0: [1.0] * 5}}
    with pytest.raises(ValueError, match="has 5 numbers"):
        engine.llm.generate(
            [{"prompt_token_ids": TOKENS}], SamplingParams(steering_vectors=asked), use_tqdm=False
        )


@pytest.mark.parametrize("point", ["q", "k", "v"])
def test_heads_are_changed_with_numbers_of_their_own(
    point: str, engine: Engine, reference: ReferenceProcess
) -> None:
    checked = Reference(str(reference.checkpoint("mixtral")))
    split = engine.llm.steering.layers()["heads"][point][1]
    width = split["num_heads"] * split["head_dim"]
    row = torch.linspace(-2, 2, width)
    wide = torch.nn.functional.pad(row, (0, checked.hidden - width))
    everywhere = torch.ones(len(TOKENS), dtype=torch.bool)
    last = split["num_heads"] - 1
    dimensions = torch.zeros(checked.hidden, dtype=torch.bool)
    dimensions[last * split["head_dim"] : width] = True
    patch = {"hook": point, "layer": 1, "positions": [1], "source": {"tensor": row.tolist()}}
    second = torch.arange(len(TOKENS)) == 1
    patched = {"alpha": 1.0, "dimensions": dimensions}
    cases: list[tuple[dict[str, object], Steers]] = [
        (
            {"steering_vectors": {point: {1: row.tolist()}}},
            {(point, 1): [("add", wide, {"scale": 1.0}, everywhere)]},
        ),
        (
            {"patch": [{**patch, "heads": [last]}]},
            {(point, 1): [("patch", wide, patched, second)]},
        ),
    ]
    plain, _ = checked.run(TOKENS, {})
    for asked, steers in cases:
        capture = {"memory": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}}
        params = SamplingParams(max_tokens=1, temperature=0, capture=capture, **asked)
        [output] = engine.llm.generate([{"prompt_token_ids": TOKENS}], params, use_tqdm=False)
        states, _ = checked.run(TOKENS, steers)
        for layer, expected in states["post_block"].items():
            rows = output.activations["post_block"][layer].tensor
            torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
        changes = not torch.allclose(states["post_block"][1], plain["post_block"][1], atol=1e-3)
        # What all keys have more is the same for each of them: softmax does not see it.
        assert changes == (point != "k" or "patch" in asked)
    with pytest.raises(ValueError, match="q, k, v, attn_heads"):
        engine.llm.generate(
            [{"prompt_token_ids": TOKENS}],
            SamplingParams(patch=[{**patch, "hook": "attn_in", "heads": [0]}]),
            use_tqdm=False,
        )

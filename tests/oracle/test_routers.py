"""The router of a mixture of experts: which experts a token goes to can be read and chosen."""

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

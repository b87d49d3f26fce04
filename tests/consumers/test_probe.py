from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tllm.consumers.probe import ProbeConsumer
from tllm.registry import consumer_from_spec

HIDDEN = 128
PROMPTS = [
    [5, 6, 7, 8],
    list(range(2, 72)),  # three chunks
    [9, 10, 11],
    [200, 3, 77, 41, 90],
]


@pytest.fixture(scope="module")
def weights() -> torch.Tensor:
    return torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))


def generate(llm: Any, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    from tllm import SamplingParams

    params = SamplingParams(ignore_eos=True, detokenize=False, **{"max_tokens": 6, **sampling})
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def check(payload: Any, expected: torch.Tensor, positions: range) -> None:
    """Scores agree to 2e-5 of the largest: float32 sums in another order."""
    assert payload.positions.tolist() == list(positions)
    wanted = expected[positions.start : positions.stop].numpy()
    assert payload.values.shape == wanted.shape
    np.testing.assert_allclose(
        payload.values, wanted, rtol=2e-5, atol=2e-5 * float(np.abs(wanted).max())
    )


def test_scores_of_a_mixed_batch_are_those_of_transformers(
    llm: Any, with_consumer: Any, reference: Any, weights: torch.Tensor
) -> None:
    bias = [0.5, -1.0, 0.0]
    with_consumer(ProbeConsumer(weights.numpy(), bias, layer=2))
    for output, prompt in zip(generate(llm, PROMPTS, temperature=0), PROMPTS, strict=True):
        tokens = [*prompt, *output.outputs[0].token_ids]
        expected = reference(tokens)[2] @ weights.T + torch.tensor(bias)
        check(output.consumer_results["probe"].payload, expected, range(len(tokens) - 1))


def test_each_of_n_samples_gets_its_own_scores(
    llm: Any, with_consumer: Any, reference: Any, weights: torch.Tensor
) -> None:
    with_consumer(ProbeConsumer(weights[0], layer=-1))
    outputs = generate(llm, PROMPTS, n=3, temperature=1.0)
    samples = [(p, s) for p, o in zip(PROMPTS, outputs, strict=True) for s in o.outputs]
    assert len({tuple(sample.token_ids) for _, sample in samples}) > len(PROMPTS)
    for prompt, sample in samples:
        tokens = [*prompt, *sample.token_ids]
        payload = sample.consumer_results["probe"].payload
        check(payload, reference(tokens)[3] @ weights[0], range(len(tokens) - 1))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_only_tokens_of_the_phase_are_scored(
    llm: Any, with_consumer: Any, reference: Any, weights: torch.Tensor, phase: Any
) -> None:
    with_consumer(ProbeConsumer(weights[1], layer=0, phase=phase))
    prompt = PROMPTS[1]
    (output,) = generate(llm, [prompt], temperature=0)
    tokens = [*prompt, *output.outputs[0].token_ids]
    asked = {"prefill": range(len(prompt)), "decode": range(len(prompt), len(tokens) - 1)}
    payload = output.consumer_results["probe"].payload
    check(payload, reference(tokens)[0] @ weights[1], asked[phase])


def test_a_sequence_without_a_token_in_the_phase_has_no_result(
    llm: Any, with_consumer: Any, weights: torch.Tensor
) -> None:
    with_consumer(ProbeConsumer(weights[1], phase="decode"))
    (output,) = generate(llm, [PROMPTS[0]], temperature=0, max_tokens=1)
    assert output.consumer_results == {}


def test_a_request_that_turns_the_probe_off_has_no_result(
    llm: Any, with_consumer: Any, weights: torch.Tensor
) -> None:
    with_consumer(ProbeConsumer(weights[1]))
    (output,) = generate(llm, [PROMPTS[0]], temperature=0, consumers={"probe": {"enabled": False}})
    assert output.consumer_results == {}


def test_two_probes_with_their_own_names_work_side_by_side(
    llm: Any, with_consumer: Any, reference: Any, weights: torch.Tensor
) -> None:
    with_consumer(ProbeConsumer(weights[0], layer=0))
    with_consumer(ProbeConsumer(weights[0], layer=1, consumer_id="second"))
    (output,) = generate(llm, [PROMPTS[0]], temperature=0)
    tokens = [*PROMPTS[0], *output.outputs[0].token_ids]
    for name, layer in (("probe", 0), ("second", 1)):
        expected = reference(tokens)[layer] @ weights[0]
        check(output.consumer_results[name].payload, expected, range(len(tokens) - 1))


def test_a_spec_string_reads_the_probe_from_a_file(
    llm: Any, with_consumer: Any, reference: Any, weights: torch.Tensor, tmp_path: Path
) -> None:
    save_file({"weight": weights[2].clone(), "bias": torch.tensor(2.0)}, tmp_path / "p.safetensors")
    with_consumer(f"probe:path={tmp_path / 'p.safetensors'},layer=1")
    (output,) = generate(llm, [PROMPTS[2]], temperature=0)
    tokens = [*PROMPTS[2], *output.outputs[0].token_ids]
    expected = reference(tokens)[1] @ weights[2] + 2.0
    check(output.consumer_results["probe"].payload, expected, range(len(tokens) - 1))


def test_a_probe_of_another_models_size_is_refused_when_it_is_registered(llm: Any) -> None:
    with pytest.raises(ValueError, match="weight is for hidden size 64, and the model's is 128"):
        llm.register_consumer(ProbeConsumer(np.ones(64), consumer_id="too small"))


def test_bad_arguments_are_refused_with_the_field_and_what_is_allowed(tmp_path: Path) -> None:
    ones = np.ones(HIDDEN)
    save_file({"w": torch.ones(2)}, tmp_path / "other.safetensors")
    (tmp_path / "empty.safetensors").touch()
    whole = (tmp_path / "other.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-1])
    for arguments, message in (
        ({}, "either weight="),
        ({"path": tmp_path / "empty.safetensors"}, "empty.safetensors' is damaged, or no file of"),
        ({"path": tmp_path / "cut.safetensors"}, "cut.safetensors' is damaged, or no file of"),
        ({"weight": ones, "path": "p.safetensors"}, "either weight="),
        ({"path": "p.safetensors", "bias": 1.0}, "put 'bias' into the file"),
        ({"path": tmp_path / "none.safetensors"}, "is not a .safetensors file"),
        ({"path": tmp_path / "other.safetensors"}, "holds w; it must hold 'weight'"),
        ({"weight": np.ones((1, 2, 3))}, r"weight has shape \[1, 2, 3\]"),
        ({"weight": ones, "bias": [1.0, 2.0]}, r"bias has shape \[2\].*give a number"),
        ({"weight": "abc"}, "weight is 'abc'; give a list of numbers, an array or a tensor"),
        ({"weight": ones * np.nan}, "weight has values that are NaN, infinite or beyond float32"),
        ({"weight": [0.5, True]}, r"weight\[1\] is True; give a number"),
        ({"weight": [0.5], "bias": True}, "bias=True is not a number"),
        ({"weight": ones, "site": "middle"}, "unknown hook point 'middle'"),
        ({"weight": ones, "phase": "later"}, "phase='later' is not known"),
    ):
        with pytest.raises(ValueError, match=message):
            ProbeConsumer(**arguments)  # type: ignore[arg-type]


def test_an_unknown_option_of_a_spec_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no options \['layr'\]"):
        consumer_from_spec("probe:layr=1")

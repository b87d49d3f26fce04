"""The reference against what `transformers` says of itself, and against its own definitions."""

from __future__ import annotations

import pytest
import torch

from tllm.verify.places import AS_LLAMA, PLACES

from .families import CONFIGS, HIDDEN, LAYERS, REQUIRED, SURVEYED
from .reference_process import ReferenceProcess

PROMPT = [11, 45, 7, 98, 23, 64, 5, 130, 77]
EVERYWHERE = torch.ones(64)


def _vector(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed))


def test_families_of_the_contract_come_first() -> None:
    assert len(REQUIRED) == 21


def test_every_kind_of_model_in_the_table_of_places_is_surveyed() -> None:
    kinds = {kind for kind, _ in (CONFIGS | SURVEYED).values()}
    inner = {"qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}  # language models of three
    assert {*PLACES, *AS_LLAMA} <= kinds | inner
    assert not PLACES.keys() & AS_LLAMA


@pytest.mark.parametrize("family", CONFIGS)
def test_streams_are_the_hidden_states_that_transformers_reports(
    family: str, reference: ReferenceProcess
) -> None:
    states = reference.capture(family, PROMPT)
    hidden = reference.hidden_states(family, PROMPT)
    for layer in range(LAYERS):
        torch.testing.assert_close(states["pre_attn"][layer], hidden[layer])
    torch.testing.assert_close(states["embed"][None], hidden[0])
    if family != "gemma3n":  # of several streams the last state is not normed
        torch.testing.assert_close(states["lm_head_in"][None], hidden[LAYERS])


@pytest.mark.parametrize("family", [family for family in CONFIGS if family != "gemma3n"])
def test_branches_sum_to_the_one_stream_there_is(family: str, reference: ReferenceProcess) -> None:
    states = reference.capture(family, PROMPT)
    if "attn_out" not in states:
        pytest.skip("the branches of this family are no tensors of their own")
    for layer in range(LAYERS):
        before, after = states["pre_attn"][layer], states["post_block"][layer]
        middle = before + states["attn_out"][layer]
        torch.testing.assert_close(middle + states["mlp_out"][layer], after)
        if "post_attn" in states:
            torch.testing.assert_close(states["post_attn"][layer], middle)


@pytest.mark.parametrize("family", CONFIGS)
def test_write_at_each_point_changes_what_comes_after_and_nothing_before(
    family: str, reference: ReferenceProcess
) -> None:
    plain = reference.capture(family, PROMPT)
    late = torch.zeros(64)
    late[4:] = 1
    for point, layer in reference.places(family):
        if layer not in (1, None):
            continue
        steered = reference.capture(family, PROMPT, {(point, layer): (_vector(), late)})
        torch.testing.assert_close(steered[point][layer], plain[point][layer])
        # Rounding: an expert works on rows together, and those after may have gone to another.
        before, limit = plain["post_block"][2][:4], 1e-5 * float(plain["post_block"][2].abs().max())
        torch.testing.assert_close(steered["post_block"][2][:4], before, atol=limit, rtol=1e-5)
        if point == "embed":
            assert not torch.allclose(steered["pre_attn"][0][4:], plain["pre_attn"][0][4:])
        else:
            torch.testing.assert_close(steered["post_block"][0], plain["post_block"][0])
        if point != "lm_head_in":
            assert not torch.allclose(steered["post_block"][2][4:], plain["post_block"][2][4:])


@pytest.mark.parametrize("family", CONFIGS)
def test_names_of_one_stream_are_one_point(family: str, reference: ReferenceProcess) -> None:
    as_leaving = {("post_block", 0): (_vector(), EVERYWHERE)}
    as_entering = {("pre_attn", 1): (_vector(), EVERYWHERE)}
    torch.testing.assert_close(
        reference.logits(family, PROMPT, as_leaving), reference.logits(family, PROMPT, as_entering)
    )


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_is_what_transformers_generates(family: str, reference: ReferenceProcess) -> None:
    assert reference.greedy(family, PROMPT, 6) == reference.generated(family, PROMPT, 6)

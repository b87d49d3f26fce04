"""Names of hook points."""

from __future__ import annotations

import pytest

from tllm.spec.hooks import HookPoint


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("block_input", HookPoint.PRE_ATTN),
        ("attn_input", HookPoint.ATTN_IN),
        ("attn_output", HookPoint.ATTN_OUT),
        ("mlp_input", HookPoint.MLP_IN),
        ("mlp_output", HookPoint.MLP_OUT),
        ("block_output", HookPoint.POST_BLOCK),
        *((point.value, point) for point in HookPoint),
        *((point, point) for point in HookPoint),
    ],
)
def test_names_and_aliases_are_understood(name: str, point: HookPoint) -> None:
    assert HookPoint.parse(name) is point


@pytest.mark.parametrize("name", ["residual", "", "PRE_ATTN", 3, None])
def test_unknown_name_is_refused_with_what_is_allowed(name: object) -> None:
    with pytest.raises(
        ValueError, match=r"unknown hook point .*pre_attn, .*block_input = pre_attn"
    ):
        HookPoint.parse(name)  # type: ignore[arg-type]


def test_only_what_enters_the_first_block_and_what_the_head_reads_have_no_layer() -> None:
    alone = [point for point in HookPoint if not point.has_layer]
    assert alone == [HookPoint.EMBED, HookPoint.LM_HEAD_IN]

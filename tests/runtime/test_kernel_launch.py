# ruff: noqa: N803 (constants of kernels are upper case)
"""A kernel that is launched again computes what it would compute when launched anew."""

from __future__ import annotations

import random

import pytest
import torch

from tllm.kernel_launch import RepeatedLaunch

pytestmark = pytest.mark.kernels

triton = pytest.importorskip("triton")
tl = triton.language

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@RepeatedLaunch
@triton.jit
def _scaled_sum(left, right, out, count, step, factor, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(left + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(right + at * step, mask=inside, other=0.0).to(tl.float32)
    if TWICE:
        value *= 2.0
    tl.store(out + at, value * factor, mask=inside)


def test_kinds_of_arguments_are_told_apart() -> None:
    """Aligned rows and others, dtypes, numbers that Triton compiles in: in any order, twice."""
    pick = random.Random(0)
    cases = [
        (left, right, offset, count, step, twice)
        for left in (torch.float32, torch.bfloat16)
        for right in (torch.float32, torch.float16)
        for offset in (0, 1, 4, 8)
        for count in (1, 16, 100, 257, 512)
        for step in (1, 2, 16)
        for twice in (False, True)
    ]
    for left_dtype, right_dtype, offset, count, step, twice in pick.sample(cases, 240) * 2:
        left, right = torch.randn(1024), torch.randn(16 * 1024)
        left = left.to(DEVICE, left_dtype)[offset : offset + count]
        right = right.to(DEVICE, right_dtype)[offset:]
        out = torch.full((count + 8,), -7.0, device=DEVICE)
        factor = pick.choice([0.5, 3.0])
        grid = (triton.cdiv(count, 128),)
        _scaled_sum[grid](left, right, out, count, step, factor, BLOCK=128, TWICE=twice)
        expected = (left.float() + right[: count * step : step].float()) * (2 if twice else 1)
        assert torch.equal(out[:count], expected * factor)
        assert (out[count:] == -7).all()


def test_constants_must_come_last() -> None:
    if not hasattr(_scaled_sum.kernel, "params"):
        pytest.skip("an interpreted kernel says nothing of its parameters")

    @triton.jit
    def first(BLOCK: tl.constexpr, out):
        tl.store(out, BLOCK)

    with pytest.raises(ValueError, match="not its last parameters"):
        RepeatedLaunch(first)

"""What the interpreter does from records is what it does without: the first launch of a kernel
records, and the next ones have other numbers of the same types."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from tllm.runtime.kernels.backend import INTERPRETED

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not INTERPRETED, reason="about Triton's interpreter"),
]


@triton.jit
def _of_two(first_ptr, second_ptr, out_ptr, number, size: tl.constexpr):
    at = tl.arange(0, size)
    first = tl.load(first_ptr + at, mask=at < number, other=-1.0)
    second = tl.load(second_ptr + at)
    tl.store(out_ptr + at, first * second)
    tl.store(out_ptr + size + at, first * first)
    tl.store(out_ptr + 2 * size + at, tl.where(first > second, first, 2.0))
    tl.store(out_ptr + 3 * size + at, (first.to(tl.int32) // 3 + 1 + number).to(tl.float32))
    tl.store(out_ptr + 4 * size + at, tl.maximum(first, second) - tl.sum(second, axis=0))
    tl.store(out_ptr + 5 * size + at, first.to(tl.float16).to(tl.float32))


@pytest.mark.parametrize("number", [8, 5])
def test_other_numbers_of_the_same_types(number: int) -> None:
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        first, second = (4 * torch.randn(8, generator=generator) for _ in range(2))
        out = torch.zeros(6, 8)
        _of_two[(1,)](first, second, out, number, size=8)
        first[number:] = -1.0
        expected = [
            first * second,
            first * first,
            torch.where(first > second, first, 2.0),
            torch.div(first.to(torch.int32), 3, rounding_mode="trunc") + 1.0 + number,
            torch.maximum(first, second) - second.sum(),
            first.half().float(),
        ]
        torch.testing.assert_close(out, torch.stack(expected))


@triton.jit
def _of_one(source_ptr, other_ptr, masked, out_ptr):
    other = tl.load(other_ptr)
    tl.store(out_ptr, tl.load(source_ptr, mask=masked != 0, other=other))
    tl.store(out_ptr + 1 + tl.program_id(0), 1 + 2 * tl.program_id(0))


@pytest.mark.parametrize("order", [(0, 7), (7, 0)])
def test_what_is_loaded_in_place_of_a_masked_scalar(order: tuple[int, int]) -> None:
    """Triton's interpreter asks whether the scalar is zero."""
    source, out = torch.tensor([5]), torch.zeros(4, dtype=torch.int64)
    for other in order * 2:
        for masked in (0, 1):
            _of_one[(3,)](source, torch.tensor([other]), masked, out)
            assert out.tolist() == [5 if masked else other, 1, 3, 5]


@triton.jit
def _of_constants(out_ptr, positive: tl.constexpr, whole: tl.constexpr):
    one = tl.load(out_ptr)
    tl.store(out_ptr + 1, one / positive)
    tl.store(out_ptr + 2, (tl.load(out_ptr).to(tl.int32) / 2 * whole).to(tl.float32))


@pytest.mark.parametrize(
    ("positive", "whole"), [(0.0, 1), (-0.0, 1), (2.0, 1), (2, 1.5), (True, True)]
)
def test_constants_that_are_equal_are_told_apart(positive: Any, whole: Any) -> None:
    out = torch.tensor([1.0, 0.0, 0.0])
    _of_constants[(1,)](out, positive, whole)
    assert out[1] == torch.tensor(1.0) / positive
    assert out[2] == 0.5 * whole


@triton.jit
def _product(source_ptr, out_ptr):
    tl.store(out_ptr, tl.load(source_ptr) * tl.load(source_ptr + 1))


def test_overflow_is_told_of_numbers_that_came_later() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    for numbers in ((2, 3), (5, 7)):
        _product[(1,)](torch.tensor(numbers, dtype=torch.int32), out)
        assert out[0] == numbers[0] * numbers[1]
    with pytest.raises(Exception, match="int32 overflow detected for operation mul"):
        _product[(1,)](torch.tensor([2**20, 2**20], dtype=torch.int32), out)

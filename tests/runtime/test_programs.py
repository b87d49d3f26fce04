"""Which of a token's captured rows belong to which taps."""

import pytest
import torch

from tllm.runtime.columns import DECODE
from tllm.runtime.programs import Program
from tllm.spec.hooks import HookPoint

TAPS = tuple((HookPoint.POST_BLOCK, layer) for layer in range(4))
APART = TAPS[3], TAPS[0], TAPS[2]


def rows_of(taps, device):
    rows = torch.arange(2.0 * len(TAPS), device=device).view(2, len(TAPS), 1)
    return rows, torch.stack([rows[:, TAPS.index(tap)] for tap in taps], 1)


@pytest.mark.parametrize("taps", [TAPS, TAPS[1:3], APART])
def test_rows_of_taps_are_found_in_their_order(taps):
    program = Program(1, DECODE, TAPS, ())
    rows, expected = rows_of(taps, "cpu")
    for _ in range(2):
        assert torch.equal(program.block(rows, taps), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")
def test_a_stream_waits_for_no_upload_of_another():
    """Consumers of different windows may ask a program for the same taps."""
    program = Program(1, DECODE, TAPS, ())
    rows, expected = rows_of(APART, "cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10**9)
        late = program.block(rows, APART)
    assert torch.equal(program.block(rows, APART), expected)
    torch.cuda.synchronize()
    assert torch.equal(late, expected)

"""Copies to the host, into memory that is there already."""

import pytest
import torch

from tllm.runtime.transfer import CopyInto

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_rows_may_lie_apart():
    rows = torch.randn(5, 2, 3, device=DEVICE)
    memory = torch.full((5, 4, 2, 3), torch.nan, pin_memory=DEVICE == "cuda")
    arrived = CopyInto(rows, memory[:, 1]).wait()
    assert torch.equal(arrived, rows.cpu()) and arrived.data_ptr() == memory[0, 1].data_ptr()
    assert memory[:, [0, 2, 3]].isnan().all()


@pytest.mark.parametrize(
    "memory", [torch.zeros(4, 3), torch.zeros(5, 3, dtype=torch.float16)], ids=["shape", "dtype"]
)
def test_memory_that_is_not_alike_is_refused(memory):
    with pytest.raises(ValueError, match=r"of shape \[5, 3\].*give memory that is alike"):
        CopyInto(torch.zeros(5, 3, device=DEVICE), memory)

"""What crosses to the process of plain `transformers` is what was sent."""

from __future__ import annotations

import torch

from tllm.verify.plain_process import PlainProcess


def test_tensors_of_any_kind_cross_as_they_are():
    rows = torch.arange(12.0).reshape(3, 4)
    sent = {
        "rows": rows,
        "a view": rows.T[1:],
        "one number": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "tokens": torch.tensor([3, 5]),
        "mask": rows > 4,
        "bfloat16": rows.bfloat16(),
        "learned": torch.nn.Parameter(rows.clone()),
        "with a gradient": rows.clone().requires_grad_(),
    }
    process = PlainProcess(threads=1)
    try:
        found = process.ask(dict, sent)
    finally:
        process.close()
    for name, tensor in sent.items():
        assert (type(found[name]), found[name].dtype) == (type(tensor), tensor.dtype), name
        assert found[name].requires_grad == tensor.requires_grad, name
        assert torch.equal(found[name], tensor), name
    assert found["rows"].add_(1)[0, 0] == 1  # it may be written to

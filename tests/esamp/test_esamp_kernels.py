"""Every Triton kernel against the PyTorch reference of the same name, on random shapes."""

import random

import pytest
import torch

from tllm.consumers.esamp import kernels, reference
from tllm.consumers.esamp.distiller import AdamW
from tllm.consumers.esamp.norm import Identity, RmsNorm

pytestmark = pytest.mark.kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BFLOAT16 = {"rtol": 2e-2, "atol": 2e-2}
FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}


class Case:
    """Random sizes and tensors."""

    def __init__(self, seed, dtype):
        pick = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.slots = pick.randint(1, 4)
        self.width = pick.choice([1, 2, 5, 16, 33])
        self.hidden = pick.choice([8, 24, 100])
        self.rank = pick.choice([1, 3, 8, 16])
        self.tolerance = FLOAT32 if dtype == torch.float32 else BFLOAT16

    def tensor(self, *shape, dtype=None):
        return torch.randn(shape, generator=self.generator).to(DEVICE, dtype or self.dtype)

    def integers(self, low, high, *shape):
        values = torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)
        return values.to(DEVICE)

    def norm(self):
        return RmsNorm(self.tensor(self.hidden, dtype=torch.float32), 1e-6)

    def same(self, *pairs):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, **self.tolerance)


@pytest.fixture(params=range(6))
def seed(request):
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def case(request, seed):
    return Case(seed, request.param)


def both(case, name, outputs, *arguments):
    """Run reference and kernel on copies of the outputs; compare them."""
    results = []
    for ops in (reference, kernels):
        copies = [output.clone() for output in outputs]
        getattr(ops, name)(*arguments, *copies)
        results.append(copies)
    case.same(*zip(results[1], results[0], strict=True))
    return results[1]


def test_gather_rows(case):
    rows = case.tensor(9, 2 * case.hidden)[:, : case.hidden]
    index = case.integers(-1, 9, case.slots, case.width)
    both(case, "gather_rows", [case.tensor(*index.shape, case.hidden)], rows, index)


def test_gate(case):
    projected = case.tensor(case.slots, case.width, 2 * case.rank)
    bias = case.tensor(case.slots, 3 * case.rank)[:, case.rank : 2 * case.rank]
    both(case, "gate", [case.tensor(case.slots, case.width, case.rank)], projected, bias)


def test_gate_backward(case):
    projected = case.tensor(case.slots, case.width, 2 * case.rank)
    bias = case.tensor(case.slots, 3 * case.rank)[:, : case.rank]
    grad = case.tensor(case.slots, case.width, case.rank)
    outputs = [torch.zeros_like(projected), torch.zeros_like(bias)]
    both(case, "gate_backward", outputs, grad, projected, bias)


@pytest.mark.parametrize("normed", [True, False])
def test_scatter_predictions(case, normed):
    x, branch = case.tensor(2, case.slots, case.width, case.hidden)
    norm = case.norm() if normed else Identity()
    places = case.slots * case.width
    order = torch.randperm(places, generator=case.generator, dtype=torch.int32).to(DEVICE)
    index = torch.where(order % 4 == 3, -1, order).view(case.slots, case.width)
    results = []
    for ops in (reference, kernels):
        out = torch.zeros(places + 1, case.hidden, dtype=case.dtype, device=DEVICE)
        ops.scatter_predictions(x, branch, norm, index, out)
        results.append(out[:-1])
    case.same(results)


@pytest.mark.parametrize("normed", [True, False])
def test_loss_backward(case, normed):
    x, branch, target = case.tensor(3, case.slots, case.width, case.hidden)
    counts = case.integers(0, case.width + 1, case.slots)
    norm = case.norm() if normed else Identity()
    outputs = [
        case.tensor(case.slots, case.width, dtype=torch.float32),
        case.tensor(case.slots, case.width, case.hidden),
    ]
    row_loss, grad = both(case, "loss_backward", outputs, x, branch, target, counts, norm)
    padding = torch.arange(case.width, device=DEVICE) >= counts.unsqueeze(-1)
    assert not row_loss[padding].any()
    assert not grad[padding].any()


def test_open_update(seed):
    case = Case(seed, torch.float32)
    slots = 5
    row_loss = case.tensor(slots, case.width, dtype=torch.float32).square()
    row_loss[1, 0] = float("nan")
    row_loss[2, 0] = float("inf")
    counts = case.integers(0, case.width + 1, slots)
    counts[1:3] = case.width
    adamw = AdamW(1e-3, (0.9, 0.95), 1e-8, 0.01)
    outputs = [
        torch.rand(slots, 2, generator=case.generator).to(DEVICE),
        case.tensor(slots, 5),
        torch.zeros(slots, dtype=torch.int32, device=DEVICE),
    ]
    _, _, active = both(case, "open_update", outputs, row_loss, counts, adamw)
    assert active[1:3].tolist() == [0, 0]


@pytest.mark.parametrize("shadow_dtype", [torch.float32, torch.bfloat16])
def test_update(seed, shadow_dtype):
    case = Case(seed, torch.float32)
    size = 64 * (seed + 1) * 11
    active = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
    corrections = torch.rand(3, 2, generator=case.generator).to(DEVICE) + 0.1
    grads = case.tensor(3, size).to(shadow_dtype)
    adamw = AdamW(1e-2, (0.9, 0.95), 1e-8, 0.1)
    results = []
    for ops in (reference, kernels):
        generator = torch.Generator().manual_seed(seed)
        state = [torch.rand(3, size, generator=generator).to(DEVICE) for _ in range(3)]
        weights, mean, square = state
        shadow = weights.to(shadow_dtype, copy=True)
        before = weights.clone()
        ops.update(weights, grads, mean, square, shadow, active, corrections, adamw)
        assert torch.equal(weights[1], before[1])
        # Triton's interpreter truncates where a GPU rounds.
        torch.testing.assert_close(shadow.float(), weights, rtol=2**-7, atol=0)
        results.append(state)
    case.same(*zip(results[1], results[0], strict=True))

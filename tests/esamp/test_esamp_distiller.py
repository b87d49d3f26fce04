"""The reference mathematics against autograd and torch's own AdamW."""

import pytest
import torch
from esamp_driver import forward

from tllm.consumers.esamp import distiller
from tllm.consumers.esamp.distiller import AdamW, Layout
from tllm.consumers.esamp.norm import CallableNorm, Identity, RmsNorm


def make_norm(name, hidden):
    if name == "identity":
        return Identity()
    if name == "rms":
        return RmsNorm(torch.rand(hidden, dtype=torch.float64) + 0.5, 1e-6)
    layer_norm = torch.nn.LayerNorm(hidden, dtype=torch.float64)
    torch.nn.init.normal_(layer_norm.weight)
    torch.nn.init.normal_(layer_norm.bias)
    return CallableNorm(layer_norm.requires_grad_(False), torch.float64)


@pytest.mark.parametrize("leading", [(), (3,)])
def test_gradients_of_the_gate_equal_autograd(leading):
    torch.manual_seed(0)
    projected = torch.randn(*leading, 5, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(*leading, 3, dtype=torch.float64, requires_grad=True)
    gated = distiller.gate(projected, bias)
    grad = torch.randn_like(gated)
    expected = torch.autograd.grad(gated, (projected, bias), grad)
    torch.testing.assert_close(distiller.gate_backward(grad, projected, bias), expected)


@pytest.mark.parametrize("norm_name", ["identity", "rms", "layer_norm"])
def test_gradients_of_norms_equal_autograd(norm_name):
    torch.manual_seed(0)
    norm = make_norm(norm_name, 10)
    z = torch.randn(3, 5, 10, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(z)
    (expected,) = torch.autograd.grad(norm.forward(z), z, grad)
    torch.testing.assert_close(norm.backward(z.detach(), grad), expected)


def test_forward_is_the_papers_formula():
    torch.manual_seed(0)
    hidden, rank = 6, 2
    layout = Layout(hidden, rank)
    weights = layout.views(torch.randn(layout.size))
    x = torch.randn(4, hidden)
    a, g = weights.project_in[:, :rank], weights.project_in[:, rank:]
    b, out = weights.gate_bias, weights.project_out
    expected = x + ((x @ a) * torch.nn.functional.silu(x @ g + b)) @ out
    torch.testing.assert_close(forward(x, weights, Identity()), expected)


def test_a_new_distiller_says_the_norm_of_its_input():
    layout = Layout(8, 4)
    norm = RmsNorm(torch.rand(8), 1e-6)
    x = torch.randn(3, 8)
    prediction = forward(x, layout.views(layout.initial(7)), norm)
    assert torch.equal(prediction, norm.forward(x))
    assert torch.equal(layout.initial(7), layout.initial(7))
    assert not torch.equal(layout.initial(7), layout.initial(8))


def test_any_norm_can_be_pulled_back_in_inference_mode():
    layer_norm = torch.nn.LayerNorm(6).requires_grad_(False)
    norm = CallableNorm(layer_norm, torch.float32)
    z = torch.randn(4, 6, requires_grad=True)
    grad = torch.randn(4, 6)
    (expected,) = torch.autograd.grad(layer_norm(z), z, grad)
    with torch.inference_mode():
        found = norm.backward(z.detach() * 1, grad * 1)
    torch.testing.assert_close(found, expected)


def test_adamw_equals_torchs_for_many_steps():
    torch.manual_seed(0)
    adamw = AdamW(lr=3e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    weight = torch.randn(1, 20)
    expected = weight[0].clone().requires_grad_()
    optimizer = torch.optim.AdamW([expected], 3e-2, (0.9, 0.99), 1e-8, 0.1)
    mean, square, corrections = torch.zeros(1, 20), torch.zeros(1, 20), torch.zeros(1, 2)
    for _ in range(100):
        expected.grad = torch.randn(20) * 1e-3
        optimizer.step()
        corrections = adamw.bias_corrections(corrections)
        adamw.update(weight, expected.grad[None], mean, square, corrections)
    torch.testing.assert_close(weight[0], expected.detach(), rtol=1e-4, atol=1e-5)

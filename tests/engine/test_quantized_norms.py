"""What the compiler makes of a norm with its tap, and of the FP8 numbers that are made of it."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

from tllm.engine import quantized_norms
from tllm.engine.quantized_norms import QuantizedNorms
from tllm.runtime import ops
from tllm.runtime.columns import PLAN_ROWS
from tllm.runtime.descriptor import DESCRIPTOR_WIDTH

ROWS, HIDDEN = 7, 64


@pytest.fixture(scope="module")
def config():
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    return config


@pytest.fixture
def quantizers(config):
    """With a scale of each row's own, and with one that is given."""
    with set_current_vllm_config(config):
        return [
            QuantFP8(static, shape, compile_native=False)
            for static, shape in ((False, GroupShape.PER_TOKEN), (True, GroupShape.PER_TENSOR))
        ]


def rows_and_tables():
    torch.manual_seed(0)
    stream, residual = torch.randn(2, ROWS, HIDDEN).bfloat16()
    tables = torch.zeros(DESCRIPTOR_WIDTH, dtype=torch.int64), torch.full((PLAN_ROWS, 16), -1)
    return stream, residual, torch.rand(HIDDEN).bfloat16(), tables[0], tables[1].to(torch.int32)


def compiled(function, change):
    """As vLLM compiles a model, but for the code that is made of the graph in the end."""
    graphs = []

    def lower(module, _):
        change(module.graph)
        module.recompile()
        graphs.append(module.graph)
        return module

    backend = aot_autograd(fw_compiler=lower, decompositions=select_decomp_table())
    return torch.compile(function, fullgraph=True, backend=backend), graphs


def called(graph):
    """How often each of our ops is in a graph."""
    names = [str(node.target) for node in graph.nodes if str(node.target).startswith("tllm.")]
    return {name: names.count(name) for name in set(names)}


@torch.no_grad()
def test_numbers_of_fp8_are_made_with_the_norm_where_nobody_else_reads_it(config, quantizers):
    by_row, given = quantizers
    change = QuantizedNorms(config)
    scale = torch.tensor([0.01])

    def block(stream, residual, weight, desc, plan):
        def norm(stream, residual, eps=1e-6, plus_one=False):
            return ops.tap_norm(stream, residual, weight, eps, desc, plan, False, plus_one)

        normed, residual = norm(stream, residual, 1e-2, True)
        numbers, scales = by_row.forward_native(normed)
        normed, residual = norm(stream * 2, residual)
        others, _ = given.forward_native(normed, scale)
        normed, residual = norm(stream * 3, residual)
        last, last_scales = by_row.forward_native(normed)
        return numbers.float() * scales, others.float(), residual, last.float(), last_scales, normed

    asked = rows_and_tables()
    expected = block(*asked)
    run, graphs = compiled(block, change)
    found = run(*asked)
    [graph] = graphs
    assert change.matched == 2
    assert called(graph) == {"tllm.tap_norm_fp8.default": 2, "tllm.tap_norm.default": 1}
    dequantized, others, *rest = zip(found, expected, strict=True)
    # The compiler does not round what is normed to bfloat16 in between.
    for ours, theirs in (dequantized, others):
        torch.testing.assert_close(ours, theirs, rtol=1 / 8, atol=1e-2)
    for ours, theirs in rest:
        assert torch.equal(ours, theirs)


def test_vllm_can_copy_the_pass_and_know_it_again(config):
    one = QuantizedNorms(config)
    assert copy.deepcopy({"pass": one})["pass"] is one
    assert one.uuid() == QuantizedNorms(config).uuid()


def test_only_formats_whose_numbers_are_known_are_computed_with_their_taps(config):
    def can(written="float-quantized", *, name="compressed-tensors", taken=None, **more):
        options = {} if taken is None else {quantized_norms._key(): taken}
        compiling = {"mode": CompilationMode.VLLM_COMPILE, "backend": "inductor", **more}
        compiling["pass_config"] = SimpleNamespace(fuse_norm_quant=more.get("fused", False))
        return quantized_norms.can_fuse(
            SimpleNamespace(
                quant_config=SimpleNamespace(get_name=lambda: name, quant_format=written),
                compilation_config=SimpleNamespace(**compiling, inductor_compile_config=options),
            )
        )

    assert can() and can("pack-quantized") and can(taken=QuantizedNorms(config))
    assert not can("nvfp4-pack-quantized") and not can(name="fp8")
    assert not can(fused=True) and not can(taken=lambda graph: None)
    assert not can(mode=CompilationMode.NONE) and not can(backend="eager")

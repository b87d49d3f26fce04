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
from vllm.platforms import current_platform

from tllm.engine import quantized_norms
from tllm.engine.quantized_norms import QuantizedNorms
from tllm.runtime import ops
from tllm.runtime.columns import PLAN_ROWS
from tllm.runtime.descriptor import DESCRIPTOR_WIDTH

ROWS, HIDDEN, GROUPS = 7, 64, 2


@pytest.fixture(scope="module")
def config():
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    config.compilation_config.pass_config.fuse_norm_quant = True  # as where FP8 has its kernels
    return config


@pytest.fixture
def quantizers(config):
    """With a scale of each row's own, and with one that is given."""
    with set_current_vllm_config(config):
        return [
            QuantFP8(static, shape, compile_native=False)
            for static, shape in ((False, GroupShape.PER_TOKEN), (True, GroupShape.PER_TENSOR))
        ]


@pytest.fixture(scope="module")
def group_quantization():
    """The schema of vLLM's kernel for groups of numbers, which a CPU has not."""
    if quantized_norms._group_quantization() is not None:
        yield
        return
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(
        "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s,"
        " int group_size, float eps, float fp8_min, float fp8_max, bool scale_ue8m0,"
        " bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()"
    )
    library.impl("per_token_group_fp8_quant", lambda *given: None, "Meta")
    yield
    library._destroy()


def rows_and_tables(hidden=HIDDEN):
    torch.manual_seed(0)
    stream, residual = torch.randn(2, ROWS, hidden).bfloat16()
    tables = torch.zeros(DESCRIPTOR_WIDTH, dtype=torch.int64), torch.full((PLAN_ROWS, 16), -1)
    return stream, residual, torch.rand(hidden).bfloat16(), tables[0], tables[1].to(torch.int32)


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


def block_with_groups(eps, plus_one, powers):
    """Norms, and numbers of FP8 with a scale for each group of a row's, in both layouts of scales.

    The function also takes what quantizes; vLLM's kernel on a GPU, if nothing is given.
    """

    def quantized(normed, by_group):
        numbers = torch.empty(normed.shape, dtype=torch.float8_e4m3fn)
        shape = (GROUPS, ROWS) if by_group else (ROWS, GROUPS)
        scales = torch.empty(shape).permute(-1, -2) if by_group else torch.empty(shape)
        fixed = quantized_norms._GROUP, 1e-10, -448.0, 448.0, powers, by_group, False
        torch.ops._C.per_token_group_fp8_quant(normed, numbers, scales, *fixed)
        return numbers, scales

    def block(stream, residual, weight, desc, plan, quantized=quantized):
        found = []
        for by_group in (False, True):
            normed, residual = ops.tap_norm(
                stream, residual, weight, eps, desc, plan, False, plus_one
            )
            numbers, scales = quantized(normed, by_group)
            found += [numbers.float(), scales]
        return *found, residual

    return block, rows_and_tables(GROUPS * quantized_norms._GROUP)


as_vllm_has_it = torch._inductor.config.patch(enable_auto_functionalized_v2=False)


@torch.no_grad()
@pytest.mark.parametrize(
    ("eps", "plus_one", "powers"),
    [(1e-2, False, False), (1e-2, True, False), (1e-6, False, True)],
    ids=["any norm", "any norm of Gemma", "powers of two, fused by vLLM"],
)
@pytest.mark.usefixtures("group_quantization")
def test_scales_of_groups_are_made_with_the_norm(config, eps, plus_one, powers):
    """A CPU cannot call the kernel for groups: had it not been replaced, this would fail."""
    with set_current_vllm_config(config):
        shape = GroupShape(1, quantized_norms._GROUP)
        quantize = QuantFP8(False, shape, use_ue8m0=False, compile_native=False)
    change = QuantizedNorms(config)
    block, asked = block_with_groups(eps, plus_one, powers)
    expected = block(*asked, lambda normed, _: quantize.forward_native(normed.float()))
    run, graphs = compiled(block, change)
    with as_vllm_has_it:
        found = run(*asked)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    [graph] = graphs
    assert change.matched == 2 and not called(graph)


@torch.no_grad()
@pytest.mark.parametrize(
    ("eps", "plus_one", "fuses", "wide"),
    [
        (1e-2, False, True, False),
        (1e-6, True, True, False),
        (1e-6, False, False, False),
        (1e-6, False, True, True),
    ],
    ids=["another epsilon", "a norm of Gemma", "not told to", "weights in float32"],
)
@pytest.mark.usefixtures("group_quantization")
def test_powers_of_two_are_left_to_vllm_where_it_fuses_nothing(config, eps, plus_one, fuses, wide):
    """There its scales are rounded."""
    told = copy.deepcopy(config)
    told.compilation_config.pass_config.fuse_norm_quant = fuses
    change = QuantizedNorms(told)
    block, (stream, residual, weight, *tables) = block_with_groups(eps, plus_one, powers=True)
    asked = stream, residual, weight.float() if wide else weight, *tables
    run, graphs = compiled(block, change)
    with as_vllm_has_it, pytest.raises(NotImplementedError, match="per_token_group_fp8_quant"):
        run(*asked)
    [graph] = graphs
    assert change.matched == 0 and called(graph) == {"tllm.tap_norm.default": 2}


def test_vllm_can_copy_the_pass_and_know_it_again(config):
    one = QuantizedNorms(config)
    assert copy.deepcopy({"pass": one})["pass"] is one
    assert one.uuid() == QuantizedNorms(config).uuid()


def test_only_formats_whose_numbers_are_known_are_computed_with_their_taps(config, monkeypatch):
    def can(written="float-quantized", *, name="compressed-tensors", taken=None, **more):
        options = {} if taken is None else {quantized_norms._key(): taken}
        compiling = {"mode": CompilationMode.VLLM_COMPILE, "backend": "inductor", **more}
        return quantized_norms.can_fuse(
            SimpleNamespace(
                quant_config=SimpleNamespace(get_name=lambda: name, quant_format=written),
                compilation_config=SimpleNamespace(**compiling, inductor_compile_config=options),
            )
        )

    assert can() and can("pack-quantized") and can(taken=QuantizedNorms(config))
    assert can(None, name="fp8") and can(None, name="auto_awq")
    assert not can("nvfp4-pack-quantized") and not can(None, name="bitsandbytes")
    assert not can(taken=lambda graph: None)
    with monkeypatch.context() as other:
        other.setattr(type(current_platform), "fp8_dtype", lambda *_: torch.float8_e4m3fnuz)
        assert not can()
    assert not can(mode=CompilationMode.NONE) and not can(backend="eager")

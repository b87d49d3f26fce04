"""Norms of quantized models, each as one kernel with the tap before it and, where linear layers
multiply FP8 numbers, with those that are made of its rows.

Of a model in FP8, torch.compile makes one kernel of a norm and of the quantization behind it. So
that a tap costs no launch there either, a pass over the compiler's graph puts one of ours in the
place of `tap_norm` with vLLM's `QuantFP8` behind it. With a scale for each group of a row's numbers
vLLM quantizes by a kernel of its own, or by one that norms, too; ours is put in its place.
Where the pass finds something else behind a norm, nothing is changed: the norm's rows are rounded
to the model's dtype, and quantized then, as vLLM does without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch._higher_order_ops import auto_functionalized
from torch._inductor.pattern_matcher import (
    PatternMatcherPass,
    fwd_only,
    register_replacement,
    stable_topological_sort,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, get_fp8_min_max
from vllm.platforms import current_platform

from tllm.engine.seams import overrides, uses
from tllm.runtime.kernels.tap_norm import FP8, LEAST_OF_GROUP

_FUSED = "a tap and a norm are computed together with the FP8 numbers that are made of its rows"
uses("vllm.compilation.passes.inductor_pass.InductorPass", "hash_source", _FUSED)
uses(
    "vllm.model_executor.layers.quantization.input_quant_fp8",
    "QuantFP8",
    _FUSED,
    takes="static group_shape compile_native",
)
uses(
    "vllm.model_executor.layers.quantization.input_quant_fp8.QuantFP8",
    "forward_native",
    _FUSED,
    takes="x scale",
)
uses("vllm.platforms.interface.Platform", "pass_key fp8_dtype", _FUSED)
uses(
    "vllm.model_executor.layers.quantization.utils.quant_utils.GroupShape",
    "PER_TOKEN PER_TENSOR",
    _FUSED,
)
uses(
    "vllm.model_executor.layers.quantization.utils.quant_utils",
    "get_fp8_min_max",
    _FUSED,
)
uses(
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
    ".CompressedTensorsConfig",
    "quant_format",
    _FUSED,
)
uses("vllm.config", "CompilationMode", _FUSED)
uses("vllm.config.CompilationConfig", "inductor_compile_config mode backend pass_config", _FUSED)
uses("vllm.config.compilation.PassConfig", "fuse_norm_quant", _FUSED)

_COMPARED = {
    "auto_awq": None,
    "auto_gptq": None,
    "compressed-tensors": {"float-quantized", "int-quantized", "pack-quantized"},
    "fp8": None,
    "online": None,
}
"""Ways of quantizing whose linear layers quantize their input not at all, by a kernel of their own,
or by `QuantFP8`, and of which formats (None: of all): what the norm before them gives is rounded to
the model's dtype, or matched here. Others are not listed until they were compared on a GPU; of
`online`, FP8 was."""


def can_fuse(vllm_config: Any) -> bool:
    """Whether norms of this quantized model are computed as vLLM does, if with their taps.

    Not where somebody else's pass has the only place for one, nor on a device with other numbers of
    FP8 than ours.
    """
    compiling = vllm_config.compilation_config
    quantized = vllm_config.quant_config
    return (
        quantized is not None
        and _was_compared(quantized)
        and compiling.mode == CompilationMode.VLLM_COMPILE
        and compiling.backend == "inductor"
        and current_platform.fp8_dtype() == FP8
        and isinstance(_pass_of(compiling), QuantizedNorms | None)
    )


def _was_compared(quantized: Any) -> bool:
    name = quantized.get_name()
    formats = _COMPARED.get(name)
    return name in _COMPARED and (formats is None or quantized.quant_format in formats)


def fuse(vllm_config: Any) -> None:
    """Have the compiler compute FP8 numbers with the norms that taps are part of. Before the model
    is made, which takes a copy of the compiler's options."""
    compiling = vllm_config.compilation_config
    compiling.inductor_compile_config[_key()] = QuantizedNorms(vllm_config)


def _pass_of(compiling: Any) -> Any:
    return compiling.inductor_compile_config.get(_key())


def _key() -> str:
    """Of the passes over a graph that is ready to be lowered, in the compiler's options."""
    return str(current_platform.pass_key)


def _any_norm(_: Any) -> bool:
    return True


def _is_fused_by_vllm(match: Any) -> bool:
    """Whether vLLM, told to, would make one kernel of a norm and its quantization."""
    eps, stream, weight = (match.kwargs[name] for name in ("eps", "stream", "weight"))
    return eps in (1e-5, 1e-6) and stream.meta["val"].dtype == weight.meta["val"].dtype


class QuantizedNorms(InductorPass):  # type: ignore[misc]
    """Puts `tap_norm_fp8` in the place of `tap_norm` and what `QuantFP8` makes of its rows.

    Attributes:
        matched: how often, in all graphs.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.matched = 0
        self._patterns = PatternMatcherPass(pass_name="tllm_quantized_norms")
        dtype = vllm_config.model_config.dtype
        fuses = vllm_config.compilation_config.pass_config.fuse_norm_quant
        with set_current_vllm_config(vllm_config, check_compile=False), FakeTensorMode():
            by_row = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN, compile_native=False)
            given = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR, compile_native=False)
            for plus_one in (False, True):
                self._register(by_row, plus_one, _examples(dtype))
                self._register(given, plus_one, [*_examples(dtype), torch.empty(1)])
                powers = (False, True) if fuses and not plus_one else (False,)
                for scales in product(powers, (False, True), (False, True)):
                    self._register_groups(scales, plus_one, _examples(dtype))

    def _register(self, quantize: Any, plus_one: bool, examples: list[torch.Tensor]) -> None:
        """Have numbers of FP8 behind a norm looked for.

        Args:
            quantize: a `QuantFP8`, which finds each row's scale, or is given one for all.
        """

        def told(numbers: Any, added: Any, scales: Any) -> tuple[Any, ...]:
            return (numbers, added) if quantize.static else (numbers, added, scales)

        def pattern(scale: Any, *norm: Any) -> tuple[Any, ...]:
            normed, added = torch.ops.tllm.tap_norm(*norm, False, plus_one)
            numbers, scales = quantize.forward_native(normed, scale)
            return told(numbers, added, scales)

        def replacement(scale: Any, *norm: Any) -> tuple[Any, ...]:
            return told(*torch.ops.tllm.tap_norm_fp8(*norm, False, scale, plus_one))

        named = _with_scale if quantize.static else _without_scale
        self._replace(named(pattern), named(replacement), examples)

    def _register_groups(
        self, scales: tuple[bool, bool, bool], plus_one: bool, examples: list[torch.Tensor]
    ) -> None:
        """Have numbers of FP8 with a scale for each group of a row's looked for.

        Args:
            scales: what is asked of them: to be powers of two, as with DeepGEMM's products; those
                of the same group of all rows side by side; and padded to as many as a GPU's tensor
                memory accelerator asks for. A norm that vLLM fuses with its quantization has no
                powers of two nevertheless, since its kernel has no such scales, and so have ours
                none. Other norms with powers of two are left to vLLM.
        """
        quantize = _group_quantization()
        if quantize is None:
            return
        names = [each.name for each in quantize._schema.arguments]
        fixed = _GROUP, LEAST_OF_GROUP, *get_fp8_min_max(), *scales
        fused = torch.ops.tllm.tap_norm_fp8_groups.default

        def pattern(numbers: Any, found: Any, *norm: Any) -> tuple[Any, ...]:
            normed, added = torch.ops.tllm.tap_norm(*norm, False, plus_one)
            given = dict(zip(names, (normed, numbers, found, *fixed), strict=True))
            _, numbers, found = auto_functionalized(quantize, **given)
            return numbers, added, found

        def replacement(_: Any, found: Any, *norm: Any) -> Any:
            given = dict(zip(_NORM, norm, strict=True))
            more = {"scales": found, "check": False, "plus_one": plus_one}
            return auto_functionalized(fused, **given, **more)

        rows, hidden = examples[0].shape
        buffers = torch.empty(rows, hidden, dtype=FP8), torch.empty(rows, 1)
        examples = [*examples, *buffers]
        powers, *_ = scales
        check = _is_fused_by_vllm if powers else _any_norm
        self._replace(_with_buffers(pattern), _with_buffers(replacement), examples, check)

    def _replace(
        self,
        pattern: Callable[..., Any],
        replacement: Callable[..., Any],
        examples: list[torch.Tensor],
        check: Callable[[Any], bool] = _any_norm,
    ) -> None:
        register_replacement(
            pattern,
            replacement,
            examples,
            fwd_only,
            self._patterns,
            extra_check=check,
            scalar_workaround={"eps": _ANY_EPS},
        )

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Change a graph in place."""
        self.matched += self._patterns.apply(graph)
        # Ours stands where a norm's sum was, which may be before what takes its scales.
        stable_topological_sort(graph)

    def __deepcopy__(self, memo: Any) -> QuantizedNorms:
        """vLLM copies the compiler's options, of which this is one."""
        return self

    @overrides(
        "vllm.compilation.passes.inductor_pass.InductorPass.uuid", "the compiler's cache knows it"
    )
    def uuid(self) -> Any:
        """What the compiler's cache tells it apart by."""
        return self.hash_source(type(self))


_ANY_EPS = 1.25e-6
"""Stands for whatever a norm has, where a pattern is traced; nowhere else in it is this number."""
_NORM = "stream", "residual", "weight", "eps", "desc", "plan"
_GROUP = 128
"""Numbers of a row that have a scale together, in all models with blocks of weights."""


def _group_quantization() -> Any:
    """vLLM's op that quantizes rows by groups, where it has one that is called as ours expects."""
    op = getattr(torch.ops._C, "per_token_group_fp8_quant", None)
    return op.default if op is not None and len(op.default._schema.arguments) == 10 else None


def _examples(dtype: torch.dtype) -> list[torch.Tensor]:
    """Stream, residual, weight, descriptor and plan, of any size."""
    rows = torch.empty(5, 16, dtype=dtype), torch.empty(5, 16, dtype=dtype)
    words = torch.empty(64, dtype=torch.int64), torch.empty(8, 5, dtype=torch.int32)
    return [*rows, torch.empty(16, dtype=dtype), *words]


def _with_scale(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function with its arguments by name, by which the compiler knows them again."""
    return lambda stream, residual, weight, eps, desc, plan, scale: run(
        scale, stream, residual, weight, eps, desc, plan
    )


def _without_scale(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same, where no scale is given."""
    return lambda stream, residual, weight, eps, desc, plan: run(
        None, stream, residual, weight, eps, desc, plan
    )


def _with_buffers(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same, where numbers and scales are written to what is there for them."""
    return lambda stream, residual, weight, eps, desc, plan, numbers, scales: run(
        numbers, scales, stream, residual, weight, eps, desc, plan
    )

"""Finds the output projection of an attention, and how what it reads is divided into heads."""

from __future__ import annotations

from typing import Any

from torch import nn

from tllm.spec.hooks import HeadSplit

_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo")
_KERNELS = ("Attention", "MLAAttention")
"""vLLM's own modules, of which each attention of its models has one."""


def find_heads(
    block: nn.Module, path: str, config: Any, tensor_parallel_size: int
) -> tuple[str, HeadSplit]:
    """The path in `block` of the output projection of the attention at `path`, and its heads.

    Raises `ValueError` with the reason where there is none whose rows are as wide as the stream,
    which rings and tables of taps are.

    Args:
        config: of the language model.
    """
    modules = dict(block.named_modules())
    if path not in modules:
        raise ValueError("it has no attention, and so no heads")
    attention = modules[path]
    kernels = [
        module
        for module in attention.modules()
        if any(cls.__name__ in _KERNELS for cls in type(module).__mro__)
    ]
    if not kernels and not is_of_transformers(attention):
        kind = type(attention).__name__
        raise ValueError(f"what mixes its tokens ({kind}) is no attention with heads")
    found = [
        f"{path}.{name}".lstrip(".")
        for name, module in attention.named_modules()
        if name.rpartition(".")[2] in _PROJECTIONS and _width(module)
    ]
    if len(found) != 1:
        raise ValueError(f"its output projection is not sure among {found or 'its modules'}")
    if tensor_parallel_size > 1:
        raise ValueError(
            f"with tensor_parallel_size={tensor_parallel_size} every rank holds a part of the heads"
        )
    width = _width(modules[found[0]])
    heads = kernels[0].num_heads if kernels else config.num_attention_heads
    if not isinstance(heads, int) or width % heads:
        raise ValueError(f"{width} numbers are not divided evenly into {heads} heads")
    if width != config.hidden_size:
        raise ValueError(
            f"its {heads} heads of {width // heads} are {width} numbers, and what is tapped must "
            f"be as wide as the residual stream, {config.hidden_size}"
        )
    return found[0], HeadSplit(heads, width // heads)


def is_of_transformers(module: nn.Module) -> bool:
    """Whether it is an attention of `transformers`, whose kernel vLLM keeps elsewhere."""
    return any(
        cls.__name__.endswith("Attention") and cls.__module__.startswith("transformers.models.")
        for cls in type(module).__mro__
    )


def _width(module: nn.Module) -> int:
    """How many numbers a linear layer reads, on all ranks together; 0 for anything else."""
    for name in ("input_size", "in_features"):
        if isinstance(width := getattr(module, name, None), int):
            return width
    return 0

"""Finds the queries, keys and values of an attention: what its kernel is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tllm.models.heads import is_of_transformers
from tllm.spec.hooks import HeadSplit, HookPoint

ARGUMENTS: Mapping[HookPoint, str] = {
    HookPoint.Q: "query",
    HookPoint.K: "key",
    HookPoint.V: "value",
}
"""The arguments of `forward` of vLLM's `Attention`."""


def find_attention_inputs(
    block: nn.Module, path: str, hidden: int, tensor_parallel_size: int
) -> tuple[str, dict[HookPoint, HeadSplit | str]]:
    """The path in `block` of the kernel of the attention at `path`, and for each of `ARGUMENTS` how
    it is divided into heads, or why it can not be tapped.

    Raises `ValueError` with the reason where none can.

    Args:
        hidden: the width of the residual stream.
    """
    modules = dict(block.named_modules())
    if path not in modules:
        raise ValueError("it has no attention")
    if is_of_transformers(modules[path]):  # its hooks would not be called
        raise ValueError("vLLM's Transformers backend calls the kernel's forward by itself")
    classes = {
        f"{path}.{name}".lstrip("."): {cls.__name__ for cls in type(module).__mro__}
        for name, module in modules[path].named_modules()
    }
    if any("MLAAttention" in names for names in classes.values()):
        raise ValueError("its attention keeps keys and values in a compressed form")
    found = [
        name
        for name, names in classes.items()
        if "Attention" in names and hasattr(modules[name], "num_kv_heads")
    ]
    if len(found) != 1:
        kind = type(modules[path]).__name__
        raise ValueError(f"{kind} holds {len(found)} of vLLM's attention kernels, and not one")
    if tensor_parallel_size > 1:
        raise ValueError(
            f"with tensor_parallel_size={tensor_parallel_size} every rank holds a part of the heads"
        )
    kernel: Any = modules[found[0]]
    dims = kernel.head_size, kernel.head_size, getattr(kernel, "head_size_v", kernel.head_size)
    counts = kernel.num_heads, kernel.num_kv_heads, kernel.num_kv_heads
    shared = getattr(kernel, "kv_sharing_target_layer_name", None)
    inputs: dict[HookPoint, HeadSplit | str] = {}
    for point, count, dim in zip(ARGUMENTS, counts, dims, strict=True):
        split = HeadSplit(count, dim)
        inputs[point] = split
        if point is not HookPoint.Q and shared is not None:
            inputs[point] = f"it uses the keys and values of another layer ({shared})"
        elif split.width > hidden:
            inputs[point] = (
                f"its {count} heads of {dim} are {split.width} numbers, and what is tapped may not "
                f"be wider than the residual stream, {hidden}"
            )
    return found[0], inputs

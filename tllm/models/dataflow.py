"""Recognises an unlisted model by what its `forward` does, so that no hook point is guessed."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

LLAMA_BLOCK = (
    "v0 = input_layernorm(hidden_states, residual)",
    "v1 = self_attn(v0[0])",
    "v2 = post_attention_layernorm(v1, v0[1])",
    "v3 = mlp(v2[0])",
    "return v3, v2[1]",
)
LLAMA_FIRST_BLOCK = (
    "v0 = input_layernorm(hidden_states)",
    "v1 = self_attn(v0)",
    "v2 = post_attention_layernorm(v1, hidden_states)",
    "v3 = mlp(v2[0])",
    "return v3, v2[1]",
)


def check_llama_block(block: nn.Module) -> None:
    """Raises `ValueError` unless `block.forward` moves the stream exactly as Llama's does."""
    for concrete, expected in (({}, LLAMA_BLOCK), ({"residual": None}, LLAMA_FIRST_BLOCK)):
        found = _dataflow(block, ("hidden_states", "residual"), concrete)
        if found != expected:
            raise ValueError(
                f"its block computes [{'; '.join(found)}], not Llama's [{'; '.join(expected)}]"
            )


def check_llama_stack(stack: nn.Module, first: int, last: int) -> bool:
    """Whether `stack.forward` ends in `norm`.

    Raises `ValueError` unless it only chains `layers[first:last]` and `norm`. On the ranks of a
    pipeline that lack the embedding or the norm, the chain starts from, or ends in, vLLM's
    intermediate tensors.
    """
    lines = list(_dataflow(stack, ("inputs_embeds", "intermediate_tensors"), {}))
    if "inputs_embeds" in lines[0]:
        streams = ["inputs_embeds"]
    else:
        streams = ["intermediate_tensors['hidden_states']", "intermediate_tensors['residual']"]
    expected = []
    for number, layer in enumerate(range(first, last)):
        expected.append(f"v{number} = layers.{layer}({', '.join(streams)})")
        streams = [f"v{number}[0]", f"v{number}[1]"]
    ends_in_norm = lines[-1].startswith(f"return v{len(expected)}[0]")
    if ends_in_norm:
        number = len(expected)
        expected.append(f"v{number} = norm({', '.join(streams)})")
        expected.append(f"return v{number}[0]")
    else:
        expected.append(f"return {', '.join(streams)}")
    if lines != expected:
        differs = next(found for found, want in zip(lines, expected, strict=False) if found != want)
        raise ValueError(f"its model does more than chain the blocks: {differs!r}")
    return ends_in_norm


class _Tracer(fx.Tracer):
    """Traces one `forward`; every submodule is a leaf."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def keys(self, obj: fx.Proxy) -> Any:
        # `**kwargs` of a block: what a caller might add beside the stream is not followed.
        return ()

    def create_arg(self, a: Any) -> Any:
        # What the stack returns on a pipeline's earlier ranks; fx knows no such type.
        is_intermediate = type(a).__name__ == "IntermediateTensors"
        return super().create_arg(tuple(a.tensors.values()) if is_intermediate else a)


def _dataflow(
    module: nn.Module, streams: tuple[str, ...], concrete: dict[str, Any]
) -> tuple[str, ...]:
    """What `module.forward` computes from the arguments in `streams`, one line a step.

    Values that do not come from a stream (positions, a rotary table) are left out of the lines.
    Raises `ValueError` when the forward cannot be traced.
    """
    try:
        graph = _Tracer().trace(module, concrete_args=concrete)
    except Exception as error:  # whatever the model's own code raises when it meets a proxy
        raise ValueError(f"{type(module).__name__}.forward cannot be traced ({error})") from error
    names: dict[fx.Node, str] = {}
    lines: list[str] = []

    def operands(args: Any) -> list[str]:
        nodes: list[fx.Node] = []
        fx.node.map_arg(args, nodes.append)
        return [names[node] for node in nodes if node in names]

    for node in graph.nodes:
        given = operands((node.args, node.kwargs))
        if node.op == "placeholder":
            if node.target in streams and node.target not in concrete:
                names[node] = node.target
        elif node.op == "output":
            lines.append(f"return {', '.join(given)}")
        elif given and node.target is operator.getitem:
            names[node] = f"{given[0]}[{node.args[1]!r}]"
        elif given:
            names[node] = f"v{len(lines)}"
            what = node.target if isinstance(node.target, str) else node.target.__name__
            lines.append(f"{names[node]} = {what}({', '.join(given)})")
    return tuple(lines)

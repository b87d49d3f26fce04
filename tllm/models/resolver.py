"""Finds the hook points of a loaded vLLM model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from torch import nn

from tllm.models.attention_inputs import ARGUMENTS, find_attention_inputs
from tllm.models.dataflow import check_llama_block, check_llama_stack
from tllm.models.families import FAMILIES, FUSED, Family, Heads, Input, Layout, Output, Written
from tllm.models.heads import find_heads
from tllm.models.routers import find_router
from tllm.models.sites import Argument, ModelSites, Site, forward_owner
from tllm.spec.hooks import HeadSplit, HookPoint, ModelPoints, TapKey


def resolve(
    model: nn.Module,
    tensor_parallel_size: int = 1,
    families: Sequence[Family] = FAMILIES,
    tapped: Iterable[HookPoint] = HookPoint,
    config: Any = None,
) -> ModelSites:
    """The hook points of `model`, and the sites of those on this pipeline rank.

    A model that is not understood has no points, and a reason for each. Under tensor parallelism a
    point whose tensor is a partial sum on every rank is left out.

    Args:
        tapped: the points that the engine is to tap.
        config: of its language model; by default the one that the model holds, as most do.
    """
    root = model.get_language_model() if hasattr(model, "get_language_model") else model
    config = config or model.config.get_text_config()
    tapped = frozenset(tapped)
    try:
        stack = _with_heads(_find_stack(root, families), config, tensor_parallel_size)
        stack = _with_routers(stack, config.hidden_size)
        missing = _missing(stack, tensor_parallel_size)
        points = ModelPoints(
            stack.family,
            stack.num_layers,
            missing,
            tapped,
            stack.linked,
            stack.heads,
            stack.experts,
            stack.one_stream,
        )
        return ModelSites(points, config.hidden_size, _sites(stack, points))
    except (ValueError, AttributeError) as error:  # AttributeError: a submodule that it lacks
        layers = config.num_hidden_layers
        keys = [
            (point, layer)
            for point in HookPoint
            for layer in (range(layers) if point.has_layer else [None])
        ]
        name = f"{type(model).__name__} ({config.model_type})"
        points = ModelPoints(name, layers, dict.fromkeys(keys, str(error)), tapped)
        return ModelSites(points, config.hidden_size, {})


@dataclass(frozen=True)
class _Stack:
    """The decoder blocks of a model on this pipeline rank, each with its layout."""

    family: str
    num_layers: int
    blocks: Mapping[int, tuple[nn.Module, Layout]]
    norm: nn.Module | None
    """The final norm; None where no one module gives what the LM head reads."""
    linked: bool = True
    norm_adds: bool = True
    """Whether what the last block here returns goes to the final norm, if that is here too, and is
    added there."""
    one_stream: bool = True
    heads: Mapping[TapKey, HeadSplit] = field(default_factory=dict)
    """Of the layers here, by each of `HEAD_POINTS` that one has."""
    experts: Mapping[int, int] = field(default_factory=dict)
    """How many there are, in the layers here that have `router`."""


def _with_heads(stack: _Stack, config: Any, tensor_parallel_size: int) -> _Stack:
    """A stack whose layouts name what each attention's kernel and output projection read, or say
    why there is none."""
    blocks = dict(stack.blocks)
    heads: dict[TapKey, HeadSplit] = {}
    for layer, (block, layout) in stack.blocks.items():
        if not isinstance(where := layout[HookPoint.ATTN_HEADS], Heads):
            blocks[layer] = block, {**dict.fromkeys(ARGUMENTS, where), **layout}
            continue
        found: dict[HookPoint, Input | str] = {}
        try:
            key = HookPoint.ATTN_HEADS, layer
            path, heads[key] = find_heads(block, where.path, config, tensor_parallel_size)
            found[HookPoint.ATTN_HEADS] = Input(path)
        except ValueError as error:
            found[HookPoint.ATTN_HEADS] = str(error)
        try:
            path, inputs = find_attention_inputs(
                block, where.path, config.hidden_size, tensor_parallel_size
            )
        except ValueError as error:
            inputs = dict.fromkeys(ARGUMENTS, str(error))
        for point, split in inputs.items():
            if isinstance(split, HeadSplit):
                heads[point, layer] = split
                found[point] = Input(path, ARGUMENTS[point], width=split.width)
            else:
                found[point] = split
        blocks[layer] = block, {**layout, **found}
    return replace(stack, blocks=blocks, heads=heads)


def _with_routers(stack: _Stack, hidden: int) -> _Stack:
    """A stack whose layouts name the routers of its experts, or say why there is none."""
    blocks, experts = dict(stack.blocks), {}
    for layer, (block, layout) in stack.blocks.items():
        if HookPoint.ROUTER in layout:  # nothing of the block is understood
            continue
        found: Output | str
        try:
            path, experts[layer] = find_router(block, hidden)
            found = Output(path, width=experts[layer])
        except ValueError as error:
            found = str(error)
        blocks[layer] = block, {**layout, HookPoint.ROUTER: found}
    return replace(stack, blocks=blocks, experts=experts)


def _find_stack(root: nn.Module, families: Sequence[Family]) -> _Stack:
    """The one stack of decoder blocks under `root`; `ValueError` where none is sure."""
    found = []
    for stack in root.modules():
        owner = forward_owner(stack)
        for layers in {family.layers for family in families if family.stack == owner}:
            blocks = _blocks_here(attrgetter(layers)(stack))
            owners = {forward_owner(block) for block in blocks.values()}
            rows = [
                family for family in families if family.stack == owner and family.block in owners
            ]
            if rows:
                found.append((stack, blocks, rows))
    if len(found) > 1:
        raise ValueError(
            f"it holds {len(found)} stacks of decoder blocks, and which one is meant is unclear"
        )
    return _listed_stack(*found[0]) if found else _llama_like_stack(root)


def _listed_stack(
    stack: nn.Module, blocks: Mapping[int, nn.Module], rows: Sequence[Family]
) -> _Stack:
    chosen = {layer: _row(stack, block, rows) for layer, block in blocks.items()}
    names = dict.fromkeys(row.name for row in chosen.values())
    return _Stack(
        family=" and ".join(names),
        num_layers=len(attrgetter(rows[0].layers)(stack)),
        blocks={layer: (block, chosen[layer].layout) for layer, block in blocks.items()},
        norm=attrgetter(rows[0].norm)(stack) if rows[0].norm else None,
        linked=rows[0].linked,
        norm_adds=rows[0].norm_adds,
        one_stream=rows[0].one_stream,
    )


def _row(stack: nn.Module, block: nn.Module, rows: Sequence[Family]) -> Family:
    """The row that this block of this stack matches; `ValueError` when there is none."""
    owner = forward_owner(block)
    candidates = [row for row in rows if row.block == owner]
    for row in candidates:
        if _has_values(stack, row.stack_is) and _has_values(block, row.block_is):
            return row
    if not candidates:
        raise ValueError(f"its block {owner} is not in the table, though other blocks of it are")
    needs = " or ".join(str({**row.stack_is, **row.block_is}) for row in candidates)
    raise ValueError(f"its block {owner} is known only with {needs}")


def _llama_like_stack(root: nn.Module) -> _Stack:
    """A model that is not in the table but is built, and verifiably computes, as Llama does."""
    for stack in root.modules():
        parts = dict(stack.named_children())
        if isinstance(parts.get("layers"), nn.ModuleList) and "norm" in parts:
            break
    else:
        raise ValueError("it is not in the table of model families, and is not built like Llama")
    blocks = _blocks_here(parts["layers"])
    for block in blocks.values():
        check_llama_block(block)
    ends_in_norm = check_llama_stack(stack, min(blocks), max(blocks) + 1)
    return _Stack(
        family=f"{type(stack).__name__} (like llama)",
        num_layers=len(parts["layers"]),
        blocks={layer: (block, FUSED) for layer, block in blocks.items()},
        norm=parts["norm"],
        norm_adds=ends_in_norm,
    )


def _blocks_here(layers: nn.ModuleList) -> dict[int, nn.Module]:
    return {layer: block for layer, block in enumerate(layers) if not _is_elsewhere(block)}


def _missing(stack: _Stack, tensor_parallel_size: int) -> dict[TapKey, str]:
    """Why, for each hook point that a block of this rank lacks."""
    missing: dict[TapKey, str] = {}
    for layer, (_, layout) in stack.blocks.items():
        for point, where in layout.items():
            if isinstance(where, str):
                missing[point, layer] = where
            elif isinstance(where, Output) and where.partial and tensor_parallel_size > 1:
                missing[point, layer] = (
                    f"with tensor_parallel_size={tensor_parallel_size} every rank holds only a "
                    "term of it, which is summed together with another branch"
                )
    if (why := missing.get((HookPoint.PRE_ATTN, 0))) is not None:
        missing[HookPoint.EMBED, None] = why
    if stack.norm is None:
        missing[HookPoint.LM_HEAD_IN, None] = (
            "no module gives, once in a forward pass, what the LM head reads"
        )
    return missing


def _sites(stack: _Stack, points: ModelPoints) -> dict[TapKey, Site]:
    """The sites of this rank by canonical key, in execution order."""
    sites = _embed_site(stack, points)
    for layer, (block, layout) in stack.blocks.items():
        for point in HookPoint:
            where = layout.get(point)
            key: TapKey = point, layer
            if where is None or key in points.missing or points.canonical(*key) != key:
                continue
            assert not isinstance(where, (str, Heads)), "its reason is among what is missing"
            sites[key] = _site(point, layer, block, where, _norm(stack, layer, where))
    key = HookPoint.LM_HEAD_IN, None
    if stack.norm and key not in points.missing and not _is_elsewhere(stack.norm):
        sites[key] = Site(*key, stack.norm, side="output", stream=0)
    return sites


def _embed_site(stack: _Stack, points: ModelPoints) -> dict[TapKey, Site]:
    """What enters the first block, if that is on this rank."""
    key: TapKey = HookPoint.EMBED, None
    if 0 not in stack.blocks or key in points.missing:
        return {}
    block, layout = stack.blocks[0]
    where = layout[HookPoint.PRE_ATTN]
    assert not isinstance(where, (str, Heads)), "its reason is among what is missing"
    return {key: _site(*key, block, where, None)}


def _norm(stack: _Stack, layer: int, where: Input | Output | Written) -> nn.Module | None:
    """The norm that takes what passes here, if it is on this rank."""
    if isinstance(where, Written):
        return None
    if isinstance(where, Input):
        return stack.blocks[layer][0].get_submodule(where.path) if where.is_norm else None
    if where.next_norm is None or not stack.linked:
        return None
    if layer + 1 in stack.blocks:
        return stack.blocks[layer + 1][0].get_submodule(where.next_norm)
    last = layer + 1 == stack.num_layers and stack.norm_adds
    return stack.norm if last and stack.norm and not _is_elsewhere(stack.norm) else None


def _site(
    point: HookPoint,
    layer: int | None,
    block: nn.Module,
    where: Input | Output | Written,
    norm: nn.Module | None,
) -> Site:
    module = block.get_submodule(where.path)
    if isinstance(where, Written):
        return Site(point, layer, module, "output", _argument(module, where.stream))
    item = None if where.active is None else attrgetter(where.active)(block)
    if isinstance(where, Output):
        return Site(
            point,
            layer,
            module,
            "output",
            stream=0,
            residual=where.residual,
            norm=norm,
            width=where.width,
            item=item,
        )
    residual = None if where.residual is None else _argument(module, where.residual)
    stream = _argument(module, where.stream)
    return Site(
        point, layer, module, "input", stream, residual, where.private, norm, where.width, item
    )


def _argument(module: nn.Module, given: int | str) -> Argument:
    """The argument of `module.forward` with this keyword or position, as a call may pass it."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    named = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if isinstance(given, int):
        # vLLM's norms take `*args`, and are called with positions.
        return Argument(named[given] if given < len(named) else None, given)
    if given not in named:
        raise ValueError(f"{type(module).__name__}.forward has no argument {given!r}")
    return Argument(given, named.index(given))


def _has_values(module: nn.Module, values: Mapping[str, object]) -> bool:
    """Whether these attributes exist and have these values, or one of several."""
    try:
        found = {path: attrgetter(path)(module) for path in values}
    except AttributeError:
        return False
    return all(
        found[path] in value if isinstance(value, tuple) else found[path] == value
        for path, value in values.items()
    )


def _is_elsewhere(module: nn.Module) -> bool:
    """Whether `module` is vLLM's placeholder for one on another pipeline rank."""
    return type(module).__name__ == "PPMissingLayer"

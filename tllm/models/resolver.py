"""Finds the hook points of a loaded vLLM model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from torch import nn

from tllm.models.dataflow import check_llama_block, check_llama_stack
from tllm.models.families import FAMILIES, FUSED, Family, Input, Layout, Output
from tllm.models.sites import Argument, ModelSites, Site, SiteKey
from tllm.spec.hooks import HookPoint


def resolve(
    model: nn.Module, tensor_parallel_size: int = 1, families: Sequence[Family] = FAMILIES
) -> ModelSites:
    """The hook points of `model`, and the sites of those on this pipeline rank.

    A model that is not understood has no points, and a reason for each. Under tensor parallelism a
    point whose tensor is a partial sum on every rank is left out.
    """
    root = model.get_language_model() if hasattr(model, "get_language_model") else model
    config = model.config.get_text_config()
    try:
        stack = _find_stack(root, families)
    except ValueError as error:
        return ModelSites(
            family=f"{type(model).__name__} ({config.model_type})",
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            points=(),
            sites={},
            missing={point: str(error) for point in HookPoint},
        )
    missing = _missing(stack, tensor_parallel_size)
    points = tuple(point for point in HookPoint if point not in missing)
    return ModelSites(
        family=stack.family,
        num_layers=stack.num_layers,
        hidden_size=config.hidden_size,
        points=points,
        sites=_sites(stack, points),
        missing=missing,
    )


@dataclass(frozen=True)
class _Stack:
    """The decoder blocks of a model on this pipeline rank, each with its layout."""

    family: str
    num_layers: int
    blocks: Mapping[int, tuple[nn.Module, Layout]]
    norm: nn.Module | None
    """The final norm; None where the model has none."""
    ends_in_norm: bool = True
    """Whether what the last block here returns goes to the final norm, if that is here too."""


def _find_stack(root: nn.Module, families: Sequence[Family]) -> _Stack:
    """The one stack of decoder blocks under `root`; `ValueError` where none is sure."""
    found = []
    for stack in root.modules():
        owner = _forward_owner(stack)
        for layers in {family.layers for family in families if family.stack == owner}:
            blocks = _blocks_here(getattr(stack, layers))
            owners = {_forward_owner(block) for block in blocks.values()}
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
        num_layers=len(getattr(stack, rows[0].layers)),
        blocks={layer: (block, chosen[layer].layout) for layer, block in blocks.items()},
        norm=getattr(stack, rows[0].norm),
    )


def _row(stack: nn.Module, block: nn.Module, rows: Sequence[Family]) -> Family:
    """The row that this block of this stack matches; `ValueError` when there is none."""
    owner = _forward_owner(block)
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
        ends_in_norm=ends_in_norm,
    )


def _blocks_here(layers: nn.ModuleList) -> dict[int, nn.Module]:
    """The blocks of this pipeline rank by layer."""
    return {layer: block for layer, block in enumerate(layers) if not _is_elsewhere(block)}


def _missing(stack: _Stack, tensor_parallel_size: int) -> dict[HookPoint, str]:
    """Why, for each hook point that some block lacks."""
    missing = {}
    for _, layout in stack.blocks.values():
        for point, where in layout.items():
            if isinstance(where, str):
                missing[point] = where
            elif isinstance(where, Output) and where.partial and tensor_parallel_size > 1:
                missing[point] = (
                    f"with tensor_parallel_size={tensor_parallel_size} every rank holds only a "
                    "term of it, which is summed together with another branch"
                )
    if stack.norm is None:
        missing[HookPoint.LM_HEAD_IN] = "it has no final norm"
    return missing


def _sites(stack: _Stack, points: Sequence[HookPoint]) -> dict[SiteKey, Site]:
    """The sites of this rank by canonical key, in execution order."""
    sites: dict[SiteKey, Site] = {}
    for layer, (block, layout) in stack.blocks.items():
        for point in points:
            # pre_attn(i) for i > 0 is post_block(i - 1), whose tap serves both.
            if not point.has_layer or (point is HookPoint.PRE_ATTN and layer > 0):
                continue
            where = layout[point]
            assert not isinstance(where, str), "a point that a block lacks is not among the points"
            sites[point, layer] = _site(point, layer, block, where, _norm(stack, layer, where))
    if HookPoint.LM_HEAD_IN in points and stack.norm and not _is_elsewhere(stack.norm):
        point = HookPoint.LM_HEAD_IN
        sites[point, None] = Site(point, None, stack.norm, side="output", stream=0)
    return sites


def _norm(stack: _Stack, layer: int, where: Input | Output) -> nn.Module | None:
    """The norm that takes what passes here, if it is on this rank."""
    if isinstance(where, Input):
        return stack.blocks[layer][0].get_submodule(where.path) if where.is_norm else None
    if where.next_norm is None:
        return None
    if layer + 1 in stack.blocks:
        return stack.blocks[layer + 1][0].get_submodule(where.next_norm)
    last = layer + 1 == stack.num_layers and stack.ends_in_norm
    return stack.norm if last and stack.norm and not _is_elsewhere(stack.norm) else None


def _site(
    point: HookPoint, layer: int, block: nn.Module, where: Input | Output, norm: nn.Module | None
) -> Site:
    module = block.get_submodule(where.path)
    if isinstance(where, Output):
        return Site(point, layer, module, "output", stream=0, residual=where.residual, norm=norm)
    residual = None if where.residual is None else _argument(module, where.residual)
    stream = _argument(module, where.stream)
    return Site(point, layer, module, "input", stream, residual, where.private, norm)


def _argument(module: nn.Module, given: int | str) -> Argument:
    """The argument of `module.forward` with this keyword or position, as a call may pass it."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    named = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if isinstance(given, int):
        # vLLM's norms take `*args`, and are called with positions.
        return Argument(named[given] if given < len(named) else None, given)
    return Argument(given, named.index(given))


def _forward_owner(module: nn.Module) -> str:
    """`module.Class` of the class whose `forward` this module runs."""
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return f"{owner.__module__.rpartition('.')[2]}.{owner.__qualname__}"


def _has_values(module: nn.Module, values: Mapping[str, object]) -> bool:
    return all(attrgetter(path)(module) == value for path, value in values.items())


def _is_elsewhere(module: nn.Module) -> bool:
    """Whether `module` is vLLM's placeholder for one on another pipeline rank."""
    return type(module).__name__ == "PPMissingLayer"

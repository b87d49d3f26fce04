"""What the resolver says about a loaded model: which hook points it has, and where each is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tllm.spec.hooks import HookPoint, ModelPoints, TapKey

_PACKAGES = "vllm.model_executor.models.", "vllm.models.", "transformers.models."
"""Of the models that the tables of this room were written from."""


def forward_owner(module: torch.nn.Module) -> str:
    """The class whose `forward` this module runs: `file.Class` of a model in vLLM or
    `transformers`, and `module:Class` of any other, which may have the names of one of these."""
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    if owner.__module__.startswith(_PACKAGES):
        return f"{owner.__module__.rpartition('.')[2]}.{owner.__qualname__}"
    return f"{owner.__module__}:{owner.__qualname__}"


@dataclass(frozen=True)
class Argument:
    """One argument of a module's `forward`, found however the caller passes it.

    name: its keyword, None where `forward` takes `*args`.
    index: its position, not counting `self`; None where it is keyword-only.
    """

    name: str | None
    index: int | None

    def get(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The argument's value in this call; None where the call leaves it out."""
        if self.index is not None and self.index < len(args):
            return args[self.index]
        return None if self.name is None else kwargs.get(self.name)

    def replace(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` of the same call with this argument's value replaced."""
        if self.index is not None and self.index < len(args):
            return (*args[: self.index], value, *args[self.index + 1 :]), dict(kwargs)
        assert self.name is not None, "the call does not pass this argument"
        return args, {**kwargs, self.name: value}


@dataclass(frozen=True)
class Site:
    """Where one hook point of one layer is found in a loaded vLLM model.

    The tensor is `[tokens, hidden]`, or `[1, tokens, hidden]` in vLLM's Transformers backend.
    """

    point: HookPoint
    layer: int | None
    """None for a point that belongs to no layer."""
    module: torch.nn.Module
    """The module at whose boundary the tensor passes."""
    side: Literal["input", "output"]
    stream: Argument | int
    """Which argument (side "input"; side "output", where the module writes its result there), or
    which item of the output tuple (side "output"; 0 also where the output is a plain tensor), is
    the tensor."""
    residual: Argument | int | None = None
    """In a model with fused residuals, the argument or item that carries the rest of the stream:
    the point's value is stream + residual. It may be None at run time (the first layer). Adding to
    `stream` alone adds to the sum."""
    private: bool = False
    """The tensor is used elsewhere too (OLMo 2's `attn_in` is the stream itself): a write goes to a
    copy that only this module receives. Otherwise a write is in place."""
    norm: torch.nn.Module | None = None
    """The module that is called next, with this stream and residual as its only arguments: nothing
    reads them before it, but for the auxiliary states that speculative decoding asks for. None
    where the next one is on another pipeline rank, too."""
    width: int | None = None
    """How many numbers the tensor has a token where these are the numbers of heads or experts, at
    most `hidden`: taps see rows that are filled up with zeros, and what they change is put back.
    None elsewhere."""
    item: int | None = None
    """Where a model carries several streams, `[streams, tokens, hidden]`: which of them the tensor
    is. None elsewhere."""


@dataclass(frozen=True)
class ModelSites:
    """The hook points of a model, and the sites of those on this pipeline rank.

    sites: by canonical key, in the order the forward pass reaches them. Two sites may share one
        boundary (OLMo 2's `post_attn` and `mlp_in`): their hooks must run in this order.
    """

    points: ModelPoints
    hidden_size: int
    sites: Mapping[TapKey, Site]

    @property
    def second(self) -> dict[TapKey, TapKey]:
        """By key of `sites`: the hook point that is the same tensor, reached right after it."""
        following: dict[TapKey, TapKey] = {}
        for point, layer in self.sites:
            if point is HookPoint.EMBED:
                following[point, layer] = HookPoint.PRE_ATTN, 0
            elif point is HookPoint.POST_BLOCK and layer is not None and self.points.linked:
                after = HookPoint.PRE_ATTN, layer + 1
                if layer + 1 < self.points.num_layers and after not in self.points.missing:
                    following[point, layer] = after
        return following

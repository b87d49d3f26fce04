"""The hooks by which what passes a module's boundary reaches its tap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from tllm.models.sites import Argument, Site

PLAN_BUFFER = "tllm_plan"
"""The name of the row plan among a module's buffers; a tap's descriptor has one of its own."""

Hook: TypeAlias = Callable[..., Any]
"""Called with the module, its arguments by place and by name, and what it returns if it is called
behind it."""


def hook_of(site: Site, name: str, hidden: int, dtype: torch.dtype, *, check: bool = False) -> Hook:
    """What taps the tensor of a site.

    Args:
        name: of the descriptor among the module's buffers.
        hidden, dtype: of the rows that taps see.
        check: whether rows may have to be finite here; of the output of a module, see
            `can_check`.
    """
    stream = site.stream
    assert not check or can_check(site)
    if site.width is not None:
        tapped = _narrow_tap(name, site.width, hidden, dtype)
        if isinstance(stream, Argument):
            return _narrow_input_hook(tapped, stream)
        return _narrow_output_hook(tapped)
    if site.item is not None:
        tapped = _tap_among(name, site.item)
        if isinstance(stream, Argument):
            return _among_input_hook(tapped, stream)
        return _among_output_hook(tapped)
    return _input_hook(site, name) if site.side == "input" else _output_hook(site, name, check)


def can_check(site: Site) -> bool:
    """Whether rows can be checked where a site is tapped."""
    return site.width is None and site.item is None and site.side == "output"


def add_hook(site: Site, hook: Hook) -> None:
    """Hook the module of a site."""
    if site.side == "input":
        site.module.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        site.module.register_forward_hook(hook, with_kwargs=True)


def unless(resting: Sequence[bool], number: int, hook: Hook) -> Hook:
    """A hook that is skipped while its tap, of this number, has nothing to do.

    Calling the op costs several times as much as this look, and a model has some hundred taps. For
    a CPU alone: a graph keeps what was called when it was made, so that in one every hook must be.
    """

    def hook_unless(module: torch.nn.Module, *given: Any) -> Any:
        if not torch.compiler.is_compiling() and resting[number]:
            return None
        return hook(module, *given)

    return hook_unless


def tapped_norm(eps: float, name: str, *, check: bool = False, plus_one: bool = False) -> Any:
    """The `forward` of a norm that taps what it adds up."""

    def forward(self: Any, stream: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            raise RuntimeError(
                f"{type(self).__name__} is called without the residual that its tap reads too; "
                "start the engine with fuse_norms=False, and report this model"
            )
        descriptor, plan = getattr(self, name), getattr(self, PLAN_BUFFER)
        given = stream, residual, self.weight, eps, descriptor, plan, check, plus_one
        return torch.ops.tllm.tap_norm(*given)

    return forward


def _input_hook(site: Site, name: str) -> Hook:
    """A pre-forward hook that taps an argument in place, or a copy that only the module sees."""
    stream_of, residual_of, private = site.stream, site.residual, site.private
    assert isinstance(stream_of, Argument)
    assert residual_of is None or isinstance(residual_of, Argument)

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream = stream_of.get(args, kwargs)
        residual = None if residual_of is None else residual_of.get(args, kwargs)
        if private:
            stream = stream.clone()
        torch.ops.tllm.tap(stream, residual, getattr(module, name), getattr(module, PLAN_BUFFER))
        return stream_of.replace(args, kwargs, stream) if private else None

    return hook


def _output_hook(site: Site, name: str, check: bool) -> Hook:
    """A forward hook that taps what the module returns, in place."""
    stream_at, residual_at = site.stream, site.residual
    assert not site.private, "the output of a module is its own"
    assert residual_at is None or isinstance(residual_at, int)

    def hook(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        residual = None
        if isinstance(stream_at, Argument):
            stream = stream_at.get(args, kwargs)
        elif isinstance(output, tuple):
            stream = output[stream_at]
            residual = None if residual_at is None else output[residual_at]
        else:
            stream = output
        descriptor, plan = getattr(module, name), getattr(module, PLAN_BUFFER)
        torch.ops.tllm.tap(stream, residual, descriptor, plan, check)

    return hook


def _narrow_tap(name: str, width: int, hidden: int, dtype: torch.dtype) -> Any:
    """What a tap of a module makes of rows `[tokens, width]`, in memory of its own.

    Taps see rows `[tokens, hidden]` in their own dtype. What they leave alone keeps its value, also
    where these rows' dtype has more of it.
    """

    def tapped(module: torch.nn.Module, found: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.pad(found.to(dtype), (0, hidden - width))
        before = rows if found.dtype == dtype else rows[:, :width].clone()
        torch.ops.tllm.tap(rows, None, getattr(module, name), getattr(module, PLAN_BUFFER))
        after = rows[:, :width]
        if found.dtype != dtype:
            after = torch.where(after == before, found, after.to(found.dtype))
        return after

    return tapped


def _narrow_output_hook(tapped: Any) -> Hook:
    """A forward hook that taps what the module returns, in place."""

    def hook(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        found = output[0] if isinstance(output, tuple) else output
        found.copy_(tapped(module, found))

    return hook


def _narrow_input_hook(tapped: Any, stream_of: Argument) -> Hook:
    """A pre-forward hook that taps an argument, of which the module alone receives what is made.

    Heads may have a dimension of their own, `[tokens, heads, head_dim]`.
    """

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = stream_of.get(args, kwargs)
        rows = tapped(module, found.flatten(1))
        return stream_of.replace(args, kwargs, rows.reshape(found.shape))

    return hook


def _tap_among(name: str, item: int) -> Any:
    """A tap of one of several streams `[streams, tokens, hidden]`, in place.

    Its rows may lie apart in memory, so they are tapped in memory of their own.
    """

    def tapped(module: torch.nn.Module, streams: torch.Tensor) -> None:
        rows = streams[item].clone(memory_format=torch.contiguous_format)
        torch.ops.tllm.tap(rows, None, getattr(module, name), getattr(module, PLAN_BUFFER))
        streams[item].copy_(rows)

    return tapped


def _among_input_hook(tapped: Any, stream_of: Argument) -> Hook:
    """A pre-forward hook that taps one of the streams in an argument."""

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tapped(module, stream_of.get(args, kwargs))

    return hook


def _among_output_hook(tapped: Any) -> Hook:
    """A forward hook that taps one of the streams that a module returns."""

    def hook(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        tapped(module, output)

    return hook

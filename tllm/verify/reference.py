"""What plain `transformers` computes in float32 with forward hooks, one sequence at a time.

It shares no code with what it checks. Each run computes everything from the first token, without a
KV cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tllm.verify.places import POINTS, WITHOUT_LAYER, BlockPlace, is_known, places_of

Layer: TypeAlias = int | None
Change: TypeAlias = tuple[str, Tensor, Mapping[str, Any], Tensor]
"""A way to steer or patch, its vector or row [hidden], its parameters, and a mask [positions],
False beyond its end. The parameter `when` is a condition (`gated.Judged`): how much of it is done
to each row."""
Steers: TypeAlias = Mapping[tuple[str, Layer], Sequence[Change]]
"""(hook point, layer) -> what is done there, in order."""
States: TypeAlias = dict[str, dict[Layer, Tensor]]
"""Hook point -> layer -> [tokens, hidden]; layer None for a point of none."""


def _component(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """How far rows lie along a direction, [rows, 1], and the direction."""
    v = w / w.norm()
    return (h @ v)[:, None], v


def _clamped(h: Tensor, w: Tensor, lowest: float, highest: float, strength: float) -> Tensor:
    p, v = _component(h, w)
    return h + strength * (p.clamp(lowest, highest) - p) * v


def _projected(h: Tensor, w: Tensor, value: float) -> Tensor:
    p, v = _component(h, w)
    return h - p * v + value * v


def _multiplied(h: Tensor, w: Tensor, factor: float) -> Tensor:
    p, v = _component(h, w)
    return h - p * v + factor * p * v


def _rotated(h: Tensor, w: Tensor, plane: Tensor, degrees: float, strength: float) -> Tensor:
    first, second = plane.to(h.device)
    first = first / first.norm()
    second = second - (second @ first) * first
    basis = torch.stack([first, second / second.norm()])
    p = h @ basis.T
    angle = torch.deg2rad(torch.tensor(degrees, device=h.device))
    turned = p.norm(dim=1, keepdim=True) * torch.stack([angle.cos(), angle.sin()])
    return h + strength * (turned - p) @ basis


def _mapped(h: Tensor, w: Tensor, strength: float, **given: Tensor) -> Tensor:
    given = {name: array.to(h.device) for name, array in given.items()}
    if "source_std" in given:
        normal = (h - given["source_mean"]) / given["source_std"]
        mapped = given["target_std"] * normal + given["target_mean"]
    else:
        mapped = given["weight"] * h + given["shift"]
    return h + strength * (mapped - h)


def _low_rank(
    h: Tensor, w: Tensor, rotation: Tensor, weight: Tensor, bias: Tensor, strength: float
) -> Tensor:
    rotation, weight, bias = (each.to(h.device) for each in (rotation, weight, bias))
    return h + strength * (h @ weight.T + bias - h @ rotation.T) @ rotation


def _with_features(h: Tensor, w: Tensor, **given: Tensor) -> Tensor:
    given = {name: array.to(h.device) for name, array in given.items()}
    before = (h - given["decoder_bias"]) @ given["encoder"].T + given["encoder_bias"]
    return h + (given["value"] - before.relu()) @ given["decoder"]


def _k_steered(h: Tensor, w: Tensor, **given: Any) -> Tensor:
    given = {k: v.to(h.device) if isinstance(v, Tensor) else v for k, v in given.items()}
    with torch.inference_mode(False), torch.enable_grad():
        row = h.clone().requires_grad_()
        state = F.relu(F.linear(row, given["weight1"], given["bias1"]))
        state = F.relu(F.linear(state, given["weight2"], given["bias2"]))
        logits = F.linear(state, given["last_weight"])
        wanted, avoided = (logits[:, given[key].long()].mean(1) for key in ("target", "avoid"))
        (gradient,) = torch.autograd.grad((avoided - wanted).sum(), row)
    return h - given["alpha"] * gradient


def _patched(h: Tensor, w: Tensor, alpha: float, dimensions: Tensor) -> Tensor:
    return torch.where(dimensions.to(h.device), (1 - alpha) * h + alpha * w, h)


CHANGED: dict[str, Callable[..., Tensor]] = {
    "add": lambda h, w, scale: h + scale * w,
    "norm_match": lambda h, w, scale: h + scale * h.norm(dim=1, keepdim=True) * w / w.norm(),
    "clamp": lambda h, w, **given: _clamped(
        h,
        w,
        given.get("min", given.get("value", -torch.inf)),
        given.get("max", given.get("value", torch.inf)),
        given.get("strength", 1.0),
    ),
    "ablate": lambda h, w: _projected(h, w, 0.0),
    "project": _projected,
    "multiply": _multiplied,
    "rotate": _rotated,
    "affine": _mapped,
    "scale_dimensions": lambda h, w, mask, scale: h + scale * h * mask.to(h.device),
    "low_rank": _low_rank,
    "sae_features": _with_features,
    "k_steering": _k_steered,
    "patch": _patched,
}
"""The rows after each change, from the rows before it, the vector as it was given, and what else
was, arrays included."""


class Reference:
    """A checkpoint, run by `transformers`.

    Args:
        checkpoint: a folder, or a name on the Hugging Face hub.
        rounded: every matrix is rounded to this dtype first, as an engine that serves it has them.
        **options: of `from_pretrained`, such as `revision`.
    """

    def __init__(
        self,
        checkpoint: str,
        rounded: torch.dtype = torch.float32,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        config = AutoConfig.from_pretrained(checkpoint, **options)
        kind = kind_of(config)
        model = kind.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager", **options
        )
        if rounded != torch.float32:
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.copy_(parameter.to(rounded))
        self.model: Any = model.to(device).eval()
        self.model_type: str = config.get_text_config().model_type
        self.blocks = _blocks(self.model)
        self.hidden: int = config.get_text_config().hidden_size
        self.by_layer = [
            places_of(self.model_type, block, self.hidden, config.model_type)
            for block in self.blocks
        ]

    def places(self) -> list[tuple[str, Layer]]:
        """The hook points there are, each with every layer that has it."""
        return [
            (point, layer)
            for point in POINTS
            for layer in ([None] if point in WITHOUT_LAYER else range(len(self.blocks)))
            if layer is None or point in self.by_layer[layer]
        ]

    def doubts(self) -> str:
        """Why the places of a kind of model that nobody looked at may be wrong; "" if not so."""
        if is_known(self.model_type):
            return ""
        states, _ = self.run(list(range(8)))
        streams = states["pre_attn"], states["post_block"]
        for before, after in pairwise(range(len(self.blocks))):
            if not _agree(streams[1][before], streams[0][after]):
                return f"what leaves block {before} is not what enters block {after}"
        for layer in range(len(self.blocks)):
            parts = [states.get(point, {}).get(layer) for point in ("attn_out", "mlp_out")]
            if any(part is None for part in parts):
                return f"block {layer} is not built like Llama's"
            total = streams[0][layer] + sum(part for part in parts if part is not None)
            if not _agree(total, streams[1][layer]):
                return f"the branches of block {layer} do not sum to its stream"
        return ""

    @torch.no_grad()
    def run(self, token_ids: list[int], steers: Steers | None = None) -> tuple[States, Tensor]:
        """What arrives at every hook point, before what is done there, and the logits
        `[tokens, vocab]`."""
        states: States = {}

        def visit(point: str, layer: Layer, tensor: Tensor) -> Tensor:
            """Keeps a copy of the tensor `[1, tokens, hidden]`; returns what to add to it."""
            arrived = tensor.reshape(-1, tensor.shape[-1]).clone()
            width = arrived.shape[1]
            if width < self.hidden:  # the numbers of experts or heads
                arrived = F.pad(arrived, (0, self.hidden - width))
            states.setdefault(point, {})[layer] = arrived.cpu()
            leaving = arrived
            for method, vector, given, mask in (steers or {}).get((point, layer), ()):
                rows = torch.zeros(len(token_ids), dtype=torch.bool, device=arrived.device)
                rows[: len(mask)] = mask[: len(token_ids)]
                given = dict(given)
                when = given.pop("when", None)
                changed = CHANGED[method](leaving, vector.to(arrived.device), **given)
                if when is not None:
                    strength = when.strength(states).to(arrived.device)[:, None]
                    changed = leaving + strength * (changed - leaving)
                leaving = torch.where(rows[:, None], changed, leaving)
            return (leaving - arrived)[:, :width].view_as(tensor)

        with self._hooked(visit):
            tokens = torch.tensor([token_ids], device=self.model.device)
            logits = self.model(tokens, use_cache=False).logits[0]
        return states, logits.float().cpu()

    @contextmanager
    def _hooked(self, visit: Callable[[str, Layer, Tensor], Tensor]) -> Iterator[None]:
        head = self.model.get_output_embeddings()
        handles = [
            _hook(head, BlockPlace("", "input"), partial(visit, "lm_head_in", None)),
            _hook(self.blocks[0], self.by_layer[0]["pre_attn"], partial(visit, "embed", None)),
        ]
        for layer, (block, places) in enumerate(zip(self.blocks, self.by_layer, strict=True)):
            handles += [
                _hook(block, place, partial(visit, point, layer)) for point, place in places.items()
            ]
        try:
            yield
        finally:
            for handle in reversed(handles):  # some stand in for what was there before them
                handle.remove()


def _hook(root: nn.Module, place: BlockPlace, delta: Callable[[Tensor], Tensor]) -> Any:
    """A hook that adds `delta(tensor)` to the tensor at `place`."""

    def changed(tensor: Tensor) -> Tensor:
        if place.item is not None:
            streams = tensor.clone()
            streams[place.item] += delta(tensor[place.item])
            return streams
        difference = delta(tensor)
        return tensor.add_(difference) if place.in_place else tensor + difference

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (changed(args[0]), *args[1:]), kwargs
        name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        return args, kwargs | {name: changed(kwargs[name])}

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (changed(output[0]), *output[1:])
        return changed(output)

    module = place.module(root)
    assert module is not None
    if place.side == "product":
        return _WithinForward(module, changed)
    if place.side in ("query", "key", "value"):
        return _WithinAttention(module, ("query", "key", "value").index(place.side), changed)
    if place.side == "input":
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)


class _WithinForward:
    """Changes what the first product with a matrix gives in a module's `forward`."""

    def __init__(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        self._module, self._forward = module, module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _FirstProduct(change):
                return self._forward(*args, **kwargs)

        module.forward = forward

    def remove(self) -> None:
        self._module.forward = self._forward


class _WithinAttention:
    """Changes what an attention gives the function that compares queries with keys.

    Args:
        index: of the argument, `[1, heads, tokens, head_dim]`.
    """

    def __init__(
        self, attention: nn.Module, index: int, change: Callable[[Tensor], Tensor]
    ) -> None:
        self._names = vars(sys.modules[type(attention).__module__])
        self._forward = self._names["eager_attention_forward"]

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is attention:
                found = args[index].transpose(1, 2)
                made = change(found.flatten(2)).view_as(found).transpose(1, 2)
                if index:  # later layers may have these keys and values too
                    made = args[index].copy_(made)
                args = (*args[:index], made, *args[index + 1 :])
            return self._forward(module, *args, **kwargs)

        self._names["eager_attention_forward"] = forward

    def remove(self) -> None:
        self._names["eager_attention_forward"] = self._forward


class _FirstProduct(TorchFunctionMode):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._change: Callable[[Tensor], Tensor] | None = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is F.linear and self._change is not None:
            change, self._change = self._change, None
            return change(found)
        return found


def kind_of(config: Any) -> Any:
    """`transformers`' class of models with this configuration."""
    return AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM


def _blocks(model: Any) -> nn.ModuleList:
    """The decoder's blocks; `ValueError` where they are not found."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    config = model.config.get_text_config()
    counts = {config.num_hidden_layers, getattr(config, "num_layers", None)}
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) in counts:
            return module
    raise ValueError(f"no list of {config.num_hidden_layers} blocks in {type(model).__name__}")


def _agree(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max()))

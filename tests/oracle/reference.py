"""The oracle: plain `transformers` in float32 with forward hooks, one request at a time.

It shares no code with `tllm/`: where the hook points are is written down here a second time, in
terms of Hugging Face's modules. Each step recomputes everything from the first token, without a KV
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .families import LAYERS, load

Layer = int | None
Writes = Mapping[tuple[str, Layer], tuple[Tensor, Tensor]]
"""(hook point, layer) -> a vector [hidden] to add, and a mask [positions], False beyond its end."""
Change = tuple[str, Tensor, Mapping[str, float], Tensor]
"""A way to steer, its vector [hidden], its parameters, and a mask [positions] as in `Writes`."""
Steers = Mapping[tuple[str, Layer], Sequence[Change]]
"""(hook point, layer) -> what is done there, in order."""
States = dict[str, dict[Layer, Tensor]]
"""Hook point -> layer -> [tokens, hidden]; the layer of `lm_head_in` is None."""


@dataclass(frozen=True)
class Place:
    """A tensor at the boundary of one of the block's modules.

    path: "" is the block; "a|b" is whichever of the two a block has.
    """

    path: str
    side: Literal["input", "output"]
    in_place: bool = False
    """A write changes the tensor for whoever holds it, as the stream at `post_attn` must be."""

    def module(self, block: nn.Module) -> nn.Module | None:
        """The module of this block; None where it has none of them."""
        found = dict(block.named_modules())
        return next((found[path] for path in self.path.split("|") if path in found), None)


def _into(path: str) -> Place:
    return Place(path, "input")


def _out_of(path: str) -> Place:
    return Place(path, "output")


def _stream_at(path: str) -> Place:
    return Place(path, "input", in_place=True)


_LLAMA = {
    "attn_in": _into("self_attn"),
    "attn_out": _out_of("self_attn"),
    "post_attn": _stream_at("post_attention_layernorm"),
    "mlp_in": _into("mlp"),
    "mlp_out": _out_of("mlp"),
}
_SANDWICH = _LLAMA | {
    "attn_out": _out_of("post_attention_layernorm"),
    "post_attn": _stream_at("pre_feedforward_layernorm"),
    "mlp_out": _out_of("post_feedforward_layernorm"),
}
_POST_NORM = _LLAMA | {
    "attn_out": _out_of("post_attention_layernorm"),
    "post_attn": _stream_at("mlp"),
    "mlp_out": _out_of("post_feedforward_layernorm"),
}
_NO_POST_ATTN = {point: place for point, place in _LLAMA.items() if point != "post_attn"}
_ONLY_INPUTS = {point: place for point, place in _LLAMA.items() if not point.endswith("_out")}
_FALCON = _NO_POST_ATTN | {
    "attn_in": _into("self_attention"),
    "attn_out": _out_of("self_attention"),
}


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


STEERED: dict[str, Callable[..., Tensor]] = {
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
}
"""The rows after each way of steering, from the rows before it and the vector as it was given."""

Places = Mapping[str, Place]

_STREAM_ONLY: Places = {}
_MIXER = {"attn_in": _into("mixer"), "attn_out": _out_of("mixer")}
_EXPERTS_AND_MORE = _ONLY_INPUTS | {
    "attn_in": _into("self_attn|mamba"),
    "mlp_in": _out_of("post_attention_layernorm"),
}
_LFM2 = {
    "attn_in": _into("self_attn|conv"),
    "attn_out": _out_of("self_attn|conv"),
    "post_attn": _stream_at("ffn_norm"),
    "mlp_in": _into("feed_forward"),
    "mlp_out": _out_of("feed_forward"),
}
_JAMBA = _LFM2 | {
    "attn_in": _into("self_attn|mamba"),
    "attn_out": _out_of("self_attn|mamba"),
    "post_attn": _stream_at("pre_ff_layernorm"),
}
_LINEAR = _LLAMA | {
    "attn_in": _into("self_attn|linear_attn"),
    "attn_out": _out_of("self_attn|linear_attn"),
}
_ZAMBA2 = {
    "attn_in": _into("mamba|mamba_decoder.mamba"),
    "attn_out": _out_of("mamba|mamba_decoder.mamba"),
}


def _nemotron_h(block: nn.Module) -> Places:
    if block.block_type in ("linear_attention", "full_attention"):
        return _MIXER
    return {"mlp_in": _into("mixer"), "mlp_out": _out_of("mixer")}


def _olmo_hybrid(block: nn.Module) -> Places:
    return _LINEAR if hasattr(block, "linear_attn") else _POST_NORM


PLACES: dict[str, Places | Callable[[nn.Module], Places]] = {
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "gemma3_mm": _SANDWICH,
    "gemma4": _SANDWICH,
    "olmo2": _POST_NORM,
    "olmo3": _POST_NORM,
    "flex_olmo": _POST_NORM,
    "exaone4": _POST_NORM,
    "glm4": _LLAMA
    | {"attn_out": _out_of("post_self_attn_layernorm"), "mlp_out": _out_of("post_mlp_layernorm")},
    "gpt2": _LLAMA
    | {"attn_in": _into("attn"), "attn_out": _out_of("attn"), "post_attn": _stream_at("ln_2")},
    "gpt_bigcode": _LLAMA
    | {"attn_in": _into("attn"), "attn_out": _out_of("attn"), "post_attn": _stream_at("ln_2")},
    "opt": _LLAMA
    | {
        "post_attn": _stream_at("final_layer_norm"),
        "mlp_in": _into("fc1"),
        "mlp_out": _out_of("fc2"),
    },
    "falcon": _FALCON,
    "falcon_one_norm": _FALCON,
    "falcon_first": _FALCON,
    "falcon_sequential": _ONLY_INPUTS | {"attn_in": _into("self_attention")},
    "cohere": _NO_POST_ATTN,
    "cohere2": _NO_POST_ATTN,
    "cohere2_moe": _NO_POST_ATTN,
    "phi": _NO_POST_ATTN,
    "gptj": _NO_POST_ATTN | {"attn_in": _into("attn"), "attn_out": _out_of("attn")},
    "gpt_neox": _NO_POST_ATTN | {"attn_in": _into("attention"), "attn_out": _out_of("attention")},
    "gpt_neox_sequential": _LLAMA
    | {"attn_in": _into("attention"), "attn_out": _out_of("attention")},
    "granite": _ONLY_INPUTS,
    "granite_swa": _ONLY_INPUTS,
    "granitemoe": _EXPERTS_AND_MORE,
    "granitemoe_swa": _EXPERTS_AND_MORE,
    "granitemoeshared": _EXPERTS_AND_MORE,
    "granitemoehybrid": _EXPERTS_AND_MORE,
    "minicpm3": _ONLY_INPUTS,
    "hyperclovax": _ONLY_INPUTS,
    "bloom": _LLAMA
    | {
        # Hugging Face adds the stream inside these two modules; their last layer is the branch.
        "attn_in": _into("self_attention"),
        "attn_out": _out_of("self_attention.dense"),
        "mlp_out": _out_of("mlp.dense_4h_to_h"),
    },
    "afmoe": _LLAMA
    | {
        "attn_out": _out_of("post_attention_layernorm"),
        "post_attn": _stream_at("pre_mlp_layernorm"),
        "mlp_out": _out_of("post_mlp_layernorm"),
    },
    "apertus": _LLAMA | {"post_attn": _stream_at("feedforward_layernorm")},
    "vaultgemma": _LLAMA | {"post_attn": _stream_at("pre_feedforward_layernorm")},
    "llama4": _LLAMA | {"mlp_in": _into("feed_forward"), "mlp_out": _out_of("feed_forward")},
    "longcat_flash": _STREAM_ONLY,
    "dbrx": {
        "attn_in": _into("norm_attn_norm.attn"),
        "attn_out": _out_of("norm_attn_norm.attn"),
        "post_attn": _stream_at("norm_attn_norm.norm_2"),
        "mlp_in": _into("ffn"),
        "mlp_out": _out_of("ffn"),
    },
    "falcon_h1": {
        "post_attn": _stream_at("pre_ff_layernorm"),
        "mlp_in": _into("feed_forward"),
        "mlp_out": _out_of("feed_forward"),
    },
    "jamba": _JAMBA,
    "bamba": _JAMBA,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "mamba": _MIXER,
    "mamba2": _MIXER,
    "falcon_mamba": _MIXER,
    "nemotron_h": _nemotron_h,
    "zamba2": _ZAMBA2,
    "olmo_hybrid": _olmo_hybrid,
    "qwen3_next": _LINEAR,
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": _LINEAR,
}
"""Families that differ from Llama; `pre_attn`, `post_block` and `lm_head_in` are alike in all."""

POINTS = (
    "pre_attn",
    "attn_in",
    "attn_out",
    "post_attn",
    "mlp_in",
    "mlp_out",
    "post_block",
    "lm_head_in",
)


class Reference:
    """One family's checkpoint, run by `transformers`."""

    def __init__(self, family: str, checkpoint: Path) -> None:
        self.model = load(checkpoint)
        self.blocks = next(
            module
            for module in self.model.modules()
            if isinstance(module, nn.ModuleList) and len(module) == LAYERS
        )
        places = PLACES.get(family, _LLAMA)
        self.by_layer = [
            {
                point: place
                for point, place in {
                    "pre_attn": _into(""),
                    **(places(block) if callable(places) else places),
                    "post_block": _out_of(""),
                }.items()
                if place.module(block) is not None
            }
            for block in self.blocks
        ]

    def places(self) -> list[tuple[str, Layer]]:
        """The hook points there are, each with every layer that has it."""
        return [
            (point, layer)
            for point in POINTS
            for layer in ([None] if point == "lm_head_in" else range(len(self.blocks)))
            if layer is None or point in self.by_layer[layer]
        ]

    def capture(self, token_ids: list[int], writes: Writes | None = None) -> States:
        """What arrives at every hook point, before a write at that same point."""
        return self.run(token_ids, writes or {})[0]

    def greedy(self, prompt_ids: list[int], n: int, writes: Writes | None = None) -> list[int]:
        """The `n` tokens that follow the prompt, each the most likely one."""
        token_ids = list(prompt_ids)
        for _ in range(n):
            token_ids.append(int(self.run(token_ids, writes or {})[1][-1].argmax()))
        return token_ids[len(prompt_ids) :]

    def logits(self, token_ids: list[int], writes: Writes | None = None) -> Tensor:
        """`[tokens, vocab]`."""
        return self.run(token_ids, writes or {})[1]

    @torch.no_grad()
    def hidden_states(self, token_ids: list[int]) -> tuple[Tensor, ...]:
        """The streams `[tokens, hidden]` as `transformers` reports them; the last one is normed."""
        output = self.model(torch.tensor([token_ids]), output_hidden_states=True)
        return tuple(stream[0] for stream in output.hidden_states)

    def generated(self, prompt_ids: list[int], n: int) -> list[int]:
        """The `n` tokens of `transformers`' own greedy search, which has a KV cache."""
        prompt = torch.tensor([prompt_ids])
        output = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, do_sample=False
        )
        return output[0, len(prompt_ids) :].tolist()

    @torch.no_grad()
    def run(
        self, token_ids: list[int], writes: Writes, steers: Steers | None = None
    ) -> tuple[States, Tensor]:
        """The states as `capture` gives them, and the logits `[tokens, vocab]`."""
        states: States = {}

        def visit(point: str, layer: Layer, tensor: Tensor) -> Tensor:
            """Keeps a copy of the tensor `[1, tokens, hidden]`; returns what to add to it."""
            arrived = tensor.reshape(-1, tensor.shape[-1]).clone()
            states.setdefault(point, {})[layer] = arrived
            changes = list((steers or {}).get((point, layer), ()))
            if (point, layer) in writes:
                vector, mask = writes[point, layer]
                changes.insert(0, ("add", vector, {"scale": 1.0}, mask))
            leaving = arrived
            for method, vector, given, mask in changes:
                rows = torch.zeros(len(token_ids), dtype=torch.bool)
                rows[: len(mask)] = mask[: len(token_ids)]
                steered = STEERED[method](leaving, vector, **given)
                leaving = torch.where(rows[:, None], steered, leaving)
            return (leaving - arrived).view_as(tensor)

        with self._hooked(visit):
            logits = self.model(torch.tensor([token_ids]), use_cache=False).logits[0]
        return states, logits

    @contextmanager
    def _hooked(self, visit: Callable[[str, Layer, Tensor], Tensor]) -> Iterator[None]:
        head = self.model.get_output_embeddings()
        handles = [_hook(head, _into(""), partial(visit, "lm_head_in", None))]
        for layer, (block, places) in enumerate(zip(self.blocks, self.by_layer, strict=True)):
            handles += [
                _hook(block, place, partial(visit, point, layer)) for point, place in places.items()
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _hook(root: nn.Module, place: Place, delta: Callable[[Tensor], Tensor]) -> Any:
    """A hook that adds `delta(tensor)` to the tensor at `place`."""

    def changed(tensor: Tensor) -> Tensor:
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
    if place.side == "input":
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)

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
from transformers import AutoModelForCausalLM

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
    """A tensor at the boundary of one of the block's modules ("" is the block)."""

    path: str
    side: Literal["input", "output"]
    in_place: bool = False
    """A write changes the tensor for whoever holds it, as the stream at `post_attn` must be."""


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

PLACES: dict[str, dict[str, Place]] = {
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "olmo2": _POST_NORM,
    "olmo3": _POST_NORM,
    "exaone4": _POST_NORM,
    "glm4": _LLAMA
    | {"attn_out": _out_of("post_self_attn_layernorm"), "mlp_out": _out_of("post_mlp_layernorm")},
    "gpt2": _LLAMA
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
    "phi": _NO_POST_ATTN,
    "gptj": _NO_POST_ATTN | {"attn_in": _into("attn"), "attn_out": _out_of("attn")},
    "granite": _ONLY_INPUTS,
    "bloom": _LLAMA
    | {
        # Hugging Face adds the stream inside these two modules; their last layer is the branch.
        "attn_in": _into("self_attention"),
        "attn_out": _out_of("self_attention.dense"),
        "mlp_out": _out_of("mlp.dense_4h_to_h"),
    },
}
"""Families that differ from Llama; `pre_attn`, `post_block` and `lm_head_in` are alike in all."""


def points(family: str) -> tuple[str, ...]:
    """The hook points that a family has."""
    return ("pre_attn", *PLACES.get(family, _LLAMA), "post_block", "lm_head_in")


class Reference:
    """One family's checkpoint, run by `transformers`."""

    def __init__(self, family: str, checkpoint: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.blocks = next(
            module
            for module in self.model.modules()
            if isinstance(module, nn.ModuleList)
            and len(module) == self.model.config.num_hidden_layers
        )
        self.places = PLACES.get(family, _LLAMA)

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
        handles = [_hook(self.model, _into("lm_head"), partial(visit, "lm_head_in", None))]
        for layer, block in enumerate(self.blocks):
            places = {"pre_attn": _into(""), **self.places, "post_block": _out_of("")}
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
        return args, kwargs | {"hidden_states": changed(kwargs["hidden_states"])}

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (changed(output[0]), *output[1:])
        return changed(output)

    module = root.get_submodule(place.path)
    if place.side == "input":
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)

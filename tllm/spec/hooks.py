"""The places in a transformer block where a model's activations can be read and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, TypeAlias


class HookPoint(str, Enum):
    """A named tensor of the forward pass; members are in the order a block computes them."""

    EMBED = "embed"
    """What enters the first block: embeddings, scaled, normed and with positions added where the
    model does that; it belongs to no layer."""
    PRE_ATTN = "pre_attn"
    """The residual stream entering the block, before its norm."""
    ATTN_IN = "attn_in"
    """What the attention module receives."""
    Q = "q"
    """The queries of all heads, side by side, as the attention compares them: normed and with
    positions encoded where the model does that. Of `q`, `k` and `v` the rest of the row is zero."""
    K = "k"
    """The keys, likewise."""
    V = "v"
    """The values, likewise."""
    ATTN_HEADS = "attn_heads"
    """What the output projection of the attention reads: what each head gives, side by side."""
    ATTN_OUT = "attn_out"
    """The attention branch as it is added to the stream."""
    POST_ATTN = "post_attn"
    """The stream after the attention branch is added."""
    MLP_IN = "mlp_in"
    """What the MLP (or expert layer) receives."""
    ROUTER = "router"
    """The logits by which a mixture of experts chooses among them, one for each expert; the rest of
    the row is zero."""
    MLP_OUT = "mlp_out"
    """The MLP branch as it is added to the stream."""
    POST_BLOCK = "post_block"
    """The stream leaving the block."""
    LM_HEAD_IN = "lm_head_in"
    """The final normed state, what the LM head reads; it belongs to no layer."""

    def __str__(self) -> str:
        return self.value

    @property
    def has_layer(self) -> bool:
        """Whether the point is found once in every layer; False for `embed` and `lm_head_in`."""
        return self not in (HookPoint.EMBED, HookPoint.LM_HEAD_IN)

    @classmethod
    def parse(cls, name: str | HookPoint) -> HookPoint:
        """The hook point called `name`, which may be an alias.

        Raises `ValueError` naming what was given and what is allowed.
        """
        if isinstance(name, str):
            try:
                return cls(ALIASES.get(name, name))
            except ValueError:
                pass
        allowed = ", ".join(point.value for point in cls)
        aliases = ", ".join(f"{alias} = {canonical}" for alias, canonical in ALIASES.items())
        raise ValueError(
            f"unknown hook point {name!r}; the hook points are {allowed} (also {aliases})"
        )


TRANSFORMER_LENS: Mapping[str, HookPoint] = {
    "hook_resid_pre": HookPoint.PRE_ATTN,
    "hook_attn_out": HookPoint.ATTN_OUT,
    "hook_resid_mid": HookPoint.POST_ATTN,
    "hook_mlp_out": HookPoint.MLP_OUT,
    "hook_resid_post": HookPoint.POST_BLOCK,
}
"""Hook names of TransformerLens' `TransformerBlock` that are the same tensor as one of ours.

Its `hook_attn_out` and `hook_mlp_out` come after the branch's own norm in models that have one
(Gemma 2), so they are the branch as it is added to the stream. Its `hook_normalized` is not our
`mlp_in`: with folded norms the weight is not in it yet. `hook_z` is in the space of the heads.
"""

HEAD_POINTS = HookPoint.Q, HookPoint.K, HookPoint.V, HookPoint.ATTN_HEADS
"""The points whose rows are divided into heads."""

TapKey: TypeAlias = tuple[HookPoint, int | None]
"""A hook point and its layer, counted from 0 (None for a point that belongs to no layer)."""


@dataclass(frozen=True)
class HeadSplit:
    """How a row of `HEAD_POINTS` is divided: the numbers of head i begin at `i * head_dim`."""

    num_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def dimensions(self, heads: Iterable[int]) -> tuple[int, ...]:
        """The dimensions of a row that belong to these heads."""
        size = self.head_dim
        return tuple(d for head in heads for d in range(head * size, (head + 1) * size))


@dataclass(frozen=True)
class ModelPoints:
    """Which hook points a model has, layer by layer, and which of them an engine taps.

    family: the model's family, as errors name it.
    num_layers: of the whole model.
    missing: why, for each hook point of a layer that the layer lacks. A pipeline rank knows this of
        its own layers only.
    tapped: the points that get a tap in every layer that has them.
    linked: what leaves a block enters the next one: `pre_attn(i)` is `post_block(i - 1)`.
    heads: by each of `HEAD_POINTS` and layer that has it. A pipeline rank knows this of its own
        layers only.
    experts: how many there are, by layer that has `router`. Likewise.
    one_stream: a token has one residual stream: each block adds its branches to it, and the final
        norm reads what leaves the last. Not so where hook points are those of one among several.
    """

    family: str
    num_layers: int
    missing: Mapping[TapKey, str]
    tapped: frozenset[HookPoint] = frozenset(HookPoint)
    linked: bool = True
    heads: Mapping[TapKey, HeadSplit] = field(default_factory=dict)
    experts: Mapping[int, int] = field(default_factory=dict)
    one_stream: bool = True

    @classmethod
    def of_stages(cls, stages: Sequence[ModelPoints]) -> ModelPoints:
        """What the ranks of all pipeline stages know together."""
        missing = {key: why for stage in stages for key, why in stage.missing.items()}
        heads = {key: split for stage in stages for key, split in stage.heads.items()}
        experts = {layer: count for stage in stages for layer, count in stage.experts.items()}
        return replace(stages[0], missing=missing, heads=heads, experts=experts)

    @cached_property
    def points(self) -> tuple[HookPoint, ...]:
        """The hook points that some layer has."""
        return tuple(point for point in HookPoint if self.layers(point))

    def layers(self, point: HookPoint) -> tuple[int | None, ...]:
        """The layers that have this point; `(None,)` for one that belongs to no layer."""
        layers = range(self.num_layers) if point.has_layer else (None,)
        return tuple(layer for layer in layers if (point, layer) not in self.missing)

    def locate(self, point: HookPoint, layer: int | None) -> TapKey:
        """The point with its layer counted from the start.

        Raises `ValueError` for a point or layer the model lacks.
        """
        if layer is not None and not point.has_layer:
            raise ValueError(f"{point} belongs to no layer; got layer {layer}, leave it out")
        if point.has_layer:
            if point not in self.points:
                raise ValueError(self.explain_missing(point, 0))
            layer = counted_layer(layer, self.num_layers, point)
        if (point, layer) in self.missing:
            raise ValueError(self.explain_missing(point, layer))
        return point, layer

    def canonical(self, point: HookPoint, layer: int | None) -> TapKey:
        """The key of the tap that serves this point; a negative layer counts from the end.

        Where `pre_attn(i)` and `post_block(i - 1)` are the same tensor and both exist, the tap of
        the latter serves both, as that of `embed` serves `pre_attn(0)`. Raises `ValueError` for a
        point or layer the model lacks.
        """
        point, layer = self.locate(point, layer)
        if point is not HookPoint.PRE_ATTN or layer is None:
            return point, layer
        if layer == 0:
            return HookPoint.EMBED, None
        shared = HookPoint.POST_BLOCK, layer - 1
        return shared if self.linked and shared not in self.missing else (point, layer)

    def is_needed(self, key: TapKey) -> bool:
        """Whether the tap of a canonical key serves any of the points that are tapped."""
        point, layer = key
        if point is HookPoint.EMBED and HookPoint.PRE_ATTN in self.tapped:
            return True
        if point is HookPoint.POST_BLOCK and HookPoint.PRE_ATTN in self.tapped and self.linked:
            return layer != self.num_layers - 1 or point in self.tapped
        return point in self.tapped

    def check(self, point: HookPoint, layer: int | None) -> TapKey:
        """As `locate`; `ValueError` also for a point that has no tap in the engine."""
        key = self.locate(point, layer)
        if not self.is_needed(self.canonical(point, layer)):
            has = ", ".join(point for point in self.points if point in self.tapped) or "none"
            raise ValueError(
                f"hook point {point} has no tap in this engine (it has {has}); start it with "
                f"hook_points=[..., {point.value!r}] or hook_points='all' (tllm serve: "
                "--hook-points), or register the consumer before the engine starts"
            )
        return key

    @property
    def reasons(self) -> dict[str, str]:
        """By name of a point: why the model, or its first layer without it, lacks it."""
        reasons: dict[str, str] = {}
        for (point, _), why in self.missing.items():
            reasons.setdefault(point.value, why)
        return reasons

    def described(self) -> dict[str, Any]:
        """For people and for JSON: the points with a tap, the layers of those that not every layer
        has, why points are missing, how rows are divided into heads by point and layer, and how
        many experts those of `router` are of."""
        tapped = [point for point in self.points if point in self.tapped]
        partly = [p for p in tapped if p.has_layer and len(self.layers(p)) < self.num_layers]
        heads: dict[str, dict[int | None, Any]] = {}
        for (point, layer), split in sorted(self.heads.items()):
            heads.setdefault(point.value, {})[layer] = asdict(split)
        return {
            "num_layers": self.num_layers,
            "hook_points": [point.value for point in tapped],
            "layers": {point.value: list(self.layers(point)) for point in partly},
            "missing": self.reasons,
            "heads": heads,
            "experts": dict(sorted(self.experts.items())),
        }

    def explain_missing(self, point: HookPoint, layer: int | None) -> str:
        """Why a layer has no such point; what the other layers, or all of them, have instead."""
        why = self.missing[point, layer]
        if others := self.layers(point):
            return (
                f"{self.family} has no hook point {point} in layer {layer}: {why} (layers that "
                f"have it: {ranges(others)})"
            )
        has = ", ".join(self.points) or "none"
        return f"{self.family} has no hook point {point}: {why} (it has: {has})"


def counted_layer(layer: int | None, num_layers: int, what: object) -> int:
    """A layer, counted from 0. Raises `ValueError` for one that `what` does not have in a model of
    so many layers, and for None."""
    if layer is None or not -num_layers <= layer < num_layers:
        raise ValueError(
            f"{what} has no layer {layer}; {what} needs a layer from 0 to {num_layers - 1}, or "
            f"from {-num_layers} to -1 counting from the end"
        )
    return layer % num_layers


def ranges(numbers: Iterable[int | None], most: int | None = None) -> str:
    """Ascending layers or positions in words, with the ends of each run of consecutive ones:
    "0, 2-5"; of at most so many runs."""
    runs: list[list[int]] = []
    for number in numbers:
        if number is None:
            continue
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    shown = ", ".join("-".join(map(str, run)) for run in runs[:most])
    left = 0 if most is None else len(runs) - most
    return f"{shown}, and {left} more runs" if left > 0 else shown


ALIASES = {
    "block_input": "pre_attn",
    "attn_input": "attn_in",
    "attn_output": "attn_out",
    "mlp_input": "mlp_in",
    "mlp_output": "mlp_out",
    "block_output": "post_block",
}

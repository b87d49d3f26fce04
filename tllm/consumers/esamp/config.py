"""What ESamp is asked to do: the configuration, and the options of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from tllm.spec.hooks import HookPoint
from tllm.spec.layers import layer_numbered
from tllm.spec.reading import (
    allow_options,
    hook_named,
    require_bool,
    require_one_of,
    said_of,
    scalar,
    whole_number,
)

Scope = Literal["prompt", "request", "shared"]
OnFull = Literal["grow", "unguided"]

_MOST = {
    "rank": 2**16,
    "slots": 2**16,
    "width": 2**22,
    "train_every_n_steps": 2**20,
}
"""What numbers may be: more than any model, or vocabulary, has a use for could not be allocated."""
_SEEDS = -(2**63), 2**63 - 1

#: Targets whose prediction the final norm and the LM head can turn into logits.
_PROJECTABLE = (
    HookPoint.LM_HEAD_IN,
    HookPoint.PRE_ATTN,
    HookPoint.POST_ATTN,
    HookPoint.POST_BLOCK,
)


@dataclass(frozen=True)
class ESampConsumerConfig:
    """How distillers learn and how their predictions guide sampling.

    Args:
        source_layer, source_site: the shallow row x that a distiller reads. Layers count from
            0; negative ones from the end.
        target_layer, target_site: the deep row it learns to predict. `lm_head_in` has no layer.
        rank: width of the distiller's bottleneck.
        beta: strength of the guidance `l + beta * (l - d)`; a request may choose its own.
        lr, betas, eps, weight_decay: AdamW's.
        train_every_n_steps: one optimiser step on the rows of this many engine steps.
        scope: who shares a distiller: the samples of one `prompt`, nobody (`request`: every
            sample has its own), or everything that runs (`shared`).
        slots: distillers there is room for at first.
        on_full: when every slot is taken, `grow` the bank or leave further prompts `unguided`.
        persist: keep the distiller of a named group, or the shared one, after its last request.
        seed: seed of the initial weights, the same for every distiller.
        width: the most candidates that are guided as a compact row; a row with more, as whole
            vocabularies are, costs a product with the LM head.
        guide: predict and guide. False only trains.
        train: learn. False leaves every distiller at its initial weights.
        cuda_graph: replay predictions and training steps as CUDA graphs.
    """

    source_layer: int = 0
    source_site: str = "post_block"
    target_layer: int = -1
    target_site: str = "lm_head_in"
    rank: int = 64
    beta: float = 0.25
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    train_every_n_steps: int = 1
    scope: Scope = "prompt"
    slots: int = 8
    on_full: OnFull = "grow"
    persist: bool = False
    seed: int = 0
    width: int = 1024
    guide: bool = True
    train: bool = True
    cuda_graph: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", whole_number(self.seed, "seed=", *_SEEDS))
        for name in ("source_layer", "target_layer"):
            object.__setattr__(self, name, layer_numbered(getattr(self, name), name))
        for name, most in _MOST.items():
            object.__setattr__(self, name, whole_number(getattr(self, name), f"{name}=", 1, most))
        for name in ("persist", "guide", "train", "cuda_graph"):
            require_bool(name, getattr(self, name))
        require_one_of("scope", self.scope, Scope)
        require_one_of("on_full", self.on_full, OnFull)
        # Kernels take numbers of Python's own.
        for name in ("beta", "lr", "eps", "weight_decay"):
            object.__setattr__(self, name, scalar(getattr(self, name), name))
        for name in ("lr", "eps"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; it must be > 0")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay!r} is not allowed; it must be >= 0")
        self._check_betas()
        self._check_sites()

    @property
    def targets_lm_head(self) -> bool:
        """Whether distillers learn what the LM head reads, so that their norm is the model's."""
        return self.target_site == HookPoint.LM_HEAD_IN.value

    @property
    def needs_final_norm(self) -> bool:
        """Whether work can only be done where the model's final norm is."""
        return self.guide or self.targets_lm_head

    def _check_betas(self) -> None:
        betas = self.betas
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"betas={betas!r} is not allowed; it must be two numbers")
        found = tuple(scalar(beta, "betas") for beta in betas)
        if not all(0 <= beta < 1 for beta in found):
            raise ValueError(f"betas={betas!r} is not allowed; both must be in [0, 1)")
        object.__setattr__(self, "betas", found)

    def _check_sites(self) -> None:
        source = hook_named(self.source_site, "source_site")
        target = hook_named(self.target_site, "target_site")
        object.__setattr__(self, "source_site", source.value)
        object.__setattr__(self, "target_site", target.value)
        if self.guide and target not in _PROJECTABLE:
            allowed = ", ".join(point.value for point in _PROJECTABLE)
            raise ValueError(
                f"target_site={target.value!r} cannot guide: its rows are not states of the "
                f"residual stream; choose one of {allowed}, or guide=False"
            )
        if source is target and (not source.has_layer or self.source_layer == self.target_layer):
            raise ValueError(
                f"source and target are both {source.value!r}: there is nothing to learn; "
                "choose a shallower source_site or source_layer"
            )


@dataclass(frozen=True)
class RequestOptions:
    """What one request asks: `SamplingParams(consumers={"esamp": {...}})`.

    Args:
        enabled: False leaves the request alone (handled by the runtime).
        beta: strength of its guidance; the configuration's when None.
        group: requests that name the same group share a distiller.
        train: whether its rows train the distiller.
    """

    enabled: bool = True
    beta: float | None = None
    group: str | None = None
    train: bool = True

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> RequestOptions:
        """Check the options of one request; `ValueError` names the field at fault."""
        allow_options(options, [field.name for field in fields(cls)], "consumers['esamp']")
        parsed = cls(**options)
        with said_of("consumers['esamp']"):
            parsed._check()
        return parsed

    def _check(self) -> None:
        require_bool("enabled", self.enabled)
        require_bool("train", self.train)
        if self.beta is not None:
            scalar(self.beta, "beta")
        if self.group is not None and not is_group(self.group):
            raise ValueError(f"group={self.group!r} is not allowed; it must be a non-empty string")


def is_group(name: object) -> bool:
    """Whether requests could name a group so."""
    return isinstance(name, str) and name != ""

"""Sparse autoencoders from files of SAELens, and which of their features are active."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from tllm.ports import Place
from tllm.spec.hooks import TRANSFORMER_LENS, HookPoint
from tllm.spec.probes import FeatureProbe
from tllm.spec.reading import json_mapping, require_one_of, said_of

Architecture = Literal["standard", "jumprelu", "topk", "gated"]
Normalization = Literal["none", "layer_norm", "constant_norm_rescale"]

_NEEDED: Mapping[str, Sequence[str]] = {
    "standard": ("W_enc", "b_enc", "b_dec"),
    "jumprelu": ("W_enc", "b_enc", "b_dec", "threshold"),
    "topk": ("W_enc", "b_enc", "b_dec"),
    "gated": ("W_enc", "b_dec", "b_gate", "b_mag", "r_mag"),
}
_DECODING = ("W_dec", "scaling_factor", "finetuning_scaling_factor")
"""What a file may hold beside that, and encoding does not need."""

_DTYPES = ({"float32"}, {"float16"}, {"bfloat16"}, {"float64"})
"""What all weights of an autoencoder may be in, so that they can be computed with."""

_HOOK_NAME = re.compile(r"blocks\.(\d+)\.(\w+)")


@dataclass(frozen=True)
class AutoencoderConfig:
    """What `cfg.json` says of an encoder.

    Attributes:
        architecture: which formula.
        d_in, d_sae: size of a row, and number of features.
        subtract_b_dec: the decoder's bias is taken off the row first.
        normalization: what is done to the row before that.
        k: of `topk`.
        scaled_by_decoder: features are scaled by the norm of their decoder's row (`topk`).
        hook_name: where it was trained, as TransformerLens names it.
        centered: it was trained on rows without their mean (`center_writing_weights`), which
            concerns models with layer norms.
        finetuned: features are multiplied with a factor before they are decoded, if the weights
            have one (`finetuning_scaling_factor`).
    """

    architecture: Architecture
    d_in: int
    d_sae: int
    subtract_b_dec: bool
    normalization: Normalization
    k: int | None
    scaled_by_decoder: bool
    hook_name: str | None
    centered: bool
    finetuned: bool

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> AutoencoderConfig:
        """`cfg.json` of SAELens before and since 6.0. Raises `ValueError` for what is not known,
        by its name."""
        known = {**given, **_mapping(given, "metadata")}
        activation = known.get("activation_fn_str", known.get("activation_fn") or "relu")
        architecture = known.get("architecture", "standard")
        if architecture == "standard" and activation == "topk":
            architecture = "topk"
        require_one_of("architecture", architecture, Architecture)
        of_it = ("topk", "relu") if architecture == "topk" else ("relu",)
        require_one_of("activation_fn", activation, of_it)
        normalization: Any = known.get("normalize_activations") or "none"
        if normalization in (True, "expected_average_only_in"):
            raise ValueError(
                "normalize_activations is 'expected_average_only_in', whose factor is not in the "
                "file; fold it into the weights with SAELens "
                "(fold_activation_norm_scaling_factor), and save it again"
            )
        require_one_of("normalize_activations", normalization, Normalization)
        require_one_of("reshape_activations", known.get("reshape_activations") or "none", ("none",))
        k = known.get("k", _mapping(known, "activation_fn_kwargs").get("k"))
        if architecture == "topk" and (type(k) is not int or k < 1):
            raise ValueError(f"k={k!r} is not known; a topk autoencoder has a whole number")
        for size in ("d_in", "d_sae"):
            found = known.get(size)
            if type(found) is not int or found < 1:
                raise ValueError(f"{size}={found!r}; a whole number was expected, 1 or more")
        hook_name = known.get("hook_name", known.get("hook_point"))
        if not isinstance(hook_name, str | None):
            raise ValueError(f"hook_name={hook_name!r:.60}; a text was expected")
        how = _mapping(known, "model_from_pretrained_kwargs")
        return cls(
            architecture,
            known["d_in"],
            known["d_sae"],
            bool(known.get("apply_b_dec_to_input", True)),
            normalization,
            k if architecture == "topk" else None,
            bool(known.get("rescale_acts_by_decoder_norm", False)),
            hook_name,
            bool(how.get("center_writing_weights", False)),
            bool(known.get("finetuning_scaling_factor", False)),
        )

    @property
    def place(self) -> Place | None:
        """The hook point that it was trained on, as we name it; None for one we do not have."""
        match = _HOOK_NAME.fullmatch(self.hook_name or "")
        if match is None or match[2] not in TRANSFORMER_LENS:
            return None
        return TRANSFORMER_LENS[match[2]].value, int(match[1])


@dataclass(frozen=True)
class SparseAutoencoder:
    """The encoder of a sparse autoencoder.

    Attributes:
        weights: by their names in the file; `W_dec` is left out.
        scale: `[features]`, what features are scaled by; None for nothing.
    """

    config: AutoencoderConfig
    weights: Mapping[str, torch.Tensor]
    scale: torch.Tensor | None = None

    @staticmethod
    def read_config(folder: Path) -> AutoencoderConfig:
        """What `cfg.json` of a folder says. Raises `ValueError` naming the folder."""
        file = folder / "cfg.json"
        if not file.is_file() or not (folder / "sae_weights.safetensors").is_file():
            raise ValueError(
                f"path={str(folder)!r} is no folder of SAELens; give one with cfg.json and "
                "sae_weights.safetensors"
            )
        with said_of(f"path={str(folder)!r}"):
            return AutoencoderConfig.parse(json_mapping(file.read_bytes(), "cfg.json"))

    @classmethod
    def load(cls, folder: Path, feature: int | None = None) -> SparseAutoencoder:
        """The encoder in a folder of SAELens (`cfg.json` and `sae_weights.safetensors`).

        Args:
            feature: the only one that is wanted; the others are not read. Not of `topk`.
        """
        config = cls.read_config(folder)
        try:
            with safe_open(folder / "sae_weights.safetensors", framework="pt") as file:
                found = {
                    name: _read(file.get_slice(name), name, config, feature)
                    for name in file.keys()  # noqa: SIM118
                }
        except SafetensorError as error:
            raise ValueError(f"path={str(folder)!r}: its weights cannot be read: {error}") from None
        if "log_threshold" in found:
            found["threshold"] = found.pop("log_threshold").exp()
        if feature is not None:
            config = replace(config, d_sae=1)
        needed = _NEEDED[config.architecture]
        missing = sorted(set(needed) - set(found))
        unknown = sorted(set(found) - {*needed, *_DECODING})
        if missing or unknown:
            raise ValueError(
                f"path={str(folder)!r}: a {config.architecture} autoencoder has "
                f"{', '.join((*needed, 'W_dec'))}; "
                + (f"missing is {missing[0]}" if missing else f"not known is {unknown[0]}")
            )
        weights = {name: found[name] for name in needed}
        dtypes = {
            name: str(tensor.dtype).removeprefix("torch.") for name, tensor in weights.items()
        }
        if set(dtypes.values()) not in _DTYPES:
            raise ValueError(
                f"path={str(folder)!r}: its weights have the dtypes {dtypes}; save all of them in "
                "one of float32, float16, bfloat16 and float64"
            )
        for name, tensor in weights.items():
            wanted = {"W_enc": (config.d_in, config.d_sae), "b_dec": (config.d_in,)}
            if tensor.shape != wanted.get(name, (config.d_sae,)):
                raise ValueError(
                    f"path={str(folder)!r}: {name} has shape {list(tensor.shape)}, and cfg.json "
                    f"says d_in={config.d_in}, d_sae={config.d_sae}"
                )
            if name == "threshold":  # infinite for a feature that is never active
                tensor = tensor.where(tensor != torch.inf, 0.0)
            _check_finite(tensor, name, folder)
        scale = None
        if config.scaled_by_decoder:
            if "W_dec" not in found:
                raise ValueError(
                    f"path={str(folder)!r}: rescale_acts_by_decoder_norm needs W_dec, which is "
                    "missing"
                )
            scale = found["W_dec"].norm(dim=-1)
            _check_finite(scale, "W_dec", folder)
        return cls(config, weights, scale)

    def to(self, device: torch.device) -> SparseAutoencoder:
        return self._each(lambda tensor: tensor.to(device))

    def only(self, features: Sequence[int]) -> SparseAutoencoder:
        """Some features of it. Not of `topk`, where the others decide which are active."""
        assert self.config.architecture != "topk"
        kept = torch.tensor(features)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[..., kept] if tensor.shape[-1] == self.config.d_sae else tensor

        weights = {n: t if n == "b_dec" else cut(t) for n, t in self.weights.items()}
        scale = None if self.scale is None else cut(self.scale)
        return SparseAutoencoder(replace(self.config, d_sae=len(features)), weights, scale)

    def probe(self, point: HookPoint, layer: int | None, *, centered: bool) -> FeatureProbe:
        """The same as a probe, of an autoencoder with one feature.

        Args:
            point, layer: where rows are read.
            centered: whether their mean is taken off first.
        """
        config = self.config
        assert config.d_sae == 1 and config.architecture != "topk"
        weights = {name: tensor.double().squeeze(-1) for name, tensor in self.weights.items()}
        vector, threshold = weights["W_enc"], torch.zeros((), dtype=torch.float64)
        if config.architecture == "gated":
            scale = weights["r_mag"].exp()
            bias = weights["b_mag"]
            threshold = bias - scale * weights["b_gate"]
        else:
            scale = torch.ones(()) if self.scale is None else self.scale.double().squeeze(-1)
            bias = scale * weights["b_enc"]
            if config.architecture == "jumprelu":
                threshold = weights["threshold"]
        vector = scale * vector
        if config.subtract_b_dec:
            bias = bias - vector @ weights["b_dec"]
        kind = "feature"
        if config.normalization == "layer_norm":
            kind = "layer_norm_feature"
        elif config.normalization == "constant_norm_rescale":
            kind = "centered_rescaled_feature" if centered else "rescaled_feature"
        if centered or kind == "layer_norm_feature":
            vector = vector - vector.mean()
        return FeatureProbe(
            point, layer, vector.float().numpy(), float(bias), max(0.0, float(threshold)), kind
        )

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> SparseAutoencoder:
        weights = {name: change(tensor) for name, tensor in self.weights.items()}
        return replace(
            self, weights=weights, scale=None if self.scale is None else change(self.scale)
        )

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """How active each feature is, `[rows, features]`, in the dtype of the weights.

        - standard: `relu(x W_enc + b_enc)`.
        - jumprelu: the same where `x W_enc + b_enc > threshold`, and 0 elsewhere.
        - topk: `relu` of the k largest, and 0 elsewhere.
        - gated: `relu(x (W_enc exp(r_mag)) + b_mag)` where `x W_enc + b_gate > 0`.

        x is the row, normalised if the config says so, without `b_dec` if it says so. Of a row
        whose numbers are not finite, or beyond that dtype, some activations are NaN or infinite.
        """
        weights, config = self.weights, self.config
        dtype = weights["W_enc"].dtype
        x = self._normalised(rows.to(torch.promote_types(dtype, torch.float32))).to(dtype)
        if config.subtract_b_dec:
            x = x - weights["b_dec"]
        if config.architecture == "gated":
            dots = x @ weights["W_enc"]
            magnitude = (dots * weights["r_mag"].exp() + weights["b_mag"]).relu()
            return torch.where(dots + weights["b_gate"] <= 0, 0.0, magnitude)  # NaN stays
        before = x @ weights["W_enc"] + weights["b_enc"]
        if self.scale is not None:
            before = before * self.scale
        if config.architecture == "jumprelu":
            return torch.where(before <= weights["threshold"], 0.0, before.relu())
        if config.k is not None:
            best, features = before.topk(min(config.k, config.d_sae), dim=-1)
            none = before * 0  # NaN where it is not finite
            return none.scatter_(-1, features, best.relu())
        return before.relu()

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.normalization == "layer_norm":
            x = x - x.mean(-1, keepdim=True)
            return x / (x.std(-1, keepdim=True) + 1e-5)
        if self.config.normalization == "constant_norm_rescale":
            return x * (self.config.d_in**0.5 / x.norm(dim=-1, keepdim=True))
        return x


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object of JSON in a configuration; empty where it has none."""
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{name}={found!r:.60}; an object of JSON was expected")
    return found


def _check_finite(tensor: torch.Tensor, name: str, folder: Path) -> None:
    """Refuse numbers with which no feature would be known."""
    if not tensor.isfinite().all():
        raise ValueError(
            f"path={str(folder)!r}: {name} has numbers that are NaN or infinite, so that no "
            "feature would be known; give a file that was saved whole"
        )


def _read(lazy: Any, name: str, config: AutoencoderConfig, feature: int | None) -> torch.Tensor:
    """A tensor of a file, or the part of it that one feature has."""
    shape = lazy.get_shape()
    every: torch.Tensor
    if feature is None or name == "b_dec" or not shape or config.d_sae not in shape:
        every = lazy[:] if shape else lazy[...]
        return every
    if name == "W_dec":
        every = lazy[feature : feature + 1]
    else:
        every = lazy[:, feature : feature + 1] if len(shape) == 2 else lazy[feature : feature + 1]
    return every

"""Decoder rows of a sparse autoencoder, in the layout of SAELens.

A folder with `cfg.json` and `sae_weights.safetensors`, in which `W_dec` is `[features, hidden]`.
Where the rows belong is in the configuration: `hook_name` under `metadata` since SAELens 6,
`hook_name` beside the rest before, and `hook_point` in the oldest files. A transcoder's rows
belong where it writes, `hook_name_out`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from tllm.spec.hooks import TRANSFORMER_LENS
from tllm.spec.reading import json_mapping, own_numbers
from tllm.steering.formats.contents import Contents, Placed
from tllm.steering.formats.names import NamedPlace, parse_place
from tllm.steering.module import FloatArray, as_vector, is_finite

CONFIG = "cfg.json"
WEIGHTS = "sae_weights.safetensors"

Features = int | Iterable[int] | Mapping[int, float]


def read(
    folder: Path, features: Features | None, normalize: bool, place: NamedPlace | None
) -> Contents:
    """The vector of some features: `sum(weight[f] * W_dec[f])`, with rows of `W_dec` multiplied by
    the factor of fine-tuning where there is one.

    Args:
        folder: has `cfg.json` and `sae_weights.safetensors`.
        features: one feature, several (each with weight 1), or `{feature: weight}`.
        normalize: give each row unit length before it is weighted.
        place: where the vector goes if the configuration's hook is none of ours.

    Raises:
        ValueError: no or unknown features, rows that live in another space than the model's
            width, a factor of which the configuration does not tell, or a hook that is none of
            ours.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(
                f"it is a folder without {name}; a sparse autoencoder in SAELens' layout has "
                f"{CONFIG} and {WEIGHTS}"
            )
    config = json_mapping((folder / CONFIG).read_bytes(), f"its {CONFIG}")
    metadata = config.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"its {CONFIG} has metadata={metadata!r:.60}, which is no JSON object")
    told = {**config, **metadata}
    weights = _weights(features)
    place = _place(told, place)
    finetuned = bool(told.get("finetuning_scaling_factor"))
    return Contents(
        (Placed(place, _vector(folder / WEIGHTS, weights, normalize, finetuned)),),
        metadata={
            "features": {str(feature): weight for feature, weight in weights.items()},
            "normalize": normalize,
            **{name: told[name] for name in _KEPT if told.get(name) is not None},
        },
    )


_KEPT = ("architecture", "model_name", "hook_name", "hook_name_out", "normalize_activations")
_FACTORS = ("scaling_factor", "finetuning_scaling_factor")
"""Names that SAELens has given to what features are multiplied with before they are decoded."""


def _place(told: Mapping[str, Any], instead: NamedPlace | None) -> NamedPlace:
    name = told.get("hook_name_out") or told.get("hook_name") or told.get("hook_point")
    if told.get("hook_head_index") is not None or str(name).endswith("hook_z"):
        raise ValueError(
            f"it reads {name!r}, so its rows are in the space of the heads before the output "
            "projection, which has no hook point"
        )
    place = parse_place(name) if isinstance(name, str) else None
    if place is not None and place.hook is not None:
        return place
    if instead is None:
        raise ValueError(
            f"its hook_name is {name!r}; those that are known are blocks.N.HOOK, with HOOK one of "
            f"{', '.join(TRANSFORMER_LENS)}, and model.layers.N; say where the rows go with hook= "
            "and one layer in layers="
        )
    return instead


def _weights(features: Features | None) -> dict[int, float]:
    if features is None:
        raise ValueError(
            "it holds a sparse autoencoder; say which of its features= you want, such as "
            "features=[123] or features={123: 1.0, 77: -0.5}"
        )
    features = own_numbers(features)
    if isinstance(features, int) and not isinstance(features, bool):
        features = [features]
    if isinstance(features, Mapping):
        weights = dict(features)
    elif isinstance(features, Iterable) and not isinstance(features, (str, bytes)):
        chosen = list(features)
        weights = dict.fromkeys(chosen, 1.0)
        if len(weights) < len(chosen):
            raise ValueError(f"features={chosen} names a feature twice; give {{feature: weight}}")
    else:
        raise ValueError(f"features={features!r} is no feature, list of them, or dict of weights")
    for feature, weight in weights.items():
        if isinstance(feature, bool) or not isinstance(feature, (int, np.integer)):
            raise ValueError(f"features= has {feature!r}; a feature is a whole number")
        if not isinstance(weight, (int, float, np.number)) or not is_finite(weight):
            raise ValueError(f"features= has the weight {weight!r}; it must be a finite number")
    if not weights:
        raise ValueError("features= is empty; name at least one")
    return {int(feature): float(weight) for feature, weight in weights.items()}


def decoding_factors(file: Any, finetuned: bool, number: int) -> torch.Tensor:
    """What SAELens multiplies features with before it decodes them, float64 `[features]`: 1 where
    the weights have no factor, whatever the configuration says.

    Args:
        file: the weights, as `safe_open` gives them.
        finetuned: whether the configuration says that there is a factor.
        number: of features.

    Raises:
        ValueError: a factor of another shape, that is not finite, or that the configuration does
            not tell of.
    """
    names = [name for name in _FACTORS if name in file.keys()]  # noqa: SIM118 - not a mapping
    if len(names) > 1:
        raise ValueError(f"its {WEIGHTS} has {' and '.join(map(repr, names))}; keep one of them")
    ones = torch.ones(number, dtype=torch.float64)
    if not names:
        return ones
    factors: torch.Tensor = file.get_tensor(names[0]).double()
    if factors.shape != ones.shape:
        raise ValueError(
            f"{names[0]} has shape {list(factors.shape)}, and W_dec has {number} features; give a "
            "number for each of them"
        )
    if not factors.isfinite().all():
        raise ValueError(
            f"{names[0]} has numbers that are NaN or infinite; give a file that was saved whole"
        )
    if not finetuned and not torch.allclose(factors, ones):
        raise ValueError(
            f"its {WEIGHTS} has {names[0]}, and its {CONFIG} does not say that features are "
            'multiplied with it; say "finetuning_scaling_factor": true there, or leave it out of '
            "the weights"
        )
    return factors


def _vector(
    path: Path, weights: Mapping[int, float], normalize: bool, finetuned: bool
) -> FloatArray:
    try:
        with safe_open(path, framework="pt") as file:
            if "W_dec" not in file.keys():  # noqa: SIM118 - not a mapping
                raise ValueError(
                    f"its {WEIGHTS} has no W_dec but {sorted(file.keys())}; only SAELens' own "
                    "layout is read, so load it with SAELens and save it with save_model"
                )
            decoder = file.get_slice("W_dec")
            shape = decoder.get_shape()
            if len(shape) != 2:
                raise ValueError(f"W_dec has shape {shape}; it must be [features, hidden]")
            factors = decoding_factors(file, finetuned, shape[0])
            # Row by row: a decoder has gigabytes, and a few rows are wanted.
            rows = {
                feature: factors[feature] * decoder[feature : feature + 1][0].to(torch.float64)
                for feature in weights
                if 0 <= feature < shape[0]
            }
    except SafetensorError as error:
        raise ValueError(f"its {WEIGHTS} is damaged: {error}") from None
    unknown = sorted(set(weights) - set(rows))
    if unknown:
        raise ValueError(f"it has no features {unknown}; there are {shape[0]}, counting from 0")
    total = torch.zeros(shape[1], dtype=torch.float64)
    for feature, weight in weights.items():
        length = float(rows[feature].norm()) if normalize else 1.0
        if length == 0.0:
            raise ValueError(f"the row of feature {feature} is zero and cannot be normalised")
        total += weight / length * rows[feature]
    return as_vector(total.numpy(), "the sum of its decoder rows")

"""Steering by features of a sparse autoencoder."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from tllm.consumers.sparse_autoencoder import AutoencoderConfig, SparseAutoencoder
from tllm.spec.layers import layer_numbered
from tllm.spec.reading import FloatArray, float_array, hook_named, said_of, scalar, whole_number
from tllm.steering.formats.sae import decoding_factors

Numbers = Mapping[int, float]


def steer_features(
    folder: str | PathLike[str],
    *,
    value: Numbers | None = None,
    factor: Numbers | None = None,
    minimum: Numbers | None = None,
    maximum: Numbers | None = None,
    only_if_active: bool = False,
    strength: float = 1.0,
    hook: str | None = None,
    layer: int | None = None,
    centers_rows: bool | None = None,
    **more: Any,
) -> dict[str, dict[int, dict[str, Any]]]:
    """A spec for `steering_vectors` and the like that sets, scales or clamps features.

    `x' = x + strength sum((target_i - f_i) W_dec[i])`, with `f` what the encoder says of the row:
    what the autoencoder does not reconstruct stays as it is. Rows of `W_dec` are multiplied by the
    factor of fine-tuning where there is one (`finetuning_scaling_factor`), as SAELens decodes.

    Args:
        folder: of SAELens, with `cfg.json` and `sae_weights.safetensors`; standard (ReLU) or
            JumpReLU, without normalisation.
        value: what features are set to, by their number.
        factor: what features are multiplied with.
        minimum, maximum: between which features are kept. One of the three is given.
        only_if_active: leave rows alone in which a feature is 0.
        hook, layer: where it is done; where the autoencoder was trained, if not given.
        centers_rows: whether the model's norms take the mean off rows, as layer norms do and RMS
            norms do not. Asked for by an autoencoder that was trained on rows without their mean
            (`center_writing_weights`, as those of GPT-2 are): it then reads them so.
        **more: `positions` and `when` of the entries.

    Raises:
        ValueError: an autoencoder whose features hang on each other (TopK), are gated, or read
            normalised rows; features that are scaled by the norm of their decoder's row; one
            trained on rows without their mean, without `centers_rows`; features that it does not
            have; a factor of which the configuration does not tell; nothing to do.
    """
    path = Path(folder)
    config = SparseAutoencoder.read_config(path)
    _check_kind(config, path)
    if config.centered and centers_rows is None:
        raise ValueError(
            f"{path}: it was trained on rows without their mean (center_writing_weights); give "
            "centers_rows=True for a model with layer norms, which take it off (GPT-2), or "
            "centers_rows=False for one with RMS norms"
        )
    trained_hook, trained_layer = config.place or (None, None)
    hook = trained_hook if hook is None else hook_named(hook, "hook").value
    layer = trained_layer if layer is None else layer
    if hook is None or layer is None:
        raise ValueError(
            f"{path}: it was trained at {config.hook_name!r}, which is no hook point here; give "
            "hook= and layer="
        )
    given = {
        key: numbers
        for key, numbers in zip(
            ("value", "factor", "min", "max"), (value, factor, minimum, maximum), strict=True
        )
        if numbers is not None
    }
    one_kind = len(given) == 1 or set(given) == {"min", "max"}
    by_feature = one_kind and all(isinstance(numbers, Mapping) for numbers in given.values())
    read = {key: _numbers(numbers, path) for key, numbers in given.items()} if by_feature else {}
    features = sorted({f for numbers in read.values() for f in numbers})
    if not features or any(set(numbers) != set(features) for numbers in read.values()):
        raise ValueError(
            f"given are {', '.join(given) or 'none'}; give one of value, factor, or minimum and "
            "maximum as {feature: number}, the same features in both: all features of an entry are "
            "read before any is changed"
        )
    both = features if set(given) == {"min", "max"} else []
    for feature, low, high in ((f, read["min"][f], read["max"][f]) for f in both):
        if low > high:
            raise ValueError(
                f"feature {feature} has minimum={low} above maximum={high}; give the smaller one "
                "as minimum"
            )
    encoder = SparseAutoencoder.load(path)
    entry = {
        "method": "sae_features",
        **_arrays(encoder, features, path, bool(config.centered and centers_rows)),
        **{key: [numbers[f] for f in features] for key, numbers in read.items()},
        "only_if_active": only_if_active,
        "strength": strength,
        **more,
    }
    return {hook: {layer_numbered(layer, "layer"): entry}}


def _check_kind(config: AutoencoderConfig, path: Path) -> None:
    """Refuse autoencoders whose features are not set one by one."""
    if config.architecture not in ("standard", "jumprelu") or config.normalization != "none":
        raise ValueError(
            f"{path}: a {config.architecture} autoencoder with normalize_activations="
            f"{config.normalization!r} cannot be steered feature by feature; standard and jumprelu "
            "ones without normalisation can"
        )
    if config.scaled_by_decoder:
        raise ValueError(
            f"{path}: a {config.architecture} autoencoder with rescale_acts_by_decoder_norm cannot "
            "be steered feature by feature, since SAELens says of topk alone how it is decoded; "
            "multiply W_enc and b_enc by the norms of the rows of W_dec, divide W_dec by them, and "
            "save it without rescale_acts_by_decoder_norm"
        )


def _numbers(given: Numbers, path: Path) -> dict[int, float]:
    """What was given for each feature."""
    found = {}
    for feature, number in given.items():
        name = whole_number(feature, f"{path}: the feature ")
        found[name] = scalar(number, f"the number of feature {name}")
    return found


def _decoder_rows(config: AutoencoderConfig, features: list[int], path: Path) -> FloatArray:
    """The rows of some features in the decoder, of which the encoder's reader has none, with the
    factors that SAELens multiplies these features with."""
    with safe_open(path / "sae_weights.safetensors", framework="pt") as file:
        if "W_dec" not in file.keys():  # noqa: SIM118 - not a mapping
            raise ValueError(f"{path}: its weights have no W_dec, by which features are steered")
        decoder = file.get_tensor("W_dec")
        with said_of(str(path)):
            factors = decoding_factors(file, config.finetuned, config.d_sae)
    if decoder.shape != (config.d_sae, config.d_in):
        raise ValueError(
            f"{path}: W_dec has shape {list(decoder.shape)}, and cfg.json says "
            f"d_sae={config.d_sae}, d_in={config.d_in}"
        )
    rows = factors[features, None] * decoder[features]
    return float_array(rows, f"{path}: W_dec")


def _arrays(
    encoder: SparseAutoencoder, features: list[int], path: Path, centered: bool
) -> dict[str, Any]:
    config = encoder.config
    if wrong := [f for f in features if not 0 <= f < config.d_sae]:
        raise ValueError(f"{path}: it has no feature {wrong[0]!r}, only 0 to {config.d_sae - 1}")
    weights = {name: tensor.float().numpy() for name, tensor in encoder.weights.items()}
    arrays = {
        "encoder": np.ascontiguousarray(weights["W_enc"][:, features].T),
        "encoder_bias": weights["b_enc"][features],
        "decoder": _decoder_rows(config, features, path),
    }
    if config.subtract_b_dec:
        arrays["decoder_bias"] = weights["b_dec"]
    if centered:  # the product with a row without its mean is that of the row with one without
        if config.subtract_b_dec:
            arrays["encoder_bias"] -= arrays["encoder"] @ arrays.pop("decoder_bias")
        arrays["encoder"] -= arrays["encoder"].mean(1, keepdims=True)
    if "threshold" in weights:
        arrays["threshold"] = weights["threshold"][features]
    return arrays

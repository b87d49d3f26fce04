"""What is steered by features of autoencoders reads what these read."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tllm.consumers.sparse_autoencoder import SparseAutoencoder
from tllm.steering import load, steer_features

HIDDEN, FEATURES = 24, 6


@pytest.fixture(params=[True, False], ids=["subtracts b_dec", "does not"])
def folder(request, tmp_path):
    """Of an autoencoder that was trained on rows without their mean, as those of GPT-2 are."""
    torch.manual_seed(0)
    decoder = torch.randn(FEATURES, HIDDEN)
    weights = {
        "W_enc": decoder.T + 0.1 * torch.randn(HIDDEN, FEATURES),
        "b_enc": torch.randn(FEATURES),
        "W_dec": decoder,
        "b_dec": torch.randn(HIDDEN),
    }
    config = {
        "architecture": "standard",
        "d_in": HIDDEN,
        "d_sae": FEATURES,
        "apply_b_dec_to_input": request.param,
        "metadata": {"hook_name": "blocks.3.hook_resid_post"},
        "model_from_pretrained_kwargs": {"center_writing_weights": True},
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        tmp_path / "sae_weights.safetensors",
    )
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("centers_rows", [True, False])
def test_rows_are_read_without_their_mean_where_the_model_takes_it_off(folder, centers_rows):
    sae = SparseAutoencoder.load(folder)
    rows = torch.randn(50, HIDDEN) + 2.0
    expected = sae.encode(rows - rows.mean(-1, keepdim=True) if centers_rows else rows)
    spec = steer_features(folder, factor={1: 0.0, 4: 0.0}, centers_rows=centers_rows)
    entry = spec["post_block"][3]
    bias = entry["encoder_bias"] - entry["encoder"] @ entry.get("decoder_bias", np.zeros(HIDDEN))
    found = np.maximum(rows.numpy() @ entry["encoder"].T + bias, 0)
    assert found == pytest.approx(expected[:, [1, 4]].numpy(), abs=1e-4)
    assert 0 < (found > 0).mean() < 1


def test_numbers_of_features_may_be_numpys(folder):
    spec = steer_features(folder, value={np.int32(1): np.float32(2.0)}, centers_rows=True)
    plain = steer_features(folder, value={1: 2.0}, centers_rows=True)
    np.testing.assert_equal(spec, plain)
    assert added(load(folder, features=np.int64(3))) == added(load(folder, features=[3]))


def added(module):
    return module.vectors["post_block"][3]["vector"].tolist()


@pytest.mark.parametrize(
    ("decoder", "says"),
    [
        (None, "its weights have no W_dec, by which features are steered"),
        (torch.ones(2, HIDDEN), r"W_dec has shape \[2, 24\], and cfg.json says d_sae=6, d_in=24"),
        (torch.ones(FEATURES, 7), r"W_dec has shape \[6, 7\], and cfg.json says"),
        (torch.full((FEATURES, HIDDEN), torch.nan), "W_dec has values that are NaN"),
    ],
)
def test_a_decoder_that_does_not_fit_is_refused(folder, decoder, says):
    weights = load_file(folder / "sae_weights.safetensors") | {"W_dec": decoder}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, folder / "sae_weights.safetensors")
    with pytest.raises(ValueError, match=says):
        steer_features(folder, value={5: 1.0}, centers_rows=True)


def test_whether_the_model_takes_the_mean_off_has_to_be_said(folder):
    with pytest.raises(ValueError, match=r"center_writing_weights.* give centers_rows=True for"):
        steer_features(folder, factor={1: 0.0})


def changed(folder, weights, **config):
    """The folder with other weights and another configuration."""
    before = load_file(folder / "sae_weights.safetensors")
    save_file(before | weights, folder / "sae_weights.safetensors")
    told = json.loads((folder / "cfg.json").read_text()) | config
    (folder / "cfg.json").write_text(json.dumps(told))
    return before["W_dec"].clone()


FACTORS = torch.linspace(-0.5, 3.0, FEATURES)


@pytest.mark.parametrize("name", ["finetuning_scaling_factor", "scaling_factor"])
def test_decoder_rows_have_the_factor_of_fine_tuning(folder, name):
    """SAELens multiplies features with it before it decodes them, where the configuration says."""
    decoder = changed(folder, {name: FACTORS}, finetuning_scaling_factor=True)
    expected = FACTORS[:, None] * decoder
    entry = steer_features(folder, value={1: 2.0, 4: 0.0}, centers_rows=True)["post_block"][3]
    np.testing.assert_allclose(entry["decoder"], expected[[1, 4]], rtol=1e-6)
    assert added(load(folder, features={4: 2.0})) == pytest.approx((2 * expected[4]).tolist())
    unit = -decoder[0] / decoder[0].norm()
    assert added(load(folder, features=0, normalize=True)) == pytest.approx(unit.tolist())


@pytest.mark.parametrize(
    ("weights", "said"),
    [({}, True), ({}, False), ({"scaling_factor": torch.ones(FEATURES)}, False)],
)
def test_without_a_factor_decoder_rows_are_as_they_are(folder, weights, said):
    """SAELens does not go by the configuration where the weights have none."""
    decoder = changed(folder, weights, finetuning_scaling_factor=said)
    entry = steer_features(folder, value={1: 2.0}, centers_rows=True)["post_block"][3]
    np.testing.assert_array_equal(entry["decoder"][0], decoder[1])
    assert added(load(folder, features=1)) == decoder[1].tolist()


@pytest.mark.parametrize(
    ("weights", "said", "says"),
    [
        ({"scaling_factor": FACTORS}, False, "does not say that features are multiplied with it"),
        ({"scaling_factor": FACTORS[:5]}, True, r"scaling_factor has shape \[5\], .* 6 features"),
        ({"scaling_factor": torch.nan * FACTORS}, True, "scaling_factor has numbers that are NaN"),
        (
            {"scaling_factor": FACTORS, "finetuning_scaling_factor": FACTORS.clone()},
            True,
            "'scaling_factor' and 'finetuning_scaling_factor'; keep one of them",
        ),
    ],
)
def test_a_factor_that_is_not_told_is_refused(folder, weights, said, says):
    changed(folder, weights, finetuning_scaling_factor=said)
    with pytest.raises(ValueError, match=says):
        steer_features(folder, value={1: 2.0}, centers_rows=True)
    with pytest.raises(ValueError, match=says):
        load(folder, features=1)


def test_features_that_are_scaled_by_the_norm_of_their_row_are_not_steered(folder):
    """SAELens says of TopK alone what this means, and the consumer reads them so."""
    changed(folder, {}, rescale_acts_by_decoder_norm=True)
    with pytest.raises(ValueError, match=r"rescale_acts_by_decoder_norm.*multiply W_enc and b_enc"):
        steer_features(folder, value={1: 2.0}, centers_rows=True)

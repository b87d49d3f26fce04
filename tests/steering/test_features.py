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

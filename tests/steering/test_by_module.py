"""Interventions that others keep by the names of modules: ml-act, angular steering."""

from typing import Any

import numpy as np
import pytest
import torch

from tllm.spec.tiers import Tiers
from tllm.steering import load_act, load_angular

HIDDEN = 12
MODULES = {"post_attention_layernorm": "mlp_in", "input_layernorm": "attn_in"}
NAMES = {
    "model.layers.3.post_attention_layernorm:0": ("mlp_in", 3),
    "model.layers.4.input_layernorm": ("attn_in", 4),
    "model.layers.5": ("post_block", 5),
}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear() -> dict[str, Any]:
    """What `LinearOTHook.state_dict` of ml-act gives."""
    return {
        "net.w1": drawn(1, HIDDEN),
        "net.b1": drawn(1, HIDDEN, seed=1),
        "quantiles_dict_src": {
            "q_0_100": [drawn(HIDDEN, seed=2) - 9, drawn(HIDDEN, seed=3) + 9],
            "q_40_60": [torch.full([HIDDEN], -0.5), torch.full([HIDDEN], 0.5)],
        },
        "quantiles_src": [-1e6, 1e6],
    }


def gaussian() -> dict[str, Any]:
    """What `GaussianOTHook.state_dict` gives; its first dimension hardly varies."""
    std = [drawn(HIDDEN, seed=seed).abs() + 0.1 for seed in (4, 5)]
    std[0][0] = 1e-5
    names = ("mu1", "mu2", "std1", "std2")
    arrays = drawn(HIDDEN, seed=6), drawn(HIDDEN, seed=7), *std
    return dict(zip(names, arrays, strict=True)) | {
        key: linear()[key] for key in ("quantiles_dict_src", "quantiles_src")
    }


def saved(folder, state, names=NAMES):
    folder.mkdir()
    for name in names:
        torch.save(state, folder / f"{name}.statedict")
    return folder


def moved(state: dict[str, Any], z: torch.Tensor, mean_only: bool) -> torch.Tensor:
    """`z_ot` of ml-act's hooks, before strength and quantiles."""
    if "net.w1" in state:
        return z * state["net.w1"] + state["net.b1"]
    mu1, mu2, std1, std2 = (state[key] for key in ("mu1", "mu2", "std1", "std2"))
    found = (z - mu1) + mu2 if mean_only else std2 / std1 * (z - mu1) + mu2
    return torch.where((std1 > 1e-4) & (std2 > 1e-4), found, z)


@pytest.mark.parametrize("quantiles", ["q_all", "q_40_60"])
@pytest.mark.parametrize(
    ("state", "mean_only"), [(linear, False), (gaussian, False), (gaussian, 1)]
)
def test_a_folder_of_ml_act_is_what_it_computes(tmp_path, state, mean_only, quantiles):
    folder = saved(tmp_path / "act", state())
    asked = {"strength": 0.5, "quantiles": quantiles, "mean_only": bool(mean_only)}
    spec = load_act(folder, modules=MODULES, positions="all_generated", **asked)
    assert {(hook, layer) for hook, layers in spec.items() for layer in layers} == {*NAMES.values()}
    assert len(list(Tiers.parse(vectors=spec))) == len(NAMES)

    z = drawn(50, HIDDEN, seed=8)
    expected = 0.5 * moved(state(), z, bool(mean_only)) + 0.5 * z
    low, high = state()["quantiles_dict_src"].get(quantiles, (z.min() - 1, z.max() + 1))
    expected = torch.where((low < z) & (z < high), expected, z)
    entry = spec["mlp_in"][3]
    assert entry["positions"] == "all_generated"
    weight, shift = (torch.from_numpy(entry[key]) for key in ("weight", "shift"))
    found = z + entry["strength"] * (weight * z + shift - z)
    if quantiles != "q_all":
        low, high = (torch.from_numpy(entry[key]) for key in ("low", "high"))
        found = torch.where((low <= z) & (z <= high), found, z)
    torch.testing.assert_close(found, expected)


class Code:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    ("state", "name", "options", "says"),
    [
        (
            linear(),
            "model.layers.3.mlp.down_proj:0",
            {},
            "it has the module 'mlp.down_proj', whose",
        ),
        (linear(), "model.layers.3.mlp:1", {}, "its name 'model.layers.3.mlp:1' is no module of a"),
        (linear(), "model.norm", {}, "its name 'model.norm' is no module of a block, such as"),
        (linear(), "model.layers.3", {"mean_only": True}, "and it is linear_ot"),
        (linear(), "model.layers.3", {"quantiles": "q_5"}, "choose one of q_all, q_0_100, q_40_60"),
        (
            linear(),
            "model.layers.3",
            {"modules": {"mlp": "x"}},
            "modules['mlp']: unknown hook point 'x'",
        ),
        ({"alpha": drawn(3)}, "model.layers.3", {}, "holds ['alpha']; those of linear_ot hold net"),
        (Code(), "model.layers.3", {}, "cannot be read as tensors alone, and anything else could"),
    ],
)
def test_what_is_no_map_of_ml_act_is_refused(tmp_path, capsys, state, name, options, says):
    folder = saved(tmp_path / "act", state, [name])
    with pytest.raises(ValueError) as refused:
        load_act(folder, **options)
    assert says in str(refused.value)
    assert str(refused.value).startswith(str(folder))
    assert "run" not in capsys.readouterr().out


def test_two_modules_that_are_one_place_are_refused(tmp_path):
    folder = saved(tmp_path / "act", linear(), ["model.layers.3", "model.layers.3.mlp"])
    with pytest.raises(ValueError, match="several modules that are post_block of layer 3"):
        load_act(folder, modules={"mlp": "post_block"})


def test_a_folder_without_such_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is no folder of ml-act, which has files NAME.statedict"):
        load_act(tmp_path)


def angular() -> dict[str, Any]:
    """What a configuration of angular steering holds."""
    first, second = drawn(2, HIDDEN).numpy()
    found = {"first_direction": first, "second_direction": second}
    return {name.removesuffix(":0"): found for name in NAMES}


def test_a_configuration_of_angular_steering_is_a_rotation_at_each_module():
    spec = load_angular(angular(), degrees=180, modules=MODULES, strength=0.5)
    assert {(hook, layer) for hook, layers in spec.items() for layer in layers} == {*NAMES.values()}
    assert len(list(Tiers.parse(vectors=spec))) == len(NAMES)
    entry = spec["attn_in"][4]
    np.testing.assert_array_equal(entry["plane"], [*angular()["model.layers.5"].values()])
    told = {key: entry[key] for key in ("method", "degrees", "adaptive", "strength")}
    assert told == {"method": "rotate", "degrees": 180, "adaptive": True, "strength": 0.5}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model.layers.3": {"first_direction": [1.0]}}, "has ['first_direction']; it has first"),
        ({"model.layers.3": [1.0]}, "config['model.layers.3'] has [1.0]; it has first_direction"),
        (angular(), "config: it has the module 'post_attention_layernorm', whose output is"),
    ],
)
def test_what_is_no_configuration_of_angular_steering_is_refused(config, says):
    with pytest.raises(ValueError) as refused:
        load_angular(config, degrees=90)
    assert says in str(refused.value)

"""Interventions of pyreft from their files."""

import json
from collections import OrderedDict

import numpy as np
import pytest
import torch

from tllm.spec.tiers import Tiers
from tllm.steering import load, load_reft

HIDDEN, RANK = 12, 3
NAMES = {
    "intkey_layer.2.repr.block_output.unit.pos.nunit.1#0.bin": ("post_block", 2),
    "intkey_layer_7_comp_mlp_output_unit_pos_nunit_4#0.bin": ("mlp_out", 7),
    "intkey_comp_model_layers[4]_output_unit_pos_nunit_1#0.bin": ("post_block", 4),
    "intkey_layer.5.repr.model.layers[5].output.unit.pos.nunit.1#0.bin": ("post_block", 5),
}
TYPE = "<class 'pyreft.interventions.LoreftIntervention'>"


def state(seed=0):
    """What `LoreftIntervention.state_dict` gives."""
    generator = torch.Generator().manual_seed(seed)
    linear = torch.nn.Linear(HIDDEN, RANK)
    rotation = torch.linalg.qr(torch.randn(HIDDEN, RANK, generator=generator)).Q
    return OrderedDict(**linear.state_dict(), rotate_layer=rotation)


def saved(folder, names=NAMES, kinds=(TYPE,), content=None):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"intervention_types": list(kinds)}))
    states = {name: content or state(seed) for seed, name in enumerate(names)}
    for name, each in states.items():
        torch.save(each, folder / name)
    return states


def test_a_folder_of_pyreft_is_what_it_computes(tmp_path):
    states = saved(tmp_path / "reft")
    spec = load_reft(tmp_path / "reft", strength=0.5, positions="last_prompt")
    assert len(list(Tiers.parse(vectors=spec))) == len(NAMES)
    h = torch.randn(5, HIDDEN)
    for name, (hook, layer) in NAMES.items():
        [entry] = spec[hook][layer]
        assert entry["positions"] == "last_prompt"
        of = states[name]
        # pyreft: base + (learned_source(base) - rotate_layer(base)) @ rotate_layer.weight.T
        learned = h @ of["weight"].T + of["bias"]
        expected = h + 0.5 * (learned - h @ of["rotate_layer"]) @ of["rotate_layer"].T
        rotation, weight, bias = (
            torch.from_numpy(entry[key]) for key in ("rotation", "weight", "bias")
        )
        found = h + entry["strength"] * (h @ weight.T + bias - h @ rotation.T) @ rotation
        torch.testing.assert_close(found, expected)


class Code:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"names": []}, "is no folder of pyreft, which has config.json and intkey"),
        (
            {"kinds": ["<class 'pyreft.interventions.DireftIntervention'>"]},
            "DireftIntervention'>; those of LoreftIntervention are read",
        ),
        ({"names": ["intkey_layer.1.bin"]}, "is none of intkey_layer.N.repr.COMPONENT"),
        (
            {"names": ["intkey_layer_1_comp_head_attention_value_output_unit_pos_nunit_1#0.bin"]},
            "is for the component 'head_attention_value_output'; those that are read are block_",
        ),
        (
            {"names": [f"intkey_layer_2_comp_mlp_output_unit_pos_nunit_{n}#0.bin" for n in (1, 3)]},
            "nunit_3#0.bin are both number 0 at mlp_out of layer 2",
        ),
        ({"content": {"weight": torch.zeros(2, 3)}}, "holds ['weight']; LoReFT's hold ['bias'"),
        ({"content": state() | {"bias": torch.zeros(RANK).to_sparse()}}, "bias is not an array of"),
        (
            {"content": state() | {"bias": torch.zeros(RANK, dtype=torch.complex64)}},
            "bias is not an array of numbers: complex64 is no kind of real number",
        ),
        ({"content": state() | {"bias": torch.full((RANK,), torch.nan)}}, "bias has values that"),
        ({"content": {**state(), "bias": torch.zeros(1)}}, "has shapes weight [3, 12], bias [1]"),
        ({"content": {**state(), "bias": [0.0] * RANK}}, "has bias as a list; each is a tensor"),
        ({"content": Code()}, "cannot be read as tensors alone, and anything else could run code"),
    ],
)
def test_what_is_no_loreft_is_refused(tmp_path, capsys, options, says):
    saved(tmp_path / "reft", **options)
    with pytest.raises(ValueError) as refused:
        load_reft(tmp_path / "reft")
    assert says in str(refused.value)
    assert "run" not in capsys.readouterr().out


def test_load_says_what_reads_such_a_folder(tmp_path):
    saved(tmp_path / "reft")
    with pytest.raises(ValueError, match=r"reft: .* read it with tllm.steering.load_reft"):
        load(tmp_path / "reft")


def test_an_empty_file_is_refused(tmp_path):
    [name] = saved(tmp_path / "reft", list(NAMES)[:1])
    (tmp_path / "reft" / name).write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be read as tensors alone"):
        load_reft(tmp_path / "reft")


def test_arrays_are_floats_of_32_bits(tmp_path):
    """pyreft's default is bfloat16."""
    half = {name: tensor.bfloat16() for name, tensor in state().items()}
    saved(tmp_path / "reft", list(NAMES)[:1], content=half)
    [entry] = load_reft(tmp_path / "reft")["post_block"][2]
    assert entry["weight"].dtype == np.float32
    assert entry["rotation"].shape == (RANK, HIDDEN)


def test_each_of_several_interventions_at_one_place_has_its_own_positions(tmp_path):
    """pyreft trains one for the first tokens and one for the last ones, unless they share."""
    names = [f"intkey_layer_2_comp_block_output_unit_pos_nunit_1#{n}.bin" for n in (0, 1, 10)]
    states = saved(tmp_path / "reft", names)
    asked = {0: [0, 1, 2], 1: [-3, -2, -1], 10: "all_prompt"}
    entries = load_reft(tmp_path / "reft", positions=asked)["post_block"][2]
    for entry, (state_of_it, positions) in zip(
        entries, zip(states.values(), asked.values(), strict=True), strict=True
    ):
        assert entry["positions"] == positions
        np.testing.assert_array_equal(entry["weight"], state_of_it["weight"].numpy())


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        (None, "at post_block of layer 2 it has 2 interventions, each trained at tokens of its"),
        ([0, 1, -1], "give positions={0: ..., 1: ...}"),
        ({0: [0]}, "positions has the numbers [0], and its files have [0, 1]"),
        ({0: [0], "phase": "prompt"}, "positions has the numbers [0, 'phase'], and its files"),
        ({0: [0], 1: [1], 2: [2]}, "positions has the numbers [0, 1, 2], and its files have"),
    ],
)
def test_one_choice_of_positions_for_several_interventions_is_refused(tmp_path, positions, says):
    names = [f"intkey_layer_2_comp_block_output_unit_pos_nunit_1#{n}.bin" for n in (0, 1)]
    saved(tmp_path / "reft", names)
    with pytest.raises(ValueError) as refused:
        load_reft(tmp_path / "reft", positions=positions)
    assert says in str(refused.value)


@pytest.mark.parametrize("kinds", [3, "LoreftIntervention"])
def test_a_config_without_a_list_of_kinds_is_refused(tmp_path, kinds):
    saved(tmp_path / "reft")
    (tmp_path / "reft" / "config.json").write_text(json.dumps({"intervention_types": kinds}))
    with pytest.raises(ValueError, match=r"intervention_types .* it is a list"):
        load_reft(tmp_path / "reft")

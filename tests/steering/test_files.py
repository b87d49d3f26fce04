"""Vectors from the files that other tools write, and every way in which a file can be wrong."""

from __future__ import annotations

import json
import pickle
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from tllm.spec.hooks import HookPoint
from tllm.spec.tiers import Tiers
from tllm.steering import ExtractedModule, SteeringModule, load
from tllm.steering.formats.names import parse_place

HIDDEN = 16
Array = npt.NDArray[np.float32]


def vector(seed: int, hidden: int = HIDDEN) -> Array:
    return np.random.default_rng(seed).standard_normal(hidden).astype(np.float32)


def added(module: SteeringModule, hook: str = "post_block") -> dict[int, Array]:
    """What is added at each layer, whichever way it is split into vector and scale."""
    return {
        layer: entry["scale"] * entry["vector"] for layer, entry in module.vectors[hook].items()
    }


def assert_adds(module: SteeringModule, expected: Mapping[int, Any], hook: str = "post_block"):
    got = added(module, hook)
    assert sorted(got) == sorted(expected)
    for layer in expected:
        np.testing.assert_allclose(got[layer], expected[layer], rtol=1e-6)


# -- GGUF ------------------------------------------------------------------------------------------


@dataclass
class ControlVector:
    """repeng's class, as far as a reader sees it; `export_gguf` writes as repeng's does."""

    model_type: str
    directions: dict[int, Any]

    def export_gguf(self, path: Path, arch: str = "controlvector", **strings: str) -> Path:
        writer = gguf.GGUFWriter(path, arch)
        writer.add_string(f"{arch}.model_hint", self.model_type)
        writer.add_uint32(f"{arch}.layer_count", len(self.directions))
        for key, value in strings.items():
            writer.add_string(key.replace("__", "."), value)
        for layer, direction in self.directions.items():
            name = layer if isinstance(layer, str) else f"direction.{layer}"
            writer.add_tensor(name, direction)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def test_a_gguf_direction_is_added_to_the_output_of_the_block_with_its_number(tmp_path: Path):
    directions = {layer: vector(layer) for layer in (1, 2, 5)}
    path = ControlVector("qwen2", directions).export_gguf(tmp_path / "happy.gguf")
    module = load(path)
    assert_adds(module, directions)
    assert module.metadata["model_hint"] == "qwen2"
    assert module.metadata["layer_count"] == 3


def test_a_gguf_file_is_known_by_its_content_and_not_its_name(tmp_path: Path):
    path = ControlVector("llama", {3: vector(0)}).export_gguf(tmp_path / "vector.bin")
    assert_adds(load(str(path)), {3: vector(0)})


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_gguf_directions_in_other_floating_point_types(tmp_path: Path, dtype: Any):
    path = ControlVector("llama", {3: vector(0).astype(dtype)}).export_gguf(tmp_path / "v.gguf")
    assert_adds(load(path), {3: vector(0).astype(dtype).astype(np.float32)})


def svec(path: Path, **saved: Any) -> Path:
    """What `SteeringVector.save` of IBM's activation-steering writes."""
    path.write_text(json.dumps({"model_type": "llama", "explained_variances": {}, **saved}))
    return path


def test_a_direction_of_cast_is_added_where_its_block_begins(tmp_path: Path):
    directions = {str(layer): vector(layer).tolist() for layer in (0, 3)}
    module = load(svec(tmp_path / "refusal.svec", directions=directions), scale=2.0)
    assert module.metadata == {"model_hint": "llama"}
    assert list(module.vectors) == ["pre_attn"]
    for layer, entry in module.vectors["pre_attn"].items():
        np.testing.assert_array_equal(entry["vector"], vector(layer))
        assert entry["scale"] == 2.0
    assert [*module.vectors["pre_attn"]] == [0, 3]


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        (
            {},
            "it is JSON with ['explained_variances', 'model_type']; what is read has 'directions'",
        ),
        (
            {"prefill_vectors": {}, "clamps": {}},
            "specification in JSON goes to llm.steering.register_module(name, json.load(file)), or "
            "to tllm serve --steering-module NAME=FILE.json",
        ),
        ({"directions": {}}, "what is read has 'directions', vectors by layer"),
        ({"directions": {"-1": [1.0]}}, "its directions have the layer '-1'; layers count from 0"),
        ({"directions": {"1": ["x"]}}, "is not an array of"),
    ],
)
def test_other_json_is_refused(tmp_path: Path, saved: Any, says: str):
    path = svec(tmp_path / "v.svec", **saved)
    with pytest.raises(ValueError) as refused:
        load(path)
    assert str(refused.value).startswith(str(path)) and says in str(refused.value)


def bfloat16_bits(values: Array) -> Any:
    bits = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    return bits.view(np.uint8)


def test_gguf_directions_in_bfloat16(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "controlvector")
    writer.add_tensor(
        "direction.2", bfloat16_bits(vector(0)), raw_dtype=gguf.GGMLQuantizationType.BF16
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = torch.from_numpy(vector(0)).bfloat16().float().numpy()
    assert_adds(load(tmp_path / "v.gguf"), {2: expected})


def test_a_big_endian_gguf_file(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "controlvector", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("direction.2", vector(0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_adds(load(tmp_path / "v.gguf"), {2: vector(0)})


def gguf_refusals() -> list[Any]:
    good = {1: vector(0)}
    return [
        pytest.param(good, {"arch": "llama"}, "general.architecture='llama'", id="a model"),
        pytest.param({}, {}, "no tensor direction.N", id="empty"),
        pytest.param({"bias.1": vector(0)}, {}, "'bias.1'", id="another tensor"),
        pytest.param({"direction.x": vector(0)}, {}, "'direction.x'", id="no number"),
        pytest.param({1: np.zeros((32, 32), np.int8)}, {}, "I8", id="integers"),
        pytest.param({1: np.zeros((2, 4), np.float32)}, {}, "shape", id="matrix"),
        pytest.param({1: vector(0), 2: vector(0, 8)}, {}, "different widths", id="widths"),
        pytest.param({1: vector(0) * np.nan}, {}, "NaN", id="nan"),
        pytest.param(
            good,
            {"controlvector__easysteer": json.dumps({"component": "router_logits"})},
            "router_logits",
            id="another component",
        ),
        pytest.param(good, {"glp__mode": "project"}, "not for adding", id="projection"),
    ]


@pytest.mark.parametrize(("directions", "strings", "message"), gguf_refusals())
def test_a_gguf_file_that_is_no_control_vector_is_refused(
    tmp_path: Path, directions: dict[Any, Any], strings: dict[str, str], message: str
):
    path = ControlVector("llama", directions).export_gguf(tmp_path / "v.gguf", **strings)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("kept", [8, 60, 130])
def test_a_gguf_file_that_was_cut_off_is_refused(tmp_path: Path, kept: int):
    path = ControlVector("llama", {1: vector(0)}).export_gguf(tmp_path / "v.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="damaged"):
        load(path)


def test_a_gguf_file_without_the_reader_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = ControlVector("llama", {1: vector(0)}).export_gguf(tmp_path / "v.gguf")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ImportError, match=r"tllm\[steering\]"):
        load(path)


def test_a_repeng_control_vector_is_taken_as_it_is():
    made = ControlVector("mistral", {layer: vector(layer) for layer in (4, 5)})
    module = load(made, layers=5, scale=2.0)
    assert_adds(module, {5: 2 * vector(5)})
    assert module.source == "repeng mistral"


# -- names of places -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "hook", "layer"),
    [
        ("12", None, 12),
        ("0", None, 0),
        ("layer_12", None, 12),
        ("layer.12", None, 12),
        ("layer12", None, 12),
        ("layers.12", None, 12),
        ("block.12", None, 12),
        ("blocks_12", None, 12),
        ("direction.12", None, 12),
        ("post_block.12", "post_block", 12),
        ("post_block_12", "post_block", 12),
        ("mlp_out.layer_3", "mlp_out", 3),
        ("block_output.3", "post_block", 3),
        ("block_input.layers.3", "pre_attn", 3),
        ("blocks.7.hook_resid_pre", "pre_attn", 7),
        ("blocks.7.hook_resid_mid", "post_attn", 7),
        ("blocks.7.hook_resid_post", "post_block", 7),
        ("blocks.7.hook_attn_out", "attn_out", 7),
        ("blocks.7.hook_mlp_out", "mlp_out", 7),
        ("model.layers.7", "post_block", 7),
        ("transformer.h.7", "post_block", 7),
    ],
)
def test_names_of_places_that_are_understood(key: str, hook: str | None, layer: int):
    assert parse_place(key) == (hook and HookPoint(hook), layer)


@pytest.mark.parametrize(
    "key",
    ["", "x", "-1", "012", "1.5", "12 ", "1٣", "layer", "layer_-1", "hidden_states.3", "foo.3"],
)
def test_names_of_places_that_are_not_understood(key: str):
    assert parse_place(key) is None


@pytest.mark.parametrize(
    "key", ["v_3", "blocks.3.attn.hook_z", "blocks.3.ln2.hook_normalized", "model.layers.3.mlp"]
)
def test_places_that_are_no_hook_point(key: str):
    assert parse_place(key) is None
    assert parse_place("lm_head_in.3") is None


def test_every_hook_point_and_alias_can_begin_a_key():
    for point in HookPoint:
        if point.has_layer:
            assert parse_place(f"{point}.4") == (point, 4)
    from tllm.spec.hooks import ALIASES

    for alias, canonical in ALIASES.items():
        assert parse_place(f"{alias}.4") == (HookPoint(canonical), 4)


# -- arrays by layer: safetensors, npz, pt ---------------------------------------------------------

Writer = Callable[[Path, dict[str, Array]], Path]


def write_safetensors(path: Path, arrays: dict[str, Array]) -> Path:
    safetensors.numpy.save_file(arrays, path)
    return path


def write_npz(path: Path, arrays: dict[str, Array]) -> Path:
    with path.open("wb") as file:
        np.savez(file, **arrays)
    return path


def write_compressed(path: Path, arrays: dict[str, Array]) -> Path:
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)
    return path


def write_pt(path: Path, arrays: dict[str, Array]) -> Path:
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    return path


def write_old_pt(path: Path, arrays: dict[str, Array]) -> Path:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    return path


writers = pytest.mark.parametrize(
    "write", [write_safetensors, write_npz, write_compressed, write_pt, write_old_pt]
)


@writers
def test_arrays_by_layer(tmp_path: Path, write: Writer):
    path = write(tmp_path / "anything", {"layer_3": vector(3), "layer_7": vector(7)})
    assert_adds(load(path), {3: vector(3), 7: vector(7)})
    assert_adds(load(path, hook="mlp_out"), {3: vector(3), 7: vector(7)}, "mlp_out")
    assert_adds(load(path, layers=[7]), {7: vector(7)})
    assert_adds(load(path, layers=3, scale=-2.0), {3: -2 * vector(3)})


@writers
def test_arrays_that_name_their_hook_points(tmp_path: Path, write: Writer):
    path = write(
        tmp_path / "v", {"post_block.3": vector(0), "attn_out.3": vector(1), "mlp_out.4": vector(2)}
    )
    module = load(path)
    assert_adds(module, {3: vector(0)})
    assert_adds(module, {3: vector(1)}, "attn_out")
    assert_adds(module, {4: vector(2)}, "mlp_out")
    only = load(path, hook="attn_output")
    assert list(only.vectors) == ["attn_out"]
    assert list(load(path, layers=3).vectors) == ["attn_out", "post_block"]
    with pytest.raises(ValueError, match="no vectors for hook='pre_attn'"):
        load(path, hook="pre_attn")


@writers
def test_one_vector_is_put_where_it_is_said(tmp_path: Path, write: Writer):
    path = write(tmp_path / "v", {"direction": vector(0)})
    assert_adds(load(path, layers=5), {5: vector(0)})
    assert_adds(
        load(path, layers=[4, 5], hook="mlp_out"), dict.fromkeys((4, 5), vector(0)), "mlp_out"
    )
    with pytest.raises(ValueError, match="says no layer; say where it goes"):
        load(path)


@writers
def test_one_row_a_layer(tmp_path: Path, write: Writer):
    rows = np.stack([vector(i) for i in range(4)])
    path = write(tmp_path / "v", {"vectors": rows})
    assert_adds(load(path), dict(enumerate(rows)))
    assert_adds(load(path, layers="10-13"), dict(enumerate(rows, 10)))
    assert load(path, layers="all").num_layers == 4
    assert_adds(load(path, layers=[10, 11, 13, 12]), dict(zip((10, 11, 13, 12), rows, strict=True)))
    assert_adds(load(path).select([2]), {2: rows[2]})
    counted = load(path)
    assert counted.num_layers == counted.select([2]).scaled(2.0).num_layers == 4
    assert load(counted.save(tmp_path / "again")).num_layers == 4
    assert {entry.num_layers for entry in Tiers.parse(vectors=counted)} == {4}
    assert load(path, layers=[10, 11, 13, 12]).num_layers is None
    with pytest.raises(ValueError, match=r"4 vectors that say no layer.*2 entries"):
        load(path, layers=[0, 1])


@writers
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"hidden_states.3": vector(0)}, "'hidden_states.3'"),
        ({"3": vector(0), "lm_head.weight": vector(1)}, "'lm_head.weight'"),
        ({"3": vector(0), "layer_3": vector(1)}, "two vectors for post_block of layer 3"),
        ({"3": vector(0), "4": vector(1, 8)}, "different widths"),
        ({"3": vector(0) * np.inf}, "NaN, infinite"),
        ({"3": np.zeros((2, HIDDEN), np.float32)}, r"shape \[2, 16\]"),
        ({"3": np.arange(HIDDEN)}, "int64"),
        ({"3": np.zeros(0, np.float32)}, "shape"),
        ({"vector": vector(0), "directions": vector(1)}, "keep one of them"),
        ({"vectors": np.zeros((2, 3, 4), np.float32)}, r"shape \[2, 3, 4\]"),
    ],
)
def test_arrays_that_cannot_be_understood_are_refused(
    tmp_path: Path, write: Writer, arrays: dict[str, Any], message: str
):
    path = write(tmp_path / "v", arrays)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)


def test_dimensions_of_length_one_before_a_vector_are_taken_off(tmp_path: Path):
    path = write_pt(tmp_path / "v.pt", {"3": vector(0)[None, None]})
    assert_adds(load(path), {3: vector(0)})
    assert_adds(
        load(write_pt(tmp_path / "w.pt", {"vector": vector(0)[None]}), layers=1), {1: vector(0)}
    )


def test_bfloat16_and_half_safetensors(tmp_path: Path):
    tensors = {
        "1": torch.from_numpy(vector(1)).bfloat16(),
        "2": torch.from_numpy(vector(2)).half(),
        "3": torch.from_numpy(vector(3)).double(),
    }
    safetensors.torch.save_file(tensors, tmp_path / "v", metadata={"made_by": "me"})
    module = load(tmp_path / "v")
    assert_adds(module, {int(name): each.float().numpy() for name, each in tensors.items()})
    assert module.metadata["made_by"] == "me"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_read_exactly(tmp_path: Path, dtype: torch.dtype):
    narrow = torch.from_numpy(vector(0)).to(dtype)
    torch.save({"vector": narrow}, tmp_path / "v.pt")
    assert_adds(load(tmp_path / "v.pt", layers=1), {1: narrow.float().numpy()})


def test_a_number_too_large_for_float32_is_refused(tmp_path: Path):
    path = write_npz(tmp_path / "v", {"1": np.full(HIDDEN, 1e300)})
    with pytest.raises(ValueError, match="infinite or beyond float32"):
        load(path)


def test_npy_files(tmp_path: Path):
    np.save(tmp_path / "one.npy", vector(0))
    assert_adds(load(tmp_path / "one.npy", layers=2), {2: vector(0)})
    np.savez(tmp_path / "unnamed.npz", vector(3))
    assert_adds(load(tmp_path / "unnamed.npz", layers=3), {3: vector(3)})
    np.savez(tmp_path / "two.npz", vector(3), vector(4))
    with pytest.raises(ValueError, match="has the key 'arr_0', which says no layer"):
        load(tmp_path / "two.npz")
    np.save(tmp_path / "many.npy", np.stack([vector(0), vector(1)]))
    assert_adds(load(tmp_path / "many.npy"), {0: vector(0), 1: vector(1)})


# -- torch.save ------------------------------------------------------------------------------------


def save(tmp_path: Path, value: Any) -> Path:
    torch.save(value, tmp_path / "v.pt")
    return tmp_path / "v.pt"


def test_a_sparse_tensor_is_refused(tmp_path: Path):
    path = save(tmp_path, {3: torch.from_numpy(vector(0)).to_sparse()})
    with pytest.raises(ValueError, match=r"v\.pt: it has a tensor of layout torch\.sparse_coo"):
        load(path)


def test_shapes_of_saved_dicts(tmp_path: Path):
    v, t = vector(0), torch.from_numpy(vector(0))
    assert_adds(load(save(tmp_path, t), layers=3), {3: v})
    assert_adds(load(save(tmp_path, t.clone().requires_grad_()), layers=3), {3: v})
    assert_adds(load(save(tmp_path, torch.nn.Parameter(t)), layers=3), {3: v})
    assert_adds(load(save(tmp_path, {3: t, 4: t.bfloat16().float()})).select(3), {3: v})
    assert_adds(load(save(tmp_path, {"vector": t, "layer": 3})), {3: v})
    record = {"direction": t, "layer": 3, "hook": "mlp_out", "scale": 2.0, "model": "x"}
    module = load(save(tmp_path, record))
    assert_adds(module, {3: 2 * v}, "mlp_out")
    assert module.metadata == {"model": "x"}
    named = {"vector": t, "layer": 3, "hook_name": "blocks.3.hook_resid_pre"}
    assert_adds(load(save(tmp_path, named)), {3: v}, "pre_attn")
    nested = {"directions": {3: t}, "model_type": "qwen2"}
    module = load(save(tmp_path, nested))
    assert_adds(module, {3: v})
    assert module.metadata == {"model_type": "qwen2"}
    ours = {"post_block": {3: {"vector": t, "scale": 0.5}, "4": [0.5] * HIDDEN}}
    assert_adds(load(save(tmp_path, ours)), {3: v / 2, 4: np.full(HIDDEN, 0.5)})


def test_a_layer_that_was_saved_as_an_array(tmp_path: Path):
    with (tmp_path / "v.npz").open("wb") as file:
        np.savez(file, vector=vector(0), layer=np.array(3))
    assert_adds(load(tmp_path / "v.npz"), {3: vector(0)})


@pytest.mark.parametrize("nested", [False, True])
def test_what_stands_beside_vectors_by_layer_is_said_of_each(tmp_path: Path, nested: bool):
    def saved(vectors: dict[Any, Any], **beside: Any) -> SteeringModule:
        return load(save(tmp_path, {**({"vectors": vectors} if nested else vectors), **beside}))

    t, v = torch.from_numpy(vector(0)), vector(0)
    module = saved({3: t, "layer_4": t}, hook="mlp_out", scale=4.0, model="x")
    assert list(module.vectors) == ["mlp_out"] and module.metadata == {"model": "x"}
    assert_adds(module, {3: 4 * v, 4: 4 * v}, "mlp_out")
    assert_adds(saved({"layer_3": t}, hook_name="blocks.3.hook_mlp_out"), {3: v}, "mlp_out")
    assert_adds(saved({3: t}, layer=3, scale=torch.tensor(2.0)), {3: 2 * v})
    assert_adds(saved({"mlp_out.3": t, 4: t}, hook="mlp_output"), {3: v, 4: v}, "mlp_out")
    assert_adds(saved({"mlp_out": {3: t}}, scale=-2.0), {3: -2 * v}, "mlp_out")
    own = {3: {"vector": t, "scale": 0.5}}
    assert_adds(saved(own, scale=1.0, hook=None, layer=None), {3: v / 2})
    with pytest.raises(ValueError, match="no vectors for hook='attn_out'"):
        load(save(tmp_path, {3: t, "hook": "mlp_out"}), hook="attn_out")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("vectors", "beside", "message"),
    [
        ({3: 1.0}, {"layer": 7}, "'layer' is 7, beside a vector for layer 3; leave 'layer' out"),
        ({3: 1.0, 4: 1.0}, {"layer": 3}, "'layer' is 3, beside a vector for layer 4"),
        ({3: 1.0}, {"layer": "3"}, "'layer' is '3'; it must be a whole number"),
        ({3: 1.0}, {"hook": "nowhere"}, "unknown hook point 'nowhere'"),
        ({3: 1.0}, {"hook": "mlp_out", "site": "mlp_out"}, "keep one"),
        (
            {4: 1.0},
            {"hook": "blocks.3.hook_mlp_out"},
            "layer is 4 and its hook is 'blocks.3.*agree",
        ),
        ({"attn_out.3": 1.0}, {"hook": "mlp_out"}, "attn_out of layer 3.*'mlp_out'.*agree"),
        ({3: 1.0}, {"scale": "big"}, "must be a number"),
        ({3: 1.0}, {"scale": [1.0, 2.0]}, "must be a number"),
        ({3: 0.5}, {"scale": 4.0}, "'scale' is 4.0, beside a vector with a scale of 0.5; keep one"),
    ],
)
def test_what_stands_beside_vectors_by_layer_and_does_not_fit_is_refused(
    tmp_path: Path, nested: bool, vectors: dict[Any, float], beside: dict[str, Any], message: str
):
    t = torch.from_numpy(vector(0))
    entries = {
        key: t if scale == 1.0 else {"vector": t, "scale": scale} for key, scale in vectors.items()
    }
    value = {**({"vectors": entries} if nested else entries), **beside}
    with pytest.raises(ValueError, match=message):
        load(save(tmp_path, value))


def test_what_stands_beside_a_record_is_said_of_it(tmp_path: Path):
    t, v = torch.from_numpy(vector(0)), vector(0)
    inner = {"control_vector": {"vector": t}, "layer": 3, "hook": "mlp_out", "scale": 2.0}
    assert_adds(load(save(tmp_path, inner)), {3: 2 * v}, "mlp_out")
    with pytest.raises(ValueError, match="beside its vector it has 'scale', without 'layer'"):
        load(save(tmp_path, {"control_vector": {"vector": t}, "scale": 2.0}))
    twice = {"control_vector": {"vector": t, "layer": 3, "scale": 1.0}, "scale": 2.0}
    with pytest.raises(ValueError, match=r"beside a vector with a scale of 1\.0; keep one"):
        load(save(tmp_path, twice))


class Bomb:
    """Runs code when it is restored."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(self.path),))  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["torch", "old torch", "pickle", "numpy", "npz"])
def test_a_file_cannot_run_code(tmp_path: Path, kind: str):
    bomb = Bomb()
    bomb.path = str(tmp_path / "ran")  # type: ignore[attr-defined]
    path = tmp_path / "v"
    if kind in ("torch", "old torch"):
        torch.save({"vector": bomb}, path, _use_new_zipfile_serialization=kind == "torch")
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({3: bomb}))
    else:
        array = np.array([bomb], dtype=object)
        with path.open("wb") as file:
            np.save(file, array) if kind == "numpy" else np.savez(file, vector=array)
    with pytest.raises(ValueError, match="run any code"):
        load(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"vector": torch.zeros(4), "bias": torch.zeros(4)}, "beside 'vector' it has 'bias'"),
        ({"vector": torch.zeros(4), "layer": "3"}, "'layer' is '3'"),
        ({"vector": torch.zeros(4), "layer": True}, "'layer' is True"),
        ({"vector": torch.zeros(4), "hook": "mlp_out"}, "without 'layer'"),
        ({"vector": torch.zeros(4), "scale": 3.0}, "without 'layer'"),
        ({"vector": torch.zeros(4), "layer": 1, "hook": "nowhere"}, "unknown hook point 'nowhere'"),
        ({"vector": torch.zeros(4), "layer": 1, "hook": "blocks.2.hook_resid_pre"}, "agree"),
        ({"vector": torch.zeros(4), "layer": 1, "hook": "mlp_out", "site": "mlp_out"}, "keep one"),
        ({"vector": torch.zeros(4), "layer": 1, "scale": float("nan")}, "must be finite"),
        ({"vector": torch.zeros(4), "layer": 1, "scale": "big"}, "must be a number"),
        ({"vector": torch.zeros(4), "layer": 1, "scale": 10**400}, "must be finite"),
        ({"vector": "file.txt"}, "must be an array"),
        ({1: {"vector": torch.zeros(4), "sclae": 2.0}}, "'sclae'"),
        ({1: {"scale": 2.0}}, "'vector' and 'scale'"),
        ({1: None}, "NoneType"),
        ({-1: torch.zeros(4)}, "layer -1"),
        ({"mlp_out": {"attn_out.1": torch.zeros(4)}}, "under 'mlp_out'"),
        ({"mlp_out": torch.zeros(4)}, "'mlp_out', which says no layer"),
        (
            {"happy": torch.zeros(4)},
            "where layers= says is alone, under one of vector, vectors, dir",
        ),
        ({"config": {"a": 1}}, "names no layer"),
        ({}, "names no layer"),
        ([torch.zeros(4)], "holds a list"),
        (3.0, "holds a float"),
        (torch.tensor(3.0), "shape"),
    ],
)
def test_saved_values_that_cannot_be_understood_are_refused(
    tmp_path: Path, value: Any, message: str
):
    with pytest.raises(ValueError, match=message):
        load(save(tmp_path, value))


# -- sparse autoencoders ---------------------------------------------------------------------------

FEATURES = 24


def write_sae(folder: Path, config: dict[str, Any], **weights: Any) -> torch.Tensor:
    """A folder as SAELens' `save_model` writes it."""
    folder.mkdir(exist_ok=True)
    decoder = torch.randn(FEATURES, HIDDEN, generator=torch.Generator().manual_seed(1))
    (folder / "cfg.json").write_text(json.dumps(config))
    tensors = {
        "W_enc": torch.zeros(HIDDEN, FEATURES),
        "W_dec": decoder,
        "b_enc": torch.zeros(FEATURES),
        "b_dec": torch.zeros(HIDDEN),
    } | weights
    safetensors.torch.save_file(tensors, folder / "sae_weights.safetensors")
    return decoder


NEW = {
    "architecture": "jumprelu",
    "d_in": HIDDEN,
    "d_sae": FEATURES,
    "normalize_activations": "none",
    "metadata": {"model_name": "gemma-2-2b", "hook_name": "blocks.12.hook_resid_post"},
}
OLD = {"hook_name": "blocks.12.hook_resid_pre", "hook_layer": 12, "hook_head_index": None}
OLDEST = {"hook_point": "blocks.12.hook_mlp_out", "hook_point_layer": 12}
TRANSCODER = {
    "architecture": "transcoder",
    "metadata": {
        "hook_name": "blocks.12.ln2.hook_normalized",
        "hook_name_out": "blocks.12.hook_mlp_out",
    },
}


@pytest.mark.parametrize(
    ("config", "hook"),
    [(NEW, "post_block"), (OLD, "pre_attn"), (OLDEST, "mlp_out"), (TRANSCODER, "mlp_out")],
)
def test_a_decoder_row_goes_where_its_autoencoder_writes(
    tmp_path: Path, config: dict[str, Any], hook: str
):
    decoder = write_sae(tmp_path / "sae", config).numpy()
    assert_adds(load(tmp_path / "sae", features=5), {12: decoder[5]}, hook)
    assert_adds(
        load(tmp_path / "sae", features=[5, 7], scale=3.0),
        {12: 3 * (decoder[5] + decoder[7])},
        hook,
    )
    unit = decoder / np.linalg.norm(decoder, axis=1, keepdims=True)
    module = load(tmp_path / "sae", features={5: 2.0, 7: -1.0}, normalize=True)
    assert_adds(module, {12: 2 * unit[5] - unit[7]}, hook)
    assert module.metadata["features"] == {"5": 2.0, "7": -1.0}


def test_an_unknown_hook_of_an_autoencoder_can_be_said(tmp_path: Path):
    decoder = write_sae(tmp_path / "sae", {"hook_name": "model.layers.3.mlp.experts"}).numpy()
    with pytest.raises(ValueError, match="say where the rows go with hook= and"):
        load(tmp_path / "sae", features=5)
    module = load(tmp_path / "sae", features=5, hook="mlp_out", layers=3)
    assert_adds(module, {3: decoder[5]}, "mlp_out")


def test_a_known_hook_of_an_autoencoder_is_not_overruled(tmp_path: Path):
    write_sae(tmp_path / "sae", NEW)
    with pytest.raises(ValueError, match="no vectors for hook='mlp_out'"):
        load(tmp_path / "sae", features=5, hook="mlp_out", layers=3)
    with pytest.raises(ValueError, match=r"for the layers \[12\]"):
        load(tmp_path / "sae", features=5, layers=3)


@pytest.mark.parametrize(
    ("config", "weights", "features", "message"),
    [
        (NEW, {}, None, "say which of its features="),
        (NEW, {}, [], "features= is empty"),
        (NEW, {}, [FEATURES], r"no features \[24\]; there are 24"),
        (NEW, {}, -1, r"no features \[-1\]"),
        (NEW, {}, [1, 1], "names a feature twice"),
        (NEW, {}, "5", "features='5'"),
        (NEW, {}, ["5"], "has '5'"),
        (NEW, {}, {5: float("inf")}, "weight inf"),
        (NEW, {"W_dec": torch.zeros(2, 3, 4)}, 0, r"shape \[2, 3, 4\]"),
        ({}, {}, 0, "hook_name is None"),
        ({"hook_name": "blocks.3.attn.hook_z"}, {}, 0, "space of the heads"),
        ({"hook_name": "blocks.3.hook_q", "hook_head_index": 2}, {}, 0, "space of the heads"),
        ({"hook_name": "blocks.3.ln2.hook_normalized"}, {}, 0, "ln2.hook_normalized"),
    ],
)
def test_autoencoders_that_cannot_be_used_are_refused(
    tmp_path: Path, config: dict[str, Any], weights: dict[str, Any], features: Any, message: str
):
    write_sae(tmp_path / "sae", config, **weights)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "sae", features=features)


def test_an_autoencoder_is_given_as_its_folder(tmp_path: Path):
    write_sae(tmp_path / "sae", NEW)
    with pytest.raises(ValueError, match=r"give the folder that has it and its cfg\.json"):
        load(tmp_path / "sae" / "sae_weights.safetensors")
    with pytest.raises(ValueError, match="is for sparse autoencoders"):
        load(tmp_path / "sae" / "sae_weights.safetensors", features=3)
    (tmp_path / "sae" / "cfg.json").unlink()
    with pytest.raises(ValueError, match=r"without cfg\.json"):
        load(tmp_path / "sae", features=3)


# -- our own files ---------------------------------------------------------------------------------


def module_of_two_hooks() -> SteeringModule:
    return SteeringModule(
        {
            "post_block": {
                3: {"vector": vector(0), "scale": 1.5},
                4: {"vector": vector(1), "scale": -0.1},
            },
            "attn_out": {3: {"vector": vector(2), "scale": 0.0}},
        },
        source="a test",
        metadata={"model": "demo", "prompts": [3, 4], "note": "ünïcode"},
    )


def test_a_module_comes_back_as_it_was_saved(tmp_path: Path):
    module = module_of_two_hooks()
    again = load(module.save(tmp_path / "m.safetensors"))
    assert type(again) is SteeringModule
    assert (again.source, again.metadata) == (module.source, module.metadata)
    assert list(again.vectors) == list(module.vectors) == ["attn_out", "post_block"]
    for hook, layers in module.vectors.items():
        for layer, entry in layers.items():
            assert again.vectors[hook][layer]["scale"] == entry["scale"]
            np.testing.assert_array_equal(again.vectors[hook][layer]["vector"], entry["vector"])


def test_an_extracted_module_comes_back_with_its_scores(tmp_path: Path):
    module = ExtractedModule(
        {"post_block": {n: {"vector": vector(n), "scale": 2.0} for n in (1, 2)}},
        method="pca",
        separation={1: 0.75, 2: 1.0},
        d_prime={1: 0.5, 2: float("inf")},
    )
    again = load(module.save(tmp_path / "m"))
    assert isinstance(again, ExtractedModule)
    assert (again.method, again.separation, again.d_prime) == (
        "pca",
        {1: 0.75, 2: 1.0},
        module.d_prime,
    )
    assert again.best_layer == 2
    assert again.select(1).best_layer == 1
    assert isinstance(load(tmp_path / "m", layers=1, normalize=True), ExtractedModule)


def test_the_best_layer_is_by_d_prime_among_equals():
    module = ExtractedModule(
        {"post_block": {n: {"vector": vector(n), "scale": 2.0} for n in (1, 2, 3)}},
        separation={1: 1.0, 2: 1.0, 3: 0.9},
        d_prime={1: 3.0, 2: 7.0, 3: 9.0},
    )
    assert module.best_layer == 2


@pytest.mark.parametrize("where", [".", "nowhere/m.safetensors"])
def test_a_path_that_cannot_be_written_is_named(tmp_path: Path, where: str):
    path = tmp_path / where
    with pytest.raises(OSError, match=re.escape(f"{path} cannot be written: ")):
        module_of_two_hooks().save(path)
    assert not list(tmp_path.iterdir())


def test_a_saved_module_can_be_read_by_others(tmp_path: Path):
    module_of_two_hooks().save(tmp_path / "m")
    tensors = safetensors.numpy.load_file(tmp_path / "m")
    assert set(tensors) == {"post_block.3", "post_block.4", "attn_out.3"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header | {"version": 99}, "version 99"),
        (lambda header: {"version": 1}, "not as SteeringModule.save writes it"),
        (lambda header: header | {"scales": {}}, "not as SteeringModule.save writes it"),
    ],
)
def test_a_header_that_was_changed_is_refused(tmp_path: Path, change: Any, message: str):
    module = module_of_two_hooks()
    header = change(module._header())
    safetensors.numpy.save_file(
        {"post_block.3": vector(0)},
        tmp_path / "m",
        metadata={"format": "tllm.steering", "tllm": json.dumps(header)},
    )
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "m")


def test_metadata_that_is_not_json_cannot_be_saved(tmp_path: Path):
    module = SteeringModule({"post_block": {1: vector(0)}}, metadata={"model": object()})
    with pytest.raises(ValueError, match="keep it to strings"):
        module.save(tmp_path / "m")


# -- modules ---------------------------------------------------------------------------------------


def test_a_module_is_a_vector_spec():
    tiers = Tiers.parse(vectors=module_of_two_hooks())
    got = {
        (str(entry.point), entry.layer): entry.coefficients.add * entry.vector for entry in tiers
    }
    np.testing.assert_allclose(got["post_block", 3], 1.5 * vector(0), rtol=1e-6)
    np.testing.assert_allclose(got["post_block", 4], -0.1 * vector(1), rtol=1e-6)
    assert ("attn_out", 3) in got
    assert len(list(Tiers.parse(vectors=module_of_two_hooks().vectors))) == 3


def test_modules_are_scaled_and_selected():
    module = module_of_two_hooks()
    for factor in "2", None, True:
        with pytest.raises(ValueError, match=f"factor={factor!r} is not a number"):
            module.scaled(factor)
    assert_adds(module.scaled(-2.0), {3: -3.0 * vector(0), 4: 0.2 * vector(1)})
    assert module.layers == [3, 4]
    assert module.hidden_size == HIDDEN
    assert list(module.select(4).vectors) == ["post_block"]
    assert list(module.select(hook="attn_output").vectors) == ["attn_out"]
    with pytest.raises(ValueError, match=r"not for all of layers=\[3, 9\]"):
        module.select([3, 9])
    assert module.select("all").layers == module.layers
    assert [module.select(form).layers for form in ("4:", "3-4", "4")] == [[4], [3, 4], [4]]
    with pytest.raises(ValueError, match="layers is empty; give 'all'"):
        module.select([])
    with pytest.raises(ValueError, match="no vectors for hook='mlp_in'"):
        module.select(hook="mlp_in")


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ({}, "has no vectors"),
        ({"post_block": {}}, "has no vectors"),
        ({"nowhere": {1: vector(0)}}, "unknown hook point"),
        ({"lm_head_in": {1: vector(0)}}, "belongs to no layer"),
        ({"post_block": {1: vector(0)}, "block_output": {2: vector(0)}}, "twice"),
        ({"post_block": {"1": vector(0)}}, "layer '1'"),
        ({"post_block": {True: vector(0)}}, "layer True"),
        ({"post_block": {1: {"vector": vector(0), "scale": None}}}, "must be a number"),
    ],
)
def test_modules_that_cannot_be_are_refused(vectors: Any, message: str):
    with pytest.raises(ValueError, match=message):
        SteeringModule(vectors)


def test_normalising(tmp_path: Path):
    path = write_pt(tmp_path / "v.pt", {"1": vector(0), "2": np.zeros(HIDDEN, np.float32)})
    module = load(path, layers=1, normalize=True)
    assert_adds(module, {1: vector(0) / np.linalg.norm(vector(0))})
    with pytest.raises(ValueError, match="is zero and cannot be normalised"):
        load(path, normalize=True)


# -- what is no file of vectors --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"{}", r"it is JSON with \[\]; what is read has"),
        (b"hello, world, this is text", "no format that is read"),
        (struct.pack("<Q", 2) + b"{}", "names no layer"),
        (struct.pack("<Q", 9) + b"{ not json", "damaged"),
        (b"\x93NUMPY\x01\x00", "numpy cannot read it"),
        (b"PK\x03\x04 broken", "damaged, or was cut off: it starts as a zip file"),
        (
            struct.pack("<Q", 200) + b'{"v": ',
            "damaged, or was cut off: .* header alone has 200 bytes",
        ),
        (b"\x80\x04broken", "could not be restored"),
        (b"GGUF", "damaged"),
    ],
)
def test_what_is_no_file_of_vectors_is_refused(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "v"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(path)


@pytest.mark.parametrize("name", ["v.pt", "v.npz", "v.safetensors"])
def test_a_file_whose_end_is_missing_is_said_to_be_cut_off(tmp_path: Path, name: str):
    path = tmp_path / name
    if name == "v.pt":
        write_pt(path, {"1": vector(0)})
    elif name == "v.npz":
        np.savez(path, **{"1": vector(0)})
    else:
        safetensors.numpy.save_file({"1": vector(0)}, path)
    content = path.read_bytes()
    for kept in (40, len(content) // 2, len(content) - 20):
        path.write_bytes(content[:kept])
        with pytest.raises(ValueError, match=f"{name}: it is damaged"):
            load(path)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing.gguf")


@pytest.mark.parametrize("layers", [-1, "last", "-2:", "2:", "2-1", [], [1.5], True])
def test_layers_that_cannot_be_are_refused(tmp_path: Path, layers: Any):
    path = write_pt(tmp_path / "v.pt", {"1": vector(0)})
    with pytest.raises(ValueError, match="layers"):
        load(path, layers=layers)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"vector": vector(0), "method": "ablate"}, "has the keys ['method']; give 'vector'"),
        ({"scale": 1.0}, "has no 'vector'"),
        (np.ones(4, complex), "complex128 is no kind of real number"),
        (torch.ones(4, device="meta"), "is not an array of numbers"),
        (torch.ones(4).to_sparse(), "is not an array of numbers"),
    ],
)
def test_a_module_takes_no_entry_for_something_else(entry: Any, says: str):
    with pytest.raises(ValueError) as refused:
        SteeringModule({"post_block": {3: entry}}, "mine")
    assert "mine: post_block of layer 3" in str(refused.value)
    assert says in str(refused.value)


def test_a_module_takes_tensors_of_every_kind():
    given = torch.from_numpy(vector(0)).bfloat16()
    assert_adds(SteeringModule({"post_block": {3: given}}), {3: given.float().numpy()})


def test_an_unknown_hook_is_refused(tmp_path: Path):
    path = write_pt(tmp_path / "v.pt", {"1": vector(0)})
    with pytest.raises(ValueError, match="unknown hook point 'nowhere'"):
        load(path, hook="nowhere")


def damaged(content: bytes, random: Random) -> bytes:
    """A few bytes or bits changed, something put between them, or the end cut off."""
    changed = bytearray(content)
    # Most of what can be misread is near the start; indices of zip files are at the end.
    near = min(int(random.expovariate(1 / 80)), len(changed) - 1)
    place = random.choice([near, len(changed) - 1 - near, random.randrange(len(changed))])
    match random.randrange(5):
        case 0:
            changed[place] = random.randrange(256)
        case 1:
            changed[place] ^= 1 << random.randrange(8)
        case 2:
            changed[place:place] = random.randbytes(random.choice([1, 8, 64]))
        case 3:
            changed[place : place + 8] = random.choice([b"\xff" * 8, bytes(8)])
        case 4:
            del changed[place:]
    return bytes(changed)


def write_any(kind: str, path: Path) -> Path:
    """A file or folder of a kind, with something to steer with; the file that is damaged."""
    arrays = {"1": vector(1), "2": vector(2)}
    match kind:
        case "gguf":
            ControlVector("m", {1: vector(1), 2: vector(2)}).export_gguf(path)
        case "ours":
            module_of_two_hooks().save(path)
        case "npy":
            with path.open("wb") as file:
                np.save(file, np.stack(list(arrays.values())))
        case "configuration" | "autoencoder":
            write_sae(path, NEW)
            return path / ("cfg.json" if kind == "configuration" else "sae_weights.safetensors")
        case _:
            write = {
                "safetensors": write_safetensors,
                "npz": write_npz,
                "compressed": write_compressed,
                "pt": write_pt,
                "old pt": write_old_pt,
            }[kind]
            write(path, arrays)
    return path


KINDS = (
    "gguf",
    "safetensors",
    "ours",
    "npz",
    "compressed",
    "npy",
    "pt",
    "old pt",
    "configuration",
    "autoencoder",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_refused_or_read_but_never_breaks_the_reader(tmp_path: Path, kind: str):
    path = tmp_path / "v"
    file = write_any(kind, path)
    options: dict[str, Any] = {"features": [1, 2]} if path.is_dir() else {}
    load(path, **options)
    content, random = file.read_bytes(), Random(0)
    refused = 0
    for _ in range(300):
        file.write_bytes(damaged(content, random))
        try:
            module = load(path, **options)
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert all(
                np.isfinite(each).all()
                for h in module.vectors
                for each in added(module, h).values()
            )
    assert refused > 20


@pytest.mark.parametrize(
    "text",
    ["[1]", "3", "null", '{"metadata": 3}', '{"hook_name": {}}', "[" * 100_000, "\udcff", "{"],
)
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, text: str):
    write_sae(tmp_path / "sae", NEW)
    (tmp_path / "sae" / "cfg.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match="sae"):
        load(tmp_path / "sae", features=1)

"""Shipped consumers on the command line, as `name:key=value,key=value`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from entry_points import declared_in
from safetensors.torch import save_file

from tllm import LLM
from tllm.consumers.lens import LensConsumer
from tllm.consumers.sae import SaeConsumer
from tllm.registry import available_consumers, check, consumer_from_spec

HIDDEN = 16


@pytest.fixture(autouse=True)
def declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(declared_in(tmp_path))
    importlib.invalidate_caches()


@pytest.fixture
def autoencoder(tmp_path: Path) -> Path:
    folder = tmp_path / "sae"
    folder.mkdir()
    weights = {"W_enc": torch.eye(HIDDEN), "b_enc": torch.zeros(HIDDEN)}
    save_file(weights | {"b_dec": torch.zeros(HIDDEN)}, folder / "sae_weights.safetensors")
    config = {"d_in": HIDDEN, "d_sae": HIDDEN, "hook_name": "blocks.1.hook_resid_pre"}
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder


def test_the_shipped_consumers_are_known() -> None:
    assert {"esamp", "lens", "logging", "probe", "sae"} <= set(available_consumers())


def test_options_are_json_and_lists_have_brackets(autoencoder: Path) -> None:
    lens = consumer_from_spec("lens:layers=[0,-1],top_k=2,positions=all_prompt,window=same_step")
    assert isinstance(lens, LensConsumer)
    [flow] = lens.request_flows({}, 4)
    assert (flow.places, flow.window) == ((("post_block", 0), ("post_block", 3)), "same_step")
    assert flow.selection.phase == "prompt"
    sae = consumer_from_spec(f"sae:path={autoencoder},features=[3,1],consumer_id=moods")
    assert isinstance(sae, SaeConsumer)
    assert (sae.consumer_id, sae.places({}, 4)) == ("moods", (("pre_attn", 1),))


def test_what_a_spec_cannot_say_is_refused(autoencoder: Path) -> None:
    with pytest.raises(
        TypeError, match="has consumer_id=3; give a text, by which requests name it"
    ):
        check(consumer_from_spec("lens:consumer_id=3"))
    check(consumer_from_spec('lens:consumer_id="3"'))
    for spec, message in (
        ("lens:layer=1", r"consumer 'lens' has no options \['layer'\]; it takes layers, path"),
        ("sae", "consumer 'sae' needs path, and 'sae' does not give it; write sae:path=..."),
        ("filesystem:tag=a", "'filesystem' needs root, .* write filesystem:root=..."),
        ("filesystem:root=7", 'root=7 is int; give a folder .*root="2024"'),
        ("lens:layers", "'layers' in 'lens:layers' is not key=value"),
        ("lens:window=", "window='' is not"),
        ("lens:top_k=none", "top_k='none' is not a whole number"),
        (f"sae:path={autoencoder},features=16", "features: 16 must be from 0 to 15"),
    ):
        with pytest.raises(ValueError, match=message):
            consumer_from_spec(spec)


@pytest.mark.parametrize("given", [3, None, {"filesystem": {"root": "acts"}}, LensConsumer])
def test_what_is_neither_a_consumer_nor_a_spec_is_refused(given: object) -> None:
    for given_to in "consumers", "capture_consumers":
        with pytest.raises((TypeError, ValueError), match=r"is not a consumer|needs root"):
            LLM("no/model", **{given_to: given})

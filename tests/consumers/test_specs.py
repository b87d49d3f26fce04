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
from tllm.cli.values import engine_argument
from tllm.consumers.esamp import ESampConsumer
from tllm.consumers.lens import LensConsumer
from tllm.consumers.sae import SaeConsumer
from tllm.ports import ConsumerFlow
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


@pytest.mark.parametrize("no", ["false", "False"])
def test_a_constant_is_spelt_as_in_json_or_as_in_python(no: str) -> None:
    esamp = consumer_from_spec(f"esamp:guide={no},persist=True")
    assert isinstance(esamp, ESampConsumer)
    assert (esamp.config.guide, esamp.config.persist) == (False, True)
    assert engine_argument(f"fuse_norms={no}") == ("fuse_norms", False)
    assert engine_argument("quantization=None") == ("quantization", None)
    assert engine_argument("served_model_name=Falseness") == ("served_model_name", "Falseness")


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


def raises(**options: object) -> None:
    raise KeyError("weights")


def exits() -> None:
    raise SystemExit(3)


def returns_none() -> None:
    """As a factory that forgot its return."""


class FlowsRaise(LensConsumer):
    def flows(self) -> list[ConsumerFlow]:
        return [self.missing]  # type: ignore[attr-defined]


NUMBER = 3


def declare(folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, **points: str) -> None:
    """Install a package of consumers that is not ours."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[tllm.consumers]", *lines]))
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "not_there:X",
            "consumer 'own' cannot be loaded from not_there:X: ModuleNotFoundError: No",
        ),
        (f"{__name__}:Nope", "cannot be loaded from .*Nope: AttributeError: module"),
        (f"{__name__}:raises", "cannot be made of 'own:a=1': KeyError: 'weights'"),
        (f"{__name__}:exits", "takes none"),
        (f"{__name__}:returns_none", "takes none"),
        (f"{__name__}:NUMBER", "consumer 'own' is 3 .*NUMBER.*, which is no function or class"),
    ],
)
def test_what_a_package_of_consumers_does_wrong_is_a_sentence_with_its_name(
    target: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(tmp_path / "other", monkeypatch, "other", own=target)
    with pytest.raises(ValueError, match=message):
        consumer_from_spec("own:a=1")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("exits", "consumer 'own' cannot be made of 'own': SystemExit: 3"),
        ("returns_none", "cannot be made of 'own': .*returns_none returned None, which is not an"),
        ("FlowsRaise", r"flows\(\) of consumer 'lens' raised: AttributeError: .*'missing'"),
    ],
)
def test_what_is_made_of_a_spec_is_a_consumer_or_an_error(
    target: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(tmp_path / "other", monkeypatch, "other", own=f"{__name__}:{target}")
    with pytest.raises(ValueError, match=message):
        consumer_from_spec("own")


def test_a_name_that_two_packages_give_to_different_consumers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(tmp_path / "other", monkeypatch, "other", logging=f"{__name__}:raises")
    with pytest.raises(ValueError, match=r"'logging' is .* of (tllm|other) and .*; remove one of"):
        consumer_from_spec("logging")
    consumer_from_spec("lens")


def test_what_a_spec_gives_twice_or_not_as_a_list_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gives layers twice; give it once"):
        consumer_from_spec("lens:layers=[0],layers=[1]")
    with pytest.raises(ValueError, match=r"'\[0' is no list; give one as JSON"):
        consumer_from_spec("lens:layers=[0")


@pytest.mark.parametrize("given", [3, None, {"filesystem": {"root": "acts"}}, LensConsumer])
def test_what_is_neither_a_consumer_nor_a_spec_is_refused(given: object) -> None:
    for given_to in "consumers", "capture_consumers":
        with pytest.raises((TypeError, ValueError), match=r"is not a consumer|needs root"):
            LLM("no/model", **{given_to: given})

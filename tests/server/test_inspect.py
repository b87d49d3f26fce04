"""Evaluations with Inspect, against `transformers`."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from server.conftest import MODEL, ROOT
from server.test_serving import decoded, states, steered_tokens

inspect_ai = pytest.importorskip("inspect_ai", reason="inspect-ai is not installed")

from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import GenerateConfig, get_model  # noqa: E402
from inspect_ai.scorer import includes  # noqa: E402

from tllm import inspect_provider  # noqa: E402

QUESTIONS = ["One day Mia went to the garden.", "Ben had a red kite."]
GREEDY = {"temperature": 0.0, "max_tokens": 8}
LAYER = 3
ROWS = {"memory": {"hooks": {"post_block": [1]}, "positions": "all_prompt"}}
TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

@task
def questions():
    return Task(dataset=[Sample(input={questions!r}[0], target="")], scorer=includes())
"""


@pytest.fixture(scope="module")
def vector():
    """What the tests steer by."""
    return 2.0 * torch.randn(128, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def module(server, vector):
    """A registered module."""
    spec = {"post_block": {str(LAYER): vector.tolist()}}
    assert server.post("/v1/steering/modules/register", {"name": "odd", "spec": spec}).is_success
    return "odd"


def chat_ids(model, question):
    messages = [{"role": "user", "content": question}]
    return list(
        model[1].apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )


def expected(model, question, vector):
    """What transformers answers, as text."""
    ids = steered_tokens(model, chat_ids(model, question), LAYER, vector, GREEDY["max_tokens"])
    return model[1].decode(ids, skip_special_tokens=True)


def evaluated(model, tmp_path, questions=QUESTIONS):
    """Each sample's output, in the order of the questions."""
    task = inspect_ai.Task(dataset=[Sample(input=each, target="") for each in questions])
    task.scorer = [includes()]
    (log,) = inspect_ai.eval(task, model=model, log_dir=str(tmp_path), display="none", **GREEDY)
    assert log.status == "success", log.error
    return [sample.output for sample in sorted(log.samples, key=lambda each: each.id)]


def test_an_evaluation_is_steered_and_has_its_rows(server, model, module, vector, tmp_path):
    url = f"{server.url}/v1"
    plain = get_model("tllm/demo", base_url=url, memoize=False)
    steered = get_model(
        "tllm/demo", base_url=url, steering=module, strength=0.5, capture=ROWS, memoize=False
    )
    texts = []
    for question, output in zip(QUESTIONS, evaluated(steered, tmp_path), strict=True):
        texts.append(output.completion)
        assert output.completion == expected(model, question, 0.5 * vector)
        result = output.metadata["capture_results"]["memory"]
        assert result["status"] == "ok", result
        rows = decoded(result["payload"]["post_block"]["1"]["tensor"])
        truth = states(model, chat_ids(model, question), 1)
        torch.testing.assert_close(rows, truth, rtol=1e-4, atol=1e-4)
    for question, output in zip(QUESTIONS, evaluated(plain, tmp_path), strict=True):
        assert output.completion == expected(model, question, torch.zeros(128))
        assert output.completion not in texts
        assert not output.metadata


def test_a_samples_own_fields_come_first(server, model, module, vector):
    found = get_model("tllm/demo", base_url=f"{server.url}/v1", steering=module, memoize=False)
    own = {"steering_name": [module, 0.5], "capture": ROWS, "top_k": 1}
    config = GenerateConfig(temperature=1.0, max_tokens=8, extra_body=own, num_choices=2)
    output = asyncio.run(found.generate(QUESTIONS[0], config=config))
    assert output.completion == expected(model, QUESTIONS[0], 0.5 * vector)
    assert len(output.metadata["samples"]) == 2
    assert output.metadata["samples"][0]["capture_results"] == output.metadata["capture_results"]


def test_inspects_own_client_steers_by_the_models_name(server, model, module, vector, tmp_path):
    """The provider that Inspect has for any server that speaks OpenAI's protocol."""
    name = f"openai-api/any/demo:{module}"
    theirs = get_model(name, base_url=f"{server.url}/v1", api_key="none", memoize=False)
    for question, output in zip(QUESTIONS, evaluated(theirs, tmp_path), strict=True):
        assert output.completion == expected(model, question, vector)


def test_the_command_line_starts_a_server_that_steers_from_a_file(model, vector, tmp_path):
    (tmp_path / "task.py").write_text(TASK.format(questions=QUESTIONS))
    save_file({f"post_block.{LAYER}": vector}, tmp_path / "odd.safetensors")
    command = [sys.executable, "-m", "inspect_ai", "eval", "task.py", "--model", f"tllm/{MODEL}"]
    options = {"steering": "odd.safetensors", "enforce_eager": "true", "dtype": "float32"}
    options |= {"max_model_len": 256, "hook_points": "all"}
    command += [part for name, value in options.items() for part in ("-M", f"{name}={value}")]
    command += ["--temperature", "0", "--max-tokens", "8", "--display", "none"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "INSPECT_LOG_FORMAT": "json"}
    with tempfile.TemporaryDirectory() as folder:
        environment |= {"TMPDIR": folder}
        subprocess.run(command, check=True, cwd=tmp_path, env=environment, timeout=500)
        assert not [*Path(folder).glob("tllm-inspect-*")]
    (log,) = (tmp_path / "logs").glob("*.json")
    (sample,) = json.loads(log.read_text())["samples"]
    assert sample["output"]["choices"][0]["message"]["content"] == expected(
        model, QUESTIONS[0], vector
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"base_url": "http://127.0.0.1:1/v1", "max_model_len": 9}, "max_model_len: options of a"),
        ({"base_url": "http://127.0.0.1:1/v1", "steering": __file__}, "is a file, and the server"),
        ({"steering": "odd"}, "steering='odd' is no file"),
    ],
)
def test_what_a_model_cannot_be_given_is_refused(options, sentence, monkeypatch):
    monkeypatch.delenv("TLLM_BASE_URL", raising=False)
    with pytest.raises(ValueError, match=sentence):
        get_model("tllm/demo", memoize=False, **options)


def test_a_model_that_is_only_looked_up_starts_no_server(monkeypatch):
    """Inspect looked up the model of an evaluation, and a second server ran beside the first."""
    monkeypatch.delenv("TLLM_BASE_URL", raising=False)
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **kwargs: started.append(command))
    found = get_model("tllm/demo", api_key="__model_info_lookup__", memoize=False)
    asyncio.run(found.api.aclose())
    assert not started


def test_the_log_of_a_server_that_does_not_start_is_kept(monkeypatch, tmp_path):
    fails = [sys.executable, "-c", "print('no room')"]
    monkeypatch.setattr(inspect_provider, "_START", fails)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = inspect_provider.StartedServer("demo", None, {}, 60)
    with pytest.raises(RuntimeError, match="no room"):
        server.wait()
    server.stop()
    (log,) = tmp_path.glob("tllm-inspect-*/server.log")
    assert log.read_text() == "no room\n"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "127.0.0.1:1/v1"])
def test_a_server_that_is_not_there_is_named(url, tmp_path):
    """Inspect tried again without end."""
    found = get_model("tllm/demo", base_url=url, memoize=False)
    told = rf"no server answers at {url} \(.+\); start one there \(tllm serve demo --port"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=told):
            asyncio.run(asyncio.wait_for(found.generate(QUESTIONS[0]), 60))


def test_options_are_arguments_of_the_command_line(tmp_path):
    options = {"max_model_len": 9, "enforce_eager": True, "allow_capture": False}
    expected = ["--max-model-len", "9", "--enforce-eager", "--no-allow-capture"]
    assert inspect_provider.flags(options | {"consumer": ["a", "b"]}) == [
        *expected,
        "--consumer",
        "a",
        "--consumer",
        "b",
    ]
    assert inspect_provider.module_name(str(Path(__file__))) == "test_inspect"
    (tmp_path / "scale=2.npz").touch()
    assert inspect_provider.module_name(str(tmp_path / "scale=2.npz")) == "scale-2"

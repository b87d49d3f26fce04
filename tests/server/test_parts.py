"""Parts of the server that need none."""

import asyncio
import base64
import json
import os
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import Gauge
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file

from tllm.cli import serving as serve
from tllm.client.results import ConsumerResult
from tllm.ports import Payload
from tllm.server import plugin
from tllm.server.fields import FieldError, asked_in
from tllm.server.metrics import CONSUMER, WORKER, Stats
from tllm.server.results import CaptureFiles, as_json
from tllm.server.settings import VARIABLE, ServerSettings
from tllm.server.state import ServerState


def counters(error=None):
    of_worker = dict.fromkeys((figure.key for figure in WORKER), 5)
    by_consumer = dict.fromkeys((figure.key for figure in CONSUMER), 3)
    by_consumer |= {"error": error, "lag_s": 0.5}
    return of_worker | {"by_consumer": {"probe": by_consumer}}


def app_of(settings, tmp_path, host, answers=True):
    app = FastAPI()
    plugin.plugin().attach_router(app)

    class Steering:
        async def modules(self):
            return {}

    class Interventions:
        steering = Steering()

        async def intervention_stats(self):
            await asyncio.sleep(0.0 if answers else 60.0)
            return [counters(), counters("it raised")]

    files = CaptureFiles(tmp_path / "captures", 60.0, 1)
    app.state.tllm = ServerState(Interventions(), settings, files, Stats(Interventions()))
    return TestClient(app, client=(host, 1))


@pytest.mark.parametrize(
    ("host", "status"), [("127.0.0.1", 200), ("::1", 200), ("10.0.0.7", 403), ("testclient", 403)]
)
def test_without_a_key_admin_routes_answer_on_loopback_only(tmp_path, host, status):
    answer = app_of(ServerSettings(), tmp_path, host).get("/v1/steering/modules")
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer secret"}, 200),
        ({"Authorization": "Basic secret"}, 401),
        ({"X-Admin-Api-Key": "secret"}, 200),
        ({"X-Admin-Api-Key": "sécret".encode()}, 401),
    ],
)
def test_with_a_key_it_is_needed_everywhere(tmp_path, headers, status):
    client = app_of(ServerSettings(admin_api_key="secret"), tmp_path, "127.0.0.1")
    assert client.get("/v1/steering/modules", headers=headers).status_code == status


def test_captures_and_options_can_be_switched_off():
    for name in ("capture", "consumers"):
        with pytest.raises(FieldError, match=f"{name} was given, but this server"):
            asked_in({name: {"memory": {}}}, ServerSettings(**{f"allow_{name}": False}))


def test_files_expire_and_the_oldest_go_first(tmp_path):
    files = CaptureFiles(tmp_path, seconds=100.0, mib=1)
    old, _ = files.put({"x": torch.zeros(10)})
    os.utime(files.find(old), (time.time() - 200, time.time() - 200))
    assert files.find(old) is None
    first, _ = files.put({"x": torch.zeros(150_000)})
    os.utime(files.find(first), (time.time() - 9, time.time() - 9))
    second, expires = files.put({"x": torch.zeros(150_000)})
    assert files.find(first) is None
    assert files.find(second) is not None
    assert expires > time.time() + 90
    assert len(list(tmp_path.iterdir())) == 1


@dataclass
class Measured(Payload):
    name: str
    share: float
    rows: torch.Tensor


def result_of(payload, tmp_path, inline_bytes=10_000):
    files = CaptureFiles(tmp_path, seconds=100.0, mib=1)
    given = as_json({"own": ConsumerResult("ok", None, payload)}, files, inline_bytes)["own"]
    return json.loads(json.dumps(given, allow_nan=False)), files


def test_a_payload_says_how_it_is_written(tmp_path):
    given, _ = result_of(Measured("a", float("nan"), torch.tensor([1.5])), tmp_path)
    data = base64.b64encode(np.float32(1.5).tobytes()).decode()
    rows = {"dtype": "float32", "shape": [1], "data": data}
    assert given["payload"] == {"name": "a", "share": "nan", "rows": rows}


def test_a_payload_that_does_not_say_is_an_error(tmp_path):
    class Silent(Payload):
        pass

    for payload, sentence in (
        (Silent(), "Silent does not say how it is written; define written()"),
        ({"a": [object()]}, "it holds a object"),
    ):
        given, _ = result_of(payload, tmp_path)
        assert (given["status"], given["payload"]) == ("error", None)
        assert sentence in given["error"]


def test_what_is_not_a_tensor_stays_in_the_response(tmp_path):
    given, files = result_of(
        {"a.b": torch.zeros(2), "a": Measured("x", 0.5, torch.ones(3))}, tmp_path, inline_bytes=8
    )
    contents = given["payload"]["contents"]
    assert (contents["a"]["name"], contents["a"]["share"]) == ("x", 0.5)
    tensors = load_file(files.find(given["payload"]["url"].rpartition("/")[2]))
    assert tensors[contents["a"]["rows"]["name"]].tolist() == [1.0] * 3
    assert tensors[contents["a.b"]["name"]].shape == (2,)


def metrics_of(text):
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_metrics_are_those_of_vllm_and_of_the_workers(tmp_path):
    client = app_of(ServerSettings(), tmp_path, "10.0.0.7")
    Gauge("vllm:of_this_test", "one of vLLM's").set(7)
    found = metrics_of(client.get("/metrics").text)
    assert found["vllm:of_this_test"] == {(): 7}
    assert found["tllm:rows_captured_total"] == {(("worker", "0"),): 5, (("worker", "1"),): 5}
    assert found["tllm:consumer_errors_total"][("consumer", "probe"), ("worker", "1")] == 1
    assert found["tllm:consumer_lag_seconds"][("consumer", "probe"), ("worker", "0")] == 0.5
    assert found["tllm:workers_answer"] == {(): 1}


def test_vllms_metrics_are_there_when_the_workers_do_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr("tllm.server.metrics.PATIENCE_S", 0.01)
    client = app_of(ServerSettings(), tmp_path, "10.0.0.7", answers=False)
    found = metrics_of(client.get("/metrics").text)
    assert found["tllm:workers_answer"] == {(): 0}
    assert "python_info" in found


def test_the_command_is_an_ordinary_vllm_serve(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    settings = ServerSettings(consumers=("esamp:beta=0.3",), admin_api_key="secret")
    arguments, environment = serve.command("MODEL", ["--port", "80"], settings, {})
    assert arguments[3:5] == ["serve", "MODEL"]
    assert arguments[-2:] == ["--port", "80"]
    assert environment["VLLM_PLUGINS"] == "other,tllm"
    assert ServerSettings.model_validate_json(environment[VARIABLE]) == settings
    assert "secret" not in serve.shown(arguments, environment)


@pytest.mark.parametrize("flag", ["--worker-cls", "--scheduler-cls=x", "--additional-config"])
def test_flags_that_are_ours_are_refused(flag):
    with pytest.raises(ValueError, match="tllm serve gives it itself"):
        serve.command("MODEL", [flag], ServerSettings(), {})


def test_modules_are_given_as_name_and_path():
    assert list(serve.modules_of(["happy=a.gguf"])) == ["happy"]
    with pytest.raises(ValueError, match="give name=path"):
        serve.modules_of(["happy"])

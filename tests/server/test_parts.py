"""Parts of the server that need none."""

import os
import time

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tllm.cli import serving as serve
from tllm.server import plugin
from tllm.server.fields import FieldError, asked_in
from tllm.server.results import CaptureFiles
from tllm.server.settings import VARIABLE, ServerSettings
from tllm.server.state import ServerState


def app_of(settings, tmp_path, host):
    app = FastAPI()
    plugin.plugin().attach_router(app)

    class Steering:
        async def modules(self):
            return {}

    class Interventions:
        steering = Steering()

    files = CaptureFiles(tmp_path / "captures", 60.0, 1)
    app.state.tllm = ServerState(Interventions(), settings, files)
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

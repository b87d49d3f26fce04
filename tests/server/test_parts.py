"""Parts of the server that need none."""

import asyncio
import base64
import gc
import hashlib
import json
import logging
import os
import re
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from http_reference import markdown, our_document
from prometheus_client import Gauge
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from server.conftest import Server
from server.counting import another
from typer.testing import CliRunner
from vllm import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tllm import request_fields
from tllm.cli import app
from tllm.cli import serving as serve
from tllm.client.results import ConsumerResult
from tllm.consumers.capture.memory import MemoryConsumer
from tllm.engine.async_front import ADMITTED
from tllm.engine.handlers import Watch
from tllm.engine.keyless_logger import KeylessLogger
from tllm.engine.launch import engine_parser
from tllm.engine.refusals import RefusedError
from tllm.params import ASKED_FIELDS
from tllm.ports import Payload, PerToken
from tllm.request_fields import FIELDS
from tllm.server import document, plugin
from tllm.server.bodies import CheckedBodies
from tllm.server.doors import Door, num_prompts, prompt_tokens
from tllm.server.fields import FieldError, asked_in, field_error
from tllm.server.later import LaterAnswers
from tllm.server.limits import LimitsByKey, captured_rows, parse_limits
from tllm.server.live import LiveScores, StreamScores
from tllm.server.metrics import CONSUMER, WORKER, Stats
from tllm.server.patch_sweeps import PatchSweeps, SweepBody
from tllm.server.refusals import RefusedChoices
from tllm.server.results import CaptureFiles, as_json
from tllm.server.settings import VARIABLE, ServerSettings
from tllm.server.state import ServerState, capture_files
from tllm.spec.media import PromptMedia
from tllm.spec.request import EXTRA_ARG
from tllm.spec.tiers import parse_modules

ROOT = Path(__file__).parents[2]

OUT = "leave them out"


def counters(error=None):
    of_worker = dict.fromkeys((figure.key for figure in WORKER), 5)
    by_consumer = dict.fromkeys((figure.key for figure in CONSUMER), 3)
    by_consumer |= {"error": error, "lag_s": 0.5}
    return of_worker | {"by_consumer": {"probe": by_consumer}}


def test_warnings_of_ours_are_heard_in_a_server():
    """A library that vLLM's server imports sets the root's level to ERROR."""
    ours, before = logging.getLogger("tllm"), logging.root.level
    try:
        logging.root.setLevel(logging.ERROR)
        ours.setLevel(logging.NOTSET)
        assert not ours.isEnabledFor(logging.WARNING)
        plugin.plugin().attach_router(FastAPI())
        assert ours.getChild("anything").isEnabledFor(logging.WARNING)
    finally:
        ours.setLevel(logging.NOTSET)
        logging.root.setLevel(before)


def app_of(settings, tmp_path, host, answers=True):
    app = FastAPI()
    plugin.plugin().attach_router(app)

    class Steering:
        async def modules(self):
            return {}

    class Interventions:
        steering = Steering()

        async def call_consumer(self, consumer, method, *args):
            raise ValueError(f"no consumer {consumer!r} is registered")

        async def intervention_stats(self):
            await asyncio.sleep(0.0 if answers else 60.0)
            return [counters(), counters("it raised")]

    files = CaptureFiles(tmp_path / "captures", 60.0, 1)
    ours, limits = Interventions(), LimitsByKey.read(None, tmp_path / "in-flight")
    sweeps = PatchSweeps(ours, limits, models=None)  # no sweep is asked for here
    app.state.tllm = ServerState(ours, settings, files, Stats(ours), sweeps)
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


def test_a_server_without_esamp_has_no_groups_to_forget(tmp_path):
    client = app_of(ServerSettings(), tmp_path, "127.0.0.1")
    answer = client.post("/v1/esamp/groups/forget", json={"group": "x"})
    told = "no consumer 'esamp' is registered"
    assert (answer.status_code, answer.json()["detail"]) == (404, told)


def test_a_field_that_is_ours_but_for_a_lone_surrogate_is_refused():
    with pytest.raises(FieldError) as refused:
        asked_in({"steering_vectors\ud800": {}}, ServerSettings())
    assert (refused.value.field, str(refused.value).isprintable()) == (None, True)
    assert "'steering_vectors\\ud800' was given, and is no field" in str(refused.value)


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
    os.utime(files.find(second), (time.time() - 200, time.time() - 200))
    CaptureFiles(tmp_path, seconds=100.0, mib=1)  # a server that is started again
    assert not list(tmp_path.iterdir())


def test_results_of_one_answer_do_not_make_room_for_each_other(tmp_path):
    """Those of later choices would be whole, and those of the first gone before they were told."""
    files, referred = CaptureFiles(tmp_path, seconds=100.0, mib=1), {}
    another, _ = files.put({"x": torch.zeros(100_000)})
    result = {"own": ConsumerResult("ok", None, torch.zeros(110_000))}
    told = [as_json(result, files, 100, referred)["own"] for _ in range(3)]
    assert [each["status"] for each in told] == ["ok", "ok", "error"]
    assert "others of this answer 0.8, and results that are fetched" in told[2]["error"]
    names = [each["payload"]["url"].removeprefix("/v1/captures/") for each in told[:2]]
    assert all(files.find(name) for name in names) and files.find(another) is None


def test_a_result_that_is_gone_may_have_made_room(tmp_path):
    """It was said to have expired, minutes before the time that its answer gave."""
    client = app_of(ServerSettings(), tmp_path, "127.0.0.1")
    files = CaptureFiles(tmp_path / "captures", 60.0, 1)
    names = [files.put({"x": torch.zeros(150_000)})[0] for _ in range(2)]
    answers = [client.get(f"/v1/captures/{name}") for name in names]
    assert [answer.status_code for answer in answers] == [404, 200]
    assert "or it made room for later ones (captures_mib)" in answers[0].text


def test_only_results_expire_in_their_folder(tmp_path):
    files = CaptureFiles(tmp_path, seconds=100.0, mib=1)
    LimitsByKey.read(None, tmp_path / "in-flight")
    own = tmp_path / "mine.safetensors"
    own.touch()
    for path in (own, tmp_path / "in-flight"):
        os.utime(path, (time.time() - 200, time.time() - 200))
    name, _ = files.put({"x": torch.zeros(10)})
    assert files.find(name) is not None
    assert own.exists()
    assert any((tmp_path / "in-flight").iterdir())


def test_results_are_for_one_server_of_one_user(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = ServerSettings()
    places = [(8000, None), (8001, None), (8000, "a.sock"), (8000, "b.sock")]
    folders = [capture_files(settings, *place).folder for place in places]
    assert len(set(folders)) == 4
    assert capture_files(settings, 8000).folder == folders[0]
    assert all(str(os.getuid()) in folder.name for folder in folders)
    folders[0].chmod(0o755)
    with pytest.raises(PermissionError, match="is for results of this server alone"):
        capture_files(settings, 8000)
    folders[1].rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folders[1].symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="others may read it or own it"):
        capture_files(settings, 8001)


def test_a_result_that_cannot_be_kept_says_why(tmp_path):
    files = CaptureFiles(tmp_path / "there", seconds=100.0, mib=1)
    rows = {"large": torch.zeros(2**18 + 1), "gone": torch.zeros(2**16)}
    given = {name: ConsumerResult("ok", None, {"rows": each}) for name, each in rows.items()}
    files.folder.rmdir()
    files.folder.touch()
    told = as_json(given, files, inline_bytes=100)
    assert [each["status"] for each in told.values()] == ["error", "error"]
    assert "1.0 MiB, and results that are fetched" in told["large"]["error"]
    assert f"{files.folder} does not take it" in told["gone"]["error"]


def test_a_result_is_kept_though_somebody_cleaned_up_the_folder(tmp_path):
    """As systemd does in /tmp, where a server's folder is unless told."""
    files = CaptureFiles(tmp_path / "there", seconds=100.0, mib=1)
    files.folder.rmdir()
    name, _ = files.put({"x": torch.zeros(10)})
    assert files.find(name) is not None
    assert files.folder.stat().st_mode & 0o777 == 0o700


def test_a_result_as_large_as_all_may_be_is_kept(tmp_path):
    files = CaptureFiles(tmp_path, seconds=100.0, mib=1)
    name, _ = files.put({"x": torch.zeros(2**18)})
    assert files.find(name) is not None


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

    class Raises(Payload):
        def written(self):
            raise KeyError("rows")

    around = []
    around.append(around)
    for payload, sentence in (
        (Silent(), "Silent does not say how it is written; define written()"),
        ({"a": [object()]}, "it holds a object"),
        (around, "RecursionError"),
        ({"a": "\ud800"}, "its text '\\ud800' has lone surrogates"),
        ({"\ud800": 1}, "has lone surrogates"),
        (Raises(), "the result cannot be written: KeyError: 'rows'"),
    ):
        given, _ = result_of(payload, tmp_path)
        assert (given["status"], given["payload"]) == ("error", None)
        assert sentence in given["error"]


def test_an_error_is_told_whatever_text_it_has(tmp_path):
    files = CaptureFiles(tmp_path, seconds=100.0, mib=1)
    given = as_json({"own": ConsumerResult("error", "no \ud800", None)}, files, 100)
    assert given["own"]["error"] == "no \\ud800"


def test_a_sparse_tensor_is_written_as_a_dense_one(tmp_path):
    given, _ = result_of(torch.eye(2).to_sparse(), tmp_path)
    assert (given["status"], given["payload"]["shape"]) == ("ok", [2, 2])
    assert base64.b64decode(given["payload"]["data"]) == torch.eye(2).numpy().tobytes()


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


def limited(tmp_path, **limits):
    given = {"default": {"capture": False}, "keys": {"k1": limits}}
    return LimitsByKey(parse_limits(given), tmp_path / "in-flight")


def test_limits_are_those_of_the_callers_key(tmp_path):
    digest = hashlib.sha256(b"k2").hexdigest()
    given = {"default": {"rows": 1}, "keys": {"k1": {"rows": 2}, f"sha256:{digest}": {"rows": 3}}}
    limits = LimitsByKey(parse_limits(given), tmp_path)
    for header, rows in (("Bearer k1", 2), ("bearer k2", 3), ("Bearer k3", 1), ("Basic k1", 1)):
        assert limits.of(limits.caller({"authorization": header})).rows == rows
    assert limits.of(limits.caller({})).rows == 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"default": {"rows": -1}}, "default.rows: input should be greater"),
        ({"default": {"configurations": 10**6}}, "default.configurations: input should be less"),
        ({"default": {"requests": True}}, "default.requests: input should be a valid integer"),
        ({"default": {"capture": 0}}, "default.capture: input should be a valid boolean"),
        ({"default": {"row": 1}}, r"default.row: .*\(there are capture, .*rows"),
        ({"keys": {"sk-research": {"bytes": "x"}}}, r"keys\['sk-res\.\.\.'\].bytes: input"),
        ({"keys": {"sha256:abc": {}}}, "after sha256: come 64 hexadecimal digits"),
        ({"keys": {"": {}}}, r"keys\[''\]: no caller can send it"),
        ({"keys": {"clé": {}}}, "no caller can send it; a key is printable ASCII"),
        ({"keys": {"k1": {}, f"sha256:{hashlib.sha256(b'k1').hexdigest()}": {}}}, "give it once"),
        ({"keys": []}, "keys is not an object"),
        ({"k1": {}}, "and nothing else"),
        ([], "and nothing else"),
    ],
)
def test_limits_that_are_wrong_are_refused(given, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        parse_limits(given)
    path = tmp_path / "limits.json"
    path.write_text(json.dumps(given))
    with pytest.raises(ValueError, match=f"--limits '{path}'"):
        serve.limits_file(path)


def test_a_name_that_stands_twice_in_limits_is_refused(tmp_path):
    path = tmp_path / "limits.json"
    for given, told in (
        ('{"keys": {"sk-research": {"rows": 1}, "sk-research": {}}}', "'sk-res...' stands 2 times"),
        ('{"default": {"rows": 1}, "default": {}}', "'default' stands 2 times"),
    ):
        path.write_text(given)
        with pytest.raises(ValueError, match=re.escape(told)):
            serve.limits_file(path)
        with pytest.raises(ValueError, match=re.escape(told)):
            LimitsByKey.read(path, tmp_path / "in-flight")


SPEC = {"post_block": {"2": [1.0, 2.0]}}
PROBED = {"probe": {"hook": "post_block", "layer": 1, "vector": [1.0, 2.0]}, "above": 0.5}
LAYERS = [[[[1.0, 2.0], [3.0, 4.0]], [0.0, 0.0]], [[[1.0, 1.0]], [0.0]]]
SMALL_MLP = {"probe": {"hook": "post_block", "layer": 1, "layers": LAYERS}, "above": 0.5}
JOINT = {"any": [PROBED, {"all": [PROBED]}]}


@pytest.mark.parametrize(
    ("limits", "asked", "status"),
    [
        ({"capture": False}, {"capture": {"memory": {}}}, 403),
        ({"consumers": False}, {"consumers": {"probe": {}}}, 403),
        ({"steering": False}, {"steering_module_ref": "a"}, 403),
        ({"patching": False}, {"patch": [{}]}, 403),
        ({"vectors": 1}, {"steering_vectors": SPEC}, None),
        ({"vectors": 1}, {"steering_vectors": {"post_block": {"1": [1.0], "2": [1.0]}}}, 400),
        ({"vectors": 1}, {"steering_clamps": {"post_block": {"1": [{}, {}]}}}, 400),
        ({"vectors": 1}, {"steering_vectors": {"post_block": [[1.0], [2.0]]}}, 400),
        (
            {"vectors": 2},
            {"steering_vectors": {"post_block": {"layer_indices": [1, 2, 3], "data": ""}}},
            400,
        ),
        ({"vectors": 2}, {"steering_vectors": {"post_block": {"2": {"when": PROBED}}}}, None),
        ({"vectors": 1}, {"steering_vectors": {"post_block": {"2": {"when": PROBED}}}}, 400),
        ({"vectors": 2}, {"steering_vectors": {"post_block": {"2": [{"when": JOINT}]}}}, 400),
        ({"vectors": 1}, {"stop_when": JOINT}, 400),
        ({"vectors": 2}, {"steering_vectors": SPEC, "stop_when": PROBED}, None),
        ({"vectors": 3}, {"stop_when": SMALL_MLP}, None),
        ({"vectors": 2}, {"stop_when": SMALL_MLP}, 400),
    ],
)
def test_what_a_key_may_not_ask_is_refused(tmp_path, limits, asked, status):
    of_key = limited(tmp_path, **limits).of(1)
    if status is None:
        of_key.check(asked)
        return
    with pytest.raises(FieldError, match="with this API key") as refusal:
        of_key.check(asked)
    assert (refusal.value.status, refusal.value.field) == (status, next(iter(asked)))


@pytest.mark.parametrize(
    ("body", "model", "told", "field"),
    [
        ({}, "demo:calm", "model='demo:calm'", "model"),
        ({"steering_name": "calm"}, None, "steering_name", "steering_name"),
        ({"steering_module_ref": "calm"}, None, "steering_module_ref", "steering_module_ref"),
    ],
)
def test_what_is_refused_of_a_module_is_told_by_the_field_that_named_it(
    tmp_path, body, model, told, field
):
    of_key = limited(tmp_path, steering=False, requests=0)
    asked = {"steering_module_ref": "calm"}
    for refuse, sentence, status in (
        (lambda: of_key.of(1).check(asked), " was given, but this server does not allow it", 403),
        (lambda: of_key.begin(1, asked), ": with this API key 0 requests with intervent", 429),
        (lambda: parse_modules(["calm", 2**64]), "[1] is beyond the 64 bits", 400),
    ):
        with pytest.raises(ValueError) as refused:
            refuse()
        error = field_error(refused.value, body, model)
        assert str(error).startswith(told + sentence)
        assert (error.field, error.status) == (field, status)


def test_a_sweep_whose_caller_leaves_is_cancelled_once(tmp_path):
    """Else a second time would end the cleaning up after the first."""
    cleaned = []

    class Patching:
        async def sweep(self, *given, progress, **more):
            try:
                progress(0, 9)
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.05)
                cleaned.append("rows")

    async def run(reads):
        of_key = LimitsByKey(parse_limits({}), tmp_path)
        sweeps = PatchSweeps(SimpleNamespace(patching=Patching()), of_key, None)
        body = SweepBody(clean="a", corrupt="b", hooks="post_block")
        stream = await sweeps.begin(body, {})
        (task,) = sweeps._running
        if reads:
            assert json.loads(await anext(stream)) == {"experiments": 9}
            await stream.aclose()
            await asyncio.sleep(0.01)
        del stream  # what was given up is collected meanwhile
        gc.collect()
        await asyncio.wait([task])
        assert task.cancelled()

    for reads in (True, False):
        asyncio.run(run(reads))
    assert cleaned == ["rows", "rows"]


def test_streams_go_on_though_a_consumer_says_nothing_of_theirs_that_can_be_read():
    class Told:
        async def call_consumer(self, name, method, since):
            await asyncio.sleep(0.01)
            if name == "mine":
                return [dict.fromkeys(since)]
            if name == "wrong":
                return [3]
            return [{prompt: {0: name} for prompt in since}]

    async def run():
        live = LiveScores(Told())
        asked = [("a", "mine"), ("b", "wrong"), ("c", "probe")]
        told = [live.ask(prompt, {name: {0: 0}}) for prompt, name in asked]
        return await asyncio.wait_for(asyncio.gather(*told), 30)

    mine, wrong, probe = asyncio.run(run())
    assert mine == {"mine": {}} and not wrong.get("wrong") and probe == {"probe": {0: "probe"}}


def test_a_stream_goes_on_whatever_a_consumer_says_of_its_tokens():
    class Told:
        consumers = dict.fromkeys("abc", SimpleNamespace(remote_methods=("so_far",)))

        async def call_consumer(self, name, method, since):
            scores = {
                "a": PerToken(np.arange(2), np.array([0.5, np.inf], np.float32)),
                "b": {"scores": PerToken(np.arange(2), [1.5, 2.5]), "share": np.float32(0.25)},
                "c": {"scores": PerToken(np.arange(2), np.zeros(2)), "what": object()},
            }
            return [{prompt: {0: scores[name]} for prompt in since}]

    noted = {"x": SimpleNamespace(finished=False, tllm_request=SimpleNamespace(prompt_id="p"))}
    scores = StreamScores(LiveScores(Told()), noted, [*"abc"])
    event = 'data: {"id": "x", "choices": [{"index": 0, "text": "y"}]}\n\n'

    def refused(name):
        raise AssertionError(f"{name} is no JSON")

    told = asyncio.run(scores.beside(event, 1)).removeprefix("data: ")
    (choice,) = json.loads(told, parse_constant=refused)["choices"]
    assert choice["consumer_results"] == {
        "a": {"positions": [0, 1], "values": [0.5, "inf"]},
        "b": {"positions": [0, 1], "scores": [1.5, 2.5], "share": 0.25},
    }


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ({"prompt": "x"}, 1),
        ({"prompt": [1, 2]}, 1),
        ({"prompt": ["x", "y"]}, 2),
        ({"prompt_embeds": b"x"}, 1),
        ({"prompt_embeds": [b"x", b"y"]}, 2),
        ({"prompt": "x", "prompt_embeds": b"y"}, 2),
        ({"prompt": "", "prompt_embeds": [b"y"]}, 1),
        ({"messages": []}, 1),
    ],
)
def test_prompts_of_a_request_are_counted_in_all_its_fields(given, prompts):
    assert num_prompts(SimpleNamespace(**given)) == prompts


def test_what_is_refused_of_a_sweep_names_it(tmp_path):
    for limits, status in (({"patching": False}, 403), ({"requests": 0}, 429)):
        of_key = limited(tmp_path / str(status), **limits)
        sweeps = PatchSweeps(None, of_key, None)
        body = SweepBody(clean="a", corrupt="b", hooks="post_block")
        with pytest.raises(FieldError, match=r"^patch_sweep\b") as refused:
            asyncio.run(sweeps.begin(body, {"authorization": "Bearer k1"}))
        assert refused.value.status == status


def test_the_vectors_of_all_fields_count(tmp_path):
    asked = {"steering_vectors": SPEC, "steering_clamps": SPEC, "stop_when": PROBED}
    limited(tmp_path, vectors=3).of(1).check(asked)
    with pytest.raises(FieldError, match="stop_when together: more than 2 vectors") as refusal:
        limited(tmp_path, vectors=2).of(1).check(asked)
    assert refusal.value.field == "stop_when"


def test_rows_are_counted_before_they_are_captured(tmp_path):
    def rows(tokens, max_tokens, num_samples, **options):
        chosen = {"hooks": {"post_block": [0, 1]}, **options}
        memory = {"memory": (MemoryConsumer(), chosen)}
        media = PromptMedia({"image": [[(1, 3)], [(5, 9)]]})
        return captured_rows(memory, 4, [7] * tokens, max_tokens, num_samples, media)

    assert rows(10, 5, 1, positions="all") == 2 * 14
    assert rows(10, 5, 3, positions="all") == 2 * (10 + 3 * 4)  # prompt rows once
    assert rows(10, 5, 3, positions="all_generated") == 2 * 12
    assert rows(10, 5, 3, positions="last_prompt") == 2
    assert rows(10, 5, 3, positions={"image": [0]}) == 2 * 2
    assert rows(10, 5, 3, positions="image") == 2 * 6
    assert rows(10, 5, 1, hooks={"post_block": "all"}, positions=[0, 3]) == 8
    # Any of the tokens that are generated may be one that is named.
    assert rows(10, 5, 3, positions={"token_ids": [7]}) == 2 * (10 + 3 * 4)
    assert rows(10, 5, 3, positions={"token_ids": [8]}) == 2 * 3 * 4
    assert rows(10, 5, 3, positions={"token_ids": [8], "phase": "prompt"}) == 0
    assert rows(10, 5, 3, positions={"exclude": {"token_ids": [7]}}) == 2 * 3 * 4
    of_key = limited(tmp_path, rows=8, bytes=64).of(1)
    of_key.check_rows(8, 8, "capture")
    with pytest.raises(FieldError, match="up to 9 rows"):
        of_key.check_rows(9, 1, "capture")
    with pytest.raises(FieldError, match="up to 72 bytes"):
        of_key.check_rows(8, 9, "capture")


def test_rows_of_prompts_that_are_embeddings_are_counted(tmp_path):
    from vllm.renderers.inputs.preprocess import PromptComponents

    given = PromptComponents(embeds=torch.zeros(9, 4))
    chosen = {"hooks": {"post_block": [0]}, "positions": "all"}
    memory = {"memory": (MemoryConsumer(), chosen)}
    assert captured_rows(memory, 4, prompt_tokens(given), 3, 1, PromptMedia({})) == 11
    assert prompt_tokens(PromptComponents(token_ids=[4, 5])) == [4, 5]


def test_requests_in_flight_are_counted_over_all_processes(tmp_path):
    limits = limited(tmp_path, requests=3)
    with another({"keys": {"k1": {}}}, tmp_path / "in-flight", {"capture": {}}):
        ends = [limits.begin(1, {"capture": {}}) for _ in range(2)]
        with pytest.raises(FieldError, match="3 requests with interventions") as refusal:
            limits.begin(1, {"capture": {}})
        assert refusal.value.status == 429
        limits.begin(0, {"capture": {}})  # somebody else
    ends.append(limits.begin(1, {"capture": {}}))  # what it had is gone with it
    for end in ends:
        end()
    assert limits._counts.totals(1) == (0, 0)


def test_requests_are_counted_though_somebody_cleaned_up_the_folder(tmp_path):
    limits = limited(tmp_path, requests=1)
    for path in (tmp_path / "in-flight").iterdir():
        path.unlink()
    (tmp_path / "in-flight").rmdir()
    end = limits.begin(1, {"capture": {}})
    with pytest.raises(FieldError, match="1 requests with interventions"):
        limits.begin(1, {"capture": {}})
    end()
    limits.begin(1, {"capture": {}})()


def test_a_way_of_steering_is_one_in_all_processes(tmp_path):
    way = {"steering_vectors": {"post_block": {"1": [1.0]}}}
    limits = limited(tmp_path, configurations=2)
    folder = tmp_path / "in-flight"
    (folder / ".nfs0000000001").touch()  # as a file system leaves of a file that somebody has open
    with another({"keys": {"k1": {"configurations": 2}}}, folder, way) as other:
        end = limits.begin(1, way)
        assert limits._counts.totals(1) == (2, 1)
        other_way = {"steering_vectors": {"post_block": {"1": [2.0]}}}
        limits.begin(1, other_way)()
        other.send("end")
        assert other.recv() == "ended"
        assert limits._counts.totals(1) == (1, 1)
        end()
        assert limits._counts.totals(1) == (0, 0)


def test_ways_of_steering_in_flight_are_distinct_ones(tmp_path):
    limits = limited(tmp_path, configurations=2)
    ways = [{"steering_vectors": {"post_block": {"1": [i]}}} for i in range(3)]
    ends = [limits.begin(1, way) for way in (ways[0], ways[1], ways[0], {"capture": {}})]
    with pytest.raises(FieldError, match="2 ways of steering in flight") as refusal:
        limits.begin(1, ways[2])
    assert refusal.value.field == "steering_vectors"
    ends[0]()
    with pytest.raises(FieldError):  # another request still steers that way
        limits.begin(1, ways[2])
    ends[2]()
    limits.begin(1, ways[2])()
    assert limits._counts.totals(1) == (2, 1)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, ServerSettings(max_body_mib=1).model_dump_json())
    client = app_of(ServerSettings(), tmp_path, "127.0.0.1")
    body = b"x" * (2**20 + 1)
    for content in (body, iter([body[:-7], body[-7:]])):
        answer = client.post("/v1/steering/set", content=content)
        assert answer.status_code == 413
        assert "more than 1 MiB" in answer.json()["error"]["message"]
    assert client.post("/v1/steering/set", content=body[:-1]).status_code == 400


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ('{"nam": "a"}', "nam was given, and is no field; give any of name, spec"),
        ('{"name": 7}', "name: 7 was given; allowed is a text; spec is missing"),
        ('{"name": "a"', "the body is no JSON: Expecting ',' delimiter, at character 12"),
        ("[]", "the body is no object; send one as JSON, with Content-Type: application/json"),
        ("", "the body is no object; send one as JSON, with Content-Type: application/json"),
        ('{"name": "a", "spec": {"\\ud800": 1}}', "spec has a text with lone surrogates; " + OUT),
        ('{"\\udfff": 1}', "'\\udfff' has a text with lone surrogates; " + OUT),
        (b'{"name": "\xed\xa0\x80"}', "name has a text with lone surrogates; " + OUT),
        ('"\\ud800"', "the body has a text with lone surrogates; " + OUT),
        ('{"nam": "\\ud83d\\ude00"}', "nam was given, and is no field; give any of name, spec"),
    ],
)
def test_a_wrong_body_of_a_route_of_ours_is_told_in_a_sentence(tmp_path, body, sentence):
    client = app_of(ServerSettings(), tmp_path, "127.0.0.1")
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/steering/modules/register", content=body, headers=headers)
    assert (answer.status_code, answer.json()["detail"]) == (400, sentence)


@pytest.mark.parametrize(
    ("model", "base", "module"),
    [
        ("demo:calm", "demo", "calm"),
        ("tuned:calm", "tuned", "calm"),
        ("demo:tuned", "demo:tuned", None),
        ("demo:tuned:calm", "demo:tuned", "calm"),
        ("demo:odd:v2", "demo", "odd:v2"),
        ("nobody:calm", "nobody:calm", None),
    ],
)
def test_a_models_name_is_divided_where_both_parts_are_known(model, base, module):
    """Adapters and modules have names with colons, too."""

    class Steering:
        async def modules(self):
            return {"calm": {}, "odd:v2": {}}

    handler = SimpleNamespace(
        _is_model_supported=lambda name: name == "demo",
        models=SimpleNamespace(lora_requests={"tuned": None, "demo:tuned": None}),
    )
    door = SimpleNamespace(_handler=handler, _interventions=SimpleNamespace(steering=Steering()))
    request = SimpleNamespace(model=model)
    found = asyncio.run(Door._module_named_by_model(door, request, {}))
    assert request.model == base
    assert found == ({} if module is None else {"steering_module_ref": module})


def test_the_reference_is_made_from_the_document():
    text = (Path(__file__).parents[2] / "doc" / "reference" / "http.md").read_text()
    made = markdown(our_document())
    assert text == made, "run python -m tests.server.http_reference > doc/reference/http.md"
    assert set(document.PROPERTIES) == set(FIELDS) == {*ASKED_FIELDS, "steering_name"}
    for path in our_document()["paths"].values():
        for method, operation in path.items():
            assert "422" not in operation["responses"]
            assert ("400" in operation["responses"]) == ("requestBody" in operation), method


def test_the_command_is_an_ordinary_vllm_serve(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    settings = ServerSettings(consumers=("esamp:beta=0.3",), admin_api_key="secret")
    arguments, environment = serve.command("serve", ["MODEL"], ["--port", "80"], settings, {})
    assert arguments[3:5] == ["serve", "MODEL"]
    assert arguments[-2:] == ["--port", "80"]
    assert environment["VLLM_PLUGINS"] == "other,tllm"
    assert ServerSettings.model_validate_json(environment[VARIABLE]) == settings
    assert "secret" not in serve.shown(arguments, environment)


def test_plugins_that_vllm_loads_unnamed_are_loaded_beside_ours(monkeypatch):
    """vLLM's resolvers of adapters are such; once one is named, vLLM loads no other."""
    of_vllm = {plugin.name for plugin in entry_points(group="vllm.general_plugins")} - {"tllm"}
    assert of_vllm
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    _, environment = serve.command("serve", ["MODEL"], [], ServerSettings(), {})
    assert {*environment["VLLM_PLUGINS"].split(",")} >= of_vllm | {"tllm"}


def test_the_command_runs_here_and_is_listed_without_the_key(tmp_path, monkeypatch, capsys):
    titles = []
    monkeypatch.setattr(serve, "setproctitle", titles.append)
    monkeypatch.setattr(sys, "argv", ["tllm", "serve", "MODEL", "--admin-api-key", "secret"])
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    monkeypatch.setenv(VARIABLE, "{}")
    monkeypatch.syspath_prepend(tmp_path)
    said = "import os, sys\nprint(__name__, os.getpid(), *sys.argv[1:], os.environ['VLLM_PLUGINS'])"
    (tmp_path / "served.py").write_text(said)
    monkeypatch.setattr(serve.launch, "module", lambda: "served")
    settings = ServerSettings(admin_api_key="secret")
    serve.run(*serve.command("serve", ["MODEL"], ["--port", "80"], settings, {}))
    shown = capsys.readouterr().out.split()
    assert shown[:4] == ["__main__", str(os.getpid()), "serve", "MODEL"]
    assert shown[-3:] == ["--port", "80", "other,tllm"]
    [title] = titles
    assert " -m served serve MODEL " in title and "secret" not in title
    assert ServerSettings.model_validate_json(os.environ[VARIABLE]) == settings


@pytest.mark.parametrize("given", [["--port", "0"], ["--port=0"], ["--port", "80", "--port=0"]])
def test_servers_whose_port_the_system_chooses_share_no_folder(given):
    """They shared results, and what their callers have in flight."""
    folders = []
    for _ in range(2):
        _, environment = serve.command("serve", ["MODEL"], given, ServerSettings(), {})
        folders.append(ServerSettings.model_validate_json(environment[VARIABLE]).captures_folder)
    assert None not in folders and folders[0] != folders[1]
    chosen = ServerSettings(captures_folder=Path("here"))
    _, environment = serve.command("serve", ["MODEL"], given, chosen, {})
    assert ServerSettings.model_validate_json(environment[VARIABLE]) == chosen
    _, environment = serve.command(
        "serve", ["MODEL"], [*given, "--port", "80"], ServerSettings(), {}
    )
    assert ServerSettings.model_validate_json(environment[VARIABLE]).captures_folder is None


def test_results_of_answers_that_nobody_fetches_make_room_for_later_ones():
    """They were kept for ever; vLLM keeps the answers alone."""
    written = []

    def write(outputs, wanted):
        written.append(outputs)
        return [{"consumer_results": dict.fromkeys(wanted, "here")}]

    later = LaterAnswers(write, most=2)
    for number in range(4):
        later.keep(f"resp_{number}", {"output": number}, ["signals"] if number else [])
    assert later.results("resp_0") == []
    [gone] = later.results("resp_1")
    assert gone["consumer_results"]["signals"]["status"] == "error"
    assert "keeps those of its newest 2 answers" in gone["consumer_results"]["signals"]["error"]
    for _ in range(2):
        assert later.results("resp_3") == [{"consumer_results": {"signals": "here"}}]
    assert written == [{"output": 3}]
    assert "resp_9" not in later and "resp_1" in later


def test_capture_consumers_are_given_in_the_plural_too(invoke, tmp_path):
    """As RhizoNymph's fork of vLLM has the option, and the engine's argument is called."""
    specs = [f"filesystem:root={tmp_path}", "logging"]
    given = ["--capture-consumers", specs[0], "--capture-consumer", specs[1]]
    status, said, _ = invoke("serve", "MODEL", *given, "--dry-run")
    assert not status
    (found,) = (word for word in shlex.split(said) if word.startswith(f"{VARIABLE}="))
    settings = ServerSettings.model_validate_json(found.partition("=")[2])
    assert settings.capture_consumers == tuple(specs)


def test_what_the_environment_says_of_a_server_is_kept(invoke, monkeypatch):
    """Some settings have no option: inline_bytes, result_timeout_s."""

    def serve(named, *given):
        monkeypatch.setenv(VARIABLE, named if isinstance(named, str) else json.dumps(named))
        return invoke("serve", "MODEL", *given, "--dry-run")

    status, said, _ = serve({"inline_bytes": 5, "allow_capture": False}, "--consumer", "logging")
    assert not status
    (found,) = (word for word in shlex.split(said) if word.startswith(f"{VARIABLE}="))
    settings = ServerSettings.model_validate_json(found.partition("=")[2])
    assert (settings.inline_bytes, settings.allow_capture) == (5, False)
    assert settings.consumers == ("logging",)
    for named, sentence in (
        ({"max_body_mib": 3}, "max_body_mib was given as an option and in TLLM_SERVER"),
        ({"inline": 3}, "TLLM_SERVER in the environment has inline: Extra inputs are not"),
        ('{"inline', "TLLM_SERVER in the environment has Invalid JSON: EOF while parsing"),
    ):
        status, _, error = serve(named, "--max-body-mib", "2")
        assert status == 2
        assert sentence in " ".join(error.split())


def test_a_dry_run_prints_the_command():
    arguments = ["serve", "MODEL", "--max-model-len", "9", "--admin-api-key", "secret", "--dry-run"]
    result = CliRunner().invoke(app, arguments)
    assert not result.exit_code, result.output
    words = shlex.split(result.output)
    assert "tllm" in words[0].removeprefix("VLLM_PLUGINS=").split(",")
    assert words[words.index("serve") + 1] == "MODEL"
    assert words[-2:] == ["--max-model-len", "9"]
    assert "secret" not in result.output


@pytest.mark.parametrize("command", ["serve", "verify"])
def test_an_option_of_vllm_before_the_model_is_refused(command):
    """The option was taken for the model, and the model for an option's value that nobody gave."""
    for given in (["--max-model-len", "9", "MODEL"], ["--enforce-eager", "MODEL"]):
        result = CliRunner().invoke(app, [command, *given])
        assert result.exit_code == 2, result.output
        said = " ".join(result.output.replace("│", " ").split())
        assert f"{given[0]} stands in the model's place; give the model first" in said
        assert f"tllm {command} MODEL {given[0]}" in said


@pytest.mark.parametrize(
    ("given", "eager"),
    [
        (["--enforce-eager"], True),
        (["--enforce_eager"], True),
        (["--no-enforce-eager", "--enforce-eager"], True),
        (["--enforce-eager", "--no_enforce_eager"], False),
        (["--served-model-name", "enforce-eager"], False),
    ],
)
def test_an_eager_server_is_known_by_any_word_for_it(monkeypatch, given, eager):
    """On a GPU it has more hook points than one with graphs."""
    seen, engine_arguments = [], serve.engine_arguments
    monkeypatch.setattr(
        serve,
        "engine_arguments",
        lambda of, *more: (seen.append(of), engine_arguments(of, *more))[1],
    )
    serve.command("serve", ["MODEL"], given, ServerSettings(), {})
    assert seen == [{"enforce_eager": eager}]


def test_a_server_of_a_model_that_does_not_generate_names_what_it_has():
    """It named routes that answered 404."""

    def generates() -> None:
        """Never called here."""

    app = FastAPI()
    app.add_middleware(CheckedBodies, max_mib=1)
    body = {"input": "Hi", "steering_name": "odd"}
    for routes, says in (
        ([], "no route of this server does, whose model generates nothing; what is set with /v1/"),
        (["/v1/completions"], "but /classify does not read it; use /v1/completions"),
    ):
        for path in routes:
            app.add_api_route(path, generates, methods=["POST"])
        refused = TestClient(app).post("/classify", json=body)
        assert refused.status_code == 400
        assert says in refused.json()["error"]["message"]


def test_a_server_takes_the_options_of_our_engine(invoke):
    """Refusals told the reader of an answer to raise what a server could not be given."""
    given = ["--engine-arg", "max_patch_mib=8", "--engine-arg", "enable_steering=false"]
    status, said, _ = invoke("serve", "MODEL", *given, "--dry-run")
    assert not status
    words = shlex.split(said)
    options = json.loads(words[words.index("--additional-config") + 1])["tllm"]
    assert (options["max_patch_mib"], options["max_steering_configs"]) == (8, 0)


@pytest.mark.parametrize("example", ["Dockerfile", "tllm.service"])
def test_the_examples_for_production_are_commands_that_vllm_takes(example, monkeypatch, tmp_path):
    text = (ROOT / "examples" / "serving" / example).read_text().replace("\\\n", " ")
    if example == "Dockerfile":
        lists = re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", text, re.M)
        command = [part for each in lists for part in json.loads(each)]
    else:
        line = re.search(r"^ExecStart=\S*/(tllm serve .*)$", text, re.M)[1]
        for theirs in ("/etc/tllm-limits.json", "/var/lib/tllm/probe.safetensors"):
            line = line.replace(theirs, str(tmp_path / Path(theirs).name))
        (tmp_path / "tllm-limits.json").write_text(json.dumps({"default": {"capture": False}}))
        save_file({"weight": torch.ones(8)}, tmp_path / "probe.safetensors")
        command = shlex.split(line)
    assert command[:2] == ["tllm", "serve"]
    given = []
    monkeypatch.setattr(serve, "run", lambda *command: given.append(command))
    monkeypatch.setenv("TLLM_ADMIN_API_KEY", "secret")
    result = CliRunner().invoke(app, command[1:])
    assert not result.exit_code, result.output
    ((arguments, environment),) = given
    assert ServerSettings.model_validate_json(environment[VARIABLE]).admin_api_key == "secret"
    parsed, rest = engine_parser("vllm serve").parse_known_args(arguments[5:])
    assert parsed.max_model_len == 4096
    assert {each for each in rest if each.startswith("-")} <= {"--host", "--port"}


@pytest.mark.parametrize(
    "flag",
    [
        *("--worker-cls", "--scheduler-cls=x", "--additional-config"),
        # Other ways in which vLLM takes them.
        *("--worker_cls", "--scheduler_cls=x", "--additional-config.tllm.hook_points=1"),
        *("--additional_config.x", "--worker-cl", "--sched"),
    ],
)
def test_flags_that_are_ours_are_refused(flag):
    with pytest.raises(ValueError, match="tllm serve gives it itself"):
        serve.command("serve", ["MODEL"], [flag], ServerSettings(), {})


@pytest.mark.parametrize(
    ("text", "eager", "own_folder"),
    [
        ("enforce-eager: true\nport: 0\n", True, True),
        ("enforce_eager: false\nport: 8000\n", False, False),
    ],
)
def test_a_file_of_options_is_read_as_vllm_reads_it(monkeypatch, tmp_path, text, eager, own_folder):
    """On a GPU a server that a file made eager had the hook points of one with graphs, and one
    whose file left the port to the system kept large results in a folder that others share."""
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    seen, engine_arguments = [], serve.engine_arguments
    monkeypatch.setattr(
        serve,
        "engine_arguments",
        lambda of, *more: (seen.append(of), engine_arguments(of, *more))[1],
    )
    for more, expected in (
        ([], (eager, own_folder)),
        (["--no-enforce-eager", "--port", "8000"], (False, False)),  # the command line counts
    ):
        given = ["--config", str(path), *more]
        _, environment = serve.command("serve", ["MODEL"], given, ServerSettings(), {})
        settings = ServerSettings.model_validate_json(environment[VARIABLE])
        assert (seen.pop()["enforce_eager"], settings.captures_folder is not None) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("worker_cls: my.Worker\n", "--worker-cls was given in the file of --config, but tllm"),
        ("additional-config: {mine: 3}\n", "--additional-config was given in the file of --config"),
        ("", "--config '.*serve.yaml': it names no options; give lines such as"),
        ("- 3\n", "it names no options"),
        ("max-steering-configs: 8\n", "give --engine-arg max_steering_configs=VALUE"),
        ("port: [8000\n", "--config '.*serve.yaml': while parsing a flow sequence"),
    ],
)
def test_a_file_that_says_what_is_ours_or_nothing_is_refused(tmp_path, text, sentence):
    """What it said of the worker and of additional settings was lost in silence."""
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        serve.command("serve", ["MODEL"], ["--config", str(path)], ServerSettings(), {})


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("consumer: logging", "--consumer"),
        ("hook_points: all", "--hook-points"),
        ("allow-capture: false", "--allow-capture"),
        ("no_allow_consumers: true", "--no-allow-consumers"),
    ],
)
def test_an_option_of_ours_in_a_file_is_told_where_it_goes(tmp_path, invoke, line, flag):
    """`allow-capture: false` was dropped by vLLM without a word, and requests could capture."""
    path = tmp_path / "serve.yaml"
    path.write_text(f"port: 8000\n{line}\n")
    status, _, said = invoke("serve", "demo/model", "--config", str(path), "--dry-run")
    assert status == 2
    assert f"{line.partition(':')[0]} was given in the file of --config" in said
    assert f"give {flag} on the command line" in said


def test_a_file_of_options_is_read_once(tmp_path, invoke, monkeypatch):
    """It might change in between."""
    path = tmp_path / "serve.yaml"
    path.write_text("port: 8000\n")
    read, load = [], FlexibleArgumentParser.load_config_file
    monkeypatch.setattr(
        FlexibleArgumentParser,
        "load_config_file",
        lambda self, path: (read.append(path), load(self, path))[1],
    )
    assert invoke("serve", "demo/model", "--config", str(path), "--dry-run")[0] == 0
    assert read == [str(path)]


def test_a_file_that_vllm_would_not_read_is_refused(tmp_path):
    """vLLM takes `--config=FILE`, and reads no file."""
    for given, sentence in (
        ([f"--config={tmp_path / 'serve.yaml'}"], "--config=FILE was given, .* give --config FILE"),
        (["--config", str(tmp_path / "gone.yaml")], "--config '.*gone.yaml': .* No such file"),
        (["--config", str(tmp_path / "serve.json")], "--config '.*serve.json': Config file must"),
    ):
        with pytest.raises(ValueError, match=sentence):
            serve.command("serve", ["MODEL"], given, ServerSettings(), {})


def test_a_module_in_json_has_all_that_a_registered_one_may_have(tmp_path):
    """It is the file that RhizoNymph's fork of vLLM reads, too."""
    path = tmp_path / "calm.json"
    entry = {"vector": [0.1] * 8, "scale": 2.0}
    clamps = {"post_block": {"1": {"vector": [1.0] * 8, "max": 4.0}}}
    for spec in (
        {"vectors": {"post_block": {"2": entry}}, "decode_vectors": None, "clamps": clamps},
        {"post_block": {"2": [0.1] * 8, "3": {"vector": [0.1] * 8, "method": "ablate"}}},
    ):
        path.write_text(json.dumps(spec))
        assert serve.modules_of([f"calm={path}"]) == {"calm": str(path)}
    for text, sentence in (
        ('{"vectors": ', "it is damaged: Expecting value"),
        ("[1.0]", "it is a list; it must be a JSON object"),
        ('{"vectors": {"post": {"2": [1.0]}}}', "vectors: unknown hook point 'post'"),
        ('{"vectors": {"post_block": {"2": [1.0]}}, "v": 1}', r"module 'calm' has unknown fields"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"--steering-module 'calm=.*{sentence}"):
            serve.modules_of([f"calm={path}"])


def test_modules_are_given_as_name_and_path(tmp_path):
    path = tmp_path / "happy.npy"
    np.save(path, np.ones((2, 8), np.float32))
    assert serve.modules_of([f"happy={path}"]) == {"happy": str(path)}
    for given, sentence in (
        (["happy"], "give name=path"),
        ([f" ={path}"], "--steering-module ' =.*': module name ' ': give 1 to 256 printable"),
        ([f"happy={path}.gone"], "--steering-module happy '.*gone' is not there"),
        ([f"happy={path}", f"happy={path}"], "'happy' was given before"),
    ):
        with pytest.raises(ValueError, match=sentence):
            serve.modules_of(given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--admin-api-key", ""], "--admin-api-key is empty; give a key, or leave it out"),
        (["--admin-api-key", "clé"], "--admin-api-key has characters that no header carries"),
        (["--admin-api-key", "key\n"], "--admin-api-key has characters that no header carries"),
        (["--consumer", "lens:consumer_id=3"], "--consumer 'lens:consumer_id=3': LensConsumer has"),
        (["--consumer", "x:[/y]=1"], "unknown consumer 'x' in 'x:[/y]=1'"),
        (["--consumer", "logging", "--consumer", "logging"], "two consumers are called 'logging'"),
        (
            ["--engine-arg", "max_num_seqs=4"],
            "'max_num_seqs' is not known; give one of capture_mib",
        ),
        (["--engine-arg", "capture_mib=much"], "capture_mib='much' is not a whole number"),
        (["--max-body-mib", "0"], "'--max-body-mib': Input should be greater"),
        (["--enable-steering"], "tLLM's engine: give --engine-arg enable_steering=VALUE"),
        (["--max_patch_mib=8"], "--max-patch-mib is no option of vllm serve"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_sentence(invoke, given, sentence):
    """An empty key was one that everybody has who gives none."""
    status, _, error = invoke("serve", "MODEL", *given, "--dry-run")
    assert status == 2
    assert sentence in " ".join(error.split())
    with pytest.raises(ValueError, match="at least 1 character"):
        ServerSettings(admin_api_key="")


@pytest.mark.parametrize("given", ["1e300", "Infinity", "NaN"])
@pytest.mark.parametrize("name", ["captures_seconds", "result_timeout_s"])
def test_times_that_never_end_are_refused(invoke, monkeypatch, name, given):
    """A result would have expired at no time that JSON can tell."""
    monkeypatch.setenv(VARIABLE, f'{{"{name}": {given}}}')
    status, _, error = invoke("serve", "MODEL", "--dry-run")
    assert status == 2
    said = f"{name}: Input should be less than or equal to 31536000"
    assert said in " ".join(error.split())


def test_choices_that_are_refused_end_once_before_the_tokens_are_counted():
    """The second sample of the first prompt was echoed, and ended, by vLLM."""
    watch = Watch(outputs={"cmpl-a-0": None, "cmpl-a-1": None})
    watch.refused.update({"cmpl-a-0": {1: "no", 0: "no"}, "cmpl-a-1": {1: "never"}})
    about = {"id": "cmpl-a", "object": "text_completion", "created": 1, "model": "demo"}
    ended = {"index": 1, "text": "echoed", "finish_reason": "abort", "stop_reason": "no"}
    bodies = [{"choices": [ended]}, {"choices": [], "usage": {}}]
    events = ["data: " + json.dumps(about | body, separators=(",", ":")) for body in bodies]
    for first in ({}, about):
        refusals = RefusedChoices(watch, 2, "demo")
        echoed, counted, done = [refusals.before(e, first) for e in (*events, "data: [DONE]")]
        assert (echoed, done) == ([], [])
        ends = [(c["index"], c["stop_reason"]) for each in counted for c in each["choices"]]
        assert ends == [(0, "no"), (3, "never")]
        assert {each["id"] for each in counted} == {"cmpl-a"}
    not_counted = RefusedChoices(watch, 2, "demo").before("data: [DONE]", {})
    assert len(not_counted) == 3


def test_keys_of_conversations_are_not_logged(monkeypatch):
    """Neither the body of a request nor its parameters, at any level; all else is, as ever."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.serve.utils import request_logger

    told = []
    for level in ("info", "debug"):
        monkeypatch.setattr(request_logger.logger, level, lambda *args: told.append(args))
    # vLLM 0.33 reads the level of bodies from the environment.
    monkeypatch.setattr(request_logger.logger, "log", lambda level, *args: told.append(args))
    monkeypatch.setattr(request_logger.logger, "isEnabledFor", lambda level: True)
    handler = SimpleNamespace(request_logger=request_logger.RequestLogger(max_log_len=None))
    for _ in range(2):  # once is enough
        KeylessLogger.put_before(handler)
    key = "a secret of this test"
    named = {"id": "chat-7", "key": key}
    body = {"model": "m", "prompt": "Kira", "conversation": named, "stop_when": "turned"}
    request = CompletionRequest(**body)
    logs_bodies = hasattr(request_logger.RequestLogger, "log_request_body")  # not in vLLM 0.30
    for extra in (None, {EXTRA_ARG: {"conversation": named}}):
        request.vllm_xargs = extra or request.vllm_xargs
        if logs_bodies:
            handler.request_logger.log_request_body(request)
    params = SamplingParams(extra_args={EXTRA_ARG: {"conversation": named}, "more": 1})
    handler.request_logger.log_inputs("r", "Kira", [1], None, params=params, lora_request=None)
    said = "\n".join(template % tuple(values) for template, *values in told)
    assert key not in said
    assert said.count("chat-7") == (4 if logs_bodies else 1)
    assert "turned" in said or not logs_bodies
    assert "'more': 1" in said
    assert request.model_extra["conversation"] == named
    assert request.vllm_xargs[EXTRA_ARG]["conversation"] == named
    assert params.extra_args[EXTRA_ARG]["conversation"] == named
    silent = SimpleNamespace(request_logger=None)
    KeylessLogger.put_before(silent)
    assert silent.request_logger is None


@pytest.mark.parametrize("read", [False, True])
def test_a_stream_that_nobody_reads_gives_up_what_was_begun(read):
    """As of a client that leaves between the request and the first event."""

    async def run():
        events = []

        async def outputs():
            ADMITTED.get()()
            try:
                yield SimpleNamespace(outputs=[], number=1)
                await asyncio.sleep(60)
            except (asyncio.CancelledError, GeneratorExit):
                events.append("aborted")
                raise

        watch = Watch()
        noted = watch.noted(outputs(), "cmpl-a-0")
        await watch.begin()
        if read:
            assert (await anext(noted)).number == watch.outputs["cmpl-a-0"].number == 1
        del noted
        gc.collect()
        await asyncio.sleep(0.05)
        return events

    assert asyncio.run(run()) == ["aborted"]


def test_a_request_that_is_refused_takes_those_beside_it_with_it():
    async def run():
        events = []

        async def taken():
            ADMITTED.get()()
            try:
                await asyncio.sleep(60)
                yield
            except asyncio.CancelledError:
                events.append("aborted")
                raise

        async def refused():
            raise RefusedError("not this one")
            yield

        watch = Watch()
        both = watch.noted(taken(), "cmpl-a-0"), watch.noted(refused(), "cmpl-a-1")
        with pytest.raises(RefusedError, match="not this one"):
            await watch.begin()
        await asyncio.sleep(0.05)
        del both
        return events

    assert asyncio.run(run()) == ["aborted"]


def test_a_server_whose_consumer_cannot_begin_ends_and_says_which(tmp_path):
    server = Server(tmp_path, "--consumer", "lens:layers=[99],consumer_id=far")
    try:
        with pytest.raises(RuntimeError, match="did not start"):
            server.wait()
        server.process.join(60)
        assert server.process.exitcode
    finally:
        server.process.kill()
    assert "consumer 'far' cannot begin: layers: " in server.log.read_text()


def test_a_name_with_a_wrong_letter_is_refused_and_a_strange_one_is_not():
    wrong = {
        "captur": "capture", "consumesr": "consumers", "stop_wen": "stop_when",
        "Abort-When": "abort_when", "steering_vectrs": "steering_vectors",
        "decode_steering_vector": "decode_steering_vectors", "converstion": "conversation",
        "steer_vector_request": "steering_vectors, prefill_steering_vectors, ",
    }  # fmt: skip
    for name, meant in wrong.items():
        with pytest.raises(FieldError, match=f"{name} was given, and is no field; {meant}"):
            asked_in({name: {"memory": {}}}, ServerSettings())
    for name in ("path", "match", "batch", "conversation_id", "consumer_group_id", "stop_words"):
        assert asked_in({name: "x"}, ServerSettings()) == {}


def test_strange_names_are_compared_with_few_fields(monkeypatch):
    """An event loop that looks at a body of many of them serves nobody else meanwhile."""
    compared, compare = [], request_fields._differ_by_one
    monkeypatch.setattr(
        request_fields, "_differ_by_one", lambda *two: (compared.append(two), compare(*two))[1]
    )
    body = {f"strange_{number}": 1 for number in range(1000)}
    assert asked_in(body, ServerSettings()) == {}
    assert len(compared) < 100
    with pytest.raises(FieldError, match="captrue was given"):
        asked_in(body | {"captrue": {}}, ServerSettings())

"""Two data-parallel replicas behind two processes of the API server answer as one engine does."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load
from server.conftest import Server
from server.test_serving import CHAT, MANY, PROMPT, WORDS, decoded

VECTOR = {"post_block": {"2": (2.0 * torch.sin(torch.arange(128.0))).tolist()}}
ROWS = {"memory": {"hooks": {"post_block": [1, 3]}, "positions": "all"}}
ASKED = {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
REQUESTS = {
    "plain": ("/v1/completions", {}),
    "steered": ("/v1/completions", {"steering_vectors": VECTOR}),
    "module": ("/v1/completions", {"steering_name": ["odd", 0.5], "capture": ROWS}),
    "model": ("/v1/completions", {"model": "demo:odd"}),
    "captured": ("/v1/completions", {"capture": ROWS, "consumers": {"probe": {}}}),
    "by reference": (
        "/v1/completions",
        {"capture": MANY, "prompt": " ".join([PROMPT] * 8), "steering_name": "odd"},
    ),
    "streamed": ("/v1/completions", {"capture": ROWS, "steering_name": "odd", "stream": True}),
    "chat": ("/v1/chat/completions", {"decode_steering_vectors": VECTOR, "capture": ROWS}),
    "beams": ("/v1/completions", {"use_beam_search": True, "steering_name": "odd", "n": 2}),
}
TIMES = 6


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """A server with two replicas of the model, started as `vllm serve` is."""
    folder = tmp_path_factory.mktemp("replicas")
    with Server(folder, "--data-parallel-size", "2", by_hand=True) as running:
        yield running


def answer_of(server, name):
    """What a server answers: texts and tokens, and the tensors of its results."""
    path, asked = REQUESTS[name]
    base = CHAT | {"temperature": 0} if "chat" in path else WORDS
    answer = server.post(path, base | ASKED | asked, key=None)
    assert answer.status_code == 200, answer.text
    lines = [each.removeprefix("data: ") for each in answer.text.splitlines()]
    events = [json.loads(each) for each in lines if each.startswith("{")]
    said = [
        [each.get("text"), each.get("message", {}).get("content"), each.get("token_ids")]
        for event in events
        for each in event["choices"]
    ]
    texts = ["".join(each[0] for each in said)] if asked.get("stream") else said
    results = {**events[-1].get("capture_results", {}), **events[-1].get("consumer_results", {})}
    assert {each["status"] for each in results.values()} <= {"ok"}, results
    return texts, tensors_of(server, {key: each["payload"] for key, each in results.items()})


def tensors_of(server, payload, path=""):
    """Every tensor of a payload, by where it is; those that are fetched by reference, too."""
    if not isinstance(payload, dict):
        return {}
    if "url" in payload:
        return dict(load(server.get(payload["url"], key=None).content))
    if "data" in payload:
        return {path: decoded(payload)}
    found = {}
    for key, each in payload.items():
        found |= tensors_of(server, each, f"{path}.{key}")
    return found


def asked_at_once(server, name):
    with ThreadPoolExecutor(TIMES) as threads:
        return list(threads.map(answer_of, [server] * TIMES, [name] * TIMES))


def compare(server, replicas, name):
    texts, tensors = answer_of(server, name)
    for their_texts, their_tensors in asked_at_once(replicas, name):
        assert their_texts == texts, name
        assert their_tensors.keys() == tensors.keys(), name
        for key, tensor in tensors.items():
            torch.testing.assert_close(their_tensors[key], tensor, rtol=1e-4, atol=1e-4)
    return texts, tensors


def test_replicas_answer_as_one_engine(server, replicas):
    body = {"name": "odd", "spec": VECTOR}
    for each in (server, replicas):  # in one process of the API server, which tells the others
        assert each.post("/v1/steering/modules/register", body).is_success
    found = {name: compare(server, replicas, name) for name in REQUESTS}
    assert {name for name, (_, tensors) in found.items() if tensors} == {
        "module", "captured", "by reference", "streamed", "chat"
    }  # fmt: skip
    assert found["plain"][0] != found["steered"][0] == found["model"][0]
    workers = replicas.get("/v1/interventions").json()
    assert len(workers) == 2  # and both of them did it
    assert all(each["rows_steered"] and each["rows_captured"] for each in workers)
    assert all(each["running_sequences"] == 0 for each in workers)


def test_what_is_global_steers_in_every_replica(server, replicas):
    plain = answer_of(replicas, "plain")
    for each in (server, replicas):
        assert each.post("/v1/steering/set", {"decode_vectors": VECTOR}).is_success
    try:
        assert compare(server, replicas, "plain") != plain
    finally:
        for each in (server, replicas):
            each.post("/v1/steering/clear", {})
    assert compare(server, replicas, "plain") == plain


def test_a_module_that_is_gone_is_gone_everywhere(replicas):
    body = {"name": "goes", "spec": VECTOR}
    assert replicas.post("/v1/steering/modules/register", body).is_success
    ask = WORDS | {"model": "demo:goes", "max_tokens": 1}
    assert all(replicas.post("/v1/completions", ask).is_success for _ in range(TIMES))
    assert replicas.post("/v1/steering/modules/unregister", {"name": "goes"}).is_success
    assert {replicas.post("/v1/completions", ask).status_code for _ in range(TIMES)} == {404}


def test_metrics_tell_the_replicas_apart(replicas):
    families = text_string_to_metric_families(replicas.get("/metrics", key=None).text)
    steered = {
        sample.labels["worker"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "tllm:rows_steered_total"
    }
    workers = replicas.get("/v1/interventions").json()
    assert list(steered.values()) == [worker["rows_steered"] for worker in workers]

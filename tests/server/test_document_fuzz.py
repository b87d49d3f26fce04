"""Requests that schemathesis makes from the server's own OpenAPI document: no 5xx, and no hang."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from http_reference import our_document  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402

READ = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
PATHS = [*READ, *our_document()["paths"]]
ENDS = {"model": "demo", "max_tokens": 1, "max_output_tokens": 1}
PLAIN = {"/v1/responses": {"input": "Once"}}
"""What vLLM reads alone, and answers some of with a 500: a refusal among the messages of an
assistant ("'ResponseOutputRefusal' object has no attribute 'text'", vLLM 0.32)."""


@pytest.fixture(scope="module")
def api(server):
    """Our routes, and vLLM's that read our fields, as the running server documents them."""
    whole = httpx.get(f"{server.url}/openapi.json").json()
    whole["paths"] = {path: whole["paths"][path] for path in PATHS}
    for path in READ:
        for answer in whole["paths"][path]["post"]["responses"].values():
            answer.pop("content", None)
    return schemathesis.openapi.from_dict(json.loads(json.dumps(whole)))


@pytest.mark.parametrize("path", PATHS)
def test_what_the_document_allows_is_no_fault_of_the_server(server, api, path):
    def ask(case):
        if path in READ and isinstance(case.body, dict):
            case.body |= ENDS | PLAIN.get(path, {})
        headers = {"Authorization": f"Bearer {server.key}"}
        answer = case.call(base_url=server.url, headers=headers, timeout=60)
        case.validate_response(answer, checks=[not_a_server_error])

    for method in api[path]:
        drawn = given(api[path][method].as_strategy())(ask)
        settings(
            max_examples=10, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        )(drawn)()  # fmt: skip


def test_what_it_sent_steers_nobody(server):
    assert server.post("/v1/steering/clear", {}).is_success
    for name in server.get("/v1/steering/modules").json():
        server.post("/v1/steering/modules/unregister", {"name": name})
    assert server.get("/v1/steering").json()["requests"] == 0

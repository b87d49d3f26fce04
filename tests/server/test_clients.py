"""The documents' clients run against the server as they stand there."""

import asyncio
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import openai

ROOT = Path(__file__).parents[2]


def test_the_example_steers_over_http(server, monkeypatch, capsys):
    arguments = ["openai_client.py", "--url", server.url, "--admin-key", server.key]
    monkeypatch.setattr(sys, "argv", arguments)
    try:
        runpy.run_path(str(ROOT / "examples" / "openai_client.py"), run_name="__main__")
    except SystemExit as end:
        assert not end.code
    plain, steered = capsys.readouterr().out.splitlines()
    assert plain.startswith("demo: ")
    assert steered.startswith("demo:happy: ")
    assert plain.split(": ", 1)[1] != steered.split(": ", 1)[1]


def test_the_guides_client_runs(server, client):
    spec = {"post_block": {"2": [1.0] * 128}}
    assert server.post("/v1/steering/modules/register", {"name": "happy", "spec": spec}).is_success
    text = (ROOT / "doc" / "guides" / "serving.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    for theirs, ours in (
        ("http://localhost:8000", server.url),
        ("Qwen/Qwen2.5-7B-Instruct", "demo"),
        ("[12]", "[2]"),
    ):
        assert theirs in code
        code = code.replace(theirs, ours)
    found = {}
    exec(code, found)
    assert found["answer"].choices[0].capture_results["memory"]["status"] == "ok"


def test_the_asynchronous_client_streams_steered_tokens_and_their_rows(server, client):
    asked = {"capture": {"memory": {"hooks": {"post_block": [1]}, "positions": "all"}}}
    asked |= {"steering_vectors": {"post_block": {"2": [3.0] * 128}}, "ignore_eos": True}
    body = {"model": "demo", "prompt": "Ben had a red kite.", "temperature": 0, "max_tokens": 6}

    async def stream():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as opened:
            events = await opened.completions.create(**body, stream=True, extra_body=asked)
            return [event async for event in events]

    events = asyncio.run(stream())
    whole = client.completions.create(**body, extra_body=asked)
    text = "".join(choice.text for event in events for choice in event.choices)
    assert text == whole.choices[0].text
    assert (
        text != client.completions.create(**body, extra_body={"ignore_eos": True}).choices[0].text
    )
    assert events[-1].capture_results == whole.capture_results


def test_the_readmes_curl_line_captures(server):
    text = (ROOT / "README.md").read_text()
    (line,) = re.findall(r"^(curl localhost:8000/v1/completions.*?\}')$", text, re.M | re.S)
    command = shlex.split(line.replace("http://", "").replace("localhost:8000", server.url[7:]))
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert '"capture_results":{"memory":{"status":"ok"' in answer

"""`tllm run-batch`: a file of requests, answered without a server, against `transformers`."""

from __future__ import annotations

import json
import os

import pytest
import torch
from child_process import TLLM, run_command
from safetensors.torch import save_file
from server.conftest import MODEL, ROOT, somebody_elses
from server.test_inspect import chat_ids
from server.test_serving import decoded, states, steered_tokens

from tllm import stores

CHAT = "/v1/chat/completions"
QUESTION = "One day Mia went to the garden."
LAYER, COUNT = 3, 8
ENGINE = ["--served-model-name=demo", "--dtype=float32", "--enforce-eager", "--max-model-len=128"]


def line(name, url=CHAT, **body):
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": COUNT} | body
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n"


def test_a_file_is_answered_with_what_each_of_its_lines_asks(model, tmp_path, forked_processes):
    vector = 2.0 * torch.randn(128, generator=torch.Generator().manual_seed(1))
    save_file({f"post_block.{LAYER}": vector}, tmp_path / "odd.safetensors")
    rows = {"hooks": {"post_block": [1]}, "positions": "all_prompt"}
    everything = {"post_block": "all"}
    many = {"hooks": everything, "positions": "all"}
    asked, answers, store = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "store"
    path = os.pathsep.join([str(tmp_path), somebody_elses(tmp_path, "parting")])
    asked.write_text(
        line("plain")
        + line("steered", steering_vectors={"post_block": {str(LAYER): vector.tolist()}})
        + line("named", model="demo:odd")
        + line("captured", capture={"memory": rows})
        + line("large", capture={"memory": many}, max_tokens=64, ignore_eos=True)
        + line("stored", capture={"filesystem": rows})
        + line("wrong", captures={"memory": rows})
    )
    status, said = run_command(
        TLLM, "run-batch", MODEL, "-i", asked, "-o", answers, *ENGINE,
        "--steering-module", f"odd={tmp_path / 'odd.safetensors'}",
        "--consumer", f"filesystem:root={store}",
        "--consumer", f"parting:path={tmp_path / 'parting'}",
        log=tmp_path / "log", environment={"PYTHONPATH": path}, cwd=ROOT, forks=True,
    )  # fmt: skip
    assert status == 0, said
    found = {each["custom_id"]: each for each in map(json.loads, answers.open())}
    bodies = {name: each["response"]["body"] for name, each in found.items()}
    texts = {
        name: body["choices"][0]["message"]["content"] for name, body in bodies.items() if body
    }
    prompt = chat_ids(model, QUESTION)
    nothing = torch.zeros(128)
    tokens = {by: steered_tokens(model, prompt, LAYER, by, COUNT) for by in (nothing, vector)}
    plain, steered = (model[1].decode(tokens[by]) for by in (nothing, vector))
    assert plain != steered
    assert texts | {"large": ""} == {
        "plain": plain, "steered": steered, "named": steered, "captured": plain, "stored": plain,
        "large": "",
    }  # fmt: skip
    assert found["wrong"]["error"]["error"]["message"] == (
        "captures was given, and is no field; capture may be meant"
    )
    expected = states(model, prompt, 1)
    memory = bodies["captured"]["choices"][0]["capture_results"]["memory"]
    torch.testing.assert_close(decoded(memory["payload"]["post_block"]["1"]["tensor"]), expected)
    # A server would keep so much to be fetched.
    large = bodies["large"]["choices"][0]["capture_results"]["memory"]["payload"]["post_block"]
    tensors = [decoded(each["tensor"]) for each in large.values()]
    assert sum(tensor.nbytes for tensor in tensors) > 65536
    torch.testing.assert_close(tensors[1][: len(prompt)], expected)
    assert bodies["stored"]["capture_results"]["filesystem"]["status"] == "ok"
    (record,) = stores.open(store)
    torch.testing.assert_close(record.tensor("post_block", 1), expected)
    assert (tmp_path / "parting").read_text() == "whole"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (line("a", "/v1/embeddings", capture={}), "line 2: capture was given, but /v1/embeddings "),
        (line("a", "/score", extra_args={"tllm": {}}), "line 2: extra_args['tllm'] was given"),
        ("{\n", "line 2 is no JSON"),
        ("[]\n", "line 2 is no request; give an object with custom_id"),
    ],
)
def test_a_line_that_nobody_would_read_is_refused_before_an_engine_starts(
    invoke, tmp_path, wrong, said
):
    asked = tmp_path / "in.jsonl"
    asked.write_text(line("first") + wrong)
    out = tmp_path / "out.jsonl"
    status, _, error = invoke("run-batch", str(MODEL), "-i", str(asked), "-o", str(out))
    assert (status, said in error) == (2, True), error
    assert not out.exists()


def test_files_and_options_that_cannot_be_are_refused(invoke, tmp_path):
    asked = tmp_path / "in.jsonl"
    asked.write_text(line("first"))
    for arguments, said in (
        (["-i", str(tmp_path / "gone"), "-o", "out"], "No such file"),
        (["-i", str(asked), "-o", str(tmp_path / "gone" / "out")], "gone"),
        (["-i", str(asked), "-o", "out", "--model=other"], "tllm run-batch gives it itself"),
        (["-i", str(asked), "-o", "out", "--overflow=drop"], "no option of vllm run-batch"),
    ):
        status, _, error = invoke("run-batch", str(MODEL), *arguments)
        assert (status, said in error) == (2, True), error

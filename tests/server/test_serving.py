"""Interventions over HTTP, against `transformers` and by the clients that people use."""

import asyncio
import base64
import json
import time
from contextlib import suppress

import httpx
import numpy as np
import openai
import pytest
import torch
from http_reference import our_document
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load
from server.conftest import feature_weights

from tllm.server import document

PROBE = torch.tensor([1.0, *[0.0] * 126, -1.0])
PROMPT = "One day Mia went to the garden."
WORDS = {"model": "demo", "prompt": PROMPT, "temperature": 0}
SET_TO_ZERO = {"hook": "post_block", "layer": 1, "positions": [-1], "source": {"zero": True}}
VECTORS = {"steering_vectors": {"post_block": {"2": [1.0] * 128}}}
CHAT = {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
EVERYTHING = {"probe": {"hook": "post_block", "layer": 1, "vector": [1.0] * 128}, "above": -1e9}


def decoded(tensor):
    """A tensor of a response."""
    flat = np.frombuffer(base64.b64decode(tensor["data"]), tensor["dtype"])
    return torch.from_numpy(flat.copy()).reshape(tensor["shape"])


@torch.no_grad()
def states(model, text_ids, layer):
    """`[tokens, hidden]`, what leaves a block."""
    loaded, _ = model
    return loaded(torch.tensor([text_ids]), output_hidden_states=True).hidden_states[layer + 1][0]


@torch.no_grad()
def steered_tokens(model, prompt_ids, layer, vector, count):
    """Greedy tokens of transformers with a vector added to what leaves a block."""
    loaded, _ = model

    def add(module, args, output):
        return (output[0] + vector, *output[1:]) if isinstance(output, tuple) else output + vector

    tokens = list(prompt_ids)
    with loaded.model.layers[layer].register_forward_hook(add):
        for _ in range(count):
            tokens.append(int(loaded(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt_ids) :]


@torch.no_grad()
def patched_tokens(model, prompt_ids, layer, position, row, count):
    """Greedy tokens of transformers with another row in the place of what leaves a block."""
    loaded, _ = model

    def put(module, args, output):
        hidden = (output[0] if isinstance(output, tuple) else output).clone()
        hidden[0, position] = row
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    tokens = list(prompt_ids)
    with loaded.model.layers[layer].register_forward_hook(put):
        for _ in range(count):
            tokens.append(int(loaded(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt_ids) :]


@pytest.mark.parametrize("positions", [[-1], "last_prompt", "all_prompt"])
def test_a_patched_request_is_that_of_transformers_beside_a_plain_one(client, model, positions):
    ids = model[1](PROMPT)["input_ids"]
    row = 4 * torch.randn(128, generator=torch.Generator().manual_seed(2))
    at = slice(0, len(ids)) if positions == "all_prompt" else len(ids) - 1
    sources = {"zero": True}, {"tensor": row.tolist()}
    found = {}
    for number, source in enumerate([None, *sources]):
        patch = [{"hook": "post_block", "layer": 2, "positions": positions, "source": source}]
        asked = {"return_token_ids": True, "ignore_eos": True}
        asked |= {} if source is None else {"patch": patch}
        answer = client.completions.create(**WORDS, max_tokens=8, extra_body=asked)
        found[number] = answer.choices[0].token_ids
    assert found[1] == patched_tokens(model, ids, 2, at, torch.zeros(128), 8)
    assert found[2] == patched_tokens(model, ids, 2, at, row, 8)
    assert found[0] == steered_tokens(model, ids, 2, torch.zeros(128), 8)
    assert len({tuple(tokens) for tokens in found.values()}) == 3


def test_a_capture_is_in_the_response(client, model):
    asked = {"memory": {"hooks": {"post_block": [2]}, "positions": "all_prompt"}}
    answer = client.completions.create(**WORDS, max_tokens=4, extra_body={"capture": asked})
    result = answer.choices[0].capture_results["memory"]
    assert (result["status"], result["error"]) == ("ok", None)
    ids = model[1](PROMPT)["input_ids"]
    captured = result["payload"]["post_block"]["2"]
    assert decoded(captured["positions"]).tolist() == list(range(len(ids)))
    torch.testing.assert_close(
        decoded(captured["tensor"]), states(model, ids, 2), rtol=1e-4, atol=1e-4
    )
    assert answer.capture_results == answer.choices[0].capture_results


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_positions_are_those_of_a_truncated_prompt(server, model, route, side):
    """vLLM cuts the prompt before anything of ours counts its tokens."""
    vector = 2.0 * torch.randn(128, generator=torch.Generator().manual_seed(6))
    entry = {"vector": vector.tolist(), "positions": [1]}
    asked = {
        "capture": {"memory": {"hooks": {"post_block": [0, 1]}, "positions": "all_prompt"}},
        "steering_vectors": {"post_block": {"0": entry}},
        "patch": [{"hook": "post_block", "layer": 1, "positions": [-1], "source": {"zero": True}}],
        "truncate_prompt_tokens": 5,
        "max_tokens": 1,
        "return_token_ids": True,
    } | ({} if side is None else {"truncation_side": side})
    messages = [{"role": "user", "content": PROMPT}]
    words = WORDS if route == "completions" else CHAT | {"messages": messages}
    answer = server.post(f"/v1/{route}", words | asked, key=None).json()
    [choice] = answer["choices"]
    ids = choice["prompt_token_ids"] if route == "completions" else answer["prompt_token_ids"]
    if route == "completions":
        whole = model[1](PROMPT)["input_ids"]
        assert ids == (whole[:5] if side == "right" else whole[-5:])
    assert len(ids) == 5
    kept = choice["capture_results"]["memory"]["payload"]["post_block"]
    assert decoded(kept["1"]["positions"]).tolist() == list(range(5))
    torch.testing.assert_close(
        decoded(kept["0"]["tensor"]), states(model, ids, 0), rtol=1e-4, atol=1e-4
    )
    found = decoded(kept["1"]["tensor"])
    expected = steered_states(model, ids, 0, 1, vector)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    beyond = asked | {"patch": [SET_TO_ZERO | {"positions": [6]}]}
    refused = server.post(f"/v1/{route}", words | beyond, key=None)
    assert refused.status_code == 400
    assert "position 6 is out of range for a prompt of 5 tokens" in refused.text


@torch.no_grad()
def steered_states(model, ids, layer, position, vector):
    """`[tokens, hidden]`, what leaves the next block where a row that leaves one was changed."""
    loaded, _ = model

    def add(module, args, output):
        hidden = (output[0] if isinstance(output, tuple) else output).clone()
        hidden[0, position] += vector
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    with loaded.model.layers[layer].register_forward_hook(add):
        return states(model, ids, layer + 1)


def test_every_choice_of_every_prompt_has_its_own_rows(client, model):
    asked = {"memory": {"hooks": {"post_block": [1]}, "positions": "all_generated"}}
    prompts = [PROMPT, "Ben had a red kite."]
    answer = client.completions.create(
        model="demo", prompt=prompts, n=2, max_tokens=5, temperature=1.0, seed=4,
        extra_body={"capture": asked, "return_token_ids": True},
    )  # fmt: skip
    assert len(answer.choices) == 4
    for number, choice in enumerate(answer.choices):
        rows = choice.capture_results["memory"]["payload"]["post_block"]["1"]
        prompt = model[1](prompts[number // 2])["input_ids"]
        expected = states(model, [*prompt, *choice.token_ids], 1)
        at = decoded(rows["positions"]).long()
        assert at.tolist() == list(range(len(prompt), len(prompt) + len(choice.token_ids) - 1))
        torch.testing.assert_close(decoded(rows["tensor"]), expected[at], rtol=1e-4, atol=1e-4)


def test_a_large_result_is_fetched_by_reference(server, client, model):
    asked = {"memory": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}}
    prompt = " ".join([PROMPT] * 8)
    answer = client.completions.create(
        model="demo", prompt=prompt, max_tokens=2, extra_body={"capture": asked}
    )
    payload = answer.capture_results["memory"]["payload"]
    assert payload["format"] == "safetensors"
    tensors = load(server.get(payload["url"], key=None).content)
    named = payload["contents"]["post_block"]["2"]["tensor"]
    assert named["name"] == "post_block.2.tensor"
    assert named["shape"] == list(tensors["post_block.2.tensor"].shape)
    expected = states(model, model[1](prompt)["input_ids"], 2)
    torch.testing.assert_close(tensors["post_block.2.tensor"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["0" * 32, "..%2f..%2fetc%2fpasswd", "a" * 300])
def test_a_capture_that_is_not_there_is_a_404(server, name):
    assert server.get(f"/v1/captures/{name}", key=None).status_code == 404


def test_a_streamed_answer_ends_with_the_results(client):
    asked = {"memory": {"hooks": {"post_block": [0]}, "positions": "all"}}
    whole = client.completions.create(**WORDS, max_tokens=6, extra_body={"capture": asked})
    events = list(
        client.completions.create(**WORDS, max_tokens=6, stream=True, extra_body={"capture": asked})
    )
    text = "".join(choice.text for event in events for choice in event.choices)
    assert text == whole.choices[0].text
    assert not events[-1].choices
    assert events[-1].capture_results == whole.capture_results
    assert events[-1].id == events[0].id


def test_a_streamed_choice_ends_once(client):
    """One of several ended again when the last did, with whose event the results come."""
    asked = {"capture": {"memory": {"hooks": {"post_block": [0]}}}}
    of = {"model": "demo", "n": 3, "temperature": 1.0, "seed": 4, "stop": [" "], "max_tokens": 30}
    of |= {"stream": True, "extra_body": asked}
    told = [{"role": "user", "content": PROMPT}]
    for events, choices in (
        (client.completions.create(prompt=[PROMPT, "Ben"], **of), 6),
        (client.chat.completions.create(messages=told, **of), 3),
    ):
        *streamed, last = events
        ends = [c.index for event in streamed for c in event.choices if c.finish_reason]
        assert sorted(ends) == list(range(choices))
        assert [sample["capture_results"]["memory"]["status"] for sample in last.samples] == (
            choices * ["ok"]
        )


@pytest.mark.parametrize("way", ["vectors", "module", "model", "colon", "packed"])
def test_steering_by_request(server, client, model, way):
    vector = 2.0 * torch.randn(128, generator=torch.Generator().manual_seed(1))
    spec = {"post_block": {"3": vector.tolist()}}
    asked, name = {"steering_vectors": spec}, "demo"
    if way in ("module", "model", "colon"):
        module = "odd:v2" if way == "colon" else "odd"
        assert server.post(
            "/v1/steering/modules/register", {"name": module, "spec": spec}
        ).is_success
        asked, name = (
            ({}, f"demo:{module}") if way != "module" else ({"steering_name": module}, name)
        )
    if way == "packed":
        data = base64.b64encode(vector.numpy().tobytes()).decode()
        packed = {"dtype": "float32", "shape": [1, 128], "layer_indices": [3], "data": data}
        asked = {"steering_vectors": {"post_block": packed}}
    body = WORDS | {"model": name}
    answer = client.completions.create(
        **body, max_tokens=8, extra_body={**asked, "return_token_ids": True}
    )
    ids = model[1](PROMPT)["input_ids"]
    assert answer.choices[0].token_ids == steered_tokens(model, ids, 3, vector, 8)
    plain = client.completions.create(**WORDS, max_tokens=8, extra_body={"return_token_ids": True})
    assert plain.choices[0].token_ids == steered_tokens(model, ids, 3, torch.zeros(128), 8)


@pytest.mark.parametrize("module", ["odd", "odd:v2"])
def test_an_adapters_name_is_one_of_the_servers_names(server, client, tuned, module):
    vector = 2.0 * torch.randn(128, generator=torch.Generator().manual_seed(1))
    spec = {"post_block": {"3": vector.tolist()}}
    assert server.post("/v1/steering/modules/register", {"name": module, "spec": spec}).is_success
    for route in ("completions", "chat/completions"):
        body = {"completions": WORDS, "chat/completions": CHAT}[route] | {"max_tokens": 8}
        body |= {"temperature": 0, "return_token_ids": True}
        answer = server.post(f"/v1/{route}", body | {"model": f"tuned:{module}"}, key=None)
        (choice,) = answer.json()["choices"]
        ids = answer.json().get("prompt_token_ids") or choice["prompt_token_ids"]
        assert choice["token_ids"] == steered_tokens(tuned, ids, 3, vector, 8)
    missing = server.post("/v1/completions", WORDS | {"model": "tuned:none"}, key=None)
    assert missing.status_code == 404
    assert "model='tuned:none': no steering module 'none'" in missing.json()["error"]["message"]


def test_models_are_listed_with_each_module(server, client):
    """What is listed can be asked for, and goes with the module."""
    spec = {"post_block": {"3": [1.0] * 128}}
    body = {"name": "listed:v2", "spec": spec}
    assert server.post("/v1/steering/modules/register", body).is_success
    cards = {card.id: card for card in client.models.list()}
    assert {"demo", "tuned", "demo:listed:v2"} <= cards.keys()
    assert (cards["demo:listed:v2"].parent, cards["demo:listed:v2"].max_model_len) == (
        "demo",
        cards["demo"].max_model_len,
    )
    answer = client.completions.create(**WORDS | {"model": "demo:listed:v2"}, max_tokens=2)
    assert answer.choices
    assert server.post("/v1/steering/modules/unregister", {"name": "listed:v2"}).is_success
    assert "demo:listed:v2" not in {card.id for card in client.models.list()}


@pytest.mark.parametrize("way", ["request", "module", "monitor", "small MLP"])
def test_steering_on_a_condition_and_its_signals(server, client, model, way):
    """One that always holds, and one that never does. The MLP says what the vector does."""
    vector, p = torch.randn(2, 128, generator=torch.Generator().manual_seed(1))
    probe = {"hook": "post_block", "layer": 1, "vector": p.tolist()}
    if way == "small MLP":
        del probe["vector"]
        probe["layers"] = [[[p.tolist(), (-p).tolist()], [0, 0]], [[[1, -1]], [0]]]
    ids = model[1](PROMPT)["input_ids"]
    for edge, steered in ((-1e9, 2 * vector), (1e9, torch.zeros(128))):
        when = {"probe": probe, "above": edge, "name": "gate"}
        spec = {"post_block": {"3": {"vector": (2 * vector).tolist(), "when": when}}}
        asked = {"steering_vectors": spec}
        if way == "module":
            body = {"name": "gated", "spec": spec}
            assert server.post("/v1/steering/modules/register", body).is_success
            asked = {"steering_name": "gated"}
        if way == "monitor":
            body = {"name": "gate", "condition": {**when, "name": "not this"}}
            assert server.post("/v1/steering/monitors/register", body).is_success
            spec["post_block"]["3"]["when"] = "gate"
        asked |= {"return_token_ids": True, "ignore_eos": True}
        answer = client.completions.create(**WORDS, max_tokens=8, extra_body=asked)
        tokens = answer.choices[0].token_ids
        assert tokens == steered_tokens(model, ids, 3, steered, 8)
        signal = answer.choices[0].consumer_results["signals"]["payload"]["gate"]
        at, scores = decoded(signal["positions"]).long(), decoded(signal["scores"])
        assert at.tolist()[-7:] == list(range(len(ids), len(ids) + 7))
        assert decoded(signal["fired"]).tolist() == (at.tolist() if edge < 0 else [])
        expected = (states(model, [*ids, *tokens], 1) @ p)[at]
        torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-3)


def test_a_feature_of_an_autoencoder_decides(client, model):
    """As `tllm serve --consumer sae:path=...` has it; one that is not there is refused."""
    ids, weights = model[1](PROMPT)["input_ids"], feature_weights()
    when = {"probe": {"sae": "sae", "feature": 1}, "above": 1e9, "name": "feature"}
    asked = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(
        **WORDS, max_tokens=8, extra_body=asked | {"stop_when": when}
    )
    [choice] = answer.choices
    signal = choice.consumer_results["signals"]["payload"]["feature"]
    at, scores = decoded(signal["positions"]).long(), decoded(signal["scores"])
    rows = states(model, [*ids, *choice.token_ids], 1)
    expected = (rows @ weights["W_enc"] + weights["b_enc"]).relu()[at, 1]
    torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-3)
    for probe in ({"sae": "sae", "feature": 2}, {"sae": "lens", "feature": 0}):
        with pytest.raises(openai.BadRequestError, match=r"feature|autoencoder"):
            wrong = {**when, "probe": probe}
            client.completions.create(**WORDS, max_tokens=1, extra_body={"stop_when": wrong})


def test_a_condition_that_remembers_is_a_plain_field(client, model):
    """One that holds for the first token steers all others; `AsyncLLM` serves it."""
    vector, p = torch.randn(2, 128, generator=torch.Generator().manual_seed(1))
    ids = model[1](PROMPT)["input_ids"]
    probe = {"hook": "post_block", "layer": 1, "vector": p.tolist()}
    when = {"probe": probe, "above": -1e9, "name": "first", "scope": "rest"}
    entry = {"vector": (2 * vector).tolist(), "when": when}
    always = {"vector": (2 * vector).tolist(), "positions": {"ranges": [[1, None]]}}
    answers = [
        client.completions.create(
            **WORDS,
            max_tokens=8,
            extra_body={
                "steering_vectors": {"post_block": {"3": each}},
                "return_token_ids": True,
                "ignore_eos": True,
            },
        )
        for each in (entry, always)
    ]
    tokens = [answer.choices[0].token_ids for answer in answers]
    assert tokens[0] == tokens[1] != steered_tokens(model, ids, 3, torch.zeros(128), 8)
    signal = answers[0].choices[0].consumer_results["signals"]["payload"]["first"]
    assert decoded(signal["fired"]).tolist() == list(range(len(ids) + 7))


def condition_of(model, ids):
    """One that holds for the third generated token, and for none before; with its name."""
    tokens = steered_tokens(model, ids, 3, torch.zeros(128), 8)
    p = states(model, [*ids, *tokens], 1)[len(ids) + 2]
    scores = states(model, [*ids, *tokens], 1) @ p
    edge = float((scores[len(ids) + 2] + scores[len(ids) : len(ids) + 2].max()) / 2)
    probe = {"hook": "post_block", "layer": 1, "vector": p.tolist()}
    assert scores[len(ids) + 2] > edge
    return tokens, {"probe": probe, "above": edge, "name": "turned"}


def test_a_condition_ends_an_answer_whole_and_streamed(client, model):
    ids = model[1](PROMPT)["input_ids"]
    tokens, turned = condition_of(model, ids)
    asked = {"stop_when": [turned], "return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(**WORDS, max_tokens=8, n=1, extra_body=asked)
    (choice,) = answer.choices
    assert (choice.token_ids, choice.finish_reason) == (tokens[:3], "stop")
    whole = model[1].decode([*ids, *tokens[:3]], skip_special_tokens=True)
    assert (choice.stop_reason, PROMPT + choice.text) == ("turned", whole)
    signal = choice.consumer_results["signals"]["payload"]["turned"]
    assert decoded(signal["fired"]).tolist() == [len(ids) + 2]
    events = client.completions.create(**WORDS, max_tokens=8, stream=True, extra_body=asked)
    choices = [choice for event in events for choice in event.choices]
    assert [token for each in choices for token in each.token_ids] == tokens[:3]
    assert "".join(each.text for each in choices) == choice.text
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", "turned")


def test_a_controller_of_the_server_steers_and_stops_an_answer(client, model):
    ids = model[1](PROMPT)["input_ids"]
    asked = {"consumers": {"turning": {"after": 1}}, "return_token_ids": True, "ignore_eos": True}
    vector, first = torch.linspace(-9, 9, 128), len(ids) + 2

    def steer(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        hidden[:, first:] += vector

    tokens: list[int] = []
    with model[0].model.layers[2].register_forward_hook(steer), torch.no_grad():
        while len(tokens) < 5:
            logits = model[0](torch.tensor([[*ids, *tokens]]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    answer = client.completions.create(**WORDS, max_tokens=8, extra_body=asked)
    events = client.completions.create(**WORDS, max_tokens=8, stream=True, extra_body=asked)
    streamed = [choice for event in events for choice in event.choices]
    (choice,) = answer.choices
    assert choice.token_ids == tokens == [t for each in streamed for t in each.token_ids]
    for last in (choice, streamed[-1]):
        assert (last.finish_reason, last.stop_reason) == ("stop", "enough")
    result = choice.consumer_results["turning"]
    steered, note, stop = result["payload"]["actions"]
    assert (result["status"], note["data"]) == ("ok", {"at": first - 1})
    assert (steered["acts_from"], steered["lag_steps"]) == (first, 1)
    assert (stop["position"], stop["acts_from"]) == (first + 1, first + 2)
    with pytest.raises(openai.BadRequestError, match=r"'turning'.*'after'"):
        client.completions.create(**WORDS, extra_body={"consumers": {"turning": {}}})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
def test_the_fault_of_a_consumer_is_told_and_ends_no_server(server, route, stream):
    prompt = {
        "completions": {"prompt": "One day"},
        "chat/completions": {"messages": [{"role": "user", "content": "One day"}]},
        "responses": {"input": "One day"},
    }[route]
    asked = {"model": "demo", "stream": stream, **prompt}
    answer = server.post(f"/v1/{route}", asked | {"consumers": {"turning": {"after": "exit"}}})
    told = "consumer 'turning' raised in validate_options: SystemExit: 3"
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, told)
    assert server.post(f"/v1/{route}", asked).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_is_refused_by_a_monitor(server, client, model, streamed):
    """Its choices have no tokens, and say why; also in a stream, for which vLLM has no event."""
    probe = {"hook": "post_block", "layer": 1, "vector": [1.0] * 128}
    spec = {"probe": probe, "above": -1e9, "name": "everything"}
    asked = {"extra_body": {"abort_when": spec}, "max_tokens": 4, "n": 2, "stream": streamed}
    chat = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}]}
    for create, body in (
        (client.completions.create, WORDS | {"temperature": 1.0}),
        (client.chat.completions.create, chat),
    ):
        answer = create(**body, **asked)
        given = list(answer) if streamed else [answer]
        choices = [choice for each in given for choice in each.choices]
        ended = [(c.index, c.finish_reason, c.stop_reason) for c in choices if c.finish_reason]
        assert ended == [(0, "abort", "everything"), (1, "abort", "everything")]
        last = given[-1].samples[1] if streamed else choices[1].model_extra
        signal = last["consumer_results"]["signals"]["payload"]["everything"]
        assert decoded(signal["fired"]).tolist() == list(range(len(decoded(signal["scores"]))))
        assert len(decoded(signal["scores"])) > 1


@pytest.mark.parametrize("echo", [False, True])
def test_each_choice_that_is_refused_ends_once_and_before_the_tokens_are_counted(client, echo):
    """Eight samples do not fit into one step, and nobody looks at their signals."""
    probe = {"hook": "post_block", "layer": 1, "vector": [1.0] * 128}
    spec = {"probe": probe, "above": -1e9, "name": "everything"}
    asked = {"abort_when": spec, "consumers": {"signals": {"enabled": False}}}
    events = list(
        client.completions.create(
            model="demo", prompt=[25 * PROMPT, PROMPT], n=8, max_tokens=4, echo=echo, stream=True,
            stream_options={"include_usage": True}, extra_body=asked,
        )
    )  # fmt: skip
    ends = [c.index for each in events for c in each.choices if c.finish_reason == "abort"]
    assert sorted(ends) == list(range(16))
    counted = [at for at, each in enumerate(events) if each.usage is not None]
    assert all(not each.choices for each in events[counted[0] :])
    assert events[counted[0]].usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
def test_whoever_steers_beyond_what_numbers_hold_hears_why(server, route, stream):
    """Each vector is allowed; their sum has a square that float32 does not hold."""
    large = [1.5e18, 0.0] * 64
    prompt = {
        "completions": {"prompt": PROMPT, "max_tokens": 4},
        "chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4},
        "responses": {"input": PROMPT, "max_output_tokens": 4},
    }[route]
    asked = {"model": "demo", "stream": stream, **prompt}
    spec = {"post_block": {"1": large, "2": large, "3": large}}
    answer = server.post(f"/v1/{route}", asked | {"steering_vectors": spec})
    assert "is not finite any more at the end of the network" in answer.text
    assert "smaller scale" in answer.text and "BadRequest" in answer.text
    assert stream or answer.status_code == 400
    assert server.post(f"/v1/{route}", asked).status_code == 200


def test_chats_and_responses_are_steered_too(server, client):
    chat = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0}
    spec = {"post_block": {"2": [5.0] * 128}}
    texts = [
        client.chat.completions.create(**chat, max_tokens=6, extra_body=extra)
        for extra in ({}, {"steering_vectors": spec}, {"capture": {"memory": {
            "hooks": {"post_block": [1]}, "positions": "last_prompt"}}})
    ]  # fmt: skip
    plain, steered, captured = (answer.choices[0].message.content for answer in texts)
    assert steered != plain == captured
    assert texts[2].choices[0].capture_results["memory"]["status"] == "ok"
    answer = {"model": "demo", "input": PROMPT, "temperature": 0, "max_output_tokens": 6}
    given = [
        server.post("/v1/responses", {**answer, **extra}).json()["output"][0]["content"][0]["text"]
        for extra in ({}, {"steering_vectors": spec})
    ]
    assert given[1] != given[0]


def test_responses_have_their_results(server, client, model):
    asked = {
        "capture": {"memory": {"hooks": {"post_block": [1]}, "positions": "all_generated"}},
        "consumers": {"probe": {}},
    }
    body = {"model": "demo", "input": PROMPT, "temperature": 0, "max_output_tokens": 6}
    whole = server.post("/v1/responses", body | asked).json()
    rows = decoded(whole["capture_results"]["memory"]["payload"]["post_block"]["1"]["tensor"])
    assert rows.shape == (5, 128)
    scores = whole["consumer_results"]["probe"]
    assert (scores["status"], scores["error"]) == ("ok", None)
    expected = rows @ PROBE
    found = decoded(scores["payload"]["values"])
    torch.testing.assert_close(found[-5:], expected, rtol=1e-4, atol=1e-4)

    stream = client.responses.create(**body, stream=True, extra_body=asked)
    last = list(stream)[-1]
    # `max_output_tokens` were all used, of which vLLM before 0.33 says nothing.
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole["output"][0]["content"][0]["text"]
    for name in ("capture_results", "consumer_results"):
        assert getattr(last.response, name) == whole[name]


def scores_of(events):
    """Streamed scores of each choice: `[(position, value)]` of each event that has any."""
    found = {}
    for event in events:
        for choice in event.choices:
            for_it = getattr(choice, "consumer_results", None)
            if for_it:
                pairs = zip(for_it["probe"]["positions"], for_it["probe"]["values"], strict=True)
                found.setdefault(choice.index, []).append(list(pairs))
    return found


def test_scores_come_beside_the_tokens_as_they_stream(client, model):
    prompts = [PROMPT, "Ben had a red kite."]
    events = list(
        client.completions.create(
            model="demo", prompt=prompts, n=2, max_tokens=60, temperature=1.0, seed=4, stream=True,
            extra_body={"consumers": {"probe": {}}, "ignore_eos": True, "return_token_ids": True},
        )
    )  # fmt: skip
    found = scores_of(events)
    tokens = {}
    for event in events:
        for choice in event.choices:
            tokens.setdefault(choice.index, []).extend(choice.token_ids or ())
    assert sorted(found) == sorted(tokens) == [0, 1, 2, 3]
    for index, streamed in found.items():
        prompt = model[1](prompts[index // 2])["input_ids"]
        positions, values = zip(*[pair for each in streamed for pair in each], strict=True)
        assert list(positions) == list(range(len(positions)))  # each once, from the prompt on
        assert len(positions) > len(prompt)
        expected = states(model, [*prompt, *tokens[index]], 1) @ PROBE
        torch.testing.assert_close(
            torch.tensor(values), expected[: len(values)], rtol=1e-3, atol=1e-3
        )
        whole = events[-1].samples[index]["consumer_results"]["probe"]["payload"]
        assert decoded(whole["values"])[: len(values)].tolist() == list(values)
        assert len(decoded(whole["values"])) == len(prompt) + 59


def test_a_lens_streams_beside_a_probe(client, server, model):
    asked = {"consumers": {"probe": {}, "lens": {"positions": "all_generated", "top_k": 2}}}
    body = {"model": "demo", "prompt": PROMPT, "temperature": 0}
    events = list(
        client.completions.create(
            **body, max_tokens=40, stream=True,
            extra_body=asked | {"ignore_eos": True, "return_token_ids": True},
        )
    )  # fmt: skip
    choices = [choice for event in events for choice in event.choices]
    tokens = [token for choice in choices for token in choice.token_ids or ()]
    results = [choice.consumer_results for choice in choices if hasattr(choice, "consumer_results")]
    streamed = {
        name: [p for each in results if name in each for p in each[name]["positions"]]
        for name in asked["consumers"]
    }
    prompt = model[1](PROMPT)["input_ids"]
    passed = len(prompt) + len(tokens) - 1
    # Each at its own pace, and each position once; what is new at the end comes with the whole.
    assert streamed["probe"] == list(range(len(streamed["probe"])))
    assert streamed["lens"] == list(range(len(prompt), len(prompt) + len(streamed["lens"])))
    whole = events[-1].samples[0]["consumer_results"]["lens"]["payload"]
    assert whole["layers"] == [0, 5]
    ids, logprobs = (decoded(whole[name]["values"]) for name in ("token_ids", "logprobs"))
    assert logprobs.shape == (passed - len(prompt), 2, 2)
    for name, wanted in (("token_ids", ids), ("logprobs", logprobs)):
        found = [row for result in results if "lens" in result for row in result["lens"][name]]
        assert found == wanted[: len(found)].tolist()
    # The last layer's best token is the one that was drawn.
    assert ids[:, 1, 0].tolist() == tokens[1:]
    with torch.no_grad():
        logits = model[0](torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) : -1]
    expected = logits.log_softmax(-1).topk(2).values
    torch.testing.assert_close(logprobs[:, 1], expected, rtol=1e-3, atol=1e-3)


def test_scores_stream_in_chats_and_responses_too(client):
    asked = {"consumers": {"probe": {}}, "ignore_eos": True}
    chat = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}]}
    events = list(
        client.chat.completions.create(**chat, max_tokens=150, stream=True, extra_body=asked)
    )
    found = scores_of(events)[0]
    assert len(found) > 2  # not all at once
    assert [pair[0] for each in found for pair in each] == list(range(sum(map(len, found))))
    events = list(
        client.responses.create(
            model="demo", input=PROMPT, max_output_tokens=150, stream=True, extra_body=asked
        )
    )
    each = [e.consumer_results["probe"] for e in events if hasattr(e, "consumer_results")]
    assert len(each) > 2
    positions = [position for scores in each for position in scores["positions"]]
    assert positions == list(range(len(positions)))
    payload = events[-1].response.consumer_results["probe"]["payload"]
    values = [value for scores in each for value in scores["values"]]
    assert decoded(payload["values"])[: len(values)].tolist() == values


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
def test_a_patch_that_was_never_reached_is_told(server, route, stream):
    """Nobody listed it among consumers or captures. What was reached is not spoken of."""
    zero = {"hook": "post_block", "layer": 2, "source": {"zero": True}}
    given = {"responses": {"input": PROMPT}, "completions": {"prompt": [PROMPT, PROMPT], "n": 2}}
    given["chat/completions"] = {"messages": [{"role": "user", "content": PROMPT}], "n": 2}
    length = "max_output_tokens" if route == "responses" else "max_tokens"
    body = {"model": "demo", length: 100, "seed": 1, "stream": stream, **given[route]}

    def told(position):
        patch = [{**zero, "positions": [position]}]
        stop = [" ", "e", "a", "."]
        answer = server.post(f"/v1/{route}", body | {"patch": patch, "stop": stop})
        assert answer.status_code == 200
        if not stream:
            whole = answer.json()
            return [whole, *whole.get("choices", ())]
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        last = json.loads(lines[-1].removeprefix("data: "))
        return [last["response"]] if route == "responses" else [last, *last.get("samples", ())]

    found = told(90)
    assert len(found) == {"responses": 1, "completions": 5, "chat/completions": 3}[route]
    for each in found:
        result = each["consumer_results"]["patching"]
        assert result["status"] == "partial_error"
        assert "patch[0]['positions']: 90" in result["error"]
    for each in told(1):
        assert not each.keys() & {"consumer_results", "capture_results", "samples"}


def test_preempted_requests_have_all_their_rows(server, model):
    """Eight requests of 7 blocks each, and 31 blocks for all of them."""
    asked = {"memory": {"hooks": {"post_block": [1]}, "positions": "all"}}

    async def ask(client, number):
        return await client.completions.create(
            model="demo", prompt=f"{number} {PROMPT}", max_tokens=200, temperature=1.0, seed=number,
            extra_body={"capture": asked, "ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, number) for number in range(8)))

    before = preemptions(server)
    for number, answer in enumerate(asyncio.run(ask_all())):
        (choice,) = answer.choices
        payload = choice.capture_results["memory"]["payload"]
        rows = load(server.get(payload["url"], key=None).content)["post_block.1.tensor"]
        prompt = model[1](f"{number} {PROMPT}")["input_ids"]
        expected = states(model, [*prompt, *choice.token_ids][:-1], 1)
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
    assert preemptions(server) > before


def preemptions(server):
    text = server.get("/metrics", key=None).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:num_preemptions_total"
    )


def test_an_answer_that_is_fetched_later_has_no_place_for_results(server):
    body = {"model": "demo", "input": PROMPT, "background": True, "consumers": {"probe": {}}}
    refused = server.post("/v1/responses", body)
    assert refused.status_code == 400
    assert "consumers was given with background=true" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_fetched_later_is_steered_or_refused_at_once(server, stream):
    """One that is refused was queued for ever."""
    body = {"model": "demo", "input": PROMPT, "background": True, "max_output_tokens": 2}
    body["stream"] = stream
    wrong = {"steering_vectors": {"post_block": {"99": [1.0] * 128}}}
    refused = server.post("/v1/responses", body | wrong)
    assert refused.status_code == 400
    assert "post_block has no layer 99" in refused.json()["error"]["message"]
    asked = body | VECTORS | {"stop_when": EVERYTHING}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=asked, timeout=60) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        if stream:
            assert "event: response.created" in next(lines)
            assert "event: response.completed" in lines
        else:
            assert json.loads(next(lines))["status"] == "queued"


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_not_done_of_an_answer_is_told_when_it_is_fetched(server, stream):
    patch = [{"hook": "post_block", "layer": 2, "positions": [90], "source": {"zero": True}}]
    body = {"model": "demo", "input": PROMPT, "background": True, "max_output_tokens": 100}
    body |= {"patch": patch, "stream": stream, "stop_when": EVERYTHING}
    answer = server.post("/v1/responses", body)
    if stream:
        given = next(line for line in answer.text.splitlines() if line.startswith("data: {"))
        name = json.loads(given.removeprefix("data: "))["response"]["id"]
    else:
        name = answer.json()["id"]
    for _ in range(600):
        found = fetched(server, name)
        if found["status"] not in ("queued", "in_progress"):
            break
        time.sleep(0.1)
    result = found["consumer_results"]["patching"]
    assert result["status"] == "partial_error"
    assert "patch[0]['positions']: 90" in result["error"]
    assert found["consumer_results"]["signals"]["status"] == "ok"
    if stream:
        replay = fetched(server, name, stream=True)
        assert replay["response"]["consumer_results"] == found["consumer_results"]


def fetched(server, name, *, stream=False):
    """An answer of the background, from the process of the server that has it, which is a matter
    of chance; of a stream, its last event."""
    for _ in range(200):
        answer = server.get(f"/v1/responses/{name}?stream={stream}")
        if answer.status_code == 200:
            break
    assert answer.status_code == 200
    if not stream:
        return answer.json()
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return json.loads(lines[-1].removeprefix("data: "))


@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_the_background_count_while_they_are_computed(server, stream):
    """Whoever asked for these could have as many as he liked at a time."""
    zero = {"hook": "post_block", "layer": 2, "positions": [0], "source": {"zero": True}}
    body = {"model": "demo", "input": PROMPT, "background": True, "patch": [zero]}
    body |= {"max_output_tokens": 150, "ignore_eos": True, "stream": stream}
    headers = {"Authorization": "Bearer little"}
    path = f"{server.url}/v1/responses"
    with httpx.stream("POST", path, json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200
        if not stream:
            answer.read()
    short = body | {"max_output_tokens": 2, "background": False, "stream": False}
    assert httpx.post(path, json=short, headers=headers, timeout=60).status_code == 429
    for _ in range(600):
        if httpx.post(path, json=short, headers=headers, timeout=60).status_code == 200:
            return
        time.sleep(0.1)
    raise AssertionError("an answer that was computed is still counted")


def test_global_steering_is_the_administrators(server, client):
    spec = {"post_block": {"2": [5.0] * 128}}
    plain = client.completions.create(**WORDS, max_tokens=6).choices[0].text
    assert server.post("/v1/steering/set", {"vectors": spec}, key=None).status_code == 401
    assert server.post("/v1/steering/set", {"vectors": spec}, key="wrong").status_code == 401
    assert server.post("/v1/steering/set", {"vectors": spec}).json()["global"]["vectors"]
    assert client.completions.create(**WORDS, max_tokens=6).choices[0].text != plain
    assert server.post("/v1/steering/clear", {}).json()["global"] == {}
    assert client.completions.create(**WORDS, max_tokens=6).choices[0].text == plain
    assert server.get("/v1/steering/layers").json()["num_layers"] == 6
    assert server.get("/v1/interventions").json()[0]["rows_steered"] > 0


@pytest.mark.parametrize("route", ["completions", "chat", "streamed chat"])
def test_beams_are_steered_by_phase(server, client, route):
    """One beam is greedy search: the tokens that it has grown by are generated ones. vLLM streams
    beams of chats alone, and asks its engine for them when the stream is read."""
    vector = (2.0 * torch.randn(128, generator=torch.Generator().manual_seed(3))).tolist()
    spec = {"post_block": {"2": vector}}
    fields = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")

    def ask(**asked):
        more = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True, **asked}}
        if route == "completions":
            return client.completions.create(**WORDS | more).choices[0].text
        messages = [{"role": "user", "content": PROMPT}]
        given = {"model": "demo", "messages": messages, **more}
        if route == "chat":
            return client.chat.completions.create(**given).choices[0].message.content
        events = client.chat.completions.create(**given, stream=True)
        return "".join(e.choices[0].delta.content or "" for e in events if e.choices)

    greedy = {field: ask(**{field: spec}) for field in fields}
    assert len({*greedy.values(), ask()}) == 4
    for field in fields:
        assert ask(**{field: spec}, use_beam_search=True) == greedy[field]
    off = {"consumers": {"turning": {"after": 1, "enabled": False}}}
    assert ask(use_beam_search=True, **off) == ask()
    try:
        for field in fields:
            tier = field.replace("steering_", "")
            server.post("/v1/steering/set", {tier: spec, "replace": True})
            assert ask(use_beam_search=True) == ask() == greedy[field]
    finally:
        server.post("/v1/steering/clear", {})


def test_a_factor_that_a_module_cannot_have_is_refused_by_its_field(server):
    module = {"name": "odd", "spec": VECTORS["steering_vectors"]}
    assert server.post("/v1/steering/modules/register", module).is_success
    for field in ("steering_name", "steering_module_ref"):
        answer = server.post("/v1/completions", WORDS | {field: ["odd", 2**63]}, key=None)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert error["message"].startswith(f"{field}: module 'odd' times 9.22e+18 adds up to ")


def test_modules_come_and_go(server):
    spec = {"post_block": {"1": [1.0] * 128}}
    body = {"name": "comes", "spec": spec}
    assert server.post("/v1/steering/modules/register", body).is_success
    assert "comes" in server.get("/v1/steering/modules").json()
    assert server.post("/v1/steering/modules/unregister", {"name": "comes"}).is_success
    assert server.post("/v1/steering/modules/unregister", {"name": "comes"}).status_code == 404
    both = {
        "prefill_vectors": spec,
        "clamps": {"post_block": {"1": {"vector": [1.0] * 128, "value": 0.5}}},
    }
    assert server.post("/v1/steering/modules/register", {"name": "both", "spec": both}).is_success
    assert server.get("/v1/steering/modules").json()["both"].keys() == both.keys()
    answer = server.post("/v1/steering/modules/register", {"name": "both", **both})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "clamps, prefill_vectors was given, and is no field; give any of name, spec: "
        '"spec": {"clamps": ...}'
    )
    assert server.post("/v1/steering/modules/unregister", {"name": "both"}).is_success
    for name in ("", "  ", "a\0b", 257 * "a"):
        answer = server.post("/v1/steering/modules/register", {"name": name, "spec": spec})
        assert answer.status_code == 400
        assert ": give 1 to 256 printable characters" in answer.json()["error"]["message"]


def test_monitors_come_and_go(server):
    """For the administrator alone; entries of modules and of global steering name them, too."""
    probe = {"hook": "post_block", "layer": 0, "vector": [1.0] * 128}
    body = {"name": "sad", "condition": {"probe": probe, "between": [0.5, 2.0]}}
    routes = ("register", body), ("unregister", {"name": "sad"})
    for route, sent in routes:
        assert server.post(f"/v1/steering/monitors/{route}", sent, key=None).status_code == 401
    assert server.get("/v1/steering/monitors", key="wrong").status_code == 401
    entry = {"vector": [1.0] * 128, "when": "sad"}
    spec = {"post_block": {"1": entry}}
    for route, sent in (
        ("modules/register", {"name": "cheer", "spec": spec}),
        ("set", {"vectors": spec}),
    ):
        answer = server.post(f"/v1/steering/{route}", sent)
        assert answer.status_code == 400
        assert "no monitor 'sad' is registered" in answer.text
    assert server.post("/v1/steering/monitors/register", body).json() == {"registered": "sad"}
    told = server.get("/v1/steering/monitors").json()["sad"]
    assert (told["probe"]["layer"], told["between"]) == (0, [0.5, 2.0])
    assert "sad" in server.get("/v1/steering").json()["monitors"]
    assert server.post("/v1/steering/set", {"vectors": spec}).is_success
    assert server.post("/v1/steering/clear", {}).is_success
    assert server.post("/v1/steering/monitors/unregister", {"name": "sad"}).is_success
    answer = server.post("/v1/steering/monitors/unregister", {"name": "sad"})
    assert answer.status_code == 404
    assert "no monitor 'sad' is registered" in answer.text
    answer = server.post("/v1/completions", {**WORDS, "steering_vectors": spec}, key=None)
    assert answer.status_code == 400
    assert "no monitor 'sad' is registered" in answer.text


def test_a_conversation_belongs_to_its_key_and_to_the_api_key(server, model):
    """What held in one request holds in the next, whichever process of the server has it."""
    vector = torch.randn(128, generator=torch.Generator().manual_seed(1))
    _, when = condition_of(model, model[1](PROMPT)["input_ids"])
    always = {"vector": (2 * vector).tolist()}
    entry = {**always, "when": {**when, "scope": "conversation"}}
    body = WORDS | {
        "max_tokens": 8,
        "decode_steering_vectors": {"post_block": {"3": entry}},
        "conversation": {"id": "chat 7", "key": "secret of chat 7", "expires_s": 60},
        "return_token_ids": True,
        "ignore_eos": True,
    }
    asked = body | {"decode_steering_vectors": {"post_block": {"3": always}}}
    answer = server.post("/v1/completions", asked, key="anna")
    steered = answer.json()["choices"][0]["token_ids"]
    for turn in range(3):
        answer = server.post("/v1/completions", body, key="anna")
        assert (answer.json()["choices"][0]["token_ids"] == steered) == (turn > 0)
    other = {**body["conversation"], "key": "another secret 7"}
    for key, conversation in (("anna", other), ("otto", body["conversation"])):
        answer = server.post("/v1/completions", {**body, "conversation": conversation}, key=key)
        assert answer.status_code == 400
        assert "'chat 7' was begun with another key" in answer.json()["error"]["message"]
    path = "/v1/steering/conversations"
    assert server.get(path, key=None).status_code == 401
    assert server.post(f"{path}/forget", {"id": "chat 7"}, key="anna").status_code == 401
    told = server.get(path).json()
    assert told["chat 7"]["requests"] == 3 and "secret" not in str(told)
    metrics = server.get("/metrics", key=None).text
    assert 'tllm:conversations{worker="0"} 1.0' in metrics
    assert server.post(f"{path}/forget", {"id": "chat 7"}).json() == {"forgotten": "chat 7"}
    assert server.post(f"{path}/forget", {"id": "chat 7"}).status_code == 404
    begun = server.post("/v1/completions", {**body, "conversation": other}, key="otto").json()
    assert begun["choices"][0]["token_ids"] != steered
    assert server.post(f"{path}/forget", {"id": "chat 7"}).is_success


def test_an_api_key_has_so_many_conversations(server, model):
    """Counted by the workers, for all processes of the server; others are not kept from theirs."""
    _, when = condition_of(model, model[1](PROMPT)["input_ids"])
    entry = {"vector": [1.0] * 128, "when": {**when, "scope": "conversation"}}
    body = WORDS | {"max_tokens": 1, "decode_steering_vectors": {"post_block": {"3": entry}}}

    def ask(name, key, also=(), **more):
        named = {"id": name, "key": "secret of a chat", "expires_s": 60, **more}
        return server.post(
            "/v1/completions", {**body, **dict(also), "conversation": named}, key=key
        )

    # vLLM refuses it after the workers were asked, and it begins none.
    refused = ask("little 0", "little", {"allowed_token_ids": [10**6]})
    assert refused.status_code == 400 and "out-of-vocab" in refused.text
    for _ in range(2):
        assert ask("little 1", "little").is_success
    refused = ask("little 2", "little")
    assert refused.status_code == 400
    assert "'little 2' would be one more than the 1 that its" in refused.json()["error"]["message"]
    assert ask("anna 1", "anna").is_success
    for key, more in (("little", {"owner": "me", "most": 9}), ("anna", {"owner": "me"})):
        refused = ask("mine", key, **more)
        assert refused.status_code == 400
        assert "'owner'], which the server says itself" in refused.json()["error"]["message"]
    path = "/v1/steering/conversations"
    assert {"little 1", "anna 1"} == set(server.get(path).json())
    for name in ("little 1", "anna 1"):
        assert server.post(f"{path}/forget", {"id": name}).is_success


def test_a_group_of_esamps_is_forgotten_by_the_administrator(server):
    path = "/v1/esamp/groups/forget"
    asked = {**WORDS, "max_tokens": 2, "consumers": {"esamp": {"group": "anna's"}}}
    assert server.post("/v1/completions", asked, key=None).is_success
    assert server.post(path, {"group": "anna's"}, key=None).status_code == 401
    for body, status, told in (
        ({"group": "ben's"}, 404, 'group: esamp has no group "ben\'s"; one lasts while its'),
        ({"group": 7}, 400, "group: 7 was given; allowed is a text"),
        ({"name": "anna's"}, 400, "name was given, and is no field; give any of group"),
    ):
        answer = server.post(path, body)
        assert (answer.status_code, told in answer.json()["error"]["message"]) == (status, True)
    assert server.post(path, {"group": "anna's"}).json() == {"forgotten": "anna's"}
    assert server.post(path, {"group": "anna's"}).status_code == 404


@pytest.mark.parametrize(
    ("condition", "sentence"),
    [
        (7, "monitor 'bad'=7 is int"),
        ({"above": 1}, "has none of probe, all and any"),
        ({"probe": {"hook": "post_block", "layer": 99, "vector": [1.0] * 128}, "above": 0}, "99"),
        ({"probe": {"hook": "post_block", "layer": 0, "vector": [1.0]}, "above": 0}, "size is 128"),
        ({"any": ["nobody"]}, "no monitor 'nobody' is registered"),
    ],
)
def test_what_is_no_monitor_is_refused(server, condition, sentence):
    body = {"name": "bad", "condition": condition}
    answer = server.post("/v1/steering/monitors/register", body)
    assert answer.status_code == 400
    assert sentence in answer.text
    assert "bad" not in server.get("/v1/steering/monitors").json()


def test_what_is_no_field_of_an_admin_route_is_refused_in_a_sentence(server):
    answer = server.post("/v1/steering/monitors/register", {"name": "a", "conditoin": {}})
    assert answer.status_code == 400
    sentence = "conditoin was given, and is no field; give any of name, condition"
    assert answer.json()["error"]["message"] == sentence


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"steering_vectors": {"post_blok": {"2": [1.0]}}}, "steering_vectors: unknown hook"),
        ({"steering_vectors": {"post_block": {"2": [1.0]}}}, "hidden size is 128"),
        ({"steering_vectors": [1]}, "steering_vectors"),
        ({"steering_name": "nope"}, "no module 'nope' is registered"),
        ({"steering_name": "a", "steering_module_ref": "b"}, "both given"),
        ({"capture": 7}, "capture=7 is int"),
        ({"capture": {"nobody": {}}}, "no such consumer is registered"),
        ({"capture": {"memory": {"hooks": {"post_block": [99]}}}}, "post_block has no layer 99"),
        ({"consumers": {"logging": {"what": 1}}}, "logging"),
        ({"patch": [{}]}, "patch[0] has no 'hook'"),
        ({"patch": [SET_TO_ZERO | {"positions": [900]}]}, "position 900 is out of range"),
        ({"patch": [SET_TO_ZERO | {"layer": 99}]}, "post_block has no layer 99"),
        ({"patch": [SET_TO_ZERO | {"positions": [2**64]}]}, "['positions'] is beyond the 64 bits"),
        ({"steering_name": ["odd", 2**70]}, "steering_name[1] is beyond the 64 bits"),
        (
            {"steering_vectors": {"post_block": {"0": [True, 0.5]}}},
            "steering_vectors['post_block'][0][0] is Tr",
        ),
        ({"consumers": [1]}, "consumers=[1] is list"),
        ({"steering_positions": "all"}, "nothing to steer with"),
        ({"vllm_xargs": {"tllm": ["capture"]}}, "as fields of the request's body"),
        ({"extra_args": {"tllm": {"capture": {}}}}, "extra_args['tllm'] was given; give what"),
        ({"vllm_xargs": {"tllm_bulk": "x"}}, "vllm_xargs['tllm_bulk'] was given; names that"),
        ({"use_beam_search": True, "vllm_xargs": {"tllm_x": 1}}, "vllm_xargs['tllm_x'] was given"),
        ({"steering_vector": VECTORS}, "steering_vector was given, and is no field; steering_v"),
        ({"stopWhen": "x"}, "stopWhen was given, and is no field; stop_when may be meant"),
        ({"captures": {}}, "captures was given, and is no field; capture may be meant"),
        ({"steering_vectrs": VECTORS}, "steering_vectrs was given, and is no field; steering_v"),
        ({"steering_scale": 2}, "steering_scale was given, and is no field; steering_vectors, "),
        ({"steering": {"a": 1}}, "(use steering_vectors) is not supported"),
        ({"extra_body": {"capture": {}}}, "extra_body['capture'] was given; put capture into the"),
        ({"vllm_xargs": {"steering_name": "odd"}}, "vllm_xargs['steering_name'] was given"),
        ({"stop_when": {**EVERYTHING, "name": "\ud800"}}, "stop_when['name']='\\ud800' has lone"),
        ({"conversation": {"id": "\ud800", "key": 16 * "b"}}, "conversation['id']='\\ud800' has"),
        ({"consumers": {"turning": {"after": 1, "a": "\ud800"}}}, "text with lone surrogates"),
        ({"capture": {"filesystem": {"tag": "\ud800"}}}, "has lone surrogates; leave them out"),
        ({"use_beam_search": True, "capture": {"memory": {}}}, "given with use_beam_search"),
        ({"stop_when": "x"}, "stop_when: no monitor 'x' is registered"),
        ({"abort_when": {"probe": 1}}, "abort_when"),
        ({"use_beam_search": True, "stop_when": "x"}, "given with use_beam_search"),
        ({"conversation": "chat"}, "conversation is str; give a mapping with 'id' and 'key'"),
        ({"conversation": {"id": "a", "key": "b"}}, "conversation['key'] must be a secret text"),
        (
            {"use_beam_search": True, "conversation": {"id": "a", "key": 16 * "b"}},
            "conversation was given with use_beam_search",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(server, asked, sentence):
    content = json.dumps({**WORDS, "max_tokens": 2, **asked})
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
@pytest.mark.parametrize(
    ("asked", "field", "sentence"),
    [
        (
            {"steering_vectors": {"post_block": {"99": [1.0] * 128}}},
            "steering_vectors",
            "post_block has no layer 99",
        ),
        ({"steering_name": "nope"}, "steering_name", "steering_name: no module 'nope' is"),
        (
            {"capture": {"memory": {"hooks": {"post_block": [0]}, "positions": [900]}}},
            "capture",
            "position 900 is out of range",
        ),
        ({"vllm_xargs": {"tllm_bulk": 1}}, "vllm_xargs", "vllm_xargs['tllm_bulk'] was given; na"),
    ],
)
def test_what_is_refused_is_an_error_of_the_request_also_of_a_stream(
    server, route, stream, asked, field, sentence
):
    """Told before the stream begins, by the name that the field was given by."""
    body = {"completions": WORDS, "chat/completions": CHAT}.get(
        route, {"model": "demo", "input": PROMPT}
    )
    answer = server.post(f"/v1/{route}", {**body, "stream": stream, **asked}, key=None)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert sentence in error["message"]


def test_nothing_is_left_of_prompts_beside_one_that_is_refused(server, client):
    asked = {"memory": {"hooks": {"post_block": [0]}, "positions": [20]}}
    long = " ".join([PROMPT] * 4)
    steered = {"steering_vectors": VECTORS["steering_vectors"], "ignore_eos": True}
    with pytest.raises(openai.BadRequestError, match="position 20 is out of range"):
        client.completions.create(
            model="demo", prompt=[long, PROMPT], max_tokens=5, stream=True,
            extra_body={"capture": asked, **steered},
        )  # fmt: skip
    for _ in range(100):  # the engine hears of it some moments later
        (stats,) = server.get("/v1/interventions").json()
        if not stats["running_sequences"] and not server.get("/v1/steering").json()["requests"]:
            return
        time.sleep(0.1)
    raise AssertionError(f"{stats['running_sequences']} sequences run")


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/messages", CHAT | VECTORS, "steering_vectors"),
        ("/v1/chat/completions/batch", CHAT | VECTORS, "steering_vectors"),
        ("/tokenize", {"prompt": "Hi", "capture": {"memory": {}}}, "capture"),
        ("/v1/embeddings", {"input": "Hi", "consumers": {"probe": {}}}, "consumers"),
        ("/pooling", {"input": "Hi", "steering_name": "odd"}, "steering_name"),
        ("/rerank", {"query": "a", "documents": ["b"], **VECTORS}, "steering_vectors"),
        ("/v1/completions/render", WORDS | VECTORS, "steering_vectors"),
        ("/generative_scoring", {"query": "a", "patch": []}, "patch"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"extra_args": {"tllm": VECTORS}}},
            "extra_args['tllm']",
        ),
        ("/v1/chat/completions/batch", CHAT | {"vllm_xargs": {"tllm": {}}}, "vllm_xargs['tllm']"),
        ("/v1/messages", CHAT | {"steering_vector": [1.0]}, "steering_vector"),
        ("/v1/messages", CHAT | {"steering_nam": "odd"}, "steering_nam"),
        (
            "/v1/messages",
            CHAT | {"vllm_xargs": {"steering_name": "odd"}},
            "vllm_xargs['steering_name']",
        ),
        (
            "/v1/chat/completions/batch",
            CHAT | {"extra_body": {"capture": {}}},
            "extra_body['capture']",
        ),
    ],
)
def test_a_route_that_reads_no_fields_says_so(server, path, body, named):
    refused = server.post(path, body, key=None)
    assert refused.status_code == 400
    assert f"{named} was given, but {path} does not read it" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/messages", CHAT | {"vllm_xargs": {"tllm_bulk": 1}}, "vllm_xargs"),
        ("/v1/chat/completions/batch", CHAT | {"vllm_xargs": {"tllm_x": 1}}, "vllm_xargs"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"extra_args": {"tllm_bulk": 1}}},
            "extra_args",
        ),
        ("/tokenize", {"prompt": "Hi", "vllm_xargs": {"tllm_": 1}}, "vllm_xargs"),
    ],
)
def test_names_of_our_own_messages_are_refused_on_every_route(server, path, body, place, stream):
    """Before a stream begins, by the name of the field as the body has it."""
    refused = server.post(path, {**body, "stream": stream}, key=None)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, place)
    assert f"{place}['tllm_" in error["message"]
    assert "names that begin with 'tllm_'" in error["message"]


def test_a_form_and_escaped_names_are_read_too(server):
    path = f"{server.url}/v1/audio/transcriptions"
    files = {"file": ("a.wav", b"RIFF", "audio/wav")}
    for name in ("steering_name", "steering-nam"):
        refused = httpx.post(path, data={"model": "demo", name: "odd"}, files=files)
        assert refused.status_code == 400
        assert f"{name} was given" in refused.json()["error"]["message"]
    escaped = r'{"prompt": "Hi", "\u0063apture": {"memory": {}}}'
    headers = {"Content-Type": "application/json"}
    for body in (escaped.encode(), '{"prompt": "Hi", "capture": {}}'.encode("utf-16")):
        refused = httpx.post(f"{server.url}/tokenize", content=body, headers=headers)
        assert "capture was given" in refused.json()["error"]["message"]


def test_a_route_that_reads_no_fields_works_without_them(server):
    assert server.post("/v1/messages", CHAT, key=None).is_success


def test_an_unknown_module_in_the_models_name_is_a_404(server):
    answer = server.post("/v1/completions", WORDS | {"model": "demo:none", "max_tokens": 2})
    assert answer.status_code == 404
    assert "'none'" in answer.json()["error"]["message"]


def test_a_client_that_leaves_frees_what_it_had(server, client):
    asked = {"memory": {"hooks": {"post_block": "all"}, "positions": "all"}}
    stream = client.completions.create(
        **WORDS, max_tokens=200, stream=True, extra_body={"capture": asked, "ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    answer = client.completions.create(**WORDS, max_tokens=2, extra_body={"capture": asked})
    assert answer.capture_results["memory"]["status"] == "ok"
    assert server.get("/v1/steering").json()["requests"] == 0


def test_streams_that_are_given_up_while_scores_are_asked_for_leave_no_result(server):
    """The engine computed them to their end, for nobody."""
    body = CHAT | {"max_tokens": 200, "stream": True, "ignore_eos": True}
    body["consumers"] = {"probe": {}}

    async def leave(client, seconds):
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(seconds),
                client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer,
            ):
                async for _ in answer.aiter_raw():
                    pass

    async def run():
        async with httpx.AsyncClient(timeout=120) as client:
            await asyncio.gather(*(leave(client, 0.5 + 0.02 * number) for number in range(24)))

    asyncio.run(run())
    before, now = None, figures_of(server)
    while before is None or now["tllm:rows_captured_total"] > before["tllm:rows_captured_total"]:
        time.sleep(1)
        before, now = now, figures_of(server)
    assert now["tllm:results_kept"] == 0


def figures_of(server):
    """What `/metrics` has of tLLM; of consumers, what the probe has."""
    text = server.get("/metrics", key=None).text
    assert "vllm:num_requests_running" in text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("tllm:") and sample.labels.get("consumer", "probe") == "probe"
    }


def test_metrics_say_what_the_workers_did(server, client):
    """Whichever process of the API server is asked."""

    before = figures_of(server)
    steered = {"post_block": {"2": [0.5] * 128}}
    answer = client.completions.create(
        **WORDS, max_tokens=5, extra_body={"ignore_eos": True, "steering_vectors": steered}
    )
    rows = answer.usage.prompt_tokens + 4
    seen = [figures_of(server) for _ in range(8)]
    assert all(each["tllm:workers_answer"] == 1 for each in seen)
    for name in ("tllm:rows_captured_total", "tllm:consumer_rows_total", "tllm:rows_steered_total"):
        assert {each[name] - before[name] for each in seen} == {rows}, name
    captured = before["tllm:captured_bytes_total"] + rows * 128 * 4
    assert seen[0]["tllm:captured_bytes_total"] >= captured
    assert seen[0]["tllm:ring_rows"] >= seen[0]["tllm:ring_rows_in_use"] == 0
    for name in ("consumer_errors_total", "requests_held_back", "consumer_waiting"):
        assert seen[0][f"tllm:{name}"] == 0


def test_the_document_has_our_routes_and_fields(server):
    found = server.get("/openapi.json").json()
    for path, how in our_document()["paths"].items():
        for method, operation in how.items():
            assert found["paths"][path][method]["responses"].keys() == operation["responses"].keys()
    for name in document.REQUESTS:
        assert set(document.PROPERTIES) <= set(found["components"]["schemas"][name]["properties"])


def limited(server, key="little"):
    """OpenAI's client with a key that may do little."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.mark.parametrize(
    ("key", "field", "refused", "allowed"),
    [("blind", "consumers", "memory", "turning"), ("plain", "capture", "turning", "memory")],
)
def test_a_consumer_is_no_other_kind_under_the_field_of_the_other(
    server, key, field, refused, allowed
):
    """A key that may not capture was given rows under the name of a consumer."""
    rows = {"hooks": {"post_block": [1]}, "positions": "last_prompt"}
    options = {"memory": rows, "turning": {"after": 1}}
    client = limited(server, key)
    with pytest.raises(openai.PermissionDeniedError, match="does not allow such with this API key"):
        client.completions.create(
            **WORDS, max_tokens=2, extra_body={field: {refused: options[refused]}}
        )
    client.completions.create(
        **WORDS, max_tokens=2, extra_body={field: {allowed: options[allowed]}}
    )


MANY = {"memory": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["completions", "chat", "responses"])
def test_rows_are_limited_by_key(server, client, route, stream):
    def ask(client):
        more = {"model": "demo", "stream": stream, "extra_body": {"capture": MANY}}
        if route == "completions":
            return client.completions.create(prompt=PROMPT, max_tokens=2, **more)
        if route == "responses":
            return client.responses.create(input=PROMPT, max_output_tokens=2, **more)
        messages = [{"role": "user", "content": PROMPT}]
        return client.chat.completions.create(messages=messages, max_tokens=2, **more)

    with pytest.raises(openai.BadRequestError, match=r"capture asks for up to \d+ rows; with this"):
        ask(limited(server))
    assert list(ask(client))  # whose key has no limits


def test_requests_in_flight_are_limited_by_key(server):
    client = limited(server)
    module = {"name": "odd", "spec": VECTORS["steering_vectors"]}
    assert server.post("/v1/steering/modules/register", module).is_success
    last = {"capture": {"memory": {"hooks": {"post_block": [1]}, "positions": "last_prompt"}}}
    stream = client.completions.create(
        **WORDS, max_tokens=200, stream=True, extra_body=last | {"ignore_eos": True}
    )
    next(iter(stream))
    with pytest.raises(openai.RateLimitError, match="1 requests with interventions in flight"):
        client.completions.create(**WORDS, max_tokens=2, extra_body=last)
    with pytest.raises(openai.RateLimitError, match="model='demo:odd': with this API key 1"):
        client.completions.create(**WORDS | {"model": "demo:odd"}, max_tokens=2)
    assert client.completions.create(**WORDS, max_tokens=2).choices  # asks for nothing
    with pytest.raises(openai.PermissionDeniedError, match="consumers was given, but this server"):
        client.completions.create(**WORDS, max_tokens=2, extra_body={"consumers": {"probe": {}}})
    stream.close()
    for _ in range(100):  # the server hears of it some moments later
        try:
            assert client.completions.create(**WORDS, max_tokens=2, extra_body=last).choices
            return
        except openai.RateLimitError:
            time.sleep(0.1)
    raise AssertionError("a request that was given up is still counted")


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=8) | st.sampled_from(["post_block", "memory", "vector", "data", "1"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
ROUTES = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    *(path for path, how in our_document()["paths"].items() if "post" in how),
]


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(path=st.sampled_from(ROUTES), asked=st.dictionaries(
    st.sampled_from([*document.PROPERTIES, "vectors", "clamps", "positions", "name", "spec"]),
    JSON, max_size=3))  # fmt: skip
def test_nothing_that_is_sent_is_a_fault_of_the_server(server, path, asked):
    """Any JSON in our fields and routes is answered, or refused with a sentence."""
    body = asked
    if path in ROUTES[:3]:
        needed = {"prompt": PROMPT, "messages": CHAT["messages"], "input": PROMPT}
        body = {"model": "demo", "max_tokens": 1, "max_output_tokens": 1, **needed, **asked}
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    url = f"{server.url}{path}"
    answer = httpx.post(url, content=content, headers=headers, timeout=60, verify=False)
    assert answer.status_code < 500, (path, body, answer.text)
    if answer.status_code >= 400:
        assert answer.json()


def test_what_was_fuzzed_steers_nobody(server):
    assert server.post("/v1/steering/clear", {}).is_success
    assert server.get("/v1/steering").json()["global"] == {}


def test_one_name_for_the_records_of_several_prompts_is_refused(server):
    """Which of them had it was chance."""
    hooks = {"post_block": [0]}
    for prompts, name, refused in (
        (["One day", "At night"], "both", True),
        ([[1, 2, 3], [4, 5]], "both ids", True),
        (["One day", "At night"], None, False),
        (["One day"], "one", False),
        ([1, 2, 3], "one of ids", False),
    ):
        asked = {"hooks": hooks} if name is None else {"hooks": hooks, "request_id": name}
        body = {**WORDS, "prompt": prompts, "max_tokens": 1, "capture": {"filesystem": asked}}
        answer = server.post("/v1/completions", body, key=None)
        if not refused:
            results = [each["capture_results"]["filesystem"] for each in answer.json()["choices"]]
            assert [each["status"] for each in results] == ["ok"] * len(results)
            continue
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "capture")
        assert (
            "capture['filesystem']['request_id'] is for one prompt, and there are 2 prompts"
            in error["message"]
        )


def test_options_of_one_prompt_are_what_a_consumer_says(server):
    """Also one of somebody else's, and one of captures that is named among consumers."""
    two = {**WORDS, "prompt": ["One day", "At night"], "max_tokens": 1}
    for name, options, option in (
        ("turning", {"after": 1, "name": "x"}, "name"),
        ("filesystem", {"hooks": {"post_block": [0]}, "request_id": "x"}, "request_id"),
    ):
        asked = {"consumers": {name: options}}
        answer = server.post("/v1/completions", two | asked, key=None)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "consumers")
        assert f"consumers[{name!r}][{option!r}] is for one prompt" in error["message"]
        assert server.post("/v1/completions", WORDS | {"max_tokens": 1} | asked).is_success

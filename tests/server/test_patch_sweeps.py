"""Sweeps over HTTP, against `transformers`; who may, and who leaves."""

import json
import time

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from server.test_serving import PROMPT, WORDS, decoded

HAPPY, SAD = (f"It was a {day} day for Kira." for day in ("wonderful", "terrible"))
ASKED = {
    "clean": HAPPY,
    "corrupt": SAD,
    "hooks": "post_block",
    "layers": [0, -1],
    "positions": [2, -1],
    "metric": ["logit_diff", "kl"],
    "answers": [" was", " cried"],
}


@torch.no_grad()
def logits_with(model, ids, layer=None, position=None, row=None):
    """Those of the token after a prompt, with another row in the place of what leaves a block."""
    loaded, _ = model

    def put(module, args, output):
        hidden = (output[0] if isinstance(output, tuple) else output).clone()
        if layer is not None:
            hidden[0, position] = row
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    with loaded.model.layers[layer or 0].register_forward_hook(put):
        return loaded(torch.tensor([ids])).logits[0, -1]


def lines_of(answer):
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/jsonl")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_sweep_is_streamed_as_transformers_computes_it(server, model):
    first, *experiments, last = lines_of(server.post("/v1/patch_sweep", ASKED, key=None))
    clean, corrupt = (model[1](prompt)["input_ids"] for prompt in (HAPPY, SAD))
    assert len(clean) == len(corrupt)
    right, wrong = (model[1](token)["input_ids"][0] for token in ASKED["answers"])
    differs = next(i for i, pair in enumerate(zip(clean, corrupt, strict=True)) if len({*pair}) > 1)
    assert first == {"experiments": len(experiments) + 1}, "one measures the noise"
    assert len(experiments) == 2 * sum(p >= differs for p in (2, len(clean) - 1))
    num_layers = model[0].config.num_hidden_layers
    assert last["summary"]["layers"] == [0, num_layers - 1]
    with torch.no_grad():
        states = model[0](torch.tensor([clean]), output_hidden_states=True).hidden_states
    rows = {}
    for experiment in experiments:
        row = experiment["experiment"]
        layer, position = row["layer"], row["position"]
        if layer < num_layers - 1:  # transformers norms the last one
            logits = logits_with(model, corrupt, layer, position, states[layer + 1][0, position])
            expected = float(logits[right] - logits[wrong])
            assert row["logit_diff"] == pytest.approx(expected, abs=2e-3)
        assert row["token"] == corrupt[position]
        rows[layer, position] = row
    ends = last["summary"]["clean"]["logit_diff"][0]
    assert rows[num_layers - 1, len(clean) - 1]["logit_diff"] == pytest.approx(ends, abs=2e-3)
    logits = logits_with(model, corrupt)
    corrupt_value = last["summary"]["corrupt"]["logit_diff"][0]
    assert corrupt_value == pytest.approx(float(logits[right] - logits[wrong]), abs=2e-3)
    values = last["summary"]["values"]["kl"]
    assert values[0][0][0][1] == pytest.approx(rows[0, len(clean) - 1]["kl"], abs=1e-6)
    assert last["summary"]["noise_floor"]["kl"] < 1e-3


def test_a_metric_brings_its_answers(server):
    own = ASKED | {"metric": {"logit_diff": ASKED["answers"]}, "answers": None}
    beside = ASKED | {"metric": "logit_diff"}
    found, expected = (lines_of(server.post("/v1/patch_sweep", of)) for of in (own, beside))
    found, expected = (
        [line["experiment"]["logit_diff"] for line in lines[1:-1]] for lines in (found, expected)
    )
    assert found == pytest.approx(expected, abs=1e-4)
    for metric, says in (
        ({"logit_diff": [5, 9]}, "different answers"),
        ({"kl": [5, 9]}, "give a function"),
    ):
        refused = server.post("/v1/patch_sweep", ASKED | {"metric": metric})
        assert refused.status_code == 400 and says in refused.text, refused.text


def test_paths_of_heads_are_swept_over_http(server):
    asked = ASKED | {"hooks": "attn_heads", "heads": "all", "together": True, "freeze": "all"}
    asked |= {"receivers": [["mlp_in", -1]], "positions": None, "layers": [1]}
    _, *experiments, last = lines_of(server.post("/v1/patch_sweep", asked, key=None))
    heads = [each["experiment"]["head"] for each in experiments]
    assert heads == last["summary"]["heads"] == list(range(len(heads))) and len(heads) > 1


def test_all_layers_and_positions_are_asked_for_by_that_word_too(server):
    told = [
        lines_of(
            server.post("/v1/patch_sweep", ASKED | dict.fromkeys(("layers", "positions"), each))
        )
        for each in ("all", None)
    ]
    assert told[0][0] == told[1][0]
    summaries = [each[-1]["summary"] for each in told]
    for field in ("layers", "positions"):
        assert summaries[0][field] == summaries[1][field]
        assert len(summaries[0][field]) > 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"corrupt": HAPPY}, "are the same"),
        ({"corrupt": "Hi"}, "give prompts of as many tokens"),
        ({"clean": [-1], "corrupt": [3]}, "the prompt has -1, no token id from 0 to"),
        ({"clean": [5] * 900, "corrupt": [6] * 900}, "256"),
        ({"hooks": "nowhere"}, "unknown hook point 'nowhere'"),
        ({"metric": "accuracy"}, "choose of logit_diff, logprob, recovered, kl"),
        ({"answers": None}, "give answers=(right, wrong)"),
        ({"freeze": "post_block"}, "is no branch that a layer adds"),
        ({"window": 0}, "window=0 must be 1 or more"),
        (
            {"answers": [True, False]},
            "answers: [true, false] was given; allowed is [right, wrong] next tokens, as text or "
            "ids; or a list, for each pair",
        ),
        ({"window": "2"}, 'window: "2" was given; allowed is a whole number'),
        ({"noising": "yes"}, 'noising: "yes" was given; allowed is true or false'),
        ({"positions": True}, "positions: true was given; allowed is a number, or a list of them"),
        ({"layers": 1.5}, 'layers: 1.5 was given; allowed is "all", 4, [0, 4], "4:9", "0,4-8,-1"'),
        ({"receivers": [["mlp_in"]]}, 'receivers: [["mlp_in"]] was given; allowed is a list of'),
        (
            {"clean": [[1.5] * 90], "hooks": 3},
            f"clean: {str([[1.5] * 90])[:60]}... was given; allowed is a prompt as text or token "
            "ids, or a list; hooks: 3 was given; allowed is a hook point",
        ),
        (
            {"positions": "last"},
            "positions='last' is not known; give \"all\", a position or a list",
        ),
        (
            {"layer": 1},
            "layer was given, and is no field; give any of clean, corrupt, hooks, layers",
        ),
    ],
)
def test_what_cannot_be_swept_over_http_is_refused(server, change, sentence):
    answer = server.post("/v1/patch_sweep", ASKED | change, key=None)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]


def test_a_sweep_of_one_position_may_name_it_without_a_list(server):
    one, listed = (
        lines_of(server.post("/v1/patch_sweep", ASKED | {"positions": given}))
        for given in (-1, [-1])
    )
    assert len(one) == 4, "two layers, between the first line and the summary"
    assert one[-1]["summary"]["values"] == listed[-1]["summary"]["values"]


def test_a_sweep_may_name_the_model_that_is_served(server):
    plain, named = (
        lines_of(server.post("/v1/patch_sweep", ASKED | more)) for more in ({}, {"model": "demo"})
    )
    assert [one.get("experiment") for one in named] == [one.get("experiment") for one in plain]
    answer = server.post("/v1/patch_sweep", ASKED | {"model": "nobody"})
    assert answer.status_code == 404
    assert "model='nobody' is not served here; served are demo, tuned" in answer.text


def sweep_of(model):
    """By layer and position, what `transformers` makes of each experiment of `ASKED` but those of
    the last layer."""
    clean, corrupt = (model[1](prompt)["input_ids"] for prompt in (HAPPY, SAD))
    right, wrong = (model[1](token)["input_ids"][0] for token in ASKED["answers"])
    with torch.no_grad():
        states = model[0](torch.tensor([clean]), output_hidden_states=True).hidden_states
    found = {}
    for position in (2, len(clean) - 1):
        logits = logits_with(model, corrupt, 0, position, states[1][0, position])
        found[0, position] = float(logits[right] - logits[wrong])
    return found


def test_a_served_adapter_is_swept_over_http(server, model, request):
    """Beside the model itself, whose weights are as they were afterwards."""
    expected = {"demo": sweep_of(model)}
    expected["tuned"] = sweep_of(request.getfixturevalue("tuned"))
    for position, value in expected["demo"].items():
        assert abs(value - expected["tuned"][position]) > 0.05, "the adapter changes them"
    for name in ("tuned", "demo", "tuned"):
        _, *experiments, last = lines_of(
            server.post("/v1/patch_sweep", ASKED | {"model": name}, key=None)
        )
        rows = [each["experiment"] for each in experiments]
        found = {(r["layer"], r["position"]): r["logit_diff"] for r in rows if r["layer"] == 0}
        assert found == {
            at: pytest.approx(value, abs=2e-3)
            for at, value in expected[name].items()
            if at in found
        }
        assert found and "summary" in last
    answer = server.post("/v1/patch_sweep", ASKED | {"model": "Tuned"}, key=None)
    assert answer.status_code == 404
    assert "model='Tuned' is not served here; served are demo, tuned" in answer.text
    named = {"model": "tuned", "capture": {"memory": {"hooks": {"post_block": [1]}}}}
    answer = server.post(
        "/v1/completions", WORDS | {"max_tokens": 8, "return_token_ids": True} | named, key=None
    ).json()
    [choice] = answer["choices"]
    ids = [*model[1](PROMPT)["input_ids"], *choice["token_ids"][:-1]]
    rows = decoded(choice["capture_results"]["memory"]["payload"]["post_block"]["1"]["tensor"])
    with torch.no_grad():
        states = model[0](torch.tensor([ids]), output_hidden_states=True).hidden_states[2][0]
    torch.testing.assert_close(rows, states, rtol=1e-3, atol=1e-3)


LONG = {"layers": None, "positions": None, "clean": [5] * 200, "corrupt": [5, *[6] * 199]}


def rows_patched(server):
    """By the workers, so far."""
    text = server.get("/metrics", key=None).text
    families = text_string_to_metric_families(text)
    [found] = [s.value for f in families for s in f.samples if s.name == "tllm:rows_patched_total"]
    return found


def test_a_client_that_leaves_stops_its_sweep(server, client):
    """And a key has a limit of experiments, and of requests in flight."""
    little = {"headers": {"Authorization": "Bearer little"}, "timeout": 60}
    url = f"{server.url}/v1/patch_sweep"
    refused = httpx.post(url, json=ASKED | LONG, **little)
    assert refused.status_code == 400
    assert "with this API key one may have 200" in refused.text
    before = rows_patched(server)
    with httpx.stream("POST", url, json=ASKED | LONG | {"layers": [0]}, **little) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines)) == {"experiments": 200}
        again = httpx.post(url, json=ASKED, **little)
        assert again.status_code == 429
        assert "1 requests with interventions in flight" in again.text
    for _ in range(200):  # the server hears of it some moments later
        answer = httpx.post(url, json=ASKED | {"layers": [0]}, **little)
        if answer.status_code == 200:
            break
        assert answer.status_code == 429
        time.sleep(0.1)
    assert "summary" in lines_of(answer)[-1]
    assert rows_patched(server) - before < 190, "the rest was not computed"
    assert client.completions.create(model="demo", prompt=HAPPY, max_tokens=2).choices

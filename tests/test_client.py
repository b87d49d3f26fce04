"""A request's own copy of the parameters, and how what it asks travels."""

from __future__ import annotations

import copy

import pytest
import vllm

from tllm import checked_params
from tllm.client import Client
from tllm.consumers.capture.memory import MemoryConsumer
from tllm.spec.request import EXTRA_ARG, RequestSpec, RowsRead, Wire
from tllm.spec.selection import Selection
from tllm.spec.steering import GroupUse

STOPS = {"stop": ["a", "b"], "stop_token_ids": [3, 4]}


def prepared(params):
    return Client().prepare(params, "id").params


@pytest.mark.parametrize("asked", [{}, STOPS, {"logit_bias": {5: 1.0}}, {"extra_args": {"x": [1]}}])
def test_what_vllm_does_to_its_copy_leaves_the_users_parameters_alone(asked):
    given = vllm.SamplingParams(temperature=0.8, **asked)
    before = copy.deepcopy(given)
    copied = prepared(given).clone()
    copied.update_from_generation_config({"eos_token_id": [7, 8]}, 9)
    copied.stop.append("more")
    if asked.get("logit_bias"):
        copied.logit_bias[6] = 2.0
    if asked.get("extra_args"):
        copied.extra_args["x"].append(2)
    assert given == before


def test_only_what_is_not_flat_is_copied_in_depth_by_vllm():
    assert prepared(vllm.SamplingParams(**STOPS)).skip_clone
    assert not prepared(vllm.SamplingParams(logit_bias={5: 1.0})).skip_clone
    assert not prepared(vllm.SamplingParams(extra_args={"x": [1]})).skip_clone


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.0, "top_p": 0.5, "top_k": 7},
        {"n": 3, "seed": -1, "max_tokens": None, "min_tokens": 2, "ignore_eos": True},
        {**STOPS, "bad_words": ["x", "x"], "include_stop_str_in_output": False},
        {"logprobs": 5, "prompt_logprobs": 2, "detokenize": False},
        {"logit_bias": {5: 1.0}, "allowed_token_ids": [1, 2]},
    ],
)
def test_vllm_works_with_what_it_would_have_copied_itself(asked):
    given, client = vllm.SamplingParams(**asked), Client()
    theirs = given.clone()
    for name in ("first", "second"):  # vLLM changes what it is given
        copied = client.prepare(given, name).params.clone()
        copied.stop_token_ids.append(11)
        copied._all_stop_token_ids.add(11)
    again = client.prepare(vllm.SamplingParams(**asked), "again").params.clone()
    for ours in (prepared(given).clone(), again):
        for name in set(given.__struct_fields__) - {"extra_args", "skip_clone"}:
            assert getattr(ours, name) == getattr(theirs, name), name
            assert type(getattr(ours, name)) is type(getattr(theirs, name)), name


def test_parameters_that_were_changed_are_checked_again():
    client, given = Client(), vllm.SamplingParams(stop_token_ids=[3], temperature=1)
    assert client.prepare(given, "first").params.stop_token_ids == [3]
    given.stop_token_ids.append(4)
    assert client.prepare(given, "longer").params._all_stop_token_ids == {3, 4}
    given.temperature = 1.0
    assert type(client.prepare(given, "a float").params.temperature) is float
    for token in (1, True):
        given.stop_token_ids = [token]
        assert client.prepare(given, "a token").params.stop_token_ids[0] is token
    given.stop_token_ids = [1.0]
    with pytest.raises(Exception, match="must contain only integers"):
        client.prepare(given, "no token")
    given.stop_token_ids = []
    given.top_p = 1.5
    with pytest.raises(Exception, match="top_p must be"):
        client.prepare(given, "wrong")
    given.top_p = 1.0
    assert client.prepare(given, "right again").params.top_p == 1.0


def test_parameters_with_fields_of_their_own_keep_them():
    class Boosted(vllm.SamplingParams):
        boost: float = 0.0

    client = Client()
    for boost in (1.0, 2.0):
        given = Boosted()
        given.boost = boost
        assert client.prepare(given, "id").params.clone().boost == boost


def test_seeds_are_told_apart_and_do_not_fill_what_is_kept(monkeypatch):
    client, kept = Client(), Client()
    for seed in (5, 6, -1, None, 7):
        given = vllm.SamplingParams(stop=["a"])
        given.seed = seed
        expected = None if seed == -1 else seed
        assert client.prepare(given, "id").params.seed == expected
    assert len(client._params._known) == 3, "with a seed, with -1, without"
    monkeypatch.setattr(checked_params, "_MAX_KEPT", 2)
    for temperature in (0.1, 0.2, 0.3, 0.4):
        assert kept.prepare(vllm.SamplingParams(temperature=temperature), "id")
        assert len(kept._params._known) <= 2


def test_what_a_request_asks_of_consumers_is_checked_however_often_its_parameters_were():
    client = Client()
    client.admit(MemoryConsumer())
    client.consumers["memory"] = MemoryConsumer()
    client.consumers["memory"].validate_options = lambda options: None
    options = {"enabled": False, "number": 1}
    asked = {"consumers": {"memory": options}}
    client.prepare(vllm.SamplingParams(extra_args={EXTRA_ARG: asked}), "id")
    given = vllm.SamplingParams(extra_args={EXTRA_ARG: asked})
    options["number"] = 2**70
    if hasattr(given, "_verify_extra_args"):
        with pytest.raises(Exception, match="extra_args integers"):
            client.prepare(given, "id")
    else:  # vLLM 0.30 finds out when it sends the request
        client.prepare(given, "id")


def test_what_a_request_asks_is_settled_when_it_is_made():
    options = {"memory": {"enabled": False}}
    client = Client()
    client.admit(MemoryConsumer())
    client.consumers["memory"] = MemoryConsumer()
    given = vllm.SamplingParams(extra_args={EXTRA_ARG: {"consumers": options}})
    wire = client.prepare(given, "id").params.extra_args[EXTRA_ARG]
    options["memory"]["enabled"] = True
    assert wire.spec.consumers == wire["consumers"] == {"memory": {"enabled": False}}


def test_parameters_that_were_changed_are_checked_as_vllm_checks_its_copy():
    given = vllm.SamplingParams(temperature=0.8, top_p=0.5)
    given.temperature = 0.0
    assert prepared(given).top_p == given.clone().top_p == 1.0
    given.temperature = -1.0
    with pytest.raises(Exception, match="temperature") as theirs:
        given.clone()
    with pytest.raises(theirs.type, match="temperature"):
        prepared(given)


def test_what_a_request_asks_arrives_as_it_was_sent():
    use = GroupUse("decode", Selection.parse("last_prompt"), "digest")
    read = RowsRead("capture", Selection(), once=True)
    full = RequestSpec("a", "b", 3, {"c": {"k": 1}}, (read,), True, True, (use,))
    for spec in (full, RequestSpec("a", "b")):
        assert Wire(dict(Wire.of(spec))).spec == spec
    assert dict(Wire.of(RequestSpec("a", "b"))) == {"request_id": "a", "prompt_id": "b"}
    assert RequestSpec("a", "b").is_plain and not full.is_plain

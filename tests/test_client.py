"""A request's own copy of the parameters, and how what it asks travels."""

from __future__ import annotations

import copy

import pytest
import vllm

from tllm.client import Client
from tllm.spec.request import RequestSpec, RowsRead, Wire
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
    for name in ("stop", "stop_token_ids", "bad_words"):
        getattr(copied, name).append("more")
    if asked.get("logit_bias"):
        copied.logit_bias[6] = 2.0
    if asked.get("extra_args"):
        copied.extra_args["x"].append(2)
    assert given == before


def test_only_what_is_not_flat_is_copied_in_depth_by_vllm():
    assert prepared(vllm.SamplingParams(**STOPS)).skip_clone
    assert not prepared(vllm.SamplingParams(logit_bias={5: 1.0})).skip_clone
    assert not prepared(vllm.SamplingParams(extra_args={"x": [1]})).skip_clone


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

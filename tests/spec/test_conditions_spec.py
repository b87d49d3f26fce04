"""Conditions as they are written: what does not need an engine."""

from __future__ import annotations

import numpy as np
import pytest

from tllm.spec.condition_reading import parse_condition
from tllm.spec.conversations import RequestConversation
from tllm.spec.gates import GateNumbers, signal_names


def _when(**more):
    probe = {"hook": "post_block", "layer": 1, "vector": [1.0, 2.0]}
    return {"probe": probe, "above": 0.5, **more}


def test_a_term_that_is_given_twice_is_joined_once():
    """Also under two names: what judges alike has one number."""
    for every in ("all", "any"):
        numbers = GateNumbers()
        given = {every: [_when(name="a"), _when(name="b"), _when(above=0.7)]}
        joint = numbers.number(parse_condition(given, "when"))
        *_, gate = numbers.gates([joint])
        assert gate.number == joint
        assert gate.terms == (0, 1)


def test_terms_keep_their_names_where_an_equal_joint_came_before():
    numbers = GateNumbers()
    for given in (
        {"any": [_when(), {"all": [_when(), _when(above=0.7)]}]},
        {"any": [_when(name="a"), {"all": [_when(), _when(above=0.7, name="b")]}], "name": "c"},
    ):
        joint = numbers.number(parse_condition(given, "when"))
    assert signal_names(numbers.gates([joint])).keys() >= {"a", "b", "c"}
    numbers.number(parse_condition({"all": [_when(), _when(above=0.7, name="a")]}, "when"))
    with pytest.raises(ValueError, match=r"two conditions of .* are called 'a'"):
        signal_names(numbers.gates([joint]))


def test_names_are_texts_that_can_be_sent():
    """A text of NumPy's ends the request that has it on its way to the engine's process."""
    condition = parse_condition(_when(name=np.str_("sad")), "when")
    conversation = RequestConversation.parse({"id": np.str_("chat"), "key": "k" * 16})
    assert (condition.name, conversation.id) == ("sad", "chat")
    assert type(condition.name) is type(conversation.id) is str

"""Conditions as they are written: what does not need an engine."""

from __future__ import annotations

import numpy as np

from tllm.spec.condition_reading import parse_condition
from tllm.spec.conversations import RequestConversation
from tllm.spec.gates import GateNumbers


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


def test_names_are_texts_that_can_be_sent():
    """A text of NumPy's ends the request that has it on its way to the engine's process."""
    condition = parse_condition(_when(name=np.str_("sad")), "when")
    conversation = RequestConversation.parse({"id": np.str_("chat"), "key": "k" * 16})
    assert (condition.name, conversation.id) == ("sad", "chat")
    assert type(condition.name) is type(conversation.id) is str

"""Conditions as they are written: what does not need an engine."""

from __future__ import annotations

import numpy as np
import pytest

from tllm.spec.condition_reading import parse_condition
from tllm.spec.conversations import RequestConversation
from tllm.spec.gates import GateNumbers, signal_names
from tllm.spec.groups import check_lasting, compose
from tllm.spec.selection import Selection
from tllm.spec.tiers import Tiers


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


LASTING_AND_ALONE = [
    ("rest", "last_prompt", "position -1"),
    ("rest", [-3], "position -3"),
    ("rest", [5], "position 5"),
    ("rest", {"ranges": [[5, 6]], "positions": [5]}, "position 5"),
    ("rest", {"ranges": [[None, 1]]}, "position 0"),
    ("rest", {"ranges": [[-3, -2]]}, "position -3"),
    ("rest", {"windows": [[4, 5]]}, "position 4"),
    ("rest", {"windows": [[0, 1]], "phase": "generation"}, r"window \[0, 1\] of the generated"),
    ("rest", {"ranges": [[-1, None]], "phase": "prompt"}, "position -1"),
    ("rest", {"positions": [5], "exclude": {"token_ids": [3]}}, "position 5"),
    ("next", [5], "position 5"),
    ("next", [7, 3], "no two of them follow each other"),
    ("next", [-3, -1], "no two of them follow each other"),
    ("next", {"positions": [1, 9], "ranges": [[5, 6]]}, "no two of them follow each other"),
    ("next", {"windows": [[0, 1], [2, 3]], "phase": "generation"}, "no two of them follow"),
]


def at(*positions, scope, field="vectors"):
    """What entries at these positions come to, which have one condition."""
    when = _when(scope=scope)
    entries = [{"vector": [1.0, 1.0], "when": when, "positions": each} for each in positions]
    return compose([Tiers.parse(**{field: {"post_block": {2: entries}}})])


@pytest.mark.parametrize(("scope", "positions", "says"), LASTING_AND_ALONE)
def test_a_condition_that_decides_on_no_token_of_its_entry_is_refused(scope, positions, says):
    with pytest.raises(ValueError, match=f"scope='{scope}'.*{says}.*: nothing would be steered"):
        check_lasting(at(positions, scope=scope), "the request")


@pytest.mark.parametrize(
    ("scope", "positions"),
    [
        ("rest", "all"),
        ("rest", "all_prompt"),
        ("rest", [3, 7]),
        ("rest", [0, -1]),
        ("rest", {"positions": [5], "token_ids": [3]}),
        ("rest", {"image": 0}),
        ("rest", {"exclude": {"positions": [5]}}),
        ("rest", {"ranges": [[5, 7]]}),
        ("rest", {"ranges": [[-1, None]]}),
        ("rest", {"ranges": [[5, None]], "phase": "prompt"}),
        ("rest", {"ranges": [[5, -3]]}),
        ("rest", {"ranges": [[None, -3]]}),
        ("rest", {"ranges": [[-1, 3]]}),
        ("rest", {"windows": [[0, None]], "phase": "generation"}),
        ("next", [3, -3]),  # neighbours in a prompt of 5 tokens or of 7
        ("next", [3, 9, 4]),
        ("next", [-2, -9, -1]),
        ("next", {"positions": [5], "windows": [[0, 1]], "phase": "generation"}),
    ],
)
def test_a_condition_that_may_decide_on_a_token_of_its_entry_is_not(scope, positions):
    check_lasting(at(positions, scope=scope), "the request")


def test_entries_that_share_a_lasting_condition_are_looked_at_together():
    check_lasting(at([3], [4], scope="next"), "the request")
    check_lasting(at("last_prompt", [9], scope="rest"), "the request")
    first = {"windows": [[0, 1]], "phase": "generation"}
    check_lasting(at("last_prompt", first, scope="next"), "the request")
    for positions, scope in (([3], "rest"), ([9], "next")):
        with pytest.raises(ValueError, match="nothing would be steered"):
            check_lasting(at([3], positions, scope=scope), "the request")
    of_prompt = at({"ranges": [[-1, None]]}, scope="rest", field="prefill_vectors")
    with pytest.raises(ValueError, match="one token alone, position -1"):
        check_lasting(of_prompt, "the request")


@pytest.mark.parametrize(("scope", "positions", "says"), LASTING_AND_ALONE)
def test_what_is_refused_decides_on_no_token_of_any_prompt(scope, positions, says):
    where = Selection.parse(positions)
    for prompt_len in range(1, 15):
        found = where.intervals(prompt_len, [3] * 30, 3)
        meant = [token for start, stop in found for token in range(start, stop)]
        assert len(meant) <= 1 or scope == "next"
        assert all(token + 1 not in meant for token in meant)

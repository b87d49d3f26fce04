"""The selection language against a model that asks of each token whether it is meant."""

import itertools
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tllm.ports import ResidualStream, Sampler, TokenTarget
from tllm.spec.media import MediaItem, PromptMedia
from tllm.spec.selection import MOST_LISTED, Selection, united

LONGEST = 40


def meant(spec, position, tokens, prompt_len):
    """What the language says about one token, word for word."""
    phase = spec.get("phase", "any")
    if phase == "prompt" and position >= prompt_len:
        return False
    if phase == "generation" and position < prompt_len:
        return False
    origin = prompt_len if phase == "generation" else 0
    criteria = [k for k in ("positions", "ranges", "windows", "token_ids") if spec.get(k)]
    included = not criteria or meets(spec, position, tokens, prompt_len, origin)
    return included and not meets(spec.get("exclude", {}), position, tokens, prompt_len, origin)


def meets(criteria, position, tokens, prompt_len, origin):
    def absolute(p):
        return p + prompt_len if p < 0 else p

    return (
        any(absolute(p) == position for p in criteria.get("positions", ()))
        or any(
            (0 if a is None else absolute(a)) <= position < (10**9 if b is None else absolute(b))
            for a, b in criteria.get("ranges", ())
        )
        or any(
            origin + a <= position < (10**9 if b is None else origin + b)
            for a, b in criteria.get("windows", ())
        )
        or (position < len(tokens) and tokens[position] in criteria.get("token_ids", ()))
    )


numbers = st.integers(-LONGEST, LONGEST)
ranges = st.tuples(st.none() | numbers, st.none() | numbers).filter(
    lambda r: r[1] != 0 and (None in r or (r[0] < 0) != (r[1] < 0) or r[0] < r[1])
)
windows = st.tuples(st.integers(0, 20), st.none() | st.integers(21, LONGEST))
criteria = st.fixed_dictionaries(
    {},
    optional={
        "positions": st.lists(numbers, min_size=1, max_size=4),
        "ranges": st.lists(ranges, min_size=1, max_size=3),
        "windows": st.lists(windows, min_size=1, max_size=2),
        "token_ids": st.lists(st.integers(0, 5), min_size=1, max_size=3),
    },
)


@settings(max_examples=400, deadline=None)
@given(
    criteria,
    st.none() | criteria,
    st.sampled_from(["any", "prompt", "generation"]),
    st.lists(st.integers(0, 6), min_size=1, max_size=LONGEST),
    st.none() | st.integers(0, 6),
)
def test_every_token_is_meant_or_not_as_the_words_say(include, exclude, phase, tokens, generated):
    spec = {**include, "phase": phase, **({"exclude": exclude} if exclude else {})}
    prompt_len = len(tokens)
    selection = Selection.parse(spec)
    assert Selection.parse(selection.to_wire()) == selection
    intervals = selection.intervals(prompt_len, tokens, generated)
    tokens = [*tokens, *[generated] * 2 * LONGEST]
    assert all(a < b for a, b in intervals)
    assert all(left[1] < right[0] for left, right in pairwise(intervals))
    for position in range(2 * LONGEST):
        found = any(a <= position < b for a, b in intervals)
        assert found == meant(spec, position, tokens, prompt_len), position


@settings(max_examples=300, deadline=None)
@given(
    criteria,
    st.none() | criteria,
    st.sampled_from(["any", "generation"]),
    st.lists(st.integers(0, 6), min_size=LONGEST, max_size=LONGEST),
    st.integers(1, LONGEST),
)
def test_what_may_be_meant_without_knowing_the_generated_tokens(
    include, exclude, phase, tokens, prompt_len
):
    spec = {**include, "phase": phase, **({"exclude": exclude} if exclude else {})}
    selection = Selection.parse(spec)
    parts = selection.in_prompt_and_after()
    assert not any(part.depends_on_generated_tokens for part in parts)
    known = tokens[:prompt_len]
    inside = [interval for part in parts for interval in part.intervals(prompt_len, known)]
    for position in range(LONGEST):
        found = any(a <= position < b for a, b in inside)
        now = meant(spec, position, tokens, prompt_len)
        assert found == now if position < prompt_len else found >= now, position
    if not selection.depends_on_generated_tokens:
        assert united(inside) == selection.intervals(prompt_len, known)


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("all", range(9)),
        ("all_prompt", range(5)),
        ("all_generated", range(5, 9)),
        ("last_prompt", [4]),
        ([0, -2], [0, 3]),
    ],
)
def test_names_and_lists(name, positions):
    intervals = Selection.parse(name).intervals(5)
    found = [p for p in range(9) if any(a <= p < b for a, b in intervals)]
    assert found == list(positions)


@pytest.mark.parametrize(
    ("given", "phases"),
    [
        ("all", {"prompt", "generation"}),
        ("last_prompt", {"prompt"}),
        ("all_generated", {"generation"}),
        ([-1, 0], {"prompt", "generation"}),
        ({"ranges": [[-4, -1]]}, {"prompt"}),
        ({"ranges": [[-4, None]]}, {"prompt", "generation"}),
        ({"image": 0}, {"prompt"}),
        ({"positions": [-1], "token_ids": [3]}, {"prompt", "generation"}),
        ({"phase": "generation", "positions": [-1]}, set()),
        ({"exclude": {"positions": [-1]}}, {"prompt", "generation"}),
    ],
)
def test_the_phases_of_what_may_be_meant(given, phases):
    assert Selection.parse(given).phases == phases


def test_positions_may_be_a_tensor():
    listed = Selection.parse([2, -1])
    positions = torch.tensor([2, -1])
    for form in (positions, list(positions), {"positions": positions}):
        assert Selection.parse(form) == listed
    ranges = torch.tensor([[0, 3], [-4, -1]])
    assert Selection.parse({"ranges": ranges}) == Selection.parse({"ranges": ranges.tolist()})
    assert Selection.parse({"ranges": list(ranges)}) == Selection.parse({"ranges": ranges.tolist()})
    for one in (3, torch.tensor(3), {"positions": 3}):
        assert Selection.parse(one) == Selection.parse([3])


@pytest.mark.parametrize(("word", "other"), [("prefill", "prompt"), ("decode", "generation")])
def test_phases_have_the_same_two_names_in_selections_and_ports(word, other):
    assert Selection.parse({"phase": word}) == Selection.parse({"phase": other})
    for port in (ResidualStream.read, ResidualStream.write, TokenTarget.read, Sampler.write):
        assert port(phase=word) == port(phase=other)
        assert port(phase=other).phase == word


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("some", "'some' is not known; give one of all, all_prompt"),
        ([], "selects nothing"),
        ([1.5], "1.5 is not a whole number"),
        ([True], "True is not a whole number"),
        ([2**70], "1180591620717411303424 must be from -2147483647 to 2147483647"),
        ([10**5000], "a number of 16610 bits must be from -2147483647 to 2147483647"),
        ({"ranges": [[0, 2**31]]}, "2147483648 must be from"),
        ({"windows": [[0, 2**63]]}, "must be from"),
        ({"token_ids": [2**64]}, "must be from"),
        (3.5, "is float; give one of"),
        ({"phase": "later"}, "'later' is not known; choose one of any, prefill, decode, prompt"),
        ({"place": [1]}, "unknown keys"),
        ({"positions": []}, "would select nothing"),
        ({"ranges": [[3, 3]]}, "is empty; stop must be greater"),
        ({"windows": [[None, 0]]}, "and is empty; give None for an open end"),
        ({"ranges": [[None, 0]]}, "[None, 0] ends before the first token, and is empty"),
        ({"exclude": {"ranges": [[-3, 0]]}}, "give None for an open end"),
        ({"ranges": [[1, 2, 3]]}, "is not [start, stop]"),
        ({"windows": [[-1, 2]]}, "counts from the phase's first token"),
        ({"token_ids": [-1]}, "token ids are 0 or more"),
        ({"exclude": {"phase": "any"}}, "['exclude']"),
        ({"image": []}, "would select nothing"),
        ({"image": "first"}, "give 'all', the index of one image"),
        ({"video": [True]}, "True is no whole number"),
        ({"image": 0, "phase": "generation"}, "such tokens are of the prompt"),
        (range(MOST_LISTED + 1), "positions lists more than 65536"),
        (np.arange(MOST_LISTED + 1), "positions lists more than 65536"),
        ({"token_ids": itertools.count()}, "['token_ids'] lists more than 65536"),
        ({"exclude": {"ranges": [[0, 1]] * (MOST_LISTED + 1)}}, "['ranges'] lists more than"),
    ],
)
def test_mistakes_are_refused_with_the_field(given, says):
    with pytest.raises(ValueError) as refused:
        Selection.parse(given, "positions")
    assert "positions" in str(refused.value)
    assert says in str(refused.value)


def test_positions_that_the_sequence_cannot_have():
    """Of 4 generated tokens the last one never passes the model, and has no row."""
    Selection.parse([-5, 7]).check(5, 4)
    Selection.parse([10**6]).check(5, None)
    for position in (-6, 8):
        with pytest.raises(ValueError) as refused:
            Selection.parse([position], "capture").check(5, 4, "capture")
        assert "position" in str(refused.value) and "capture" in str(refused.value)
        assert "prompt of 5 tokens and max_tokens=4; give -5 to 7" in str(refused.value)
    with pytest.raises(ValueError, match="max_tokens=1; give -5 to 4"):
        Selection.parse([5]).check(5, 1)


def test_what_lies_beyond_the_end_may_be_left_out():
    Selection.parse({"exclude": {"positions": [-9, 99]}}).check(5, 4)


MEDIA = PromptMedia({"image": [[(1, 3), (4, 5)], [(7, 9)]], "audio": [[(10, 11)]]})


@pytest.mark.parametrize(
    ("given", "intervals"),
    [
        ("image", ((1, 3), (4, 5), (7, 9))),
        ({"image": 0}, ((1, 3), (4, 5))),
        ({"image": [-1]}, ((7, 9),)),
        ({"image": [0, 1], "audio": "all"}, ((1, 3), (4, 5), (7, 9), (10, 11))),
        ({"image": 1, "positions": [-1]}, ((7, 9), (11, 12))),
        ({"phase": "prompt", "exclude": {"image": "all"}}, ((0, 1), (3, 4), (5, 7), (9, 12))),
        ("video", ()),
        ({"image": 2}, ()),
        ({"phase": "prompt", "exclude": {"video": "all"}}, ((0, 12),)),
    ],
)
def test_items_of_a_prompt_are_the_tokens_that_stand_for_them(given, intervals):
    selection = Selection.parse(given)
    assert Selection.parse(selection.to_wire()) == selection
    placed = selection.in_prompt(MEDIA)
    assert not placed.media
    assert placed.intervals(12) == intervals
    assert Selection.from_wire(placed.to_wire()).intervals(12) == intervals


def test_items_without_a_prompt_are_nowhere():
    with pytest.raises(ValueError, match="where these are in the prompt was not found out"):
        Selection.parse("image").intervals(12)


def test_an_item_that_a_prompt_lacks_is_refused_with_those_that_it_has():
    MEDIA.check(MediaItem("image", -2), "positions")
    with pytest.raises(
        ValueError, match=r"tokens of image 2, .* \(it has 2 of image, 1 of audio\)"
    ):
        MEDIA.check(MediaItem("image", 2), "positions")
    with pytest.raises(ValueError, match=r"tokens of image, .* \(it has text alone\)"):
        PromptMedia().check(MediaItem("image"), "positions")


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ({"phase": "prompt", "positions": [4, -5]}, True),
        ({"phase": "prompt", "positions": [5]}, False),
        ({"phase": "generation", "positions": [4, 5]}, True),
        ({"phase": "generation", "positions": [4, -1]}, False),
        ({"phase": "generation", "positions": [4], "ranges": [[3, None]]}, True),
        ({"positions": [5]}, True),
    ],
)
def test_positions_of_which_none_is_of_the_phase_are_refused(given, fits):
    says = r"of a prompt of 5 tokens and phase='\w+' have no token in common"
    with nullcontext() if fits else pytest.raises(ValueError, match=says):
        Selection.parse(given).check(5, 5)

"""The grammar of layers: what each form means, and that all forms of one choice mean the same."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tllm.spec.hooks import HookPoint
from tllm.spec.layers import Layers, layer_at, layer_numbered


def of(given, num_layers=12):
    return Layers.parse(given).of(num_layers, "post_block", "layers")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("all", range(12)),
        ("last", [11]),
        (4, [4]),
        ("4", [4]),
        (" -1 ", [11]),
        (np.int64(-2), [10]),
        (torch.tensor(3), [3]),
        ([0, "4", -1], [0, 4, 11]),
        ((5, -7, 5), [5]),
        (np.array([1, 2]), [1, 2]),
        (torch.tensor([1, 2]), [1, 2]),
        ([torch.tensor(1), np.int32(2)], [1, 2]),
        (range(4, 9), range(4, 9)),
        (slice(4, 9), range(4, 9)),
        (slice(-2, None), [10, 11]),
        ("4:9", range(4, 9)),
        ("4-8", range(4, 9)),
        ("-4--1", range(8, 12)),
        ("-2-1", [10, 11, 0, 1]),
        (":3", range(3)),
        ("-2:", [10, 11]),
        (":", range(12)),
        ("0,4-6,-1", [0, 4, 5, 6, 11]),
        ("0 4:7 last", [0, 4, 5, 6, 11]),
        ("0+4 + 5", [0, 4, 5]),
        (["0", "4:7", slice(-1, None)], [0, 4, 5, 6, 11]),
        (["all", 3], range(12)),
    ],
)
def test_forms(given, meant):
    assert of(given) == tuple(meant)
    assert Layers.parse(Layers.parse(given)) == Layers.parse(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "at is empty; give 'all', 'last', an index"),
        ("", "'' is not a layer; give 'all', 'last', an index, a range such as '4:9'"),
        ("4,,5", "'' is not a layer"),
        ("4,", "'' is not a layer"),
        (None, "None is not a layer"),
        (True, "True is not a layer"),
        ([0, 10**5000], "at: the number of a layer is beyond the 64 bits"),
        ([0, 1.5], "1.5 is not a layer"),
        (np.array([True]), "True is not a layer"),
        ("first", "'first' is not a layer"),
        ("0x4", "'0x4' is not a layer"),
        ({"post_block": 1}, "is not a layer"),
        (slice(0, 4, 2), "is not a layer"),
        (b"4", "is not a layer"),
        ("9" * 5000, "is not a layer"),
        ("0-999999999", "is not a layer"),  # it would be written out where no model is known
        ("4:4", "the range 4:4 has no layers; give the smaller edge first"),
        ("8-4", "the range 8-4 has no layers"),
        ("-1--3", "the range -1--3 has no layers"),
    ],
)
def test_what_is_no_layers_is_refused_by_the_field(given, message):
    with pytest.raises(ValueError, match=r"^at\b") as refusal:
        Layers.parse(given, "at")
    assert message in str(refusal.value)


@pytest.mark.parametrize("given", [12, -13, "12", "0:13", "-13:", "0-12", "0-99999", "5:-9"])
def test_layers_that_a_model_lacks_are_refused_alike(given):
    with pytest.raises(
        ValueError, match=r"^layers: post_block has no layers? .*from -12 to -1 counting"
    ):
        of(given)


INDICES = st.integers(-12, 11)


@given(st.lists(INDICES, min_size=1), st.randoms(use_true_random=False))
def test_every_way_to_list_layers_means_the_same(layers: list[int], chance: random.Random) -> None:
    meant = tuple(dict.fromkeys(layer % 12 for layer in layers))
    words = [str(layer) for layer in layers]
    text = words[0] + "".join(chance.choice([",", "+", " ", ", "]) + word for word in words[1:])
    for form in (layers, tuple(layers), np.array(layers), torch.tensor(layers), words, text):
        assert of(form) == meant


@given(INDICES, st.integers(-12, 12))
def test_a_range_is_a_slice_of_the_layers(start: int, stop: int) -> None:
    meant = tuple(range(12)[start:stop])
    for form in (f"{start}:{stop}", slice(start, stop), [f"{start}:{stop}"]):
        if meant:
            assert of(form) == meant
        else:
            with pytest.raises(ValueError, match="has no layers"):
                of(form)


@given(INDICES, INDICES)
def test_a_range_with_a_hyphen_has_both_its_ends(first: int, last: int) -> None:
    text = f"{first}-{last}"
    if first <= last:
        assert of(text) == of(range(first, last + 1))
        assert Layers.parse(text).numbers("layers") == tuple(range(first, last + 1))
    elif last < 0 <= first and first <= last + 12:
        assert of(text) == tuple(range(first, last + 12 + 1))
    else:
        with pytest.raises(ValueError, match="has no layers"):
            of(text)


PARTS = st.one_of(
    INDICES.map(str),
    st.tuples(INDICES, INDICES).map(lambda e: f"{min(e)}-{max(e)}"),
    st.tuples(INDICES, st.integers(-12, 12)).map(lambda e: f"{e[0]}:{e[1]}"),
    INDICES.map(lambda e: f"{e}:"),
    st.sampled_from(["all", "last", ":", ":4"]),
)


@given(st.lists(PARTS, min_size=1, max_size=4).map(",".join))
def test_what_is_known_without_the_model_is_what_the_model_has(text: str) -> None:
    try:
        layers = Layers.parse(text)
        numbers = layers.numbers("layers")
    except ValueError:
        return
    assert of(str(layers)) == of(text) == tuple(dict.fromkeys(n % 12 for n in numbers))


@given(st.text("0123456789-:,+ alst", max_size=12))
def test_any_text_is_layers_of_the_model_or_a_sentence_of_ours(text: str) -> None:
    try:
        found = of(text)
    except ValueError as error:
        assert str(error).startswith("layers: ")
    else:
        assert found and set(found) <= set(range(12)) and len(set(found)) == len(found)


@pytest.mark.parametrize("given", ["all", "4:", ":-1", ":", "2:-1"])
def test_what_only_the_model_tells_is_refused_without_it(given):
    with pytest.raises(ValueError, match="is not known without the model; give numbers, or ranges"):
        Layers.parse(given).numbers("layers")


def test_where_nothing_counts_from_the_end_open_ranges_stop_at_what_is_there():
    why = "a store does not know"
    assert Layers.parse("0,4:").from_start("layers", why, 7) == (0, 4, 5, 6)
    assert Layers.parse("all").from_start("layers", why, 2) == (0, 1)
    assert Layers.parse("9:").from_start("layers", why, 7) == ()
    for wrong in (-1, "last", "-2:", "0,:-1"):
        with pytest.raises(ValueError, match="negative numbers; layers count from 0 here, since a"):
            Layers.parse(wrong).from_start("layers", why, 7)


def test_some_layers_are_the_same_in_every_model():
    assert Layers.parse("3,0-1,-1,4:6,:-1,7:,-3:").certain == (3, 0, 1, 4, 5)
    assert Layers.parse("all").certain == ()


def test_one_layer_is_read_by_the_same_words():
    forms = [4, "4", " +4 ", np.int64(4), torch.tensor(4)]
    assert [layer_numbered(form, "at") for form in forms] == [4] * 5
    assert layer_numbered("last", "at") == -1
    assert layer_at(HookPoint.POST_BLOCK, "-2", "at") == -2
    assert layer_at(HookPoint.LM_HEAD_IN, None, "at") is None
    for wrong in (True, 1.5, "4:9", "all", [4], None):
        with pytest.raises(ValueError, match=r"^at: .* is not a layer; give its index"):
            layer_numbered(wrong, "at")
    with pytest.raises(ValueError, match="at: post_block needs a layer"):
        layer_at(HookPoint.POST_BLOCK, None, "at")
    with pytest.raises(ValueError, match="at: lm_head_in belongs to no layer"):
        layer_at(HookPoint.LM_HEAD_IN, 3, "at")

"""What may be asked of a capture."""

import pytest

from tllm.spec.capture import CaptureSpec, parse_hooks


def places(hooks, num_layers=6):
    return CaptureSpec.parse({"hooks": hooks}, "capture").places(num_layers)


@pytest.mark.parametrize(
    "hooks",
    [
        {"post_block": [4, 5], "lm_head_in": "all"},
        {"block_output": [-2, -1], "lm_head_in": None},
        {"post_block": "4:6", "lm_head_in": []},
        {"post_block": "-2:", "lm_head_in": True},
        {"post_block": "4,5", "lm_head_in": "all"},
        {"post_block": "4-5", "lm_head_in": "all"},
        {"post_block": ["4", -1], "lm_head_in": "all"},
        {"post_block": range(4, 6), "lm_head_in": "all"},
        "post_block:4:6 lm_head_in",
        "post_block:4+5; lm_head_in:all",
        "post_block:4, 5 lm_head_in",
        ["post_block:-2:", "lm_head_in"],
        ["post_block:-2: lm_head_in"],
    ],
)
def test_forms_of_the_same_hooks(hooks):
    assert places(hooks) == (("post_block", 4), ("post_block", 5), ("lm_head_in", None))


def test_all_layers_are_the_models():
    assert places({"mlp_in": "all"}, 3) == (("mlp_in", 0), ("mlp_in", 1), ("mlp_in", 2))
    assert places({"mlp_in": 1}) == (("mlp_in", 1),)


def test_a_layer_is_there_once():
    assert places({"mlp_in": [5, -1, 5]}) == (("mlp_in", 5),)


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({}, "hooks is empty"),
        (3, "hooks=3 is int"),
        ([3], "3 is not text"),
        ("middle:1", "unknown hook point 'middle'"),
        ("post_block", "names no layers"),
        ("post_block:1 block_output:2", "names post_block twice"),
        ({"post_block": True}, "True is not a layer"),
        ({"post_block": [1.5]}, "1.5 is not a layer"),
        ({"post_block": "x"}, "'x' is not a layer"),
        ("lm_head_in:3", "belongs to no layer"),
    ],
)
def test_what_is_wrong_is_refused(hooks, message):
    with pytest.raises(ValueError, match=message):
        parse_hooks(hooks)


@pytest.mark.parametrize("layers", ["2:9", "-9:", "4:4", "5:2", "2-6", [1, 6]])
def test_layers_must_lie_in_the_model(layers):
    with pytest.raises(ValueError, match=r"hooks.*: .* has no layer"):
        places({"post_block": layers})

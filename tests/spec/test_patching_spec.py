"""Patching as it is written: what does not need an engine."""

import numpy as np
import pytest
import torch

from tllm.spec.media import PromptMedia
from tllm.spec.patching import PatchUse, RequestPatch, check_patch_positions, noise_rows


def test_noise_of_a_position_hangs_on_the_seed_and_on_it_alone():
    """Negative positions too, which are far from 0 as whole numbers without a sign."""
    positions = [-3, -2, -1, 0, 1, 2]
    for seed in (0, 7, 2**63 - 1):
        rows = noise_rows(1.0, seed, positions, 16)
        assert len(np.unique(rows, axis=0)) == len(positions)
        again = noise_rows(1.0, seed, positions[::-1], 16)[::-1]
        np.testing.assert_array_equal(rows, again)
    assert not np.array_equal(noise_rows(1.0, 1, [-1], 16), noise_rows(1.0, 2, [-1], 16))


IMAGES = PromptMedia({"image": [[(1, 3)], [(5, 6)]]})


def patch(**given):
    entry = {"hook": "post_block", "layer": 0, "source": {"zero": True}, **given}
    return RequestPatch.parse([entry])


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ("image", (1, 2, 5)),
        ({"image": -1}, (5,)),
        ({"image": [1, 0]}, (1, 2, 5)),
        ([4, 3], (4, 3)),
        ("all_prompt", (0, 1, 2, 3, 4, 5)),
        ("last_prompt", (-1,)),
    ],
)
def test_what_is_named_of_a_prompt_is_patched_by_its_positions(positions, expected):
    (entry,) = patch(positions=positions).in_prompt(6, IMAGES).entries
    assert entry.positions == expected
    assert not entry.unplaced


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"positions": "all"},
            "or, of a prompt that has such items, image, video",
        ),
        (
            {"positions": {"ranges": [[0, 1]]}},
            "image, video, audio, or a mapping with any of these",
        ),
        ({"positions": "all_generated"}, "what is done to generated tokens"),
        (
            {"positions": "all_prompt", "source": {"tensor": [[1.0], [2.0]]}},
            "has shape [2, 1], and 6 positions are patched",
        ),
        ({"positions": {"image": []}}, "names no item"),
        ({"positions": {"image": 2}}, "the prompt has no such item"),
        ({"positions": "video"}, "the prompt has no such item"),
        (
            {"positions": "image", "source": {"tensor": [[1.0], [2.0]]}},
            "has shape [2, 1], and 3 positions are patched",
        ),
        (
            {"positions": {"image": 0}, "source": {"run": "a", "positions": [1]}},
            "has 1 positions, and 2 are patched",
        ),
    ],
)
def test_patches_of_images_that_cannot_be(given, says):
    with pytest.raises(ValueError) as refused:
        patch(**given).in_prompt(6, IMAGES)
    assert says in str(refused.value)


def test_positions_may_be_a_tensor():
    [given] = patch(positions=torch.tensor([3, -1]), mask=np.arange(2)).entries
    assert (given.positions, given.mask) == ((3, -1), (0, 1))


@pytest.mark.parametrize(
    "mask", [[True, False], np.array([True, False]), torch.tensor([True, False]), [np.True_]]
)
def test_a_mask_that_says_yes_or_no_is_refused_with_what_to_give(mask):
    """As users have it from elsewhere, and as the mask of scale_dimensions is."""
    with pytest.raises(ValueError, match=r"'mask'\] says yes or no .* numpy.flatnonzero\(mask\)"):
        patch(positions=[3], mask=mask)


def test_a_position_that_is_named_from_both_ends_is_refused():
    """It would be patched twice, which is not what once would be."""
    use = PatchUse("post_block", 0, (-1, 11), keep=0.5, scale=0.5)
    check_patch_positions([use], 13, 4)
    with pytest.raises(ValueError, match="-1 and 11 are the same position of a prompt of 12"):
        check_patch_positions([use], 12, 4)


def test_generated_positions_are_not_those_of_the_prompt() -> None:
    """The third token of the prompt, and the third that is generated."""
    check_patch_positions([PatchUse("post_block", 0, (2, 14, -1, 13), keep=0.0, scale=1.0)], 12, 4)

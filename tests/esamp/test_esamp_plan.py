"""Rows are grouped by distiller without losing, repeating or misplacing any."""

import numpy as np
import pytest

from tllm.consumers.esamp.plan import plan_blocks


@pytest.mark.parametrize("seed", range(20))
def test_every_row_has_one_place_in_its_distillers_block(seed):
    random = np.random.default_rng(seed)
    capacity = int(random.integers(1, 70))
    slots = random.integers(-1, capacity, int(random.integers(1, 300)))
    if seed % 3 == 0:
        slots[random.random(len(slots)) < 0.8] = 0
    seen = []
    for block in plan_blocks(slots, capacity):
        assert block.shape.stop <= capacity
        assert block.index.shape == (block.shape.slots, block.shape.width)
        for offset, (places, count) in enumerate(zip(block.index, block.counts, strict=True)):
            rows = places[:count]
            if count and (places[count:] == -1).all() and (rows >= 0).all():
                assert (slots[rows] == block.shape.first + offset).all()
                assert (np.diff(rows) > 0).all()
                seen.extend(rows.tolist())
            else:
                assert (places == -1).all()
                assert count == 0
    assert sorted(seen) == np.flatnonzero(slots >= 0).tolist()


def test_equal_prompts_make_one_block_without_padding():
    (block,) = plan_blocks(np.repeat(np.arange(8), 16), 8)
    assert block.shape == (0, 8, 16)
    assert (block.index.ravel() == np.arange(128)).all()


def test_one_crowded_distiller_does_not_pad_the_others():
    slots = np.concatenate((np.zeros(1000), np.arange(1, 200))).astype(int)
    blocks = plan_blocks(slots, 256)
    assert sum(block.shape.rows for block in blocks) < 4 * len(slots)


def test_few_shapes_occur_while_samples_finish():
    slots = np.repeat(np.arange(8), 16)
    shapes = {plan_blocks(slots[done:], 8)[0].shape for done in range(128)}
    assert len(shapes) <= 40


def test_no_rows_make_no_blocks():
    assert plan_blocks(np.array([-1, -1]), 8) == []

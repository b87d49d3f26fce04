"""Patch rows in a worker's tables: what a tap makes of them, against the formula written out."""

import random

import pytest
import torch

from tllm.runtime.columns import Column
from tllm.runtime.kernels import tap
from tllm.runtime.patching import Patching
from tllm.runtime.taps import Taps
from tllm.spec.hooks import HookPoint
from tllm.spec.patching import PatchUse

HIDDEN, POSITIONS, CPU = 8, 12, torch.device("cpu")
FIRST, SECOND = (HookPoint.POST_BLOCK, 0), (HookPoint.PRE_ATTN, 1)


@pytest.fixture
def taps():
    return Taps(
        {FIRST: None},
        second={FIRST: SECOND},
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=CPU,
        max_tokens=POSITIONS,
        max_programs=4,
        add_rows=4,
    )


@pytest.fixture
def patching(taps):
    return Patching(taps, lambda hook, layer: (HookPoint(hook), layer), 2**20, 2**20)


def rows_of(starts):
    """The patch row of each position."""
    found, begin, row = [], 0, -1
    for position in range(POSITIONS):
        for start, patch_row in starts:
            if start == position:
                begin, row = start, patch_row
        found.append(row if row < 0 else row + position - begin)
    return found


def computed(taps, patching, starts, stream):
    """What a tap makes of rows at positions 0 to 11."""
    taps.plan[Column.PATCH.plan_row] = torch.tensor(rows_of(starts), dtype=torch.int32)
    patching.commit()
    taps.commit()
    stream = stream.clone()
    tap.reference(stream, None, taps.descriptors[0], taps.plan)
    return stream


def asked(pick, kept):
    """A random patch, at positions counted from either end."""
    positions = pick.sample(range(POSITIONS), pick.randint(1, 6))
    count = len(positions)
    source = pick.choice(["zero", "row", "rows", "kept"])
    rows = torch.randn({"row": 1, "rows": count}.get(source, 0), HIDDEN)
    return PatchUse(
        *pick.choice([("post_block", 0), ("pre_attn", 1)]),
        tuple(p - POSITIONS if pick.random() < 0.3 else p for p in positions),
        pick.choice([0.0, 0.3, 1.0]),
        pick.choice([1.0, -0.5]),
        pick.choice([None, (0, 3), (7,)]),
        rows.numpy().tobytes() if len(rows) else None,
        (kept, tuple(pick.choices(range(4), k=count))) if source == "kept" else None,
    ), rows


def formula(stream, uses, run):
    """The patches of each stage in turn."""
    for place in (("post_block", 0), ("pre_attn", 1)):
        for use, rows in uses:
            if (use.hook, use.layer) != place:
                continue
            for i, position in enumerate(use.at(POSITIONS)):
                source = torch.zeros(HIDDEN)
                if use.kept is not None:
                    source = run[use.kept[1][i], ("post_block", "pre_attn").index(use.hook)]
                elif use.rows is not None:
                    source = rows[i % len(rows)]
                changed = use.keep * stream[position] + use.scale * source
                where = list(use.mask) if use.mask is not None else list(range(HIDDEN))
                stream[position, where] = changed[where]
    return stream


@pytest.mark.parametrize("seed", range(6))
def test_sequences_come_and_go_and_each_has_its_own(taps, patching, seed):
    torch.manual_seed(seed)
    pick = random.Random(seed)
    run = torch.randn(4, 2, HIDDEN)
    patching.keep("r", [("post_block", 0), ("pre_attn", 1)], run.clone())
    running = []
    for _ in range(12):
        uses = [asked(pick, "r") for _ in range(pick.randint(1, 4))]
        running.append((uses, patching.acquire([use for use, _ in uses], POSITIONS)))
        if pick.random() < 0.4:
            patching.release(running.pop(pick.randrange(len(running)))[1])
        for uses, patched in running:
            stream = torch.randn(POSITIONS, HIDDEN)
            ours = computed(taps, patching, patched.starts, stream)
            torch.testing.assert_close(ours, formula(stream.clone(), uses, run))
    for _, patched in running:
        patching.release(patched)
    patching.commit()
    taps.commit()
    assert not patching.users and not taps.descriptors[0, 0], "taps return at once again"
    assert (patching._patches.tensor == -1).all()


def test_who_asks_the_same_shares_the_rows_unless_the_end_is_elsewhere(patching):
    from_start = PatchUse("post_block", 0, (3,), 0.0, 1.0)
    from_end = PatchUse("post_block", 0, (-1,), 0.0, 1.0)
    assert patching.acquire([from_start], 5) is patching.acquire([from_start], 9)
    assert patching.acquire([from_end], 5) is not patching.acquire([from_end], 9)
    assert patching.users == 4


def test_a_row_that_is_not_kept_may_hold_anything(taps, patching):
    stream = torch.full((POSITIONS, HIDDEN), torch.inf)
    patched = patching.acquire([PatchUse("post_block", 0, (2,), 0.0, 1.0)], POSITIONS)
    changed = computed(taps, patching, patched.starts, stream)
    assert not changed[2].any() and changed[3].isinf().all()


def test_kept_rows_have_a_limit_and_go_when_they_are_dropped(patching):
    rows = torch.zeros(2**14, 1, HIDDEN)
    patching.keep("a", [("post_block", 0)], rows)
    patching.keep("b", [("post_block", 0)], rows.clone())
    assert patching.free_bytes() == 0
    with pytest.raises(ValueError, match=r"0\.0 MiB left; drop what is not needed"):
        patching.keep("c", [("post_block", 0)], torch.zeros(1, 1, HIDDEN))
    use = PatchUse("post_block", 0, (2,), 0.0, 1.0, None, None, ("a", (0,)))
    patched = patching.acquire([use], POSITIONS)
    patching.drop("a")
    assert patching.free_bytes() == rows.nbytes
    assert patched.alive, "whoever runs still has them"
    with pytest.raises(ValueError, match="dropped before the request began"):
        patching.acquire([PatchUse("post_block", 0, (3,), 0.0, 1.0, None, None, ("a", (0,)))], 9)


def test_rows_that_were_dropped_are_missed_also_where_another_stage_has_the_layer(patching):
    """All stages give the request up, and the last one is heard."""
    elsewhere = PatchUse("post_block", 5, (3,), 0.0, 1.0, None, None, ("a", (0,)))
    patching.keep("a", [], torch.empty(0, 0, HIDDEN))
    patching.release(patching.acquire([elsewhere], POSITIONS))
    patching.drop("a")
    with pytest.raises(ValueError, match=r"of layer 5: the rows .* dropped before the request"):
        patching.acquire([elsewhere], POSITIONS)

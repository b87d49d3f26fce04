"""What is done to a sequence by several parties, against what each does position by position."""

import random
import sys

from hypothesis import given
from hypothesis import strategies as st

from tllm.spec.changes import combined, steering_changes
from tllm.spec.groups import GroupUse
from tllm.spec.patching import PatchUse, patch_changes
from tllm.spec.selection import Selection
from tllm.spec.stretches import configurations, most_configurations, steering_stretches

DIGESTS = st.sampled_from([b"", b"", b"one", b"two"])
STARTS = st.lists(st.integers(1, 12), unique=True, max_size=4).map(
    lambda found: [0, *sorted(found)]
)
CHANGES = STARTS.flatmap(
    lambda starts: st.tuples(*(DIGESTS for _ in starts)).map(
        lambda done: list(zip(starts, done, strict=True))
    )
)


def at(changes, position):
    return [digest for start, digest in changes if start <= position][-1]


@given(st.dictionaries(st.sampled_from(["steering", "patch", "gate"]), CHANGES, min_size=1))
def test_positions_have_one_digest_where_the_same_is_done_to_them(parts):
    found = combined(parts)
    assert found[0][0] == 0
    done = {p: tuple((name, at(parts[name], p)) for name in sorted(parts)) for p in range(14)}
    for p in done:
        assert bool(at(found, p)) == any(digest for _, digest in done[p])
        for q in done:
            assert (at(found, p) == at(found, q)) == (done[p] == done[q])


def test_who_does_it_counts():
    once = combined({"steering": [(0, b"one")], "patch": [(0, b"")]})
    assert once != combined({"steering": [(0, b"")], "patch": [(0, b"one")]})


def patch_at(positions, rows=b""):
    return PatchUse("post_block", 0, tuple(positions), 0.0, 1.0, rows=rows)


def listed(pick, prompt_len):
    """Some hundred positions in any order, from either end."""
    found = pick.sample(range(prompt_len + 50), 200)
    return [p - prompt_len if p < prompt_len and pick.random() < 0.3 else p for p in found]


def test_long_lists_of_positions_are_steered_and_patched_there_and_nowhere_else():
    pick = random.Random(0)
    prompt_len = 400
    lists = [listed(pick, prompt_len) for _ in range(3)]
    at_each = [{p + prompt_len if p < 0 else p for p in each} for each in lists]
    phases = ["any", "prefill", "decode"]
    uses = [
        GroupUse(phase, Selection.parse(each), f"use {i}")
        for i, (phase, each) in enumerate(zip(phases, lists, strict=True))
    ]
    stretches = steering_stretches(uses, prompt_len, ())
    patches = [patch_at(each) for each in lists]
    changes = patch_changes(patches, prompt_len)
    for position in range(500):
        here = [i for i, positions in enumerate(at_each) if position in positions]
        phase = "prefill" if position < prompt_len else "decode"
        meant = tuple(f"use {i}" for i in here if phases[i] in ("any", phase))
        assert at(stretches, position) == meant
        assert bool(at(changes, position)) == bool(here)


def test_a_patch_changes_a_position_alike_whatever_is_patched_after_it():
    one, other = patch_at([3, -1], b"rows"), patch_at([8])
    for prompt_len in (20, 30):
        alone, both = patch_changes([one], prompt_len), patch_changes([other, one], prompt_len)
        assert at(alone, 3) == at(both, 3) != b""
        assert at(alone, 8) == b"" != at(both, 8)
    assert at(patch_changes([one], 4), 3) != at(patch_changes([one], 20), 3)


def test_positions_one_after_the_other_are_one_stretch():
    use = patch_at(range(5, 60000))
    assert [start for start, _ in patch_changes([use], 60000)] == [0, 5, 60000]


def test_a_list_of_sixty_thousand_positions_costs_the_scheduler_little():
    """Two calls of Python for each of 120,000 stretches, at most: there were eight, or a second."""
    wire = Selection.parse(range(0, 120000, 2)).to_wire()
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        use = GroupUse("any", Selection.from_wire(wire), "vector")
        kinds = most_configurations([use])
        stretches = steering_stretches([use], 125000, ())
        found = configurations(stretches)
        changes = steering_changes(stretches, "")
    finally:
        sys.setprofile(None)
    assert (kinds, found, len(changes)) == (1, {(), ("vector",)}, 120000)
    assert calls < 2 * 120000

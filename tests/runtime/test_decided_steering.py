"""Which positions what controllers decide is done to, without an engine."""

from __future__ import annotations

from tllm.runtime.decided_steering import DecidedSteering, NamedSteering
from tllm.spec.changes import combined, decided_changes
from tllm.spec.selection import END
from tllm.spec.stretches import TokenChoice
from tllm.spec.tiers import Tiers


def named(*groups, until=END):
    return NamedSteering(Tiers(), Tiers(), until, groups)


def test_what_is_decided_later_takes_the_place_of_what_was_to_come():
    decided = DecidedSteering()
    decided.named = {("c", "a"): named("a"), ("c", "b"): named("b", until=12)}
    decided.change(9)
    assert decided.stretches == [(9, ("a", "b")), (12, ("a",))]
    decided.named = {("c", "a"): named("a2", until=11), ("c", "b"): named("b", until=12)}
    decided.change(10)
    assert decided.stretches == [(9, ("a", "b")), (10, ("a2", "b")), (11, ("b",)), (12, ())]
    decided.named = {}
    decided.change(10)
    assert decided.stretches == [(9, ("a", "b")), (10, ())]


def test_only_what_is_still_to_be_computed_is_in_force():
    decided = DecidedSteering(stretches=[(4, ("a",)), (6, ()), (9, ("b",))])
    assert decided.in_force() == [(0, ()), *decided.stretches]
    decided.begin = 7
    assert decided.in_force() == [(0, ()), (9, ("b",))]
    decided.begin = 9
    assert decided.in_force() == [(0, ("b",))]


def test_what_is_decided_is_done_after_what_the_request_asks():
    decided = DecidedSteering(stretches=[(4, ("x",)), (8, ())])
    choice = TokenChoice(((7, ("b",)),), ())
    both = decided.after([(0, ("a",)), (6, choice)])
    chosen = TokenChoice(((7, ("b", "x")),), ("x",))
    assert both == [(0, ("a",)), (4, ("a", "x")), (6, chosen), (8, choice)]


def test_from_where_on_a_request_may_be_steered_its_blocks_are_like_no_others():
    first, second = decided_changes(5), decided_changes(5)
    assert first[0] == second[0] == (0, b"")
    assert first[1] != second[1]
    steered = [(0, b""), (3, b"s")]
    found = combined({"steering": steered, "decided": first})
    assert [start for start, _ in found] == [0, 3, 5]
    assert not found[0][1] and found[1][1] and found[2][1]
    assert decided_changes(0)[0][1]

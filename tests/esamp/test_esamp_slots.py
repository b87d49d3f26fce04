"""Who gets which distiller, and when it is taken back."""

import pytest
from esamp_driver import make_request

from tllm.consumers.esamp.slots import UNGUIDED, SlotTable


def make_table(capacity=2, growable=False, scope="prompt", persist=False):
    return SlotTable(capacity, growable, scope, persist)


def test_samples_of_a_prompt_share_and_prompts_do_not():
    table = make_table()
    a = [table.join(make_request("a", i, slot=i, n=2)).slot for i in range(2)]
    b = table.join(make_request("b", slot=5)).slot
    assert a[0] == a[1] != b


def test_every_sample_has_its_own_with_request_scope():
    table = make_table(scope="request")
    slots = {table.join(make_request("a", i, slot=i, n=2)).slot for i in range(2)}
    assert slots == {0, 1}


def test_everything_shares_one_with_shared_scope():
    table = make_table(scope="shared")
    assert {table.join(make_request(name, slot=0)).slot for name in "abc"} == {0}


def test_a_group_goes_before_the_scope():
    table = make_table()
    options = {"group": "x"}
    first = table.join(make_request("a", slot=0, options=options))
    second = table.join(make_request("b", slot=1, options=options))
    assert first is second
    assert first.label == "group:x"


def test_a_prompt_keeps_its_slot_while_samples_wait_to_be_scheduled():
    table = make_table()
    first, second = (make_request("a", i, slot=0, n=2) for i in range(2))
    lease = table.join(first)
    table.leave(first)
    assert table.join(second) is lease
    table.leave(second)
    assert table.in_use == 0


def test_the_slot_of_a_prompt_that_runs_nothing_is_taken_first():
    table = make_table(capacity=1)
    first = make_request("a", 0, slot=0, n=2)
    table.join(first)
    table.leave(first)
    assert table.join(make_request("b", slot=1)).slot == 0
    assert table.refused == 0


def test_a_full_table_refuses_or_grows():
    refusing, growing = make_table(1), make_table(1, growable=True)
    for table in (refusing, growing):
        table.join(make_request("a", slot=0))
    late = make_request("b", slot=1)
    assert refusing.join(late).slot == UNGUIDED
    assert refusing.refused == 1
    assert growing.join(late).slot == 1
    assert growing.capacity == 2


def test_a_refused_prompt_stays_unguided_to_its_end():
    table = make_table(1)
    first, second = make_request("a", slot=0), make_request("b", slot=1)
    table.join(first)
    table.join(second)
    table.leave(first)
    assert table.join(second).slot == UNGUIDED


def test_failing_to_grow_leaves_the_newcomers_unguided():
    table = make_table(1, growable=True)
    leases = [table.join(make_request(name, slot=i)) for i, name in enumerate("abc")]
    table.shrink_to(1)
    assert [lease.slot for lease in leases] == [0, UNGUIDED, UNGUIDED]
    assert table.join(make_request("d", slot=3)).slot == UNGUIDED
    assert table.fresh == {0: "req-a"}


@pytest.mark.parametrize("persist", [False, True])
def test_groups_are_kept_only_when_asked(persist):
    table = make_table(persist=persist)
    member = make_request("a", slot=0, options={"group": "x"})
    table.join(member)
    table.fresh.clear()
    table.leave(member)
    table.join(make_request("b", slot=0, options={"group": "x"}))
    assert (table.fresh == {}) is persist


def test_a_group_that_is_forgotten_gives_its_slot_to_others():
    table = make_table(capacity=1, persist=True)
    of_group = make_request("a", slot=0, options={"group": "x"})
    lease = table.join(of_group)
    table.leave(of_group)
    assert table.join(make_request("b", slot=1)).slot == UNGUIDED
    table.leave(make_request("b", slot=1))
    table.fresh.clear()
    before = table.version
    assert not table.forget_group("y")
    assert table.forget_group("x") and not table.forget_group("x")
    assert (table.in_use, table.version > before) == (0, True)
    again = table.join(of_group)
    assert again is not lease
    assert table.fresh == {0: "group:x"}, "it begins anew"


def test_a_group_that_is_forgotten_while_it_runs_goes_on_and_who_names_it_later_begins_anew():
    table = make_table(persist=True)
    first, second, third = (
        make_request(name, slot=slot, options={"group": "x"}) for slot, name in enumerate("abc")
    )
    old = table.join(first)
    assert table.forget_group("x")
    new = table.join(second)
    assert (new is old, new.slot == old.slot, table.in_use) == (False, False, 2)
    assert table.join(third) is new
    assert table.join(first) is old, "a sequence keeps its distiller"
    assert table.leave(first)
    assert table.join(second) is new
    assert (table.in_use, table.fresh[new.slot]) == (1, "group:x")
    assert table.leave(second) and table.leave(third)
    assert table.in_use == 1, "the new one persists"
    assert table.forget_group("x")
    assert table.in_use == 0


def test_room_that_a_bank_has_not_got_is_taken_from_who_was_forgotten_too():
    table = make_table(growable=True)
    requests = [make_request(n, slot=i, options={"group": n}) for i, n in enumerate("abc")]
    leases = [table.join(request) for request in requests]
    assert table.forget_group("c")
    table.shrink_to(2)
    assert [lease.slot for lease in leases] == [0, 1, UNGUIDED]
    assert not table.leave(requests[2])


@pytest.mark.parametrize("persist", [False, True])
def test_a_later_input_that_names_another_group_gives_back_the_distiller_of_the_first(persist):
    table = make_table(capacity=3, persist=persist)
    first, later, without = (
        make_request("a", slot=0, options=options)
        for options in ({"group": "x"}, {"group": "y"}, {})
    )
    other = make_request("b", slot=1, options={"group": "y"})
    shared = table.join(other)
    old, before = table.join(first), table.version
    assert table.join(later) is shared is not old
    assert table.version > before
    assert table.in_use == (2 if persist else 1)
    assert table.join(without).label == "req-a" and table.in_use == (3 if persist else 2)
    assert table.leave(without) and table.leave(other)
    assert table.in_use == (2 if persist else 0)
    assert not table._joined and not shared.live and not old.live

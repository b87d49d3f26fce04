"""The ring never gives out rows that somebody still reads."""

import random
import weakref

import pytest
import torch

from tllm.runtime.ring import Ring


def make_ring(rows=8, max_rows=8, overflow="drop", make_progress=lambda: False, moves=None):
    return Ring(
        hidden_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        rows=rows,
        max_rows=max_rows,
        overflow=overflow,
        on_move=(moves if moves is not None else []).append,
        make_progress=make_progress,
    )


def held(ring, rows):
    span = ring.reserve(rows)
    if span is not None:
        span.hold()
    return span


def test_rows_nobody_holds_are_given_again():
    ring = make_ring()
    assert [ring.reserve(8).start for _ in range(3)] == [0, 0, 0]


def test_it_wraps_around_when_the_oldest_rows_are_free():
    ring = make_ring()
    first, second = held(ring, 4), held(ring, 3)
    first.release()
    assert held(ring, 4).start == 0
    assert second.start == 4


def test_rows_behind_those_that_wait_are_given_when_the_rows_before_them_are_too_few():
    ring = make_ring(rows=32)
    first, _ = held(ring, 6), held(ring, 4)
    first.release()
    assert [held(ring, rows).start for rows in (4, 4, 2, 18)] == [0, 10, 4, 14]
    assert ring.reserve(1) is None


def test_rows_in_use_are_those_that_somebody_holds():
    ring = make_ring()
    first, _ = held(ring, 2), held(ring, 3)
    assert (ring.in_use, ring.row_bytes) == (5, 16)
    first.release()
    assert ring.in_use == 3


def test_drop_gives_up_when_it_is_full():
    ring = make_ring()
    span = held(ring, 6)
    assert ring.reserve(3) is None
    span.release()
    assert ring.reserve(3).start == 0


def test_block_waits_for_the_oldest_reader():
    waiting = []
    ring = make_ring(overflow="block", make_progress=lambda: waiting.pop(0).release() or True)
    waiting += [held(ring, 4), held(ring, 4)]
    assert ring.reserve(6).start == 0
    assert waiting == []


def test_block_takes_what_a_reader_gave_back_just_before_it_would_have_been_waited_for():
    def too_late_to_wait_for():
        given.release()
        return False

    ring = make_ring(overflow="block", make_progress=too_late_to_wait_for)
    given = held(ring, 8)
    assert ring.reserve(6).start == 0


def test_block_gives_up_when_nothing_can_make_progress():
    ring = make_ring(overflow="block")
    held(ring, 8)
    assert ring.reserve(1) is None


def test_it_grows_before_it_drops_and_keeps_what_is_read():
    moves = []
    ring = make_ring(rows=4, max_rows=16, moves=moves)
    span = held(ring, 4)
    old = ring.arena
    old.fill_(7.0)
    assert ring.reserve(5).start == 0
    assert ring.capacity == 10 and moves[-1] is ring.arena
    assert ring.arena is not old and (old == 7.0).all() and span.held


def test_what_it_has_outgrown_goes_though_no_rows_are_asked_for():
    moves = []
    ring = make_ring(rows=4, max_rows=16, moves=moves)
    span, old = held(ring, 4), weakref.ref(ring.arena)
    ring.reserve(5)
    moves.clear()
    ring.free_spans()
    assert old() is not None
    span.release()
    ring.free_spans()
    assert old() is None


def test_more_rows_than_it_may_ever_hold_are_dropped_at_once():
    assert make_ring(overflow="drop").reserve(9) is None


def test_a_step_that_alone_needs_more_gets_it_with_block():
    ring = make_ring(overflow="block")
    first = held(ring, 5)
    assert held(ring, 9).start == 0
    assert ring.capacity == 9
    first.release()


def test_without_memory_for_it_a_step_is_dropped(monkeypatch):
    ring = make_ring(overflow="block")

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "empty", full)
    assert ring.reserve(9) is None
    assert ring.reserve(8).start == 0


@pytest.mark.parametrize("seed", range(20))
def test_spans_that_are_held_never_overlap_and_rows_are_dropped_only_where_none_fit(seed):
    pick = random.Random(seed)
    ring = make_ring(rows=16, max_rows=64)
    alive, given, dropped = [], [], 0
    for _ in range(300):
        if alive and pick.random() < 0.5:
            alive.pop(pick.randrange(len(alive)))[1].release()
        rows = pick.randint(1, 12)
        span = held(ring, rows)
        while given and not given[0].held:  # taken back in the order in which they were given
            given.pop(0)
        if span is not None:
            assert span.start >= 0 and span.start + span.rows <= ring.capacity
            alive.append((ring.arena, span))
            given.append(span)
        else:
            dropped += 1
            used = {row for s in given for row in range(s.start, s.start + s.rows)}
            places = range(ring.capacity - rows + 1)
            assert not any(used.isdisjoint(range(place, place + rows)) for place in places)
        taken = [(id(arena), row) for arena, s in alive for row in range(s.start, s.start + s.rows)]
        assert len(taken) == len(set(taken))
    assert dropped

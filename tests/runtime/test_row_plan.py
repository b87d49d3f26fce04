"""The planner against a model that goes through the batch token by token."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tllm.ports import RequestInfo
from tllm.runtime.batch import RowPlanner, StepBatch
from tllm.runtime.descriptor import PlanRow
from tllm.runtime.kernels.backend import INTERPRETED
from tllm.runtime.slots import Sequence, Slots
from tllm.runtime.timeline import Timeline

SLOTS, TOKENS, RING = 6, 64, 200
WIDTHS = np.array([0, 1, 3, 0], np.int32)
"""Ring rows a token takes, by program; program 3 captures no tap."""


class StubRing:
    def __init__(self):
        self.arena = torch.zeros(RING, 2)
        self.head = 0

    def take(self, rows):
        if rows > RING:
            return None
        start = self.head if self.head + rows <= RING else 0
        self.head = start + rows
        return SimpleNamespace(start=start)


class StubPrograms:
    widths = WIDTHS

    def __getitem__(self, number):
        return SimpleNamespace(number=number, taps=range(WIDTHS[number]))


@st.composite
def traffic(draw, *, only_steered=0):
    """What each slot asks, and some steps: `(slot, tokens computed, jump back)` each.

    Sequences in the last `only_steered` slots are steered or not, each the same from its first
    token on, and nothing else is done to them.
    """
    phases = st.tuples(st.integers(0, 3), st.integers(0, 3))
    asks = draw(st.lists(phases, min_size=SLOTS, max_size=SLOTS))
    adds = draw(st.lists(st.integers(-1, 3), min_size=2 * SLOTS, max_size=2 * SLOTS))
    steers = draw(st.lists(st.integers(-3, 3), min_size=2 * SLOTS, max_size=2 * SLOTS))
    stretch = st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(-3, 3))
    timelines = draw(st.lists(st.lists(stretch, max_size=5), min_size=SLOTS, max_size=SLOTS))
    lengths = draw(st.lists(st.integers(1, 12), min_size=SLOTS, max_size=SLOTS))
    step = st.lists(
        st.tuples(st.integers(0, SLOTS - 1), st.integers(1, 9), st.booleans()),
        min_size=1,
        max_size=SLOTS,
        unique_by=lambda entry: entry[0],
    )
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        steps.append(draw(step))
        steady = [(slot, 1, False) for slot, _, _ in steps[-1]]
        steps += draw(st.sampled_from([0, 0, 1, 2, 15])) * [steady]
    for slot in range(SLOTS - only_steered, SLOTS):
        asks[slot], timelines[slot] = (0, 0), []
        adds[slot] = adds[SLOTS + slot] = -1
        steers[SLOTS + slot] = steers[slot]
    return asks, adds, steers, timelines, lengths, steps


def timeline_of(stretches, prompt_len):
    """Stretches of these lengths, cut where the prompt ends."""
    starts, rows, at = [], [], 0
    for length, program, steer in stretches:
        starts += [at, prompt_len] if at < prompt_len < at + length else [at]
        rows += [(program, steer)] * (2 if at < prompt_len < at + length else 1)
        at += length
    if prompt_len > starts[-1]:
        starts.append(prompt_len)
        rows.append(rows[-1])
    program, steer = np.array(rows, np.int32).T
    return Timeline(np.array(starts, np.int32), program, steer)


@settings(max_examples=30 if INTERPRETED else 150, deadline=None)
@given(traffic())
def test_each_token_does_what_its_sequence_asked(case):
    plays(*case)


@settings(max_examples=15 if INTERPRETED else 80, deadline=None)
@given(st.one_of(traffic(only_steered=SLOTS), traffic(only_steered=SLOTS - 1)))
def test_tokens_of_sequences_that_are_only_steered(case):
    plays(*case)


A_DECODE = [[(0, 4, False), (1, 6, False)], *(20 * [[(0, 1, False), (1, 1, False)]])]


@pytest.mark.parametrize(
    "then",
    [
        pytest.param(
            [[(0, 1, False), (1, 1, True)], [(0, 1, False), (1, 20, False)], *A_DECODE[1:]],
            id="one is preempted",
        ),
        pytest.param([*A_DECODE[:1], [(0, 30, True), (1, 30, True)]], id="both are preempted"),
        pytest.param(
            [[(0, 1, True), (1, 1, True)], *(2 * A_DECODE[1:])], id="both again, token by token"
        ),
        pytest.param(3 * [[(1, 1, False), (0, 1, False)]], id="their order changes"),
        pytest.param(3 * [[(0, 1, False)]], id="one ends"),
        pytest.param(
            [[(1, 1, False)], [(1, 1, False)], [(0, 30, True), (1, 1, False)]],
            id="one waits and is computed again",
        ),
        pytest.param([[(0, 2, False), (1, 1, False)], *A_DECODE[1:]], id="one gets two tokens"),
    ],
)
@pytest.mark.parametrize("second", [(2, 1), (0, 0)], ids=["two captured", "one captured"])
def test_a_long_decode_is_followed_by_anything(then, second):
    asks = [(1, 2), second] + (SLOTS - 2) * [(0, 0)]
    adds, steers = 2 * SLOTS * [-1], 2 * [*range(SLOTS)]
    plays(asks, adds, steers, SLOTS * [[]], SLOTS * [5], A_DECODE + then)


def test_the_next_sequence_in_a_slot_has_nothing_delivered():
    table = Slots(2)
    table.deliver(np.array([0, 1]), np.array([9, 7]))
    info = RequestInfo("new", "new", 0, 1, slot=0, prompt_len=3)
    table.add_sequence(Sequence("new", info, {}, keep_results=False))
    assert table.delivered.tolist() == [0, 7]


def plays(asks, adds, steers, timelines, lengths, steps):
    """Plan each step, and compare with what each token of it should do."""
    table = Slots(SLOTS)
    table.prompt_len[:] = lengths
    table.program[:] = np.array(asks, np.int32).T
    table.add[:] = np.array(adds, np.int32).reshape(2, SLOTS)
    table.steer[:] = np.array(steers, np.int32).reshape(2, SLOTS)
    for slot, stretches in enumerate(timelines):
        if stretches:
            table.set_timeline(slot, timeline_of(stretches, lengths[slot]))
    plan = torch.full((len(PlanRow), TOKENS), -1, dtype=torch.int32)
    taps = SimpleNamespace(device=torch.device("cpu"), plan=plan, unsettle=lambda: None)
    planner = RowPlanner(table, taps, StubPrograms(), StubRing())
    computed = np.zeros(SLOTS, np.int32)
    delivered = np.zeros(SLOTS, np.int32)
    for number, step in enumerate(steps):
        for slot, _, jump_back in step:
            if jump_back:  # preempted: everything is computed again
                computed[slot] = 0
        slots = np.array([slot for slot, _, _ in step], np.int32)
        counts = np.array([count for _, count, _ in step], np.int32)
        batch = StepBatch(slots, computed[slots].copy(), counts, np.zeros(len(slots), np.int32))
        frame = planner.plan(number, batch)

        row, expected, places = 0, {}, set()
        for slot, count in zip(slots, counts, strict=True):
            for position in range(computed[slot], computed[slot] + count):
                phase = int(position >= lengths[slot])
                program, steer = table.program[phase, slot], table.steer[phase, slot]
                if timelines[slot]:
                    of = table.timelines[slot]
                    at = max(i for i, start in enumerate(of.starts) if start <= position)
                    program, steer = of.program[at], of.steer[at]
                program = 0 if position < delivered[slot] else program
                destination, what, add, steered = plan[:, row].tolist()
                assert (add, steered) == (table.add[phase, slot], steer)
                if WIDTHS[program]:
                    assert what == program
                    rows = range(destination, destination + WIDTHS[program])
                    assert not places & set(rows)
                    places |= set(rows)
                else:
                    assert destination == -1
                if program:
                    expected.setdefault(int(program), []).append((slot, position, row))
                row += 1
            computed[slot] += count
            delivered[slot] = max(delivered[slot], computed[slot])
        nothing = [PlanRow.DESTINATION, PlanRow.ADD, PlanRow.STEER]
        assert (plan[nothing, row:] == -1).all()

        chosen = plan[PlanRow.STEER] < -1
        assert frame.chooses == bool(chosen.any())
        plan[PlanRow.STEER, chosen] = 7  # as a choice by token leaves it

        found = {}
        for rows in frame.rows:
            which = np.repeat(np.arange(len(rows.counts)), rows.counts)
            found[rows.program.number] = list(
                zip(
                    rows.slots[which],
                    rows.by_row(rows.positions),
                    rows.by_row(rows.batch_rows),
                    strict=True,
                )
            )
            if rows.tensor is not None:
                assert len(rows.tensor) == len(which)
        assert {k: sorted(v) for k, v in found.items() if v} == {
            k: sorted(v) for k, v in expected.items()
        }

"""The planner against a model that goes through the batch token by token."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tllm.ports import RequestInfo
from tllm.runtime import planner as planner_module
from tllm.runtime.batch import StepBatch
from tllm.runtime.columns import DESTINATION, NEUTRAL, PLAN_ROWS, Column
from tllm.runtime.kernels.backend import INTERPRETED
from tllm.runtime.planner import RowPlanner
from tllm.runtime.slots import RunningSequence, Slots, Timeline

SLOTS, TOKENS, RING = 6, 64, 200
WIDTHS = np.array([0, 1, 3, 0], np.int32)
"""Ring rows a token takes, by program; program 3 captures no tap."""


class StubRing:
    def __init__(self):
        self.arena = torch.zeros(RING, 2)
        self.head = 0

    def reserve(self, rows):
        if rows > RING:
            return None
        start = self.head if self.head + rows <= RING else 0
        self.head = start + rows
        return SimpleNamespace(start=start)


class StubPrograms:
    widths = WIDTHS

    def __getitem__(self, number):
        return SimpleNamespace(number=number, taps=range(WIDTHS[number]))


HIGHEST = 3
LOWEST = {Column.STEER: -3}
"""Of the values that are drawn; else the neutral one is the lowest. Below -1 are choices."""
VALUES = {c: st.integers(LOWEST.get(c, c.neutral), HIGHEST) for c in Column}


@st.composite
def traffic(draw, *, only_steered=0):
    """What each slot asks, and some steps: `(slot, tokens computed, jump back)` each.

    Sequences in the last `only_steered` slots are steered or not, each the same from its first
    token on, and nothing else is done to them.
    """
    values = np.full((len(Column), 2, SLOTS), -7, np.int32)
    for column in Column:
        # What counts up comes with stretches of positions only.
        drawn = st.just(column.neutral) if column.consecutive else VALUES[column]
        flat = draw(st.lists(drawn, min_size=2 * SLOTS, max_size=2 * SLOTS))
        values[column] = np.reshape(flat, (2, SLOTS))
    stretch = st.tuples(st.integers(1, 9), *(VALUES[column] for column in Column))
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
        steered = values[Column.STEER, 0, slot]
        values[:, :, slot], timelines[slot] = NEUTRAL[:, None], []
        values[Column.STEER, :, slot] = steered
    return values, timelines, lengths, steps


def timeline_of(stretches, prompt_len):
    """Stretches of these lengths, cut where the prompt ends."""
    starts, rows, at = [], [], 0
    for length, *values in stretches:
        starts += [at, prompt_len] if at < prompt_len < at + length else [at]
        rows += [values] * (2 if at < prompt_len < at + length else 1)
        at += length
    if prompt_len > starts[-1]:
        starts.append(prompt_len)
        rows.append(rows[-1])
    by_column = zip(Column, zip(*rows, strict=True), strict=True)
    return Timeline(starts, {c: values for c, values in by_column if c.by_position})


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
    values = np.tile(NEUTRAL[:, None, None], (2, SLOTS))
    values[Column.PROGRAM, :, 0], values[Column.PROGRAM, :, 1] = (1, 2), second
    values[Column.STEER] = range(SLOTS)
    plays(values, SLOTS * [[]], SLOTS * [5], A_DECODE + then)


@pytest.mark.parametrize("kept", [False, True], ids=["planned", "kept"])
def test_positions_of_a_batch_that_goes_on_count_up_where_they_are(monkeypatch, kept):
    sent, upload = [], planner_module.upload
    monkeypatch.setattr(
        planner_module, "upload", lambda *given: (sent.append(1), upload(*given))[1]
    )
    table = Slots(3)
    table.prompt_len[:] = 4
    table.values[Column.GATE, :, :2] = [5, 6]
    table.values[Column.STEER] = 2
    plan = torch.full((PLAN_ROWS, TOKENS), -1, dtype=torch.int32)
    taps = SimpleNamespace(device=torch.device("cpu"), plan=plan, note_write=lambda: None)
    planner = RowPlanner(table, taps, StubPrograms(), StubRing())
    slots, ones = np.array([0, 2, 1], np.int32), np.ones(3, np.int32)
    starts = np.array([9, 5, 30], np.int32)
    for number in range(5):
        begin = starts + number
        goes_on = kept and planner.keep(slots, begin, ones)
        assert goes_on == (kept and number > 0)
        if not goes_on:
            planner.plan(number, StepBatch(slots, begin, ones, 0 * ones))
        expected = [9 + number, -1, 30 + number, -1]
        assert plan[Column.POSITION.plan_row, :4].tolist() == expected
        assert plan[Column.GATE.plan_row, :4].tolist() == [5, -1, 6, -1]
    assert len(sent) == 1
    planner.plan(5, StepBatch(slots[:2], starts[:2] + 5, ones[:2], 0 * ones[:2]))
    assert plan[Column.POSITION.plan_row, :4].tolist() == [14, -1, -1, -1]
    assert len(sent) == 2


@pytest.mark.parametrize("positions", [False, True], ids=["captured", "with-positions"])
def test_a_batch_that_goes_on_takes_turns_between_places_in_the_ring(monkeypatch, positions):
    written, launch = [], planner_module.row_plan.reference
    monkeypatch.setattr(
        planner_module.row_plan, "reference", lambda *given: (written.append(1), launch(*given))[1]
    )
    monkeypatch.setattr(planner_module, "uses_triton", lambda device: False)
    table = Slots(3)
    table.prompt_len[:] = 4
    table.values[Column.PROGRAM, :, :2] = [1, 2]
    table.values[Column.GATE, :, 0] = 5 if positions else -1
    plan = torch.full((PLAN_ROWS, TOKENS), -1, dtype=torch.int32)
    taps = SimpleNamespace(device=torch.device("cpu"), plan=plan, note_write=lambda: None)
    ring = StubRing()
    planner = RowPlanner(table, taps, StubPrograms(), ring)
    slots, ones = np.array([0, 2, 1], np.int32), np.ones(3, np.int32)
    starts = np.array([9, 5, 30], np.int32)
    for number in range(12):
        ring.head = 10 * (number % 3)
        planner.plan(number, StepBatch(slots, starts + number, ones, 0 * ones))
        first = 10 * (number % 3)
        assert plan[DESTINATION, :4].tolist() == [first, -1, first + 1, -1]
        assert plan[Column.PROGRAM.plan_row, :4].tolist() == [1, 0, 2, -1]
        expected = 9 + number if positions else -1
        assert plan[Column.POSITION.plan_row, :4].tolist() == [expected, -1, -1, -1]
    assert len(written) == 4  # the first, and the first at each place when it is known to go on
    ring.head = 0
    planner.plan(12, StepBatch(slots[:2], starts[:2] + 12, ones[:2], 0 * ones[:2]))
    assert plan[DESTINATION, :4].tolist() == [0, -1, -1, -1]
    assert len(written) == 5


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("gates", [False, True], ids=["captured", "with positions"])
def test_batches_that_take_turns_are_laid_out_once_each(monkeypatch, batches, gates):
    """As over pipeline stages. One is smaller; then a sequence goes from one to the other."""
    made, lay_out = [], RowPlanner._lay_out
    monkeypatch.setattr(RowPlanner, "_lay_out", lambda *given: (made.append(1), lay_out(*given))[1])
    values = np.tile(NEUTRAL[:, None, None], (2, SLOTS))
    values[Column.PROGRAM, :, :4] = [1, 2, 2, 0]
    values[Column.STEER, :, :4] = [3, -1, 4, 5]
    values[Column.GATE, :, :4] = [6, -1, -1, 7] if gates else -1
    prompts = [[(0, 4, False), (1, 4, False)], [(2, 4, False), (3, 4, False), (4, 4, False)]]
    turns = [[(0, 1, False), (1, 1, False)], [(2, 1, False), (3, 1, False), (4, 1, False)]]
    others = [[(0, 1, False)], [(1, 1, False), (2, 1, False), (3, 1, False), (4, 1, False)]]
    again = [[(0, 14, True)], [(1, 14, True), (2, 14, True), (3, 14, True), (4, 14, True)]]
    plays(values, SLOTS * [[]], SLOTS * [4], prompts + 8 * turns + 4 * others + again, batches)
    assert len(made) == (2 + 2 + 2 + 2 if batches == 2 else 2 + 16 + 8 + 2)


def test_batches_that_take_turns_keep_their_plans_and_what_was_delivered_of_each():
    table = Slots(4)
    table.prompt_len[:] = 4
    table.values[Column.STEER] = [2, 3, 4, 5]
    table.values[Column.GATE, :, 0] = 6
    plan = torch.full((PLAN_ROWS, TOKENS), -1, dtype=torch.int32)
    taps = SimpleNamespace(
        device=torch.device("cpu"), plan=plan, note_write=lambda: None, separate=lambda: None
    )
    planner = RowPlanner(table, taps, StubPrograms(), StubRing(), batches=2)
    turns = [np.array([0, 2], np.int32), np.array([1, 3], np.int32)]
    ones = np.ones(2, np.int32)
    for number in range(10):
        slots, starts = turns[number % 2], np.full(2, 4 + number // 2, np.int32)
        assert planner.keep(slots, starts, ones) == (number > 1)
        if number < 2:
            planner.plan(number, StepBatch(slots, starts, ones, 0 * ones))
        steered = [[2, 4], [3, 5]][number % 2]
        position = [starts[0] if number % 2 == 0 else -1, -1]
        assert plan[Column.STEER.plan_row, :3].tolist() == [*steered, -1]
        assert plan[Column.POSITION.plan_row, :2].tolist() == position
        if number == 6:
            planner.clear()  # a forward pass that is not a step
    assert table.delivered.tolist() == [9, 9, 9, 9]
    table.version += 1  # a sequence comes
    assert not planner.keep(turns[0], np.full(2, 9, np.int32), ones)


def test_lanes_keep_their_plan_as_long_as_their_tokens_are_the_prompts(monkeypatch):
    """A turn's token is the last of a prompt that has grown; one that is drawn after it is not."""
    sent, upload = [], planner_module.upload
    monkeypatch.setattr(
        planner_module, "upload", lambda *given: (sent.append(1), upload(*given))[1]
    )
    table = Slots(3)
    table.prompt_len[:] = 8
    table.values[Column.PROGRAM, 0], table.values[Column.PROGRAM, 1] = 3, 2
    table.values[Column.STEER, 0], table.values[Column.STEER, 1] = 4, 5
    plan = torch.full((PLAN_ROWS, TOKENS), -1, dtype=torch.int32)
    taps = SimpleNamespace(device=torch.device("cpu"), plan=plan, note_write=lambda: None)
    planner = RowPlanner(table, taps, StubPrograms(), StubRing())
    slots, ones = np.array([2, 0, 1], np.int32), np.ones(3, np.int32)
    starts, frames = np.full(3, 7, np.int32), []
    for number in range(4):
        if number:
            table.grow([2, 0, 1], [8 + number] * 3, [7 + number] * 3)
        begin = starts + number
        frames.append(planner.plan(number, StepBatch(slots, begin, ones, 0 * ones)))
        assert plan[Column.STEER.plan_row, :3].tolist() == [4, 4, 4]
        (rows,) = frames[-1].rows
        positions = rows.group.positions(frames[-1].batch)
        assert (rows.group.program.number, positions.tolist()) == (3, begin.tolist())
    assert [frame.goes_on for frame in frames] == [False, True, True, True]
    assert len(sent) == 1
    planner.plan(4, StepBatch(slots, starts + 4, ones, 0 * ones))
    assert plan[Column.STEER.plan_row, :3].tolist() == [5, 5, 5]
    table.grow([1], [13], [12])
    planner.plan(5, StepBatch(slots, starts + 5, ones, 0 * ones))
    assert plan[Column.STEER.plan_row, :3].tolist() == [5, 5, 4]
    assert len(sent) == 3


def test_a_batch_whose_prompts_have_grown_is_planned_though_it_was_to_keep_its_plan():
    """It does not go on, however often that is asked."""
    table = Slots(2)
    table.prompt_len[:] = 8
    table.values[Column.STEER, 0], table.values[Column.STEER, 1] = 4, 5
    plan = torch.full((PLAN_ROWS, TOKENS), -1, dtype=torch.int32)
    taps = SimpleNamespace(device=torch.device("cpu"), plan=plan, note_write=lambda: None)
    planner = RowPlanner(table, taps, StubPrograms(), StubRing())
    slots, starts, ones = (
        np.arange(2, dtype=np.int32),
        np.full(2, 8, np.int32),
        np.ones(2, np.int32),
    )
    planner.plan(0, StepBatch(slots, starts, ones, 0 * ones))
    assert planner.keep(slots, starts + 1, ones)
    table.grow([1], [11], [10])
    assert not planner.keep(slots, starts + 2, ones)
    planner.plan(2, StepBatch(slots, starts + 2, ones, 0 * ones))
    assert plan[Column.STEER.plan_row, :2].tolist() == [5, 4]


def test_the_next_sequence_in_a_slot_has_nothing_delivered():
    table = Slots(2)
    table.deliver(np.array([0, 1]), np.array([9, 7]))
    info = RequestInfo("new", "new", 0, 1, slot=0, prompt_len=3)
    table.add_sequence(RunningSequence("new", info, {}, keep_results=False))
    assert table.delivered.tolist() == [0, 7]


def test_a_stretch_is_looked_up_once_however_often_the_batch_changes(monkeypatch):
    seen, between = [], Timeline.between
    monkeypatch.setattr(
        Timeline, "between", lambda of, *where: (seen.append(where), between(of, *where))[1]
    )
    values = np.tile(NEUTRAL[:, None, None], (2, SLOTS))
    timelines = [[(n, 0, -1, row, -1, -1, -1, -1) for n, row in ((8, 2), (20, 3), (5, 1))]]
    both = [[(0, 4, False), (1, 6, False)]]
    changing = [[(0, 1, False)], [(1, 1, False), (0, 1, False)]]
    plays(values, timelines + (SLOTS - 1) * [[]], SLOTS * [4], both + 20 * changing)
    # When it came, its prompt, and what was decoded in the first, second and third stretch.
    assert len(seen) == 5


def asked_of(table, timeline, slot, position):
    """What each column says of a token."""
    phase = int(position >= table.prompt_len[slot])
    said = table.values[:, phase, slot].copy()
    if timeline is not None:
        at = max(i for i, start in enumerate(timeline.starts) if start <= position)
        for column in Column:
            if column.by_position:
                said[column] = timeline.said[column][at]
                if column.consecutive and said[column] >= 0:
                    said[column] += position - timeline.starts[at]
    if said[Column.GATE] >= 0:
        said[Column.POSITION] = position
    return said


def plays(values, timelines, lengths, steps, batches=1):
    """Plan each step, and compare with what each token of it should do."""
    table = Slots(SLOTS)
    table.prompt_len[:] = lengths
    table.values[:] = values
    asked = [
        timeline_of(stretches, lengths[slot]) if stretches else None
        for slot, stretches in enumerate(timelines)
    ]
    for slot, timeline in enumerate(asked):
        if timeline is not None:
            table.assign_timeline(slot, timeline, lengths[slot])
    plan = torch.full((PLAN_ROWS, TOKENS), -1, dtype=torch.int32)
    taps = SimpleNamespace(device=torch.device("cpu"), plan=plan, note_write=lambda: None)
    planner = RowPlanner(table, taps, StubPrograms(), StubRing(), batches)
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
                said = asked_of(table, asked[slot], slot, position)
                program = 0 if position < delivered[slot] else int(said[Column.PROGRAM])
                destination, what = plan[[DESTINATION, Column.PROGRAM.plan_row], row].tolist()
                for column in set(Column) - {Column.PROGRAM}:
                    assert plan[column.plan_row, row] == said[column], column
                if WIDTHS[program]:
                    assert what == program
                    rows = range(destination, destination + WIDTHS[program])
                    assert not places & set(rows)
                    places |= set(rows)
                else:
                    assert destination == -1
                if program:
                    expected.setdefault(program, []).append((slot, position, row))
                row += 1
            computed[slot] += count
            delivered[slot] = max(delivered[slot], computed[slot])
        nothing = [column.plan_row for column in set(Column) - {Column.PROGRAM}]
        assert (plan[[DESTINATION, *nothing], row:] == -1).all()

        chosen = plan[Column.STEER.plan_row] < -1
        assert frame.chooses == bool(chosen.any())
        plan[Column.STEER.plan_row, chosen] = 7  # as a choice by token leaves it

        found = {}
        for rows in frame.rows:
            group = rows.group
            which = np.repeat(np.arange(len(group.counts)), group.counts)
            found[group.program.number] = list(
                zip(
                    group.slots[which],
                    group.by_row(group.positions(frame.batch)),
                    group.by_row(group.batch_rows),
                    strict=True,
                )
            )
            if rows.tensor is not None:
                assert len(rows.tensor) == len(which)
        assert {k: sorted(v) for k, v in found.items() if v} == {
            k: sorted(v) for k, v in expected.items()
        }


def test_the_kernel_is_compiled_before_a_request_needs_it():
    """Which changes nothing, and leaves nothing to compile."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = torch.full((PLAN_ROWS, TOKENS), -1, dtype=torch.int32, device=device)
    taps = SimpleNamespace(device=device, plan=plan, note_write=lambda: None)
    table = Slots(2)
    planner = RowPlanner(table, taps, StubPrograms(), StubRing())
    planner.warm_up()
    assert (plan == -1).all()
    if device.type == "cuda":
        kernel = planner_module.row_plan._row_plan_kernel
        compiled = dict(kernel._variants)
        table.values[Column.STEER] = 2
        slots, ones = np.arange(2, dtype=np.int32), np.ones(2, np.int32)
        planner.plan(0, StepBatch(slots, 0 * ones, ones, 0 * ones))
        assert (plan[Column.STEER.plan_row, :2] == 2).all()
        assert compiled and kernel._variants == compiled

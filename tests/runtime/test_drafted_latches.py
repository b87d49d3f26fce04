"""What drafted rows make of the latches of their sequences, and how many tokens are kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tllm.runtime.batch import StepBatch
from tllm.runtime.columns import DECODE, Column
from tllm.runtime.drafted_latches import DraftedLatches
from tllm.runtime.kernels import drafted
from tllm.runtime.kernels.backend import HAS_TRITON
from tllm.runtime.latches import BEFORE, NEVER, Latches
from tllm.runtime.slots import Slots
from tllm.spec.gates import MAX_GATES, Gate
from tllm.spec.memory import SCOPES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POSITIONS = 100
REST, NEXT = SCOPES.index("rest"), SCOPES.index("next")


def gate(number, scope):
    return Gate(number, "post_block", 1, vector="probe", scope=scope)


def bits_of(latches, latch, number):
    """The positions at which a gate of scope `next` held."""
    words = latches.tables[1][latch.held[number]].tolist()
    return [i for i in range(POSITIONS) if words[i // 32] >> i % 32 & 1]


def remember(latches, latch, number, position):
    """As a tap does."""
    cells, held, _ = latches.tables
    cells[latch.row, 0, number] = min(int(cells[latch.row, 0, number]), position)
    if number in latch.held:
        bit = 1 << position % 32
        held[latch.held[number], position // 32] |= bit - (bit >> 31 << 32)


def settle(run, latches, latch, first, drafts, drawn):
    words = np.array([[1, latch.row, first, drafts, latches.gates_of_next[latch.row]]], np.int32)
    counts = torch.tensor([7, drawn, 7], dtype=torch.int32, device=DEVICE)
    cells, held, _ = latches.tables
    run(torch.from_numpy(words).to(DEVICE), counts, cells, held)
    assert counts.tolist()[::2] == [7, 7]
    return int(counts[1])


def made(gates, before=()):
    latches = Latches(4, POSITIONS, DEVICE)
    latches.acquire([gate(3, NEXT)])  # another sequence's
    latch = latches.acquire(gates, before)
    latches.commit()
    return latches, latch


RUNS = [drafted.reference, pytest.param(drafted.launch, marks=pytest.mark.kernels)]


@pytest.mark.parametrize("run", RUNS if HAS_TRITON else RUNS[:1])
@pytest.mark.parametrize(
    ("fired", "drawn", "kept"),
    [
        ((), 4, 4),
        ((), 2, 2),
        ((60,), 4, 1),  # the token that was the sequence's own before
        ((62,), 4, 3),
        ((62,), 2, 2),  # of a draft that is rejected
        ((61, 62, 63), 4, 2),
        ((63,), 4, 4),  # nothing is drafted after it
        ((12,), 4, 4),  # long ago
        ((12, 61), 4, {REST: 4, NEXT: 2}),
    ],
)
@pytest.mark.parametrize("scope", [REST, NEXT])
def test_tokens_after_the_first_row_that_changes_a_latch_are_not_kept(
    run, scope, fired, drawn, kept
):
    latches, latch = made([gate(0, REST), gate(31, scope)], before=(0,))
    for position in fired:
        remember(latches, latch, 31, position)
    kept = kept[scope] if isinstance(kept, dict) else kept
    assert settle(run, latches, latch, 60, 3, drawn) == kept
    own = [position for position in fired if position < 60 + kept]
    cells = latches.tables[0][latch.row, 0].tolist()
    assert (cells[0], cells[31]) == (BEFORE, min(own, default=NEVER))
    if scope == NEXT:
        assert bits_of(latches, latch, 31) == own


def test_the_latches_of_the_first_rank_count_for_all():
    """Which tokens are kept must be the same, though the other one saw a row on the other side of
    an edge."""
    slots, told, found = Slots(2), [], []
    for fired, agree in (
        ((61,), lambda table: told.append(table.clone())),
        ((63,), lambda table: table.copy_(told.pop(0))),
    ):
        latches, latch = made([gate(0, REST), gate(31, NEXT)])
        for position in fired:
            remember(latches, latch, 31, position)
        slots.values[Column.GATE, DECODE, 1] = latch.row
        drafted_latches = DraftedLatches(slots, latches, DEVICE, agree)
        drafted_latches.begin(StepBatch(*np.array([[1], [60], [4], [0], [3]], np.int32)))
        drawn = torch.tensor([4], dtype=torch.int32, device=DEVICE)
        drafted_latches.settle(drawn)
        found.append((int(drawn), bits_of(latches, latch, 31), latches.tables[0].cpu()))
    (first, *_), (other, *_) = found
    assert first == other == 2
    assert found[0][1] == found[1][1] == [61]
    assert torch.equal(found[0][2], found[1][2])
    assert not told


@pytest.mark.kernels
@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
def test_the_kernel_is_its_reference():
    pick = np.random.default_rng(0)
    for _ in range(20):
        both = []
        scopes = pick.choice([REST, NEXT], MAX_GATES)
        fires = pick.random((POSITIONS, MAX_GATES)) < pick.choice([0.0, 0.01, 0.3])
        first, drafts = int(pick.integers(0, 90)), int(pick.integers(1, 9))
        drawn = int(pick.integers(1, drafts + 2))
        for run in (drafted.reference, drafted.launch):
            latches, latch = made([gate(n, int(scope)) for n, scope in enumerate(scopes)])
            for position, number in zip(*fires[: first + drafts + 1].nonzero(), strict=True):
                remember(latches, latch, int(number), int(position))
            kept = settle(run, latches, latch, first, drafts, drawn)
            both.append((kept, *(table.cpu() for table in latches.tables[:2])))
        assert both[0][0] == both[1][0]
        assert all(torch.equal(a, b) for a, b in zip(both[0][1:], both[1][1:], strict=True))

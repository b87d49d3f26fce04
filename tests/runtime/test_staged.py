"""Tables that the host writes, against an array that is written at once."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tllm.runtime import staged
from tllm.runtime.staged import StagedTable

CPU = torch.device("cpu")
PLACES = st.tuples(st.integers(0, 3), st.integers(0, 5))
ACTIONS = st.one_of(
    st.tuples(st.just("stage"), PLACES, st.integers(-9, 9)),
    st.tuples(st.just("stage all"), PLACES, st.integers(-9, 9)),
    st.tuples(st.just("grow"), PLACES, st.just(0)),
    st.tuples(st.just("commit"), PLACES, st.just(0)),
)


@given(st.lists(ACTIONS, max_size=30))
def test_what_is_staged_arrives_together_and_outlives_growing(actions):
    table = StagedTable((4, 6, 3), 2, torch.int32, CPU, fill=-1)
    expected, pending = np.full((4, 6, 3), -1), {}
    for action, (point, row), value in actions:
        if action == "stage":
            pending[point, row] = value
            table.stage((point, row), np.full(3, value, np.int32))
        elif action == "stage all":
            there = [((point + i) % 4, row) for i in range(3)]
            pending |= {place: value + i for i, place in enumerate(there)}
            entries = torch.arange(value, value + 3, dtype=torch.int32)[:, None].expand(3, 3)
            table.stage_all(np.array(there), entries)
        elif action == "grow":
            moved = table.grow((4, 3 * row, 3))
            more = max(0, 3 * row - expected.shape[1])
            assert moved == bool(more)
            expected = np.concatenate([expected, np.full((4, more, 3), -1)], 1)
        else:
            assert table.commit() == bool(pending)
            for place, staged_value in pending.items():
                expected[place] = staged_value
            pending = {}
        assert bool(table) == bool(pending)
        assert (table.tensor.numpy() == expected).all()


def test_a_commit_is_one_upload(monkeypatch):
    sent, upload = [], staged.upload
    monkeypatch.setattr(staged, "upload", lambda *given: (sent.append(1), upload(*given))[1])
    table = StagedTable((0, 2), 1, torch.bfloat16, CPU)
    for row in range(5):
        table.stage(row, torch.full((2,), row, dtype=torch.bfloat16))
    table.grow((8, 2))
    table.commit()
    assert len(sent) == 1
    assert table.tensor[:, 0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


def test_large_entries_are_written_without_being_joined(monkeypatch):
    """Of an entry that is staged twice the later one, too; what was staged is not changed."""
    sent, uploaded = [], staged.uploaded
    monkeypatch.setattr(staged, "uploaded", lambda *given: (sent.append(1), uploaded(*given))[1])
    table = StagedTable((64, 4096), 1, torch.bfloat16, CPU)
    entries = torch.randn(40, 4096).to(torch.bfloat16)
    table.stage_all(np.arange(40)[::-1].copy(), entries)
    table.commit()
    assert torch.equal(table.tensor[:40], entries.flip(0)) and not table.tensor[40:].any()
    before = entries.clone()
    table.stage_all(np.arange(40), entries)
    table.stage(3, torch.ones(4096, dtype=torch.bfloat16))
    table.commit()
    assert len(sent) == 2
    assert (table.tensor[3] == 1).all() and torch.equal(table.tensor[4:40], entries[4:])
    assert torch.equal(entries, before)


def test_numbers_are_written_one_at_a_time():
    table = StagedTable((2, 3), 2, torch.int32, CPU, fill=-1)
    table.stage((1, 2), np.array([7], np.int32))
    table.commit()
    assert table.tensor.tolist() == [[-1, -1, -1], [-1, -1, 7]]

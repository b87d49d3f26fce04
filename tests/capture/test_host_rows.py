"""Rows on the host come back by sequence, whoever copied them and whenever they were taken."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tllm.consumers.capture import host_rows, row_copier
from tllm.consumers.capture.host_rows import Chunk, HostRows
from tllm.consumers.capture.row_copier import RowCopier, RowCopy
from tllm.result_memory import ResultMemory

SHAPE = 3, 5
"""Places and width."""


def rows_of(sequence: int, positions: np.ndarray) -> torch.Tensor:
    """What the rows of a sequence hold: every number says where it belongs."""
    number = 1_000 * sequence + torch.from_numpy(positions.astype(np.float32))
    inner = torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE) / 100
    return number[:, None, None] + inner


@pytest.fixture
def many_threads(monkeypatch):
    """Copies of any size are shared by four threads."""
    monkeypatch.setattr(row_copier, "_PIECE", 128)
    monkeypatch.setattr(host_rows, "RowCopier", lambda: RowCopier(4))


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_copies_are_made_wherever_they_go(monkeypatch, threads, dtype):
    monkeypatch.setattr(row_copier, "_PIECE", 128)
    copier = RowCopier(threads)
    generator = torch.Generator().manual_seed(0)
    copies, expected = [], []
    for count in (0, 1, 7, 200):
        source = (100 * torch.rand(count, 4, 3, generator=generator)).to(dtype)
        target = torch.zeros(count + 5, 4, 3, dtype=dtype)
        copies.append(RowCopy(target, 2, source))
        expected.append((target[2 : 2 + count], source))
        order = torch.randperm(count + 5, generator=generator)[:count]
        target = torch.zeros(count + 5, 4, 3, dtype=dtype)
        copies.append(RowCopy(target, order.numpy(), source))
        expected.append((target, torch.zeros_like(target).index_copy_(0, order, source)))
    copier.run(copies)
    copier.close()
    assert all(torch.equal(found, wanted) for found, wanted in expected)
    assert all(not copy.target[: copy.at].any() for copy in copies if isinstance(copy.at, int))


@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_every_row_is_given_once_in_order(monkeypatch, many_threads, leave, seed):
    monkeypatch.setattr(host_rows, "_CHUNK_BYTES", 40_000)
    rng = random.Random(seed)
    held = HostRows(1 << 30, ResultMemory(0), leave=leave)
    ahead = dict.fromkeys(range(8), 0)
    given: dict[int, list[tuple[np.ndarray, torch.Tensor]]] = {s: [] for s in ahead}
    for _ in range(300):
        prefill = rng.random() < 0.2
        chosen = rng.sample(sorted(ahead), rng.randint(1, 4))
        counts = [rng.randint(5, 60) if prefill else 1 for _ in chosen]
        positions = [
            np.arange(ahead[s], ahead[s] + n, dtype=np.int32)
            for s, n in zip(chosen, counts, strict=True)
        ]
        for sequence, count in zip(chosen, counts, strict=True):
            ahead[sequence] += count
        index = np.repeat(np.arange(len(chosen), dtype=np.int32), counts)
        rows = torch.cat([rows_of(s, at) for s, at in zip(chosen, positions, strict=True)])
        order = np.arange(len(index))
        if rng.random() < 0.3:  # as where two stretches of a sequence are in one step
            order = np.argsort([rng.random() for _ in order], kind="stable")
            order = order[np.argsort(np.concatenate(positions)[order], kind="stable")]
        held.add(
            "kind",
            Chunk(
                chosen,
                index[order],
                np.concatenate(positions)[order],
                rows[torch.from_numpy(order)].contiguous(),
            ),
        )
        if prefill and rng.random() < 0.5:
            sequence, limit = chosen[0], rng.randint(0, 200)
            held.sort("kind")
            most = rng.choice([500, 1 << 30])
            early = held.take_before(sequence, limit, most)
            if early is not None:
                assert early.positions[-1] < limit
                assert early.tensor.nbytes + 4 * len(early) * SHAPE[0] <= most
                given[sequence].append((early.positions, early.tensor))
    for sequence, count in ahead.items():
        rows, missing = held.take("kind", sequence)
        assert not missing
        if rows is not None:
            given[sequence].append((rows.positions, rows.tensor))
        positions = np.concatenate([at for at, _ in given[sequence]])
        assert positions.tolist() == list(range(count))
        tensor = torch.cat([rows for _, rows in given[sequence]])
        assert torch.equal(tensor, rows_of(sequence, positions))
    assert held.held == 0
    held.close()

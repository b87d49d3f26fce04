"""Rows on the host come back by sequence, whoever copied them and whenever they were taken."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tllm import result_memory
from tllm.consumers.capture import host_rows, landing, row_copier
from tllm.consumers.capture.host_rows import Chunk, HostRows
from tllm.consumers.capture.landing import Landed, Landing, LandingPart, Slab
from tllm.consumers.capture.row_copier import RowCopier, RowCopy
from tllm.ports import RequestInfo, RowMeta
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


@pytest.mark.parametrize("sorts", [True, False], ids=["sorted", "taken one by one"])
@pytest.mark.parametrize("seed", range(6))
def test_rows_that_land_by_sequence_are_not_copied_again(monkeypatch, seed, sorts):
    """Batches go on for some steps, change, and have prompts among them; memory comes back now and
    then, and is used for as many rows as it holds."""
    monkeypatch.setattr(result_memory, "WORTHWHILE", 64)
    monkeypatch.setattr(landing, "_LEAST_BYTES", 256)
    rng = random.Random(seed)
    memory, device = ResultMemory(), torch.device("cpu")
    lands, held = Landing(memory, device), HostRows(1 << 30, memory, leave=False)
    copied: list[RowCopy] = []
    run = held._copier.run
    monkeypatch.setattr(held._copier, "run", lambda copies: (copied.extend(copies), run(copies)))
    landed_rows = 0
    for _ in range(60):  # batches
        for nbytes in rng.sample([500, 2_000, 9_000, 40_000], rng.randint(0, 3)):
            memory.empty((nbytes,), torch.uint8).fill_(255)  # a result that is gone
        names = [f"r{n}" for n in rng.sample(range(1_000), rng.randint(1, 5))]
        requests = tuple(RequestInfo(n, n, 0, 1, i, 0) for i, n in enumerate(names))
        numbers = [int(name[1:]) for name in names]
        ahead = [0] * len(names)
        for step in range(rng.randint(1, 30)):
            counts = [rng.randint(5, 60) if not step and rng.random() < 0.7 else 1 for _ in names]
            index = np.repeat(np.arange(len(names), dtype=np.int32), counts)
            where = [
                np.arange(a, a + n, dtype=np.int32) for a, n in zip(ahead, counts, strict=True)
            ]
            ahead = [a + n for a, n in zip(ahead, counts, strict=True)]
            rows = torch.cat([rows_of(n, at) for n, at in zip(numbers, where, strict=True)])
            steps = np.zeros(len(index), np.int64)
            meta = RowMeta(requests, index, np.concatenate(where), steps)
            stop = 0
            for part in lands.parts("kind", meta, rows) or [LandingPart(0, len(rows))]:
                assert part.first == stop
                stop = part.stop
                own = meta.select(np.arange(part.first, part.stop))
                if part.into is not None:
                    part.into.copy_(rows[part.first : part.stop])
                    landed_rows += part.stop - part.first
                into = rows[part.first : part.stop] if part.into is None else part.into
                whose = [request.request_id for request in own.requests]
                chunk = Chunk(whose, own.request_index, own.positions, into, part.landed)
                held.add("kind", chunk)
            assert stop == len(rows)
        lands.forget()
        if sorts:
            held.sort("kind")
        kept = {row.untyped_storage().data_ptr() for copy in copied for row in [copy.source]}
        assert not kept & {piece.address for _, piece in memory._pieces.values()}
        copied.clear()
        for name, number, count in zip(names, numbers, ahead, strict=True):
            found, missing = held.take("kind", name)
            assert not missing and found is not None
            assert found.positions.tolist() == list(range(count))
            assert torch.equal(found.tensor, rows_of(number, found.positions))
            del found
    assert landed_rows > 100
    assert held.held == 0
    held.close()
    memory.trim()


def test_new_memory_is_made_ready_for_the_prompts_of_a_step(monkeypatch):
    monkeypatch.setattr(result_memory, "WORTHWHILE", 64)
    monkeypatch.setattr(landing, "_FILE_BYTES", 3_000)
    memory = ResultMemory()
    monkeypatch.setattr(memory, "_made", lambda nbytes: pytest.fail("memory was made on demand"))
    counts = [60, 5, 7, 100, 41]
    requests = tuple(RequestInfo(f"r{n}", f"r{n}", 0, 1, n, 0) for n in range(len(counts)))
    index = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    positions = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    rows = torch.cat([rows_of(n, np.arange(count)) for n, count in enumerate(counts)])
    meta = RowMeta(requests, index, positions, np.zeros(len(index), np.int64))
    assert not Landing(memory, torch.device("cpu")).parts("kind", meta, rows)
    held = HostRows(1 << 30, memory, leave=False)
    held.add("kind", Chunk([r.request_id for r in requests], index, positions, rows))
    for number, count in enumerate(counts):
        found, _ = held.take("kind", f"r{number}")
        assert torch.equal(found.tensor, rows_of(number, np.arange(count)))
    assert not memory._coming  # as much as was needed
    held.close()
    del found
    memory.trim()


def test_rows_land_in_the_largest_memory_that_fits():
    """Beside the files of small results, which are many."""
    memory, cpu = ResultMemory(), torch.device("cpu")
    sizes = (4 << 20, 32 << 20, 4 << 20, 64 << 20, 16 << 20)
    results = [memory.empty((size,), torch.uint8) for size in sizes]
    del results
    taken = [memory.used_before(1 << 20, 48 << 20, cpu) for _ in range(5)]
    assert [None if raw is None else len(raw) >> 20 for raw in taken] == [32, 16, 4, 4, None]
    del taken
    memory.trim()


def test_a_batch_that_is_described_anew_in_each_step_goes_on():
    memory, count = ResultMemory(), 16
    memory.empty((1 << 20,), torch.uint8)  # a result that is gone
    lands = Landing(memory, torch.device("cpu"))
    requests = [RequestInfo(str(n), str(n), 0, 1, n, 0) for n in range(count)]
    rows = torch.zeros(count, 1, 1024)
    slabs = set()
    for step in range(18):
        positions = np.full(count, step, np.int32)
        index = np.arange(count, dtype=np.int32)
        meta = RowMeta(tuple(requests), index, positions, positions.astype(np.int64))
        slabs |= {part.landed.slab for part in lands.parts("kind", meta, rows)}
    assert [slab.steps for slab in slabs] == [16], "all but the first two"


def test_rows_of_consecutive_steps_that_lie_in_one_place_are_one_piece():
    """Of a sequence that ends while the others go on."""
    held = HostRows(1 << 30, ResultMemory(0), leave=False)
    slabs = [Slab(torch.zeros(3, 4, *SHAPE)) for _ in range(2)]
    index = np.arange(3, dtype=np.int32)
    for position in range(10):
        at = np.full(3, position, np.int32)
        rows = torch.cat([rows_of(sequence, at[:1]) for sequence in range(3)])
        landed = (
            None if position in (0, 9) else Landed(slabs[(position - 1) // 4], (position - 1) % 4)
        )
        if landed is not None:
            slab = landed.slab.rows
            slab[:, landed.step] = rows
            rows = slab[:, landed.step]
        held.add("kind", Chunk(["a", "b", "c"], index, at, rows, landed))
    for name in "bca":
        number = "abc".index(name)
        found, _ = held.take("kind", name)
        assert found is not None and found.positions.tolist() == list(range(10))
        assert [len(rows) for _, rows in found.pieces()] == [1, 4, 4, 1]
        assert torch.equal(found.tensor, rows_of(number, found.positions))
    assert held.held == 0
    held.close()


@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("lands", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_sequences_that_come_and_go_are_given_their_rows_in_few_pieces(
    monkeypatch, many_threads, leave, lands, seed
):
    """One ends in nearly every step, and has some rows that were sorted and some that were not."""
    rng = random.Random(seed)
    held = HostRows(1 << 30, ResultMemory(0), leave=leave)
    sorts, sort = [], held.sort
    monkeypatch.setattr(held, "sort", lambda kind: (sorts.append(kind), sort(kind)))
    running, number, pieces, steps = dict.fromkeys(range(20), 0), 20, [], 200
    for _ in range(steps):
        names = rng.sample(sorted(running), len(running))
        counts = [rng.choice([1, 1, 1, 3]) for _ in names]
        index = np.repeat(np.arange(len(names), dtype=np.int32), counts)
        where = [np.arange(running[n], running[n] + c) for n, c in zip(names, counts, strict=True)]
        rows = torch.cat([rows_of(n, at) for n, at in zip(names, where, strict=True)])
        landed = Landed() if lands and rng.random() < 0.2 else None
        positions = np.concatenate(where).astype(np.int32)
        held.add("kind", Chunk(names, index, positions, rows, landed))
        for name, count in zip(names, counts, strict=True):
            running[name] += count
        if rng.random() < 0.8:
            ended = rng.choice(sorted(running))
            count = running.pop(ended)
            running[number], number = 0, number + 1
            found, missing = held.take("kind", ended)
            assert not missing and found is not None
            assert found.positions.tolist() == list(range(count))
            pieces.append(len(list(found.pieces())))
            assert torch.equal(found.tensor, rows_of(ended, found.positions))
    for name, count in running.items():
        found, _ = held.take("kind", name)
        assert (found is None) if not count else found.positions.tolist() == list(range(count))
    assert held.held == 0
    if not lands:
        assert len(sorts) < steps / 3
        assert sum(pieces) / len(pieces) < 8, "they run for 25 steps each"
    held.close()


def test_of_two_rows_of_one_position_the_later_counts_also_where_it_is_a_prompts():
    """A streamed prompt goes on with rows of its own where generated ones were dropped."""
    held = HostRows(1 << 30, ResultMemory(0), leave=False)
    for position in (3, 4):
        at = np.array([position], np.int32)
        held.add("kind", Chunk(["a"], np.zeros(1, np.int32), at, rows_of(0, at)))
    later = np.arange(4, 20, dtype=np.int32)
    held.add("kind", Chunk(["a"], np.zeros(16, np.int32), later, rows_of(7, later)))
    found, _ = held.take("kind", "a")
    assert found is not None and found.positions.tolist() == list(range(3, 20))
    assert torch.equal(found.tensor, torch.cat([rows_of(0, np.array([3])), rows_of(7, later)]))
    held.close()

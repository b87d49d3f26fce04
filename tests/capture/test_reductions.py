"""Reductions on the device go by position, and keep nothing of what has ended."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tllm.consumers.capture.reductions import AHEAD, Reductions
from tllm.ports import PortBundle, RequestInfo, RowMeta

PLACES, HIDDEN = 2, 3


class Context:
    """As much of a `ConsumerContext` as reductions use."""

    def upload(self, array):
        return torch.from_numpy(array)


CONTEXT: Any = Context()


def info(name: str) -> RequestInfo:
    return RequestInfo(name, name, 0, 1, slot=0, prompt_len=100)


def values(positions) -> torch.Tensor:
    at = torch.as_tensor(np.asarray(positions, np.float32))
    return at[:, None, None].sin() * torch.arange(1, 1 + PLACES * HIDDEN).view(PLACES, HIDDEN)


def bundle(phase: str, rows: list[tuple[RequestInfo, int]]) -> PortBundle:
    """Rows of some sequences, at these positions and in this order."""
    requests = list(dict.fromkeys(id(request) for request, _ in rows))
    known = {id(request): request for request, _ in rows}
    positions = np.array([position for _, position in rows], np.int32)
    meta = RowMeta(
        tuple(known[each] for each in requests),
        np.array([requests.index(id(request)) for request, _ in rows], np.int32),
        positions,
        np.zeros(len(rows), np.int64),
    )
    return PortBundle({"rows": values(positions)}, meta, {"phase": phase})


def expected(how: str, positions: list[int]) -> torch.Tensor:
    rows = values(sorted(positions))
    return {"mean": rows.sum(0), "max": rows.amax(0), "last": rows[-1]}[how]


@pytest.mark.parametrize("how", ["mean", "max", "last"])
@pytest.mark.parametrize("seed", range(5))
def test_rows_may_arrive_in_any_order(how, seed):
    draw = random.Random(seed)
    table = Reductions(how, PLACES, HIDDEN, torch.device("cpu"))
    sequences = [info(str(number)) for number in range(12)]
    positions = {id(each): [list(range(30)), list(range(100, 130))] for each in sequences}
    left = {each: [draw.sample(p, len(p)) for p in given] for each, given in positions.items()}
    for _ in range(200):
        phase, most = draw.randrange(2), draw.choice([1, 1, 4])
        rows = []
        for each in sequences:
            own = left[id(each)][phase]
            rows += [(each, own.pop()) for _ in range(min(most, len(own)))]
        draw.shuffle(rows)
        if rows:
            table.add(bundle(("prefill", "decode")[phase], rows), CONTEXT)
    for each in sequences:
        taken = table.take(each, CONTEXT)
        for phase in (0, 1):
            given = sorted(set(positions[id(each)][phase]) - set(left[id(each)][phase]))
            tail = taken.tail_positions.tolist() if phase else []
            assert taken.positions[phase].tolist() == sorted(set(given) - set(tail))
            if set(given) - set(tail):
                want = expected(how, list(set(given) - set(tail)))
                assert torch.allclose(taken.totals[phase], want, atol=1e-5)
        if taken.tail is not None:
            assert torch.equal(taken.tail, values(taken.tail_positions))
    assert table.unused


@pytest.mark.parametrize("how", ["mean", "max", "last"])
def test_sequences_that_ended_keep_no_place(how):
    """Eight at once, each with two or three generated tokens, one after another."""
    table = Reductions(how, PLACES, HIDDEN, torch.device("cpu"))
    running: list[tuple[RequestInfo, int]] = []
    for number in range(400):
        running.append((info(str(number)), number % 5))
        for step in range(2):
            rows = [(request, 100 + age + step) for request, age in running]
            table.add(bundle("decode", rows), CONTEXT)
        if len(running) == 8:
            taken = table.take(running.pop(0)[0], CONTEXT)
            assert taken.tail is not None
        assert table.rows == 16
    for request, _ in running:
        table.take(request, CONTEXT)
    assert table.unused and AHEAD > 0

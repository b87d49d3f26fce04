"""What sequences remember of their conditions, in the tables of a worker: chunks, and beginning
again."""

import numpy as np
import pytest
import torch

from tllm.runtime.columns import Column
from tllm.runtime.kernels import tap
from tllm.runtime.steering import Steering
from tllm.runtime.taps import Taps
from tllm.spec.groups import compose
from tllm.spec.hooks import HookPoint
from tllm.spec.tiers import Tiers

HIDDEN, TOKENS = 8, 6
EARLY, LATE = (HookPoint.POST_BLOCK, 1), (HookPoint.POST_BLOCK, 2)
V, P, Q = np.random.default_rng(0).standard_normal((3, HIDDEN), dtype=np.float32)


class Worker:
    """One sequence at two taps; its probe is at the first of them."""

    def __init__(self, when, place=2, phase="vectors", prompt_len=5, agree=None):
        self.taps = Taps(
            dict.fromkeys([EARLY, LATE]),
            second={},
            hidden_size=HIDDEN,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_tokens=TOKENS,
            max_programs=4,
            add_rows=4,
        )
        self.steering = Steering(
            self.taps, lambda hook, layer: (HookPoint(hook), layer), 4, 8, 70, agree
        )
        entry = {"vector": V, "when": when}
        self.groups = compose([Tiers.parse(**{phase: {"post_block": {place: entry}}})])
        for group in self.groups:
            self.steering.put(
                group.vectors, {group.digest: group.operations}, {group.digest: group.gates}
            )
        self.prompt_len = prompt_len
        self.rows = [
            self.steering.acquire(tuple(g.digest for g in self.groups if g.phase in ("any", each)))
            for each in ("prefill", "decode")
        ]
        digests = [group.digest for group in self.groups]
        self.latch = self.steering.remember(0, digests, prompt_len)

    def step(self, rows, start):
        """Compute tokens of the sequence from `start` on; what the taps make of them."""
        self.steering.commit()
        plan, count = self.taps.plan, len(rows)
        positions = torch.arange(start, start + count)
        plan[Column.STEER.plan_row, :count] = torch.where(
            positions < self.prompt_len, *map(torch.tensor, self.rows)
        ).int()
        plan[Column.GATE.plan_row, :count] = self.latch.row
        plan[Column.POSITION.plan_row, :count] = positions.int()
        for column in (Column.STEER, Column.GATE, Column.POSITION):
            plan[column.plan_row, count:] = -1
        self.taps.commit()
        means = self.steering.gates.means
        means.begin(*(np.array([each], np.int32) for each in (0, start, count)))
        self.steering.gates.forget_scores(TOKENS)
        for i in range(2):
            rows = rows.clone()
            tap.reference(rows, None, self.taps.descriptors[i], plan)
        means.judge()
        return rows


def rows_of(count, seed=1):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def probe(vector, score="dot", **more):
    where = {"hook": "post_block", "layer": 1, "vector": vector, "score": score}
    return {"probe": where, **more}


def score_of(row, vector, score):
    """The formula written out, `vector` of length 1 but for `dot`."""
    row, v = row.double(), torch.from_numpy(vector).double()
    if score == "dot":
        return row @ v
    v = v / v.norm()
    if score == "cast":
        v = torch.tanh((row @ v) * v)
    return torch.cosine_similarity(row, v, dim=0)


@pytest.mark.parametrize("begins_again", [False, True])
@pytest.mark.parametrize("score", ["dot", "cosine", "cast"])
@pytest.mark.parametrize("holds", [False, True])
def test_the_mean_of_a_prompt_is_judged_once_whatever_its_chunks(score, holds, begins_again):
    prompt = rows_of(5)
    expected = float(score_of(prompt.mean(0), P, score))
    edge = expected + (-1e-3 if holds else 1e-3)
    worker = Worker(probe(P, score, above=edge, over="prompt_mean"), place=1)
    chunks = [(0, 3)] * begins_again + [(0, 2), (2, 4), (4, 5)]
    for start, end in chunks:
        assert torch.equal(worker.step(prompt[start:end], start), prompt[start:end])
        state = worker.steering.gates.state
        assert bool(state[: end - start, :, 0].isnan().all()) == (end < 5)
    strength, found = state[0, :, 0].tolist()
    assert found == pytest.approx(expected, abs=1e-5)
    assert strength == float(holds)
    for position in (5, 6):
        row = rows_of(1, position)
        assert torch.equal(worker.step(row, position), row + torch.from_numpy(V) * holds)
    # Preempted, and computed again at once: nothing is judged anew.
    assert torch.equal(worker.step(prompt, 0), prompt)
    again = rows_of(3, 9)
    assert torch.equal(worker.step(again, 5), again + torch.from_numpy(V) * holds)
    worker.steering.forget(0, worker.latch)


@pytest.mark.parametrize("holds", [False, True])
def test_ranks_that_add_the_rows_of_a_prompt_in_another_order_decide_alike(holds):
    """As float32, 1e8 + 1 is 1e8."""
    orders = [(1e8, -1e8, 1.0), (1e8, 1.0, -1e8)]
    told = []
    when = probe(np.ones(HIDDEN, np.float32), above=1.0, over="prompt_mean")
    ranks = [
        Worker(when, 1, prompt_len=3, agree=lambda judged: told.append(judged.clone())),
        Worker(when, 1, prompt_len=3, agree=lambda judged: judged.copy_(told[0])),
    ]
    row = rows_of(1, 7)
    for rank, order in zip(ranks, orders if holds else reversed(orders), strict=True):
        for position, value in enumerate(order):
            rank.step(torch.full((1, HIDDEN), value), position)
        found = rank.steering.gates.state[0, :, 0].tolist()
        assert found == pytest.approx([float(holds), HIDDEN * holds / 3])
        assert torch.equal(rank.step(row, 3), row + torch.from_numpy(V) * holds)
    assert len(told) == 1


@pytest.mark.parametrize("every", [False, True])
def test_conditions_on_the_mean_are_joined(every):
    prompt = rows_of(5)
    means = [float(score_of(prompt.mean(0), vector, "dot")) for vector in (P, Q)]
    terms = [probe(P, above=means[0] - 1), probe(Q, above=means[1] + 1)]
    worker = Worker({"all" if every else "any": terms, "over": "prompt_mean"})
    worker.step(prompt, 0)
    assert worker.steering.gates.state[4, 0, :3].tolist() == [1, 0, float(not every)]
    row = rows_of(1, 7)
    assert torch.equal(worker.step(row, 5), row + torch.from_numpy(V) * (not every))


@pytest.mark.parametrize("scope", ["rest", "next"])
@pytest.mark.parametrize("decode", [False, True])
def test_tokens_computed_again_together_find_what_they_found_one_by_one(scope, decode):
    """With steering before the probe, of generated tokens; and after it, of all. More positions
    than a word has bits."""
    rows = rows_of(70)
    worker = Worker(
        probe(P, above=1.0, scope=scope),
        place=1 if decode else 2,
        phase="decode_vectors" if decode else "vectors",
    )
    first = [worker.step(rows[i : i + 1], i) for i in range(len(rows))]
    held = rows @ torch.from_numpy(P) > 1.0
    held[: 5 if decode else 0] = False
    before = torch.cat([torch.tensor([False]), held[:-1]])
    shares = before if scope == "next" else before.cumsum(0) > 0
    expected = rows + shares[:, None] * torch.from_numpy(V)
    assert 0 < int(shares.sum()) < 70
    assert torch.equal(torch.cat(first), expected)
    again = [worker.step(rows[i : i + TOKENS], i) for i in range(0, len(rows), TOKENS)]
    assert torch.equal(torch.cat(again), expected)


def test_the_memory_of_a_sequence_that_has_ended_is_the_next_ones():
    worker = Worker(probe(P, above=-1e9, scope="next"))
    worker.step(rows_of(5), 0)
    worker.steering.forget(0, worker.latch)
    old, digests = worker.latch, [group.digest for group in worker.groups]
    worker.latch = worker.steering.remember(0, digests, 5)
    assert (worker.latch.row, worker.latch.held) == (old.row, old.held)
    row = rows_of(1, 3)
    assert torch.equal(worker.step(row, 3), row)

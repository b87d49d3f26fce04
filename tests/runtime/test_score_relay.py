"""Conditions that are judged on one pipeline stage and needed on another: as on one stage alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from tllm.runtime.columns import PLAN_ROWS, Column
from tllm.runtime.kernels import relayed, tap
from tllm.runtime.kernels.backend import uses_triton
from tllm.runtime.latches import NEVER
from tllm.runtime.score_relay import ScoreRelay
from tllm.runtime.steering import Steering
from tllm.runtime.taps import Taps
from tllm.spec.gates import MAX_GATES
from tllm.spec.groups import compose
from tllm.spec.hooks import HookPoint
from tllm.spec.tiers import Tiers

HIDDEN, LAYERS, TOKENS, PROMPT = 8, 6, 40, 37
V, P, Q = np.random.default_rng(0).standard_normal((3, HIDDEN), dtype=np.float32)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Stage:
    """Some layers of the model, and what is done there to one sequence, in slot 5."""

    def __init__(self, layers, number, stages, groups):
        self.taps = Taps(
            {(HookPoint.POST_BLOCK, layer): None for layer in layers},
            second={},
            hidden_size=HIDDEN,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_tokens=TOKENS,
            max_programs=4,
            add_rows=4,
        )
        self.steering = Steering(self.taps, lambda hook, layer: (HookPoint(hook), layer), 4, 8, 90)
        for group in groups:
            self.steering.put(
                group.vectors,
                {group.digest: group.operations},
                {group.digest: group.gates} if group.gates else {},
            )
        is_last = number == stages - 1
        self.relay = ScoreRelay(self.steering, stages, is_last=is_last, max_sequences=2)
        self.rows = [
            self.steering.acquire(tuple(g.digest for g in groups if g.phase in ("any", each)))
            for each in ("prefill", "decode")
        ]
        digests = [group.digest for group in groups]
        self.latch = self.steering.remember(5, digests, PROMPT)
        self.relay.ask(5, digests)

    def step(self, rows, start, arrived):
        """What comes of rows, and what goes to the next stage with them."""
        self.steering.commit()
        plan, count = self.taps.plan, len(rows)
        positions = torch.arange(start, start + count)
        plan[:] = -1
        of_prompt = positions < PROMPT
        plan[Column.STEER.plan_row, :count] = torch.where(
            of_prompt, *map(torch.tensor, self.rows)
        ).int()
        if self.latch is not None:
            plan[Column.GATE.plan_row, :count] = self.latch.row
            plan[Column.POSITION.plan_row, :count] = positions.int()
        means = self.steering.gates.means
        means.begin(*(np.array([each], np.int32) for each in (5, start, count)))
        self.relay.begin(*(np.array([each], np.int32) for each in (5, count)), arrived)
        self.taps.commit()
        for i in range(len(self.taps.sites)):
            rows = rows.clone()
            tap.reference(rows, None, self.taps.descriptors[i], plan)
        means.judge()
        return rows, self.relay.take()


class Pipeline:
    """The same sequence on so many stages."""

    def __init__(self, stages, tiers):
        groups = compose([Tiers.parse(**tiers)])
        size = LAYERS // stages
        layers = [range(size * i, size * (i + 1)) for i in range(stages)]
        self.stages = [Stage(of, i, stages, groups) for i, of in enumerate(layers)]

    def step(self, rows, start):
        """What comes of rows, and which stages sent anything."""
        told, sent = None, []
        for stage in self.stages:
            rows, told = stage.step(rows, start, told)
            sent.append(told is not None)
        return rows, sent


def when(layer, vector=P, **more):
    probe = {"hook": "post_block", "layer": layer, "vector": vector}
    return {"probe": probe, **({"above": 0.5} | more)}


def entry(condition):
    return {"vector": V, "scale": 0.3, "when": condition}


TERMS = [when(0), when(3, Q, above=None, below=1.5)]
MEANS = [when(0, above=-1.0), when(3, Q, above=None, below=2.0)]
ACROSS = {
    "token": {"vectors": {"post_block": {4: entry(when(1))}}},
    "soft": {"vectors": {"post_block": {3: entry(when(0, soft=2.0))}}},
    "rest": {"vectors": {"post_block": {3: entry(when(0, scope="rest", above=4.0))}}},
    "next": {"vectors": {"post_block": {5: entry(when(2, scope="next"))}}},
    "generated": {"decode_vectors": {"post_block": {5: entry(when(2, scope="rest"))}}},
    "last": {"vectors": {"post_block": {4: entry(when(1, over="prompt_last", above=-9))}}},
    "mean": {"vectors": {"post_block": {4: entry(when(1, over="prompt_mean", above=-9))}}},
    "joint": {"vectors": {"post_block": {5: entry({"all": TERMS})}}},
    "joint of means": {
        "vectors": {"post_block": {5: entry({"all": MEANS, "over": "prompt_mean"})}}
    },
    "many": {
        "vectors": {
            "post_block": {
                3: entry(when(0, scope="rest", above=4.0)),
                4: [entry(when(1, Q)), entry(when(3, scope="next"))],
                5: entry({"any": TERMS, "scope": "rest"}),
            }
        }
    },
}
NOT_ALL = {"soft", "last", "mean", "joint of means", "many"}
"""Of these, the ones that change every token, or every one after the prompt."""


@pytest.mark.parametrize("stages", [2, 3, 6])
@pytest.mark.parametrize("name", ACROSS)
def test_stages_do_what_one_alone_does(name, stages):
    """The prompt in chunks and at once, generated tokens one by one, and all of it again, as after
    a preemption."""
    rows = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(3))
    one, several = Pipeline(1, ACROSS[name]), Pipeline(stages, ACROSS[name])
    edges = [0, 20, PROMPT, *range(PROMPT + 1, 65)]
    again = [0, TOKENS, 64]
    changed = torch.zeros(0)
    for start, end in [*pairwise(edges), *pairwise(again)]:
        expected, _ = one.step(rows[start:end], start)
        found, sent = several.step(rows[start:end], start)
        assert torch.equal(found, expected)
        assert not sent[-1]
        assert any(sent)
        if end <= 64 and len(changed) < 64:
            changed = torch.cat([changed, (expected - rows[start:end]).abs().amax(1)])
    assert bool((changed > 0).any())
    assert name in NOT_ALL or bool((changed == 0).any())


@pytest.mark.parametrize("stages", [2, 3])
def test_nothing_is_sent_where_no_condition_crosses(stages):
    last = LAYERS - 1
    tiers = {"vectors": {"post_block": {0: entry(when(0, above=-9)), last: entry(when(last))}}}
    pipeline = Pipeline(stages, tiers)
    rows, sent = pipeline.step(torch.ones(3, HIDDEN), 0)
    assert not any(sent)
    assert not torch.equal(rows, torch.ones(3, HIDDEN))


def test_what_does_not_arrive_is_missed():
    pipeline = Pipeline(2, ACROSS["token"])
    stage = pipeline.stages[1]
    with pytest.raises(RuntimeError, match="did not arrive with the rows of a step"):
        stage.step(torch.ones(3, HIDDEN), 0, None)
    stage.relay.forget(5)
    stage.step(torch.ones(3, HIDDEN), 0, None)


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_remembers_as_the_reference_does(seed):
    if not uses_triton(DEVICE):
        pytest.skip("no Triton here")
    make = torch.Generator().manual_seed(seed)
    tokens, latches, words = 24, 3, 4
    told = torch.randn(tokens, 2, MAX_GATES, generator=make)
    told[torch.rand(told.shape, generator=make) < 0.3] = torch.nan
    plan = torch.full((PLAN_ROWS, 64), -1, dtype=torch.int32)
    plan[Column.GATE.plan_row, :tokens] = torch.arange(tokens).int() // 6 - 1
    positions = torch.arange(tokens).int() % 6 + 29
    plan[Column.POSITION.plan_row, :tokens] = positions
    cells = torch.full((latches, 2, MAX_GATES), NEVER, dtype=torch.int32)
    cells[:, 0, ::3] = 31
    starts = torch.arange(latches * MAX_GATES // 4).view(latches, -1).int() * words
    cells[:, 1, ::4] = starts
    held = torch.randint(-(2**31), 2**31, (starts.numel(), words), generator=make).int()
    given = [each.to(DEVICE).clone() for each in (told, plan, cells, held)]
    before = cells.clone()
    relayed.reference(told, plan, cells, held)
    relayed.launch(*given)
    assert not torch.equal(before, cells)
    assert torch.equal(given[2].cpu(), cells)
    assert torch.equal(given[3].cpu(), held)

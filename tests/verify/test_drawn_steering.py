"""What `tllm verify` draws: every method and kind of score, by the formulas it compares with."""

from __future__ import annotations

import pytest
import torch

from tllm.runtime.columns import Column
from tllm.runtime.kernels import tap
from tllm.runtime.mlp_score import mlp_score
from tllm.runtime.steering import Steering
from tllm.runtime.taps import Taps
from tllm.spec import methods
from tllm.spec.condition_reading import parse_condition
from tllm.spec.hooks import HookPoint
from tllm.spec.tiers import Tiers
from tllm.verify.gated import MLP, Judged
from tllm.verify.reference import CHANGED
from tllm.verify.steered import METHODS, Steered, arrays_for, steering_fields

HIDDEN = 48
PLACE = ("post_block", 0)


def rows(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*shape, HIDDEN, generator=generator)


def test_every_method_is_drawn():
    assert {method for method, _ in METHODS} == set(methods.METHODS)


@pytest.mark.parametrize("number", range(len(METHODS)))
def test_each_method_is_asked_as_the_reference_computes_it(number):
    method, given = METHODS[number]
    direction, h = rows(number), rows(99, 8)
    arrays = arrays_for(method, direction, torch.Generator().manual_seed(50 + number))
    asked = steering_fields([Steered(PLACE, method, direction, given, arrays=arrays)])
    (parsed,) = Tiers.parse(vectors=asked["steering_vectors"])
    taps = Taps(
        {(HookPoint.POST_BLOCK, 0): None},
        second={},
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_tokens=8,
        max_programs=4,
        add_rows=4,
    )
    steering = Steering(taps, lambda hook, layer: (HookPoint(hook), layer), 2, 16, 64)
    steering.put({"v": parsed.vector}, {"g": [(*PLACE, "v", parsed.coefficients)]})
    taps.plan[Column.STEER.plan_row] = steering.acquire(("g",))
    steering.commit()
    taps.commit()
    steered = h.clone()
    tap.reference(steered, None, taps.descriptors[0], taps.plan)
    expected = CHANGED[method](h, direction, **given, **arrays)
    torch.testing.assert_close(steered, expected, rtol=1e-5, atol=1e-5)
    assert float((expected - h).norm(dim=1).max()) > 0.1


def test_the_small_mlp_is_asked_as_it_is_scored():
    judged, h = Judged(PLACE, rows(3), 0.0, MLP), rows(4, 20)
    condition = parse_condition(judged.entry, "when")
    packed = torch.from_numpy(condition.vector.copy())
    found = mlp_score(h, packed, condition.widths, condition.score) + condition.bias
    states = {"post_block": {0: h}}
    torch.testing.assert_close(found, judged.scores(states))
    nudged = {"post_block": {0: h + 1e-4 * h.abs().amax(1, keepdim=True) * rows(5, 20).sign()}}
    off = (judged.scores(nudged) - found).abs()
    assert bool((off <= judged.rounding(states, 1e-4)).all())

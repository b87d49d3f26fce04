from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from demo import diversity


def test_the_bootstrap_keeps_a_puzzles_two_figures_together() -> None:
    without = np.array([1.0, 10.0, 3.0, 25.0])
    difference, ratio = diversity.paired_bootstrap(without, without + 2)
    assert (difference.value, difference.low, difference.high) == pytest.approx((2, 2, 2))
    assert ratio.value == pytest.approx(47 / 39)
    assert ratio.low < ratio.value < ratio.high


def test_an_interval_holds_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for trial in range(200):
        without = rng.normal(8, 3, 50)
        having = without + rng.normal(0.5, 1, 50)
        difference, _ = diversity.paired_bootstrap(without, having, draws=500, seed=trial)
        held += difference.low <= 0.5 <= difference.high
    assert 0.88 < held / 200 < 0.99


def test_beta_is_chosen_on_other_puzzles_than_are_measured() -> None:
    measured = diversity.chosen("held_out")
    swept = diversity.chosen("train", 20)
    assert len(swept) == 20
    assert len(measured) >= 20
    assert not {p.question for p in swept} & {p.question for p in measured}
    assert len({p.family for p in swept}) == 3


def test_both_arms_are_sampled_alike() -> None:
    setting = diversity.Setting()
    off, on = setting.params({"enabled": False}, 3), setting.params({"beta": 0.2}, 3)
    off.extra_args = on.extra_args = None
    assert repr(off) == repr(on)

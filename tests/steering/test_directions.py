"""Directions and their scores: against planted truths, slow references, and nonsense."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tllm.steering.directions import (
    FINDERS,
    NoDirectionError,
    find_direction,
    first_component,
    probe,
)
from tllm.steering.separation import Separation, held_out_scores

Rows = tuple[torch.Tensor, torch.Tensor]

every_method = pytest.mark.parametrize("method", FINDERS)
either_way = pytest.mark.parametrize("paired", [True, False])


def measure_separation(*rows: torch.Tensor | str, **given: object) -> Separation:
    return held_out_scores(*rows, **given).separation


def planted(
    n: int = 60, hidden: int = 24, gap: float = 4.0, seed: int = 0, nuisance: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two clouds that differ by `gap` along a known unit direction, in float32.

    Pairs share a big part of their own (as two prompts about the same scene do), and
    `nuisance` is the spread along one direction that has nothing to do with the contrast.
    """
    random = torch.Generator().manual_seed(seed)
    truth, other = torch.linalg.qr(torch.randn(hidden, 2, generator=random, dtype=torch.float64))[
        0
    ].T
    shared = torch.randn(n, hidden, generator=random, dtype=torch.float64)
    rows = []
    for side in (0.5, -0.5):
        noise = 0.3 * torch.randn(n, hidden, generator=random, dtype=torch.float64)
        along = nuisance * torch.randn(n, 1, generator=random, dtype=torch.float64) * other
        rows.append((shared + noise + along + side * gap * truth + 7.0).float())
    return rows[0], rows[1], truth


def cosine(left: Any, right: Any) -> float:
    left, right = (torch.as_tensor(each, dtype=torch.float64) for each in (left, right))
    return float(left @ right / left.norm() / right.norm())


@every_method
@either_way
def test_a_planted_direction_is_found(method: str, paired: bool):
    positive, negative, truth = planted(n=400, gap=6.0)
    found = find_direction(positive, negative, method, paired=paired)
    assert cosine(found.vector, truth) > (0.9 if method == "probe" else 0.97)
    assert found.scale == pytest.approx(6.0, rel=0.1)
    assert found.vector.dtype == np.float32
    assert np.linalg.norm(found.vector) == pytest.approx(1, abs=1e-6)


@every_method
@either_way
def test_exchanging_the_sides_turns_the_direction_round(method: str, paired: bool):
    positive, negative, _ = planted()
    there = find_direction(positive, negative, method, paired=paired)
    back = find_direction(negative, positive, method, paired=paired)
    if method != "lat" or paired:  # random pairs are drawn from one list of all rows
        np.testing.assert_allclose(there.vector, -back.vector, atol=1e-5)
        assert there.scale == pytest.approx(back.scale, rel=1e-5)
    assert there.scale > 0 and back.scale > 0


@every_method
@either_way
def test_the_scale_leads_from_one_mean_to_the_other(method: str, paired: bool):
    positive, negative, _ = planted()
    found = find_direction(positive, negative, method, paired=paired)
    vector = torch.from_numpy(found.vector)
    moved = negative.mean(0) + found.scale * vector
    assert float(moved @ vector) == pytest.approx(float(positive.mean(0) @ vector), rel=1e-5)
    middle = (positive.mean(0) + negative.mean(0)) / 2
    assert found.middle == pytest.approx(float(middle @ vector), rel=1e-5)


def test_scale_times_direction_is_the_difference_of_the_means():
    positive, negative, _ = planted()
    found = find_direction(positive, negative, "diffmean")
    expected = positive.double().mean(0) - negative.double().mean(0)
    np.testing.assert_allclose(found.scale * found.vector, expected, rtol=1e-4, atol=1e-6)


@every_method
@either_way
def test_moving_all_rows_changes_nothing(method: str, paired: bool):
    positive, negative, _ = planted()
    shift = torch.linspace(-50, 50, positive.shape[1]).double()
    found = find_direction(positive, negative, method, paired=paired)
    moved = find_direction(
        positive.double() + shift, negative.double() + shift, method, paired=paired
    )
    np.testing.assert_allclose(found.vector, moved.vector, atol=1e-5)
    assert found.scale == pytest.approx(moved.scale, rel=1e-5)


@every_method
@either_way
def test_the_same_call_gives_the_same_bits(method: str, paired: bool):
    positive, negative, _ = planted()
    first, second = (
        find_direction(positive, negative, method, paired=paired, seed=3) for _ in range(2)
    )
    np.testing.assert_array_equal(first.vector, second.vector)
    assert (first.scale, first.middle) == (second.scale, second.middle)


# -- against slow references -----------------------------------------------------------------------


def reference_component(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.linalg.svd(rows, full_matrices=False)[2][0]


@pytest.mark.parametrize(("n", "hidden"), [(5, 40), (40, 5), (20, 20), (1, 3), (300, 200)])
def test_the_first_component_is_that_of_a_singular_value_decomposition(n: int, hidden: int):
    rows = torch.randn(n, hidden, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    got = first_component(rows)
    assert abs(cosine(got, reference_component(rows.numpy()))) == pytest.approx(1, abs=1e-12)


def test_pca_of_pairs_is_the_component_of_rows_with_their_pairs_centre_taken_off():
    positive, negative, _ = planted(n=12, gap=1.0)
    centre = (positive + negative).double() / 2
    rows = torch.cat([positive - centre, negative - centre]).numpy()
    found = find_direction(positive, negative, "pca")
    assert abs(cosine(found.vector, reference_component(rows))) == pytest.approx(1, abs=1e-9)


def test_pca_keeps_what_all_pairs_have_in_common():
    """Where centring the differences, as repeng's pca_diff does, would leave only noise."""
    positive, negative, truth = planted(n=40, gap=8.0)
    differences = (positive - negative).double().numpy()
    centred = reference_component(differences - differences.mean(0))
    assert abs(cosine(centred, truth)) < 0.5
    assert cosine(find_direction(positive, negative, "pca").vector, truth) > 0.99


def test_pca_without_pairs_weighs_the_sides_alike():
    positive, negative, truth = planted(n=300, gap=6.0)
    few = find_direction(positive[:30], negative, "pca", paired=False)
    assert cosine(few.vector, truth) > 0.95


def test_lat_of_pairs_is_the_component_of_their_unit_differences():
    positive, negative, _ = planted(n=12, gap=1.0)
    differences = (positive.double() - negative.double()).numpy()
    unit = differences / np.linalg.norm(differences, axis=1, keepdims=True)
    found = find_direction(positive, negative, "lat")
    assert abs(cosine(found.vector, reference_component(unit))) == pytest.approx(1, abs=1e-9)


def test_lat_of_random_pairs_depends_on_the_seed_alone():
    positive, negative, _ = planted(n=12, gap=1.0)
    state = torch.random.get_rng_state()
    drawn = [find_direction(positive, negative, "lat", paired=False, seed=s).vector for s in (1, 2)]
    assert not np.allclose(*drawn)
    assert torch.equal(state, torch.random.get_rng_state())


def test_lat_leaves_out_pairs_of_equal_rows():
    positive, negative, _ = planted(n=12)
    same = torch.cat([positive, positive[:3]]), torch.cat([negative, positive[:3]])
    with_them, without = (
        find_direction(*rows, "lat").vector for rows in (same, (positive, negative))
    )
    np.testing.assert_allclose(with_them, without, atol=1e-6)


def newton_logistic(
    positive: npt.NDArray[np.float64], negative: npt.NDArray[np.float64], l2: float
) -> npt.NDArray[np.float64]:
    """Logistic regression on standardised features by Newton's method, mapped back."""
    rows = np.concatenate([positive, negative])
    target = np.concatenate([np.ones(len(positive)), np.zeros(len(negative))])
    std = rows.std(0)
    std[std == 0] = 1
    features = np.c_[(rows - rows.mean(0)) / std, np.ones(len(rows))]
    penalty = np.full(features.shape[1], l2)
    penalty[-1] = 0
    weights = np.zeros(features.shape[1])
    for _ in range(100):
        probability = 1 / (1 + np.exp(-features @ weights))
        gradient = features.T @ (probability - target) + penalty * weights
        hessian = (features.T * (probability * (1 - probability))) @ features + np.diag(penalty)
        weights -= np.linalg.solve(hessian, gradient)
    assert np.abs(gradient).max() < 1e-9
    return weights[:-1] / std


@pytest.mark.parametrize("l2", [0.01, 1.0, 100.0])
@pytest.mark.parametrize(("n", "m", "hidden"), [(40, 25, 8), (10, 10, 50)])
def test_the_probe_is_a_logistic_regression(n: int, m: int, hidden: int, l2: float):
    positive, negative, _ = planted(n=max(n, m), hidden=hidden, gap=1.0)
    positive, negative = positive[:n].double(), negative[:m].double()
    got = probe(positive, negative, paired=False, seed=0, l2=l2).numpy()
    expected = newton_logistic(positive.numpy(), negative.numpy(), l2)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def test_the_probe_does_not_depend_on_a_features_unit():
    positive, negative, _ = planted(n=40, gap=1.0)
    unit = torch.logspace(-6, 6, positive.shape[1], dtype=torch.float64)
    plain = probe(positive.double(), negative.double(), paired=False, seed=0)
    other = probe(positive.double() * unit, negative.double() * unit, paired=False, seed=0)
    np.testing.assert_allclose(other * unit, plain, rtol=1e-5)


def test_the_probe_gives_constant_features_no_weight():
    positive, negative, _ = planted(n=40)
    # 0.1 has no exact mean in floating point: its spread comes out as rounding, not as zero.
    positive[:, 3] = negative[:, 3] = 0.1
    weights = probe(positive.double(), negative.double(), paired=False, seed=0)
    assert weights[3] == 0.0
    assert torch.isfinite(weights).all()


def test_half_precision_rows_are_computed_in_double():
    positive, negative, _ = planted()
    for kind in (torch.bfloat16, torch.float16):
        rows = positive.to(kind), negative.to(kind)
        found = find_direction(*rows, "diffmean")
        expected = rows[0].double().mean(0) - rows[1].double().mean(0)
        np.testing.assert_allclose(found.scale * found.vector, expected, rtol=1e-4, atol=1e-6)


# -- scores ----------------------------------------------------------------------------------------


def slow_separation(positive: Any, negative: Any, folds: list[Any], method: str) -> Separation:
    """By its formulas, pair by pair."""
    ordered, pairs, high, low = 0.0, 0, [], []
    for fold in folds:
        keep = np.setdiff1d(np.arange(len(positive)), fold)
        found = find_direction(positive[keep], negative[keep], method)
        scores = [
            [
                float(row.double().numpy() @ found.vector.astype(np.float64) - found.middle)
                for row in rows
            ]
            for rows in (positive[fold], negative[fold])
        ]
        for a, b in product(*scores):
            ordered += 1.0 if a > b else 0.5 if a == b else 0.0
            pairs += 1
        high += scores[0]
        low += scores[1]
    spread = math.sqrt((np.var(high) + np.var(low)) / 2)
    return Separation(ordered / pairs, (np.mean(high) - np.mean(low)) / spread)


@every_method
def test_scores_are_what_their_formulas_say(method: str):
    positive, negative, _ = planted(n=23, gap=0.6)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(5)) % 5
    folds = [np.flatnonzero(order.numpy() == fold) for fold in range(5)]
    expected = slow_separation(positive, negative, folds, method)
    got = measure_separation(positive, negative, method, seed=5)
    assert got.auroc == pytest.approx(expected.auroc, abs=1e-9)
    assert got.d_prime == pytest.approx(expected.d_prime, rel=1e-5)
    assert 0.5 < got.auroc < 1.0


@every_method
@either_way
def test_scores_of_rows_without_a_difference_are_near_chance(method: str, paired: bool):
    """Although there are more dimensions than rows, so that any labels can be told apart."""
    scores = []
    for seed in range(12):
        random = torch.Generator().manual_seed(seed)
        positive, negative = torch.randn(2, 30, 64, generator=random)
        scores.append(measure_separation(positive, negative, method, paired=paired, seed=seed))
    assert np.mean([each.auroc for each in scores]) == pytest.approx(0.5, abs=0.08)
    assert np.mean([each.d_prime for each in scores]) == pytest.approx(0.0, abs=0.3)


@every_method
def test_scores_of_a_wide_gap_are_full(method: str):
    positive, negative, _ = planted(gap=20.0)
    score = measure_separation(positive, negative, method)
    assert score.auroc == 1.0
    assert score.d_prime > 5


def test_all_rows_of_a_prompt_are_held_out_together():
    """Rows that are known by heart from their own prompt, and say nothing about another's."""
    random = torch.Generator().manual_seed(0)
    prompts = torch.arange(12).repeat_interleave(10)
    rows = [
        10 * torch.randn(12, 200, generator=random)[prompts]
        + 0.01 * torch.randn(120, 200, generator=random)
        for _ in range(2)
    ]
    groups = {"positive_groups": prompts, "negative_groups": prompts}
    honest = measure_separation(*rows, "diffmean", paired=False, **groups)
    leaking = measure_separation(*rows, "diffmean", paired=False)
    assert leaking.auroc > 0.95
    assert honest.auroc < 0.8


def test_a_direction_that_misses_the_contrast_scores_near_chance():
    positive, negative, _ = planted(n=100, gap=4.0, nuisance=30.0)
    assert measure_separation(positive, negative, "lat", paired=False).auroc < 0.65
    assert measure_separation(positive, negative, "probe", paired=False).auroc > 0.85


def test_two_prompts_a_side_are_enough():
    positive, negative, _ = planted(n=2, gap=20.0)
    for method, paired in product(FINDERS, (True, False)):
        assert 0.0 <= measure_separation(positive, negative, method, paired=paired).auroc <= 1.0


def test_rows_that_do_not_vary_have_an_infinite_d_prime():
    positive, negative = torch.ones(4, 3), torch.zeros(4, 3)
    assert measure_separation(positive, negative, "diffmean") == (1.0, math.inf)


def test_a_fold_without_a_direction_counts_as_chance():
    positive = torch.tensor(
        [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    )
    negative = torch.zeros(6, 2)
    score = measure_separation(positive, negative, "diffmean")
    assert 0.5 <= score.auroc < 0.7


# -- what is refused -------------------------------------------------------------------------------


@every_method
@either_way
def test_sets_that_are_the_same_are_refused(method: str, paired: bool):
    rows = planted()[0]
    with pytest.raises(NoDirectionError):
        find_direction(rows, rows.clone(), method, paired=paired)


@pytest.mark.parametrize("method", ["diffmean", "pca", "probe"])
def test_sets_that_are_the_same_in_another_order_are_refused(method: str):
    rows = planted()[0]
    with pytest.raises(NoDirectionError):
        find_direction(rows, rows.flip(0), method, paired=False)


GOOD = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("positive", "negative", "options", "message"),
    [
        (GOOD[:1], GOOD, {}, "positive has 1 rows; give at least 2"),
        (GOOD, GOOD[:0], {}, "negative has 0 rows"),
        (GOOD, GOOD[0], {}, r"shape \[3\]"),
        (GOOD, GOOD.int(), {}, "torch.int32"),
        (GOOD, GOOD[:, :2], {}, "width 3 and negative 2"),
        (GOOD, GOOD * math.nan, {}, "NaN or infinity"),
        (GOOD / 0, GOOD, {}, "NaN or infinity"),
        (GOOD, GOOD[:3], {}, "no pairs; give as many of each"),
        (GOOD, -GOOD, {"method": "svm"}, "choose one of diffmean, pca, lat, probe"),
        (torch.eye(2), -torch.eye(2), {"method": "pca"}, "two largest principal components"),
        (torch.eye(40), -torch.eye(40), {"method": "pca"}, "two largest principal components"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(
    positive: torch.Tensor, negative: torch.Tensor, options: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        find_direction(positive, negative, **options)


def test_scores_need_two_prompts_a_side():
    positive, negative, _ = planted(n=6)
    with pytest.raises(ValueError, match="one prompt only"):
        measure_separation(
            positive,
            negative,
            "diffmean",
            paired=False,
            positive_groups=torch.zeros(6, dtype=torch.int64),
        )


def test_a_probe_that_does_not_converge_says_so():
    positive, negative, _ = planted(n=40, gap=1.0)
    rows = positive.double(), negative.double()
    with pytest.raises(RuntimeError, match="did not converge"):
        probe(*rows, paired=False, seed=0, max_iterations=2)
    with pytest.raises(ValueError, match="must be above 0"):
        probe(*rows, paired=False, seed=0, l2=0.0)

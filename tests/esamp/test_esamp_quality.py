"""The problems that ESamp's quality is measured on, and what samples of them are worth."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from benchmarks.esamp_quality.keys import Blocks
from benchmarks.esamp_quality.problems import (
    ADD,
    END,
    EQUALS,
    FIRST_NUMBER,
    LEFT,
    NEXT,
    Problem,
    chain_length,
    draw,
    problems,
    prompt_length,
    read_solution,
)
from benchmarks.esamp_quality.scores import Scores, interval, score
from benchmarks.esamp_quality.stratified import draw_within


def drawn(numbers, count=200):
    rows = draw(count, numbers, torch.Generator().manual_seed(numbers)).tolist()
    for row in rows:
        given = [token - FIRST_NUMBER for token in row[: numbers + 2]]
        problem = Problem(tuple(given[:numbers]), given[-1])
        assert row[: prompt_length(numbers)] == problem.tokens
        yield problem, row[prompt_length(numbers) :]


@pytest.mark.parametrize("numbers", [2, 3, 6])
def test_every_problem_that_is_drawn_has_the_solution_it_comes_with(numbers):
    for problem, chain in drawn(numbers):
        assert len(chain) == chain_length(numbers)
        assert read_solution(problem, chain).right


def test_a_chain_with_anything_changed_is_not_valid():
    for problem, chain in drawn(4, 20):
        for place in range(len(chain)):
            for token in (chain[place] + 1, NEXT, END, EQUALS):
                wrong = [*chain[:place], token, *chain[place + 1 :]]
                # Another operator may come to the same number, as in 2 + 2.
                if token != chain[place] and chain[place] not in range(ADD, ADD + 3):
                    assert not read_solution(problem, wrong).valid
        assert not read_solution(problem, chain[:-1]).valid
        assert not read_solution(problem, [*chain, END]).valid
        elsewhere = Problem(problem.numbers, problem.target + 1)
        found = read_solution(elsewhere, chain)
        assert (found.valid, found.right) == (True, False)


def test_two_solutions_are_one_if_they_take_the_same_steps():
    def solved(*steps):
        chain = []
        for a, b, c, left in steps:
            chain += [FIRST_NUMBER + a, ADD, FIRST_NUMBER + b, EQUALS, FIRST_NUMBER + c]
            chain += [LEFT, *(FIRST_NUMBER + each for each in left), NEXT] if left else [END]
        return read_solution(Problem((1, 2, 3, 4), 10), chain)

    one = solved((1, 2, 3, [3, 4, 3]), (3, 4, 7, [3, 7]), (3, 7, 10, []))
    same = solved((4, 3, 7, [1, 2, 7]), (2, 1, 3, [7, 3]), (7, 3, 10, []))
    other = solved((1, 4, 5, [2, 3, 5]), (2, 3, 5, [5, 5]), (5, 5, 10, []))
    assert one.right and same.right and other.right
    assert one.steps == same.steps != other.steps


def test_pass_at_k_is_the_chance_that_a_draw_of_k_has_a_right_one():
    for right in range(9):
        outcomes = [True] * right + [False] * (8 - right)
        for k in (1, 3, 8):
            draws = list(combinations(outcomes, k))
            expected = sum(any(each) for each in draws) / len(draws)
            values = {name: [right] for name in ("right", "distinct", "valid")}
            [found] = Scores.of({"samples": 8, **values}).pass_at(k)
            assert found == pytest.approx(expected)


def test_samples_are_counted_by_problem():
    chains = dict(drawn(3))
    asked = list(chains)[:2]
    right = [chains[problem] for problem in asked]
    found = score(asked, [[right[0], right[0], [END]], [right[0], [END], [END]]])
    assert found.right.tolist() == [2, 0]
    assert found.distinct.tolist() == [1, 0]
    assert found.pass_at(1).tolist() == pytest.approx([2 / 3, 0])
    assert Scores.of(found.as_dict()).right.tolist() == [2, 0]
    with pytest.raises(ValueError, match="all must have as many"):
        score(asked, [[[END]], []])
    low, high = interval(found.pass_at(1))
    assert low == 0 and high == pytest.approx(2 / 3)


def test_problems_are_different_and_the_same_in_every_run():
    found = problems(50, 4, seed=1)
    assert len(set(found)) == 50
    assert found == problems(50, 4, seed=1)
    assert found != problems(50, 4, seed=2)


def test_rows_of_a_key_stand_side_by_side():
    keys = np.array([3, 1, 3, 3, 7, 1])
    blocks = Blocks.of(keys, torch.device("cpu"))
    assert blocks.keys.tolist() == [1, 3, 7]
    rows = [row[there].tolist() for row, there in zip(blocks.rows, blocks.there, strict=True)]
    assert rows == [[1, 5], [0, 2, 3], [4]]
    values = torch.arange(6.0)[:, None]
    assert torch.equal(blocks.spread(values[blocks.rows], 6), values)


def test_stratified_samples_share_out_each_distribution():
    """Two tokens in a row: every pair comes as often as it should, to within a sample or two,
    in whatever order a row's candidates stand."""
    count = 600
    generator = torch.Generator().manual_seed(0)
    codes = (torch.arange(count, dtype=torch.float64) + 0.37)[:, None] / count
    first = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    second = torch.tensor(
        [[0.25] * 4, [0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4], [0.97, *[0.01] * 3]]
    )
    drawn = []
    for p in (first.expand(count, 4), None):
        p = second.double()[drawn[0]] if p is None else p
        order = torch.rand(count, 4, generator=generator).argsort(1)
        place, codes = draw_within(p.log().gather(1, order), order, codes)
        assert ((codes >= 0) & (codes < 1)).all()
        drawn.append(order.gather(1, place)[:, 0])
    pairs = torch.bincount(4 * drawn[0] + drawn[1], minlength=16).view(4, 4)
    expected = count * first[:, None] * second
    assert (pairs - expected).abs().max() <= 2


def test_stratified_samples_draw_only_candidates():
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [3.0, -torch.inf, -torch.inf]])
    ids = torch.tensor([[7, 2, 0], [5, 0, 0]])
    for code in (0.0, 0.49, 0.51, 1 - 2**-53):
        place, _ = draw_within(logits, ids, torch.full((2, 1), code, dtype=torch.float64))
        assert place[:, 0].tolist() == [int(code < 0.5), 0]

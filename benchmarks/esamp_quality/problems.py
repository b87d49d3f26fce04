"""Reach a number from others: problems with many right answers, each a chain of small steps.

    7 12 3 25 4 9 to 46 ; 12 * 4 = 48 left 7 3 25 9 48 ; 9 - 7 = 2 left 3 25 48 2 ; ...

In each step two of the numbers that are left become one; the last step must give the target. How a
chain begins is nearly free, and decides whether it can end well: samples part early. Any number is
one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

PAD, END, TO, EQUALS, LEFT, NEXT = range(6)
ADD, SUBTRACT, MULTIPLY = 6, 7, 8
FIRST_NUMBER = 16
HIGHEST = 99
"""Every number is between 0 and this, also on the way."""
VOCABULARY = 128
OPERATORS = {ADD: "+", SUBTRACT: "-", MULTIPLY: "*"}

Step: TypeAlias = tuple[int, int, int, int]
"""First number, operator, second number, result."""


def chain_length(numbers: int) -> int:
    """Tokens of a whole chain, its end included."""
    return sum(6 + left for left in range(numbers - 1, 1, -1)) + (numbers - 2) + 6


def prompt_length(numbers: int) -> int:
    """Tokens of a problem."""
    return numbers + 3


@dataclass(frozen=True)
class Problem:
    """What is asked."""

    numbers: tuple[int, ...]
    target: int

    @property
    def tokens(self) -> list[int]:
        """The prompt."""
        given = [FIRST_NUMBER + number for number in self.numbers]
        return [*given, TO, FIRST_NUMBER + self.target, NEXT]


@dataclass(frozen=True)
class Solution:
    """What a sample says.

    Attributes:
        valid: every step is right and follows from what was left, and the chain has its end.
        right: it is valid, and its last result is the target.
        steps: in an order-free form: two solutions of the same steps are one.
    """

    valid: bool
    right: bool
    steps: frozenset[Step]


def read_solution(problem: Problem, tokens: Sequence[int]) -> Solution:
    """Check a sample, token by token."""
    left = list(problem.numbers)
    steps: list[Step] = []
    wrong = Solution(False, False, frozenset())
    rest = list(tokens)
    while len(left) > 1:
        if len(rest) < 5 or rest[1] not in OPERATORS or rest[3] != EQUALS:
            return wrong
        one, operator, other, result = rest[0], rest[1], rest[2], rest[4]
        a, b, c = (token - FIRST_NUMBER for token in (one, other, result))
        rest = rest[5:]
        if a not in left:
            return wrong
        left.remove(a)
        if b not in left or c != _result(a, operator, b) or not 0 <= c <= HIGHEST:
            return wrong
        left.remove(b)
        left.append(c)
        if operator != SUBTRACT:
            a, b = max(a, b), min(a, b)
        steps.append((a, operator, b, c))
        if len(left) > 1:
            said, rest = rest[: len(left) + 2], rest[len(left) + 2 :]
            if said[:1] != [LEFT] or said[-1] != NEXT:
                return wrong
            # In any order: a number may be there twice, and either may have been taken.
            if sorted(said[1:-1]) != sorted(FIRST_NUMBER + number for number in left):
                return wrong
    valid = rest == [END]
    return Solution(valid, valid and left[0] == problem.target, frozenset(steps))


def _result(a: int, operator: int, b: int) -> int:
    if operator == ADD:
        return a + b
    return a - b if operator == SUBTRACT else a * b


def draw(
    count: int, numbers: int, generator: torch.Generator, device: torch.device | str = "cpu"
) -> Tensor:
    """Problems with a solution each, `[count, prompt_length + chain_length]`, int64: steps that
    are drawn at random, and what they come to as the target.

    Args:
        generator: on the device.
    """

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    rows = torch.arange(count, device=device)
    left = (1 + (random(count, numbers) * 25).long()).clamp(max=25)
    problem, pieces = left.clone(), []

    def fixed(token: int) -> Tensor:
        return torch.full((count, 1), token, device=device)

    for remaining in range(numbers, 1, -1):
        order = random(count, remaining).argsort(1)
        pair = left.gather(1, order[:, :2])
        a, b = pair.unbind(1)
        results = torch.stack([a + b, (a - b).abs(), a * b], 1)
        allowed = (results <= HIGHEST) & torch.stack(
            [torch.ones_like(a, dtype=torch.bool), a != b, (a > 1) & (b > 1)], 1
        )
        allowed[:, 1] |= ~allowed.any(1)  # then the difference, which is 0
        choice = random(count, 3).masked_fill(~allowed, -1).argmax(1)
        result = results[rows, choice]
        swap = (choice == 1) & (a < b)
        first, second = torch.where(swap, b, a), torch.where(swap, a, b)
        kept = order[:, 2:].sort(1).values
        left = torch.cat([left.gather(1, kept), result[:, None]], 1)
        written = [first + FIRST_NUMBER, choice + ADD, second + FIRST_NUMBER]
        pieces += [*(each[:, None] for each in written), fixed(EQUALS)]
        pieces.append(result[:, None] + FIRST_NUMBER)
        if remaining > 2:
            pieces += [fixed(LEFT), left + FIRST_NUMBER, fixed(NEXT)]
    asked = [problem + FIRST_NUMBER, fixed(TO), left + FIRST_NUMBER, fixed(NEXT)]
    return torch.cat([*asked, *pieces, fixed(END)], 1)


def problems(count: int, numbers: int, seed: int) -> list[Problem]:
    """Different problems, each of which has a solution."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[Problem, None] = {}
    while len(found) < count:
        for row in draw(count, numbers, generator).tolist():
            values = [token - FIRST_NUMBER for token in row[: numbers + 2]]
            found.setdefault(Problem(tuple(values[:numbers]), values[-1]))
    return list(found)[:count]

"""Steering rows by token: what stands for them, and that nothing is left."""

import torch

from tllm.runtime.token_choices import TokenChoices

CPU = torch.device("cpu")


def chosen(choices, stands, tokens):
    """The steering rows of these tokens."""
    steer = torch.full((len(tokens),), stands, dtype=torch.int32)
    choices.apply(steer, torch.tensor(tokens))
    return steer.tolist()


def test_the_row_of_a_token_stands_where_its_choice_was():
    choices = TokenChoices(CPU)
    first = choices.acquire((((3, 7), (5, 8)), 1))
    second = choices.acquire((((5, 9),), -1))
    assert chosen(choices, first, [3, 4, 5]) == [7, 1, 8]
    assert chosen(choices, second, [3, 4, 5]) == [-1, -1, 9]
    choices.release((((3, 7), (5, 8)), 1))
    again = choices.acquire((((4, 6),), 2))
    assert again == first  # its place is used again
    assert chosen(choices, again, [3, 4, 5]) == [2, 6, 2]
    assert chosen(choices, second, [3, 4, 5]) == [-1, -1, 9]


def test_nothing_is_left_of_choices_that_no_token_came_to():
    """As of requests that end with their first token, and steer those after it."""
    choices = TokenChoices(CPU)
    for row in range(5):
        choice = ((3, row), (5, row)), 1
        choices.acquire(choice)
        choices.release(choice)
        assert not choices._new
    kept = choices.acquire((((3, 7),), 1))
    assert len(choices._new) == 1
    assert chosen(choices, kept, [3, 5]) == [7, 1]
    assert not choices._new

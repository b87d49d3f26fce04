"""Which rows of a step end a sequence, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from tllm.runtime.verdicts import PROMPT, Verdicts
from tllm.spec.gates import MAX_GATES

NAMES = ["a", "b", "c", "d"]


def judged(verdicts, state, starts, counts, drafts=None):
    """What is said of a step of the first sequences, in slots that are counted backwards."""
    arrays = [np.array(each, np.int32) for each in (starts, counts)]
    slots = np.arange(len(starts), dtype=np.int32)[::-1].copy()
    given = None if drafts is None else np.array(drafts, np.int32)
    verdicts.begin(NAMES[: len(starts)], slots, *arrays, given)
    verdicts.copy()
    state.fill_(torch.nan)  # as where consumers have read it
    taken = verdicts.take()
    assert verdicts.take() is None
    return None if taken is None else taken.wait()


def made(rows, fires):
    """Conditions that hold where `fires` says, `(row, number)`."""
    state = torch.full((rows, 2, MAX_GATES), torch.nan)
    state[:, 0] = 0
    for row, number in fires:
        state[row, 0, number] = 1
    return Verdicts(SimpleNamespace(state=state), 4), state


def test_the_row_that_a_token_is_drawn_from_ends_its_sequence_alone():
    verdicts, state = made(9, [(0, 2), (1, 2), (1, 5), (2, 2), (8, 2)])
    verdicts.ask(2, 4, [], [2])  # b, whose condition 5 is part of another
    verdicts.ask(0, 4, [], [2])  # d
    # Slots 3, 2, 1, 0: a decodes, b decodes, c has a prompt, d decodes and is computed again.
    assert judged(verdicts, state, [7, 9, 0, 4], [1, 1, 5, 2]) == {
        "b": ((0, 2),),
        "d": ((0, 2),),
    }


def test_preempted_sequences_may_come_on_top_of_the_most_that_run():
    verdicts, _ = made(2, [(0, 1), (1, 1)])
    verdicts.ask(0, 1, [], [1])
    slots, ones = np.array([9, 0], np.int32), np.ones(2, np.int32)
    verdicts.begin(NAMES[:2], slots, 5 * ones, ones, None)
    assert verdicts.take().wait() == {"b": ((0, 1),)}, "nobody asked for the one in slot 9"
    verdicts.forget(30)
    verdicts.ask(30, 1, [], [1])
    verdicts.begin(NAMES[:2], np.array([30, 0], np.int32), 5 * ones, ones, None)
    assert verdicts.take().wait() == {"a": ((0, 1),), "b": ((0, 1),)}


def test_rows_of_a_prompt_refuse_it_and_end_nothing():
    verdicts, state = made(6, [(1, 0), (5, 1)])
    verdicts.ask(0, 6, [0], [1])
    assert judged(verdicts, state, [0], [6]) == {"a": ((PROMPT, 0),)}


def test_of_a_sequence_that_is_computed_again_each_row_is_judged_as_what_it_is():
    verdicts, state = made(6, [(1, 0), (3, 1), (4, 0), (5, 1)])
    verdicts.ask(0, 3, [0], [1])
    # Tokens 3 and 4 were generated before, and judged then; 5 is new.
    assert judged(verdicts, state, [0], [6]) == {"a": ((PROMPT, 0), (0, 1))}


def test_rows_of_drafts_say_which_of_the_tokens_drawn_they_end():
    verdicts, state = made(4, [(2, 3), (3, 3)])
    verdicts.ask(0, 2, [], [3])
    assert judged(verdicts, state, [8], [4], drafts=[3]) == {"a": ((2, 3), (3, 3))}


def test_nothing_is_copied_for_sequences_that_do_not_ask():
    verdicts, state = made(2, [(0, 0), (1, 0)])
    assert judged(verdicts, state, [5, 6], [1, 1]) is None
    verdicts.ask(3, 2, [], [0])
    assert judged(verdicts, state, [5, 6], [1, 1]) is None
    verdicts.forget(3)
    verdicts.ask(1, 7, [], [0])  # a prompt's row, of one that only stops
    assert judged(verdicts, state, [5, 6], [1, 1]) is None


def test_a_batch_that_goes_on_is_judged_alike_until_it_is_computed_again():
    verdicts, state = made(2, [])
    slots, ones = np.array([1, 0], np.int32), np.ones(2, np.int32)
    verdicts.ask(0, 4, [1], [2])

    def step(start, *fires):
        state[:, 0] = 0
        for row, number in fires:
            state[row, 0, number] = 1
        verdicts.begin(NAMES[:2], slots, start * ones, ones, None)
        taken = verdicts.take()
        return None if taken is None else taken.wait()

    assert step(4, (1, 2)) == {"b": ((0, 2),)}
    assert step(5, (0, 2), (1, 1)) == {}
    assert step(6, (1, 2)) == {"b": ((0, 2),)}
    assert step(3, (1, 1), (1, 2)) == {"b": ((PROMPT, 1),)}
    assert step(4, (1, 2)) == {"b": ((0, 2),)}
    verdicts.forget(0)
    assert step(5, (1, 2)) is None

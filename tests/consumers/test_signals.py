"""What conditions made of tokens, of which arrays are made when somebody looks."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from tllm.consumers import signals
from tllm.consumers.signals import ConditionRows, Signal

ROWS = ConditionRows(
    np.array([0, 2, 3, 5], np.int32),
    np.array([[[0, 1], [3, 4]], [[np.nan, 1], [0, 2]], [[1, 0], [5, 6]], [[1, 1], [7, 8]]], "f"),
)
"""Strengths and scores of two conditions, the first of which is not judged at position 2."""


def listed(signal: Signal) -> list[list[float]]:
    return [each.tolist() for each in (signal.positions, signal.scores, signal.strengths)]


def test_rows_that_were_not_judged_are_left_out() -> None:
    assert listed(Signal.of_rows(ROWS, 0)) == [[0, 3, 5], [3, 5, 7], [0, 1, 1]]
    assert listed(Signal.of_rows(ROWS, 1)) == [[0, 2, 3, 5], [4, 2, 6, 8], [1, 1, 0, 1]]


def test_it_ends_where_its_sequence_does_whether_somebody_has_looked_or_not() -> None:
    looked_at = Signal.of_rows(ROWS, 0)
    assert looked_at.fired.tolist() == [3, 5]
    for signal in (looked_at, Signal.of_rows(ROWS, 0), Signal(*map(np.array, listed(looked_at)))):
        assert listed(signal.up_to(4)) == [[0, 3], [3, 5], [0, 1]]
        assert listed(signal.up_to(4).up_to(9)) == listed(signal.up_to(4))
        assert listed(signal.up_to(0)) == [[], [], []]


@pytest.mark.parametrize("few_bytes", [0, 64 << 10])
def test_it_is_the_same_after_being_sent(few_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_FEW_BYTES", few_bytes)
    nothing = ConditionRows(np.zeros(0, np.int32), np.zeros((0, 2, 1), np.float32))
    assert listed(pickle.loads(pickle.dumps(Signal.of_rows(nothing, 0)))) == [[], [], []]
    made = Signal(*map(np.array, listed(Signal.of_rows(ROWS, 0))))
    assert listed(pickle.loads(pickle.dumps(made))) == listed(made)
    signal = Signal.of_rows(ROWS, 0).up_to(4)
    again = pickle.loads(pickle.dumps(signal, protocol=5))
    assert listed(again) == listed(signal) and again.written().keys() == signal.written().keys()
    assert repr(again) == repr(signal)

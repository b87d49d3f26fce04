"""Ctrl-C where it must wait: of single calls, and of many for which one handler stands."""

from __future__ import annotations

import signal

import pytest

from tllm.engine.interrupts import often_uninterrupted, uninterrupted


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_it_is_raised_at_the_end_of_the_outermost_call():
    said = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            press()
            said.append("inner call")
        said.append("outer call")
    assert said == ["inner call", "outer call"]


def test_who_cannot_wait_asks_again():
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        press()
        with pytest.raises(KeyboardInterrupt):
            press()


def test_between_many_calls_it_is_raised_in_place():
    with often_uninterrupted():
        with uninterrupted():
            pass
        with pytest.raises(KeyboardInterrupt):
            press()
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            press()
        with uninterrupted():  # nothing is left of those before
            pass


def test_an_error_of_the_call_comes_before_it():
    with pytest.raises(ValueError, match="theirs"), uninterrupted():
        press()
        raise ValueError("theirs")
    with uninterrupted():
        pass


def test_another_handler_is_left_alone():
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    with often_uninterrupted(), uninterrupted():
        press()
        assert heard == [1]
    signal.signal(signal.SIGINT, signal.default_int_handler)

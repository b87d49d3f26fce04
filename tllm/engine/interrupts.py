"""Ctrl-C, where it must wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def raises_in_place() -> bool:
    """Whether an interrupt would be raised wherever this thread is."""
    is_python_own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return is_python_own and threading.current_thread() is threading.main_thread()


@contextmanager
def noted_interrupts(note: Callable[[], None]) -> Iterator[None]:
    """An interrupt is noted in place of being raised. Who cannot wait asks again."""
    theirs = signal.getsignal(signal.SIGINT)

    def pressed(*_: Any) -> None:
        note()
        signal.signal(signal.SIGINT, theirs)

    signal.signal(signal.SIGINT, pressed)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, theirs)


class _PatientHandler:
    """Python's own handler of an interrupt, which waits where it must.

    Attributes:
        waits: the calls that must not be interrupted and are under way, one within the other.
        pressed: there was an interrupt meanwhile.
    """

    def __init__(self) -> None:
        self.waits = 0
        self.pressed = False

    def __call__(self, number: int, frame: Any) -> None:
        if not self.waits or self.pressed:  # who cannot wait asks again
            signal.default_int_handler(number, frame)
        self.pressed = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """An interrupt waits for the end of this, or of what it is within."""
        self.waits += 1
        try:
            yield
        finally:
            self.waits -= 1
            pressed = self.pressed and not self.waits
            self.pressed = self.pressed and not pressed
        if pressed:
            raise KeyboardInterrupt


_patient: _PatientHandler | None = None
"""The one that is in the place of Python's own; on the main thread only."""


@contextmanager
def often_uninterrupted() -> Iterator[None]:
    """Many calls follow that must not be interrupted, and between them an interrupt is raised in
    place. To put a handler in the place of another takes some 30 us: it is done once for all."""
    global _patient
    if _patient is not None or not raises_in_place():
        yield
        return
    _patient = _PatientHandler()
    signal.signal(signal.SIGINT, _patient)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _patient = None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """An interrupt is raised at the end of this."""
    if _patient is None and raises_in_place():
        with often_uninterrupted(), uninterrupted():
            yield
        return
    handler = _patient
    if handler is None or threading.get_ident() != threading.main_thread().ident:
        yield
        return
    with handler.waiting():
        yield

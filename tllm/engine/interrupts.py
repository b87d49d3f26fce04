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


@contextmanager
def uninterrupted() -> Iterator[None]:
    """An interrupt is raised at the end of this."""
    if not raises_in_place():
        yield
        return
    pressed: list[None] = []
    with noted_interrupts(lambda: pressed.append(None)):
        yield
    if pressed:
        raise KeyboardInterrupt

"""Ctrl-C, where it must wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.engine.core_client import SyncMPClient

from tllm.engine.seams import uses
from tllm.engine.unowned import unowned

uses(
    "vllm.v1.engine.core_client.SyncMPClient",
    "_send_input",
    "an interrupt waits until a message to the engine's process is sent",
    takes="request_type request",
)


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


def send_whole(client: Any) -> None:
    """Let a front end send each message to the engine's process whole. Of one that is sent in part
    the engine hears together with the next one, which ends the thread that reads them: nothing is
    heard any more."""
    if not isinstance(client, SyncMPClient):
        return
    send = unowned(client, "_send_input")

    def sent(*args: Any, **kwargs: Any) -> Any:
        with uninterrupted():
            return send(*args, **kwargs)

    client._send_input = sent  # type: ignore[method-assign]

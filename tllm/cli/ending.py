"""How commands end that are told to."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def end_with_signals() -> None:
    """Let a command that is told to end, as `timeout` and cluster schedulers do, end its engine
    with it: processes of an engine outlive the one that started them, keep their memory, and hold
    the store that they write into."""
    told = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if told:  # who cannot wait for that says so again
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        told = True
        # The handler stays: an engine of this process knows by it what it must not take for the
        # error of a consumer.
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:  # and not ignored, as by nohup
            signal.signal(number, end)

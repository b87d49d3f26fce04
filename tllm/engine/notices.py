"""Notices that tokens were computed, from the scheduler's process to a client's, at that moment.

vLLM tells its client of a step when its scheduler has gone through all outputs, another thread has
packed them and the client has taken them apart: milliseconds, when there are hundreds. Whoever
finds what he wants in shared memory only needs to know that it is there, and can ask for more while
the scheduler still works. A notice comes early or not at all: what it says, vLLM's own message says
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from array import array
from collections.abc import Callable, Sequence

from tllm.shared_memory import own_path

_NUMBER = "q"
_MOST_BYTES = 2**17
"""Of one notice; longer ones are not sent."""


class NoticeInbox:
    """A client's, on the running event loop. Only processes of the same user reach it, and when one
    has, it has no name any more: nothing is left behind, however this process ends.

    Args:
        heard: called on that loop with the numbers of a notice.

    Raises `OSError` where there is no room for it, and `NotImplementedError` from an event loop
    that cannot watch a socket.
    """

    def __init__(self, heard: Callable[[Sequence[int]], None]) -> None:
        self._heard = heard
        self._path = own_path()
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind(str(self._path))
            self._path.chmod(0o600)
            self._loop.add_reader(self._socket.fileno(), self._read)
        except BaseException:
            self._remove()
            raise

    @property
    def address(self) -> str:
        """As `NoticeOutbox` takes it."""
        return str(self._path)

    def _read(self) -> None:
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._heard(array(_NUMBER, self._socket.recv(_MOST_BYTES)))

    def close(self) -> None:
        """Hear nothing any more."""
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._remove()

    def _remove(self) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)


class NoticeOutbox:
    """The scheduler's, for one inbox of this host.

    Args:
        address: of an inbox; where none is reached, nothing is sent.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):
            self._socket.connect(address)

    def send(self, numbers: Sequence[int]) -> None:
        """Tell the inbox, if it is there and not full. Never waits, and raises nothing."""
        notice = array(_NUMBER, numbers).tobytes()
        if len(notice) <= _MOST_BYTES:
            with contextlib.suppress(OSError):
                self._socket.send(notice)

    def close(self) -> None:
        """Send nothing any more."""
        self._socket.close()

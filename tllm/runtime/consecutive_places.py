"""Which places of a table are taken, several at once that lie one after the other."""

from __future__ import annotations


class ConsecutivePlaces:
    """Consecutive places of a table. Those that are released serve runs of the same length.

    Attributes:
        end: the place after the last that was ever taken.
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: dict[int, list[int]] = {}

    def acquire(self, length: int) -> int:
        """The first of as many places."""
        if free := self._free.get(length):
            return free.pop()
        self.end += length
        return self.end - length

    def release(self, start: int, length: int) -> None:
        """These places are not used any more."""
        self._free.setdefault(length, []).append(start)

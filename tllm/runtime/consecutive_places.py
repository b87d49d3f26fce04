"""Which places of a table are taken, several at once that lie one after the other."""

from __future__ import annotations


class ConsecutivePlaces:
    """Consecutive places of a table. Those that are released serve runs of the same length at once,
    and of another where room is needed.

    Attributes:
        end: the place after the last that is taken, or was when places were last joined.
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: dict[int, list[int]] = {}

    def acquire(self, length: int) -> int:
        """The first of as many places."""
        if free := self._free.get(length):
            return free.pop()
        if any(self._free.values()):
            self._join()
            if longer := [each for each, free in self._free.items() if free and each >= length]:
                start = self._free[min(longer)].pop()
                if min(longer) > length:
                    self.release(start + length, min(longer) - length)
                return start
        self.end += length
        return self.end - length

    def release(self, start: int, length: int) -> None:
        """These places are not used any more."""
        self._free.setdefault(length, []).append(start)

    def _join(self) -> None:
        """Make one run of those that touch each other; what lies at the end is no run."""
        runs = sorted((start, length) for length, free in self._free.items() for start in free)
        joined: list[tuple[int, int]] = []
        for start, length in runs:
            if joined and sum(joined[-1]) == start:
                joined[-1] = joined[-1][0], joined[-1][1] + length
            else:
                joined.append((start, length))
        if joined and sum(joined[-1]) == self.end:
            self.end = joined.pop()[0]
        self._free = {}
        for start, length in reversed(joined):
            self.release(start, length)

"""What the conditions of a request made of each of its rows."""

from __future__ import annotations

from tllm.ports.base import PortRead


class Signals:
    """`[rows, 2, 32]` float32: the strength (0 to 1) and the score of each condition of steering
    that a row's request has, by its number; no number where a condition was not judged.

    They are there in the step itself: a flow that reads them has `window="same_step"`.
    """

    @staticmethod
    def read(*, role: str = "signals") -> PortRead:
        """Read what conditions made of each row."""
        return PortRead("signals", role)

"""`python -m benchmarks.neighbour PID`: keep a core busy while this process is a child of PID."""

from __future__ import annotations

import os
import sys

_TURNS = 200_000
"""A few milliseconds of work between two looks at the parent."""


def burn(parent: int) -> None:
    """Compute until this process is no child of `parent` any more.

    A parent that was killed takes nobody with it, so each neighbour looks for itself.
    """
    while os.getppid() == parent:
        total = 0
        for number in range(_TURNS):
            total += number


if __name__ == "__main__":
    burn(int(sys.argv[1]))

"""What the rows of one sequence do, by position, where the phase alone does not decide it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tllm.spec.selection import END, Intervals

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Consecutive stretches of positions; within one, every row does the same.

    Attributes:
        starts: `[stretches]`, first position of each; the first is 0, the last has no end.
        program: `[stretches]`, the capture program; 0 for none.
        steer: `[stretches]`, the steering row; -1 for none, less for a choice by token.
    """

    starts: IntArray
    program: IntArray
    steer: IntArray

    def between(self, start: int, stop: int) -> slice:
        """The stretches that the positions from `start` to before `stop` lie in."""
        low = int(np.searchsorted(self.starts, start, side="right")) - 1
        return slice(low, int(np.searchsorted(self.starts, stop, side="left")))

    def lasts_until(self, position: int) -> int:
        """The first position of the stretch after the one that `position` lies in."""
        following = int(np.searchsorted(self.starts, position, side="right"))
        return int(self.starts[following]) if following < len(self.starts) else END


def covers_each(intervals: Intervals, positions: Sequence[int]) -> npt.NDArray[np.bool_]:
    """`[positions]`, whether each lies in any of the intervals (sorted and disjoint)."""
    edges = np.array(intervals, np.int64).reshape(-1)
    return np.searchsorted(edges, np.asarray(positions), side="right") % 2 == 1

"""What calls cost the thread that makes them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

CALLS = (
    "begin_undecided",
    "begin_idle",
    "begin",
    "take_scores",
    "before_sampling",
    "guide",
    "after_sampling",
    "accept",
    "accept_later",
    "take_verdicts",
    "end",
)
"""What a worker of ours calls of `Session.steps` in a step, in this order: some in each, others
where tokens are drafted, guided or judged."""


class CallTimes:
    """Thread CPU time of the calls that an object gets, in seconds, by name.

    A call that is made within another counts there. What the clock itself takes, which on a rented
    machine may be some microseconds, is not counted.
    """

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = {}
        self.clock = _clock()
        self._within = False
        self._replaced: list[tuple[Any, str, Any]] = []

    def of(self, owner: Any, name: str) -> None:
        """Measure a method of an object from now on, if it has it: those of older commits lack
        some."""
        if not hasattr(owner, name):
            return
        call: Callable[..., Any] = getattr(owner, name)
        taken = self.taken.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return call(*args, **kwargs)
            self._within = True
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                taken.append(max(0.0, time.thread_time() - began - self.clock))
                self._within = False

        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, timed)

    def clear(self) -> None:
        """Begin anew."""
        for taken in self.taken.values():
            taken.clear()

    def restore(self) -> None:
        """Measure nothing any more."""
        for owner, name, before in self._replaced:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._replaced.clear()


def _clock() -> float:
    """What it takes to read the clock twice, in seconds."""
    taken = []
    for _ in range(1000):
        began = time.thread_time()
        taken.append(time.thread_time() - began)
    return statistics.median(taken)

"""What calls cost the thread that makes them."""

from __future__ import annotations

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

    A call that is made within another counts there. What it takes to read the clock is not counted:
    it is measured beside each call, where a call of nothing stands in its place. In an engine whose
    own work has filled the caches that is some microseconds, and ten times what it is elsewhere.
    """

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = {}
        self._within = False
        self._replaced: list[tuple[Any, str, Any]] = []

    def of(self, owner: Any, name: str) -> None:
        """Measure a method of an object from now on, if it has it: those of older commits lack
        some."""
        if not hasattr(owner, name):
            return
        call: Callable[..., Any] = getattr(owner, name)
        taken = self.taken.setdefault(name, [])
        clock = time.thread_time

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return call(*args, **kwargs)
            self._within = True
            clock()  # what follows finds it in the caches
            before = clock()
            _nothing()
            began = clock()
            try:
                return call(*args, **kwargs)
            finally:
                taken.append((clock() - began) - (began - before))
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


def _nothing() -> None:
    pass

"""When an engine gave something out, in vLLM and tLLM alike."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import pairwise
from typing import Any


class StepTimes(ABC):
    """When steps gave something out while this is entered, by `time.perf_counter`.

    Attributes:
        finished: when each request did, by its id.
        steps: when each step's outputs came.
    """

    def __init__(self) -> None:
        self.finished: dict[str, float] = {}
        self.steps: list[float] = []

    @abstractmethod
    def __enter__(self) -> StepTimes: ...

    @abstractmethod
    def __exit__(self, *exception: object) -> None: ...

    @property
    def middle(self) -> float:
        """Mean of the middle half of the times between steps, in seconds."""
        return middle_of(self.steps)


class LLMStepTimes(StepTimes):
    """Those of an `LLM`."""

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self._engine = llm.llm_engine
        self._step = self._engine.step

    def __enter__(self) -> StepTimes:
        self._engine.step = self._timed
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.step = self._step

    def _timed(self) -> Any:
        outputs = self._step()
        now = time.perf_counter()
        self.steps.append(now)
        self.finished.update({output.request_id: now for output in outputs if output.finished})
        return outputs


def middle_of(steps: Iterable[float]) -> float:
    """Mean of the middle half of the times between steps, in seconds."""
    between = sorted(after - before for before, after in pairwise(steps))
    quarter = len(between) // 4
    return statistics.mean(between[quarter : len(between) - quarter])

"""Which answers may be kept, and which lanes go on: those of one version."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from tllm.client.llm import AsyncLLM
from tllm.consumers.base import Consumer


class Versions:
    """What answers depend on beside what is asked: steering, weights, and consumers that write to
    the rows of every request."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._consumers: list[Consumer] = []
        self._writing: list[Consumer] = []
        self._changes = 0

    @property
    def now(self) -> tuple[int, int]:
        """Another one after each change."""
        consumers = list(self._engine.consumers.values())
        if not _are_same(consumers, self._consumers):
            self._consumers = consumers
            writing = [each for each in consumers if not each.on_request_only and writes(each)]
            self._changes += not _are_same(writing, self._writing)
            self._writing = writing
        return self._engine.steering.version, self._changes


def writes(consumer: Consumer) -> bool:
    """Whether a consumer may change rows, in ways that are not known."""
    return any(w.port == "residual_stream" for flow in consumer.flows() for w in flow.writes)


def _are_same(left: Sequence[Consumer], right: Sequence[Consumer]) -> bool:
    """Whether these are the same objects, however they compare."""
    return len(left) == len(right) and all(map(is_, left, right))

"""Features of the autoencoders that are registered as consumers, for conditions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tllm.consumers.base import Consumer
from tllm.consumers.sae import SaeConsumer
from tllm.spec.probes import FeatureProbe

if TYPE_CHECKING:
    from tllm.client.facts import Facts

_MOST = 1024
"""Features that are kept: each is read from a file."""


class FeatureProbes:
    """Finds features by the names of consumers, and keeps those that were found.

    Args:
        consumers: those that are registered, by id.
    """

    def __init__(self, consumers: Mapping[str, Consumer], facts: Callable[[], Facts]) -> None:
        self._consumers = consumers
        self._facts = facts
        self._found: dict[tuple[str, int], FeatureProbe] = {}

    def forget(self) -> None:
        """Consumers have come or gone."""
        self._found.clear()

    def find(self, name: str, feature: int) -> FeatureProbe:
        """A feature as a probe. `ValueError` for one that there is not."""
        found = self._found.get((name, feature))
        if found is None:
            consumer = self._consumers.get(name)
            if not isinstance(consumer, SaeConsumer):
                known = [n for n, each in self._consumers.items() if isinstance(each, SaeConsumer)]
                raise ValueError(
                    f"no autoencoder {name!r} is registered; registered are "
                    f"{', '.join(sorted(known)) or 'none'}. Use "
                    "llm.register_consumer(SaeConsumer(path))"
                )
            if len(self._found) >= _MOST:
                self._found.clear()
            found = consumer.probe_of(feature, centers_rows=self._facts().centers_rows)
            self._found[name, feature] = found
        return found

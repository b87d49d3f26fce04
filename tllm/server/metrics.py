"""What interventions do, in the form of Prometheus, beside vLLM's own on `/metrics`.

The workers own the numbers, and are asked when somebody looks: it does not matter which process of
the API server answers, nor how many there are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tllm.client.attached import Attached

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long the workers are waited for: vLLM's own numbers are there without them."""


class Figure(NamedTuple):
    """One metric.

    Attributes:
        key: where the number is in the statistics of a worker, or of a consumer there.
        counts: whether it only grows.
        name: where it is called otherwise than its key.
    """

    key: str
    counts: bool
    about: str
    name: str = ""


WORKER = (
    Figure("rows_captured", True, "Rows of tokens that were captured"),
    Figure("bytes_captured", True, "Bytes of captured rows", "captured_bytes"),
    Figure("rows_dropped", True, "Rows that the capture ring had no room for"),
    Figure("rows_steered", True, "Rows of tokens that were steered"),
    Figure("rows_patched", True, "Rows of tokens that were patched"),
    Figure("ring_rows", False, "Rows that the capture ring holds"),
    Figure("ring_rows_in_use", False, "Ring rows that are still read"),
    Figure("steering_configurations", False, "Distinct ways of steering in use"),
    Figure("steering_mib", False, "Device memory of steering vectors, in MiB"),
    Figure("requests_held_back", False, "Requests that wait for room in the steering tables"),
    Figure("sequences_not_steered", True, "Sequences that were to be steered and could not be"),
    Figure("sequences_not_patched", True, "Sequences that were to be patched and could not be"),
    Figure("sequences_not_finite", True, "Sequences with a row that was not finite any more"),
    Figure("conversations", False, "Conversations that conditions are remembered for"),
    Figure("max_conversations", False, "The most of them at a time"),
    Figure("results_forgotten", True, "Results that nobody came for"),
    Figure("results_kept", False, "Prompts whose results nobody came for yet"),
    Figure("running_sequences", False, "Sequences that run"),
)
"""Of each worker."""

CONSUMER = (
    Figure("rows", True, "Rows that were delivered to the consumer"),
    Figure("calls", True, "Bundles of rows that it was called with"),
    Figure("rows_dropped", True, "Rows it should have had"),
    Figure("error", True, "Whether it raised, and was detached", "errors"),
    Figure("waiting", False, "Deliveries that wait for it"),
    Figure("lag_s", False, "Since when the oldest of them waits", "lag_seconds"),
)
"""Of each consumer in each worker; `consumer_` stands before their names."""


class Stats:
    """The workers' statistics; who asks while they are asked gets the same answer."""

    def __init__(self, interventions: Attached) -> None:
        self._interventions = interventions
        self._asking: asyncio.Task[Sequence[Mapping[str, Any]]] | None = None

    async def read(self) -> Sequence[Mapping[str, Any]] | None:
        """Of each worker; None when they do not answer in time, or cannot."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        try:
            return await asyncio.wait_for(asyncio.shield(self._asking), PATIENCE_S)
        except Exception as error:  # whoever looks at the numbers wants to see the others
            logger.warning("the workers did not tell their statistics: %r", error)
            return None

    async def _ask(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = await self._interventions.intervention_stats()
        return found


def exposition(stats: Sequence[Mapping[str, Any]] | None) -> bytes:
    """Statistics of the workers in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(stats))
    return generate_latest(registry)


class _Families:
    """A collector of statistics that were read before."""

    def __init__(self, stats: Sequence[Mapping[str, Any]] | None) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "tllm:workers_answer", "Whether the workers told the rest", int(self._stats is not None)
        )
        for figure in WORKER:
            family = _family("tllm:", figure, ("worker",))
            for rank, worker in enumerate(self._stats or ()):
                family.add_metric((str(rank),), worker[figure.key])
            yield family
        for figure in CONSUMER:
            family = _family("tllm:consumer_", figure, ("worker", "consumer"))
            for rank, worker in enumerate(self._stats or ()):
                for name, counters in worker["by_consumer"].items():
                    value = counters[figure.key]
                    number = bool(value) if figure.key == "error" else value
                    family.add_metric((str(rank), name), number)
            yield family


def _family(
    prefix: str, figure: Figure, labels: Sequence[str]
) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if figure.counts else GaugeMetricFamily
    return kind(f"{prefix}{figure.name or figure.key}", figure.about, labels=labels)

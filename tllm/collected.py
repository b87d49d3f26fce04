"""Brings what the workers say about the results of one prompt together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tllm.outputs import ConsumerResult
from tllm.ports import Payload

_WORST = ("ok", "pending", "partial_error", "error")


class Collected:
    """The results of one prompt: each worker's, by sample and consumer, until they are joined."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[str, dict[int, Mapping[str, Any]]]] = {}

    def add(self, worker: int, samples: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> None:
        """Add a worker's answer; it replaces what was pending."""
        for index, results in samples.items():
            for name, result in results.items():
                self._parts.setdefault(index, {}).setdefault(name, {})[worker] = result

    @property
    def pending(self) -> bool:
        """Whether a consumer of any worker is not done."""
        return any(
            result["status"] == "pending"
            for results in self._parts.values()
            for by_worker in results.values()
            for result in by_worker.values()
        )

    def joined(self) -> dict[int, dict[str, ConsumerResult]]:
        """One result for each sample and consumer.

        Of a tensor-parallel group the first rank's payload counts. Those of pipeline stages are
        joined if they are `Payload`s; else the first stage's counts that has one.
        """
        return {
            index: {name: _joined(list(by_worker.values())) for name, by_worker in results.items()}
            for index, results in self._parts.items()
        }


def _joined(parts: list[Mapping[str, Any]]) -> ConsumerResult:
    status = max((part["status"] for part in parts), key=_WORST.index)
    errors = dict.fromkeys(part["error"] for part in parts if part["error"])
    payload = None
    for part in parts:
        other = part["payload"]
        if payload is None:
            payload = other
        elif other is not None and isinstance(payload, Payload):
            payload = payload.joined(other)
    return ConsumerResult(status, "; ".join(errors) or None, payload)

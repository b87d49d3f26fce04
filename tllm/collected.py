"""Brings what the workers say about the results of one prompt together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cloudpickle

from tllm.outputs import ConsumerResult
from tllm.ports import Payload

_WORST = ("ok", "pending", "partial_error", "error")
_LEFT_OUT = (
    "pipeline stages returned different results, and only the first one's is here; let "
    "on_request_finished return a mapping with a key for each layer, or a Payload that joins them"
)


class Collected:
    """The results of one prompt: each worker's, by sample and consumer, until they are joined."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[str, dict[int, Mapping[str, Any]]]] = {}

    def add(self, worker: int, samples: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> None:
        """Add a worker's answer; it replaces what was pending there."""
        for parts in self._parts.values():
            for name, by_worker in list(parts.items()):
                if worker in by_worker and by_worker[worker]["status"] == "pending":
                    del by_worker[worker]
                if not by_worker:
                    del parts[name]
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

        Payloads come from the first rank of a tensor-parallel group. Those of pipeline stages are
        joined if they are `Payload`s or mappings (key by key). Others that differ cannot be: the
        first stage's is given, and the result is a `partial_error`.
        """
        return {
            index: {name: _joined(list(by_worker.values())) for name, by_worker in results.items()}
            for index, results in self._parts.items()
        }


def _joined(parts: list[Mapping[str, Any]]) -> ConsumerResult:
    status = max((part["status"] for part in parts), key=_WORST.index)
    errors = dict.fromkeys(part["error"] for part in parts if part["error"])
    payload, left_out = None, False
    for part in parts:
        payload, complete = _with(payload, part["payload"])
        left_out = left_out or not complete
    if left_out:
        status = max(status, "partial_error", key=_WORST.index)
        errors[_LEFT_OUT] = None
    return ConsumerResult(status, "; ".join(errors) or None, payload)


def _with(payload: Any, other: Any) -> tuple[Any, bool]:
    """A stage's payload with that of a later one, and whether all of it is there."""
    if payload is None or other is None:
        return (other if payload is None else payload), True
    if isinstance(payload, Payload) and type(payload).joined is not Payload.joined:
        return payload.joined(other), True
    if isinstance(payload, Mapping) and isinstance(other, Mapping):
        pairs = {key: _with(payload.get(key), value) for key, value in other.items()}
        joined = {key: value for key, (value, _) in pairs.items()}
        return {**payload, **joined}, all(complete for _, complete in pairs.values())
    return payload, cloudpickle.dumps(payload) == cloudpickle.dumps(other)

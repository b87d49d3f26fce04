"""A consumer that writes down all it is given, where a test of the same process can read it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tllm.consumers.base import Consumer
from tllm.ports import ConsumerContext, ConsumerFlow, PortBundle, RequestInfo, RowMeta

#: By consumer id. The worker has a copy of the consumer; both find their log here.
LOGS: dict[str, Log] = {}


@dataclass
class Call:
    """One call of `consume_bundle`."""

    flow: int
    key: Mapping[str, Any]
    meta: RowMeta
    entries: Mapping[str, torch.Tensor]
    step: int
    thread: str


@dataclass
class Log:
    """What happened to one consumer, in order."""

    calls: list[Call] = field(default_factory=list)
    started: list[RequestInfo] = field(default_factory=list)
    finished: list[RequestInfo] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    exports: list[tuple[str, Mapping[str, torch.Tensor], RowMeta | None, str]] = field(
        default_factory=list
    )


RowKey = tuple[str, int, int]
"""Request id, sample index, position."""


class Recorder(Consumer):
    """Reads `flows`, and returns the positions it saw as each request's result."""

    def __init__(self, *flows: ConsumerFlow, consumer_id: str = "recorder") -> None:
        self.consumer_id = consumer_id
        self._flows = flows
        LOGS[consumer_id] = Log()

    def flows(self) -> Sequence[ConsumerFlow]:
        return self._flows

    @property
    def log(self) -> Log:
        return LOGS[self.consumer_id]

    def on_request_started(self, request: RequestInfo, ctx: ConsumerContext) -> None:
        self.log.started.append(request)
        self.log.events.append(f"started {request.request_id}")

    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        entries = {
            role: value.to("cpu", copy=True)
            for role, value in bundle.entries.items()
            if isinstance(value, torch.Tensor)
        }
        thread = threading.current_thread().name
        self.log.calls.append(Call(bundle.flow, bundle.key, bundle.meta, entries, ctx.step, thread))
        self.log.events.append(f"bundle {bundle.flow}")

    def on_step_end(self, ctx: ConsumerContext) -> None:
        self.log.events.append("step_end")

    def on_export(self, channel, tensors, meta) -> None:
        thread = threading.current_thread().name
        self.log.exports.append((channel, tensors, meta, thread))

    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> Any:
        self.log.finished.append(request)
        self.log.events.append(f"finished {request.request_id}")
        return {"sample": request.sample_index, "request_id": request.request_id}

    def rows(self, role: str, flow: int = 0) -> dict[RowKey, torch.Tensor]:
        """Every row of an entry. A row that arrived twice is an error."""
        rows: dict[RowKey, torch.Tensor] = {}
        for call in self.log.calls:
            if call.flow != flow:
                continue
            tensor = call.entries[role]
            assert len(tensor) == len(call.meta)
            for i, position in enumerate(call.meta.positions):
                info = call.meta.requests[call.meta.request_index[i]]
                key = (info.request_id, info.sample_index, int(position))
                assert key not in rows, f"row {key} arrived twice"
                rows[key] = tensor[i]
        return rows

    def positions(self, role: str, flow: int = 0) -> dict[tuple[str, int], list[int]]:
        """The positions that arrived, sorted, by request and sample."""
        found: dict[tuple[str, int], list[int]] = defaultdict(list)
        for request_id, sample, position in self.rows(role, flow):
            found[request_id, sample].append(position)
        return {key: sorted(positions) for key, positions in found.items()}

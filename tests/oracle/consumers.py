"""The two consumers of the oracle: one returns every row it reads, the other writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tllm.consumers.base import Consumer
from tllm.ports import (
    ConsumerContext,
    ConsumerFlow,
    Logits,
    PerToken,
    Phase,
    PortBundle,
    RequestInfo,
    ResidualStream,
)
from tllm.verify.steered import Place


def read(place: Place, phase: Phase = "any") -> Any:
    point, layer = place
    return ResidualStream.read(layer=layer or 0, site=point, phase=phase, role=_role(place))


class Gatherer(Consumer):
    """Returns with each sequence its rows `[rows, places, hidden]`, in the order they arrived.

    Args:
        places: what is read.
        phase: of the rows.
        logits: return the logits that tokens are drawn from, too.
    """

    def __init__(
        self, consumer_id: str, places: Sequence[Place], phase: Phase, *, logits: bool = False
    ) -> None:
        self.consumer_id = consumer_id
        self._reads = [[read(place, phase) for place in places]]
        if logits:
            self._reads.append([Logits.read()])

    def flows(self) -> Sequence[ConsumerFlow]:
        return [ConsumerFlow(reads=reads) for reads in self._reads]

    def start(self, ctx: ConsumerContext) -> None:
        self._rows: Any = defaultdict(list)

    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        meta = bundle.meta
        stacked = torch.stack(
            [bundle.entries[read.role] for read in self._reads[bundle.flow]], dim=1
        )
        for index, request in enumerate(meta.requests):
            chosen = np.flatnonzero(meta.request_index == index)
            rows = stacked[torch.from_numpy(chosen).to(stacked.device)]
            self._rows[_key(request), bundle.flow].append((meta.positions[chosen], rows))

    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> Any:
        results = {}
        for flow, name in enumerate(["states", "logits"][: len(self._reads)]):
            if arrived := self._rows.pop((_key(request), flow), None):
                positions = np.concatenate([positions for positions, _ in arrived])
                values = torch.cat([rows for _, rows in arrived]).float().cpu()
                results[name] = PerToken(positions, values)
        return results


class Writer(Consumer):
    """Adds one vector, in each request at the place and in the phase that its options name."""

    consumer_id = "writer"

    def __init__(self, places: Sequence[Place], vector: torch.Tensor) -> None:
        self._places = places
        self._vector = vector

    def flows(self) -> Sequence[ConsumerFlow]:
        phases: tuple[Phase, ...] = ("prefill", "decode", "any")
        return [
            ConsumerFlow(
                writes=[
                    ResidualStream.write(
                        layer=layer or 0,
                        site=point,
                        phase=phase,
                        role=f"{_role((point, layer))} {phase}",
                    )
                    for point, layer in self._places
                    for phase in phases
                ]
            )
        ]

    def validate_options(self, options: Mapping[str, Any]) -> None:
        if not set(options) <= {"enabled", "role"}:
            raise ValueError(f"the writer takes enabled and role; got {sorted(options)}")

    @staticmethod
    def options(place: Place, phase: Phase) -> dict[str, str]:
        """The options of a request that is to be written to."""
        return {"role": f"{_role(place)} {phase}"}

    def on_request_started(self, request: RequestInfo, ctx: ConsumerContext) -> None:
        ctx.writer(request.options["role"]).set([request], self._vector.to(ctx.device))


def _role(place: Place) -> str:
    point, layer = place
    return f"{point} {layer}"


def _key(request: RequestInfo) -> tuple[str, int]:
    return request.prompt_id, request.sample_index

"""A consumer that adds a vector to the requests it is enabled for."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from engine.recorder import Recorder
from engine.reference import Place
from tllm.ports import ConsumerContext, ConsumerFlow, PortBundle, RequestInfo, ResidualStream


class Adder(Recorder):
    """Writes when a request starts, or at its first bundle.

    Args:
        place: where the vector is added.
        vector: `[hidden]`.
        phase: of the tokens it is added to.
        moment: `started`, or the window of the bundle in which it writes.
        clear_after: clear the vector in the `same_step` bundle with a row at this position.
    """

    def __init__(
        self,
        place: Place,
        vector: torch.Tensor,
        *,
        phase: str = "any",
        moment: str = "started",
        clear_after: int | None = None,
        consumer_id: str = "adder",
    ) -> None:
        point, layer = place
        window = "same_step" if moment == "started" else moment
        flow = ConsumerFlow(
            reads=[ResidualStream.read(layer=0, site="pre_attn", role="h")],
            writes=[ResidualStream.write(layer=layer or 0, site=point, phase=phase, role="add")],
            window=window,
        )
        super().__init__(flow, consumer_id=consumer_id)
        self._vector = vector
        self._moment = moment
        self._clear_after = clear_after
        self._written: set[str] = set()

    def on_request_started(self, request: RequestInfo, ctx: ConsumerContext) -> None:
        if self._moment == "started":
            ctx.writer("add").set([request], self._vector)

    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        if self._moment != "started":
            self._write([r for r in bundle.meta.requests if r.prompt_id not in self._written], ctx)
        if self._clear_after is not None and self._clear_after in bundle.meta.positions:
            ctx.writer("add").clear(bundle.meta.requests)

    def _write(self, requests: Sequence[RequestInfo], ctx: ConsumerContext) -> None:
        if requests:
            ctx.writer("add").set(requests, self._vector.expand(len(requests), -1))
            self._written.update(r.prompt_id for r in requests)
            WRITTEN.set()


#: Set once an `Adder` of this process has written.
WRITTEN = threading.Event()

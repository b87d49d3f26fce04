"""Consumers whose results are on their way to the host when a sequence ends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from tllm.consumers.base import Consumer
from tllm.ports import ConsumerContext, ConsumerFlow, CpuExport, RequestInfo, RowMeta

_ROWS, _END = "rows", "end"


class ExportingConsumer(Consumer):
    """Sends what it finds to the host as it goes, and promises a sequence that ends its result,
    which is made when all of it has arrived."""

    @abstractmethod
    def on_rows(
        self, tensors: Mapping[str, torch.Tensor], meta: RowMeta | None, attached: Any
    ) -> None:
        """What `send_rows` sent has arrived, in the order in which it was sent."""

    @abstractmethod
    def result_of(self, request: RequestInfo) -> Any:
        """The result of a sequence that has ended, all of whose rows have arrived."""

    def flows(self) -> Sequence[ConsumerFlow]:
        """The way to the host; no rows of everybody's."""
        return [ConsumerFlow(writes=[CpuExport.write(channel=each) for each in (_ROWS, _END)])]

    def send_rows(
        self,
        ctx: ConsumerContext,
        tensors: Mapping[str, torch.Tensor],
        meta: RowMeta | None = None,
        attached: Any = None,
    ) -> None:
        """Send what was found to `on_rows`."""
        ctx.export(_ROWS, tensors, meta, attach=attached)

    def promised(self, request: RequestInfo, ctx: ConsumerContext) -> Future[Any]:
        """The result of a sequence that ends, when what was sent so far has arrived."""
        promise: Future[Any] = Future()
        ctx.export(_END, {}, attach=(request, promise))
        return promise

    def on_export(
        self,
        channel: str,
        tensors: Mapping[str, torch.Tensor],
        meta: RowMeta | None,
        attached: Any = None,
    ) -> None:
        """What was found is on the host, or all of a sequence that has ended."""
        if channel == _ROWS:
            self.on_rows(tensors, meta, attached)
            return
        request, promise = attached
        promise.set_result(self.result_of(request))

"""What every capture shares: from a request's options to its rows on the host."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tllm.consumers.base import Consumer
from tllm.consumers.capture.activations import Activations, Block, Reduced, Rows
from tllm.consumers.capture.host_rows import Chunk, HostRows
from tllm.consumers.capture.reductions import Reductions, Taken, sequence_key
from tllm.ports import (
    ConsumerContext,
    ConsumerFlow,
    CpuExport,
    Place,
    PortBundle,
    RequestInfo,
    ResidualStream,
    RowMeta,
)
from tllm.spec.capture import CaptureSpec

_Key = tuple[str, int]
_NONE = np.zeros(0, np.int32)
_ONE = np.zeros(1, np.int32)


class Capturing(Consumer):
    """Brings the rows that requests ask for to the host, and hands each sequence's to `conclude`.

    Rows leave the ring on a side stream, into page-locked host memory. Sorting them by sequence is
    the delivery thread's, so the engine's thread does the same work for one hook point of one
    sequence as for all of all.
    """

    @abstractmethod
    def spec(self, options: Mapping[str, Any]) -> CaptureSpec:
        """What a request's options ask for; `ValueError` names the field."""

    @abstractmethod
    def conclude(self, ending: Ending, activations: Activations) -> None:
        """All rows of a sequence are on the host: give `ending.result` its value, now or later.

        On the delivery thread.
        """

    def flows(self) -> Sequence[ConsumerFlow]:
        """No rows of everybody's; the way to the host."""
        return [
            ConsumerFlow(writes=[CpuExport.write(channel="rows"), CpuExport.write(channel="end")])
        ]

    def validate_options(self, options: Mapping[str, Any]) -> None:
        """As `spec` has it."""
        if options.get("enabled", True):
            self.spec(options)

    def request_flows(self, options: Mapping[str, Any], num_layers: int) -> Sequence[ConsumerFlow]:
        """One flow for all hook points."""
        spec = self.spec(options)
        return [
            ConsumerFlow(
                reads=[ResidualStream.read_block(spec.places(num_layers), role="rows")],
                window="out_of_band",
                delivery="device_lease",
                positions=spec.positions,
                label=_label(spec),
                prompt_rows="once",
                ranks="first",
                split_by_stage=True,
            )
        ]

    def start(self, ctx: ConsumerContext) -> None:
        """Nothing is allocated before somebody asks."""
        self._model = ctx.model
        self._specs: dict[_Key, CaptureSpec] = {}
        self._places: dict[tuple[Place, ...], tuple[Place, ...]] = {}
        self._reductions: dict[tuple[str, tuple[Place, ...]], Reductions] = {}
        # What the exports under way are; they arrive in order, on one thread.
        self._exported: deque[tuple[str, tuple[Place, ...]]] = deque()
        self._ending: deque[Ending] = deque()
        self._rows = HostRows()
        self._captured_rows = 0
        self._captured_bytes = 0

    def on_request_started(self, request: RequestInfo, ctx: ConsumerContext) -> None:
        """Remember what it asked."""
        if self._model.first_rank:
            self._specs[sequence_key(request)] = self.spec(request.options)

    # Tables made in inference mode can only be written in it.
    @torch.inference_mode()
    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Send rows to the host, or reduce them here; on the side stream."""
        meta, rows = bundle.meta, bundle.entries["rows"]
        places = bundle.reads[0].places
        spec = self._specs[sequence_key(meta.requests[0])]
        self._places[spec.places(self._model.num_layers)] = places
        prefill = bundle.key["phase"] == "prefill"
        if spec.reduction != "none":
            self._table(spec, places).add(meta, rows, prefill)
            return
        if spec.dtype != "model":
            rows = rows.to(getattr(torch, spec.dtype))
        self._captured_rows += len(meta)
        self._captured_bytes += rows.numel() * rows.element_size()
        self._exported.append((bundle.label, places))
        ctx.export("rows", {"rows": rows}, meta)

    def _table(self, spec: CaptureSpec, places: tuple[Place, ...]) -> Reductions:
        key = (spec.reduction, places)
        found = self._reductions.get(key)
        if found is None:
            found = self._reductions[key] = Reductions(
                spec.reduction, len(places), self._model.hidden_size, self._model.device
            )
        return found

    @torch.inference_mode()
    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> Future[Any] | None:
        """A promise: the rows are still under way."""
        spec = self._specs.pop(sequence_key(request), None)
        if spec is None:
            return None
        asked = spec.places(self._model.num_layers)
        places = self._places.get(asked, asked)
        ending = Ending(request, spec, places)
        tensors: dict[str, torch.Tensor] = {}
        with _on(ctx.side_stream()):
            table = self._reductions.get((spec.reduction, places))
            if table is not None:
                ending.taken = taken = table.take(request)
                tensors["totals"] = taken.totals
                if taken.tail is not None:
                    tensors["tail"] = taken.tail
            self._ending.append(ending)
            ctx.export("end", tensors)
        return ending.result

    def on_export(
        self, channel: str, tensors: Mapping[str, torch.Tensor], meta: RowMeta | None
    ) -> None:
        """Rows have arrived on the host, or all of a sequence that has ended."""
        if channel == "rows":
            assert meta is not None
            sequences = [sequence_key(request) for request in meta.requests]
            chunk = Chunk(sequences, meta.request_index, meta.positions, tensors["rows"])
            self._rows.add(self._exported.popleft(), chunk)
            return
        ending = self._ending.popleft()
        spec = ending.spec
        if spec.reduction == "none":
            block = self._kept_rows(ending)
        else:
            block = self._reduced(ending, tensors)
        dtype = self._model.dtype if spec.dtype == "model" else getattr(torch, spec.dtype)
        activations = Activations(
            [block], reduction=spec.reduction, dtype=dtype, num_layers=self._model.num_layers
        )
        self.conclude(ending, activations)

    def _kept_rows(self, ending: Ending) -> Block:
        spec, places, request = ending.spec, ending.places, ending.request
        dtype = self._model.dtype if spec.dtype == "model" else getattr(torch, spec.dtype)
        empty = torch.empty((0, len(places), self._model.hidden_size), dtype=dtype)
        rows = self._rows.take((_label(spec), places), sequence_key(request))
        if rows is None:
            rows = Rows(_NONE, [empty])
        prompt, generated = rows.split(request.prompt_len)
        return Block(places, prompt, generated)

    def _reduced(self, ending: Ending, tensors: Mapping[str, torch.Tensor]) -> Block:
        places, taken = ending.places, ending.taken
        shape = (1, len(places), self._model.hidden_size)
        none = Rows(_NONE, [torch.empty((0, *shape[1:]), dtype=self._model.dtype)])
        if taken is None:
            nothing = Reduced(_NONE, Rows(_NONE, [torch.zeros(shape)]), none)
            return Block(places, nothing, nothing)
        totals = [Rows(_ONE, [tensors["totals"][phase : phase + 1]]) for phase in (0, 1)]
        tail = Rows(taken.tail_positions, [tensors["tail"]]) if "tail" in tensors else none
        return Block(
            places,
            Reduced(taken.positions[0], totals[0], none),
            Reduced(taken.positions[1], totals[1], tail),
        )

    def synchronize(self) -> None:
        """Nothing beyond what the runtime waits for."""

    def read_stats(self) -> Mapping[str, Any]:
        """`{"rows", "bytes"}` that were brought to the host, reductions aside."""
        return {"rows": self._captured_rows, "bytes": self._captured_bytes}


@dataclass(eq=False)
class Ending:
    """A sequence that has ended, while the last of its rows are under way."""

    request: RequestInfo
    spec: CaptureSpec
    places: tuple[Place, ...]
    taken: Taken | None = None
    result: Future[Any] = field(default_factory=Future)


def _label(spec: CaptureSpec) -> str:
    return f"{spec.reduction} {spec.dtype}"


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)

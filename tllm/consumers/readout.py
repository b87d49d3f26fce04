"""The base of consumers that compute a few numbers for every token, where the rows are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch

from tllm.consumers.exporting import ExportingConsumer
from tllm.consumers.token_rows import Arrays, TokenRows, check_since
from tllm.inference_mode import in_inference_mode
from tllm.ports import (
    ConsumerContext,
    ConsumerFlow,
    PerToken,
    Place,
    PortBundle,
    RequestInfo,
    RequestResult,
    ResidualStream,
    RowMeta,
)
from tllm.ports.base import Ranks
from tllm.spec.reading import allow_options, require_one_of
from tllm.spec.selection import Selection

ReadoutWindow = Literal["out_of_band", "same_step"]


class ReadoutConsumer(ExportingConsumer):
    """Computes something of the rows of the requests that name it, on a side stream.

    Only what `read_out` returns leaves the device. It is sorted by sequence on the host, comes back
    with the request's output, and is given while the request streams.

    Args:
        positions: the tokens of a sequence that are read, unless its request says: anything that
            `SamplingParams(capture=...)` takes as positions.
        window: `out_of_band`, beside the next forward pass; `same_step`, before the step's tokens
            are drawn.
    """

    on_request_only = True
    place_argument = "site"
    remote_methods = ("so_far",)

    #: What a request may say beside `enabled` and `positions`.
    known_options: Sequence[str] = ()

    #: Which ranks of a tensor-parallel group `read_out` is called on; all have the same rows.
    ranks: Ranks = "first"

    def __init__(self, *, positions: Any = "all", window: ReadoutWindow = "out_of_band") -> None:
        Selection.parse(positions)
        require_one_of("window", window, ReadoutWindow)
        self._positions = positions
        self._window = window

    @abstractmethod
    def places(self, options: Mapping[str, Any], num_layers: int) -> tuple[Place, ...]:
        """The hook points that a request with these options reads; `ValueError` for what it cannot
        have."""

    @abstractmethod
    def read_out(self, rows: torch.Tensor, places: tuple[Place, ...]) -> Mapping[str, torch.Tensor]:
        """What is wanted of `rows` `[rows, places, hidden]`, on the device: by name, `[rows, ...]`.

        Nothing here may wait for the device.
        """

    @abstractmethod
    def nothing(self, options: Mapping[str, Any]) -> Arrays:
        """What `read_out` finds of no rows, for a request with these options."""

    @abstractmethod
    def given(self, options: Mapping[str, Any], found: Mapping[str, PerToken]) -> Any:
        """What a request with these options is given of what was read of its tokens: a `PerToken`,
        or a mapping that has some."""

    def validate_options(self, options: Mapping[str, Any]) -> None:
        """Which options there are; `places` checks what depends on the model."""
        known = ("enabled", "positions", *self.known_options)
        allow_options(options, known, f"consumers[{self.consumer_id!r}]")
        if "positions" in options:
            Selection.parse(options["positions"], f"consumers[{self.consumer_id!r}]['positions']")

    def request_flows(self, options: Mapping[str, Any], num_layers: int) -> Sequence[ConsumerFlow]:
        """One flow for all hook points."""
        positions = options.get("positions", self._positions)
        return _flows(
            self.places(options, num_layers), Selection.parse(positions), self._window, self.ranks
        )

    def start(self, ctx: ConsumerContext) -> None:
        """Nothing is known yet."""
        self._found = TokenRows()
        #: Slots of sequences that had rows.
        self._read: set[int] = set()
        self._answers = ctx.model.first_rank
        self._alone = ctx.model.num_stages == 1

    def on_request_started(self, request: RequestInfo, ctx: ConsumerContext) -> None:
        """What is found may be asked for while it runs."""
        self._found.begin(request)

    @in_inference_mode
    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Compute, and send what was found to the host."""
        found = self.read_out(bundle.entries["rows"], bundle.reads[0].places)
        self._read.update(request.slot for request in bundle.meta.requests)
        if self._answers:
            self.send_rows(ctx, found, bundle.meta)

    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> Any:
        """A promise: what was found is on its way. None where another rank answers."""
        had_rows = request.slot in self._read
        self._read.discard(request.slot)
        if self._answers and had_rows:
            return self.promised(request, ctx)
        self._found.take(request)
        return RequestResult(self._of_no_rows(request.options)) if self._answers else None

    def _of_no_rows(self, options: Mapping[str, Any]) -> Any:
        """What a sequence is given that had no such token. Of several pipeline stages each says
        that it has nothing: which of them reads is not known here."""
        if not self._alone:
            return None
        none = np.zeros(0, np.int32)
        found = {name: PerToken(none, values) for name, values in self.nothing(options).items()}
        return self.given(options, found)

    def on_rows(
        self, tensors: Mapping[str, torch.Tensor], meta: RowMeta | None, attached: Any
    ) -> None:
        """Sort it by sequence."""
        assert meta is not None
        self._found.add(meta, {name: tensor.numpy() for name, tensor in tensors.items()})

    def result_of(self, request: RequestInfo) -> Any:
        """What was found of it; None for nothing."""
        found = self._found.take(request)
        return None if found is None else self.given(request.options, found)

    def validate_call(self, method: str, args: Sequence[Any]) -> None:
        """Refuse what `so_far` does not take."""
        check_since(method, args)

    def so_far(self, since: Mapping[str, Mapping[int, int]]) -> dict[str, dict[int, Any]]:
        """What was found of sequences that run, as far as it is on the host.

        Args:
            since: the first position of interest, by the id of a prompt and its sample.

        Returns:
            By prompt and sample; what is not there has nothing new, or has ended.
        """
        found = self._found.so_far(since)
        return {
            prompt_id: {
                sample: self.given(request.options, rows)
                for sample, (request, rows) in samples.items()
            }
            for prompt_id, samples in found.items()
        }


@lru_cache(1024)
def _flows(
    places: tuple[Place, ...], positions: Selection, window: ReadoutWindow, ranks: Ranks
) -> tuple[ConsumerFlow, ...]:
    """Remembered: flows are asked for with every request."""
    return (
        ConsumerFlow(
            reads=[ResidualStream.read_block(places, role="rows")],
            window=window,
            bundle_key=("engine_step_id",),
            delivery="device_lease",
            positions=positions,
            ranks=ranks,
        ),
    )

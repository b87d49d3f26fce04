"""Keeps the rows of a run on the device, for patches to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tllm.consumers.base import Consumer
from tllm.inference_mode import in_inference_mode
from tllm.ports import (
    ConsumerContext,
    ConsumerFlow,
    Place,
    PortBundle,
    RequestInfo,
    RequestResult,
    ResidualStream,
)

IntArray = npt.NDArray[np.int32]

FOR_RUNS_ALONE = (
    "consumers['patch_runs'] is for llm.patching.run alone; call that, and refer to the run with "
    "patch=[{..., 'source': {'run': run}}]"
)


@dataclass
class _RunningRows:
    """What was seen of a run so far: positions and rows `[rows, places, hidden]`, in pieces."""

    places: tuple[Place, ...]
    positions: list[IntArray] = field(default_factory=list)
    pieces: list[torch.Tensor] = field(default_factory=list)


class PatchRunsConsumer(Consumer):
    """Keeps the prompt rows of the requests that ask for it, until `take` hands them over.

    A request asks with `consumers={"patch_runs": {"uid": ..., "places": [[hook, layer], ...]}}`.
    Nothing leaves the device. `llm.patching.run` is what a user calls.
    """

    consumer_id = "patch_runs"
    on_request_only = True

    def flows(self) -> Sequence[ConsumerFlow]:
        """No rows of everybody's."""
        return ()

    def validate_options(self, options: Mapping[str, Any]) -> None:
        """As `llm.patching.run` gives them."""
        if set(options) != {"uid", "places"}:
            raise ValueError(FOR_RUNS_ALONE)

    def request_flows(self, options: Mapping[str, Any], num_layers: int) -> Sequence[ConsumerFlow]:
        """The rows of the prompt at all places together."""
        places = [(hook, layer) for hook, layer in options["places"]]
        return [
            ConsumerFlow(
                reads=[ResidualStream.read_block(places, phase="prefill", role="rows")],
                delivery="device_lease",
                split_by_stage=True,
            )
        ]

    def start(self, ctx: ConsumerContext) -> None:
        self._running: dict[int, _RunningRows] = {}
        self._ended: dict[str, tuple[tuple[Place, ...], torch.Tensor]] = {}

    @in_inference_mode
    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Copy what lies in the ring."""
        rows, meta = bundle.entries["rows"], bundle.meta
        for i, request in enumerate(meta.requests):
            own = np.flatnonzero(meta.request_index == i)
            low, high = int(own[0]), int(own[-1]) + 1
            if high - low == len(own):
                piece = rows[low:high].clone()
            else:
                piece = rows[ctx.upload(own.astype(np.int64))]
            seen = self._running.setdefault(request.slot, _RunningRows(bundle.reads[0].places))
            seen.positions.append(meta.positions[own])
            seen.pieces.append(piece)

    @in_inference_mode
    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> Any:
        """Keep what was seen, if all of it was."""
        seen = self._running.pop(request.slot, None)
        if seen is None:  # another pipeline stage has them
            return None
        positions = np.concatenate(seen.positions)
        if request.missing or len(positions) != request.prompt_len:
            return RequestResult(None, "error", request.missing or "rows of the prompt are missing")
        rows = torch.cat(seen.pieces)
        if (np.diff(positions) < 0).any():
            rows = rows[ctx.upload(np.argsort(positions))]
        self._ended[request.options["uid"]] = seen.places, rows
        return None

    def take(self, uid: str) -> tuple[tuple[Place, ...], torch.Tensor] | None:
        """Hook points and rows `[positions, places, hidden]` of a run that has ended; None where
        this worker has none. They are the caller's then."""
        return self._ended.pop(uid, None)

    #: In the worker only: rows do not leave it.
    remote_methods = ("take",)

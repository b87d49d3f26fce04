"""Keeps `dims` numbers of each activation instead of all, projected on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tllm.consumers.base import Consumer
from tllm.ports import (
    ConsumerContext,
    ConsumerFlow,
    PerToken,
    PortBundle,
    RequestInfo,
    ResidualStream,
)
from tllm.spec.layers import Layers
from tllm.spec.selection import Selection

_LAYERS = "capture['sketch']['layers']"


class SketchConsumer(Consumer):
    """`SamplingParams(capture={"sketch": {"layers": [4, 8], "positions": "all"}})` gives
    `output.capture_results["sketch"].payload`, a `PerToken` of values `[tokens, layers, dims]`.

    Args:
        dims: numbers to keep of each activation.
        seed: of the projection.
    """

    consumer_id = "sketch"
    on_request_only = True

    def __init__(self, dims: int = 16, seed: int = 0) -> None:
        if dims < 1:
            raise ValueError(f"dims={dims} must be 1 or more")
        self._dims = dims
        self._seed = seed
        self.received = 0

    # -- in the user's process, and in the workers ---------------------------------------------

    def flows(self) -> Sequence[ConsumerFlow]:
        return ()

    def validate_options(self, options: Mapping[str, Any]) -> None:
        if unknown := sorted(set(options) - {"enabled", "layers", "positions"}):
            raise ValueError(f"capture['sketch'] has unknown options {unknown}")
        Layers.parse(options.get("layers", "all"), _LAYERS)
        Selection.parse(options.get("positions", "all"), "capture['sketch']['positions']")

    def request_flows(self, options: Mapping[str, Any], num_layers: int) -> Sequence[ConsumerFlow]:
        layers = Layers.parse(options.get("layers", "all"))
        places = [("post_block", n) for n in layers.of(num_layers, "post_block", _LAYERS)]
        return [
            ConsumerFlow(
                reads=[ResidualStream.read_block(places, role="rows")],
                window="background",
                delivery="device_lease",
                positions=options.get("positions", "all"),
                ranks="first",
            )
        ]

    # -- in the workers ------------------------------------------------------------------------

    def start(self, ctx: ConsumerContext) -> None:
        generator = torch.Generator().manual_seed(self._seed)
        matrix = torch.randn(ctx.model.hidden_size, self._dims, generator=generator)
        self._matrix = (matrix / self._dims**0.5).to(ctx.device)
        self._kept: dict[tuple[str, int], list[tuple[Any, Any]]] = {}

    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """A step's rows `[rows, layers, hidden]`; only this thread waits for the device."""
        with torch.inference_mode():
            sketch = (bundle.entries["rows"].float() @ self._matrix).cpu().numpy()
        meta = bundle.meta
        for i, request in enumerate(meta.requests):
            own = np.flatnonzero(meta.request_index == i)
            key = request.prompt_id, request.sample_index
            self._kept.setdefault(key, []).append((meta.positions[own], sketch[own]))

    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> PerToken | None:
        kept = self._kept.pop((request.prompt_id, request.sample_index), None)
        if kept is None:
            return None
        positions, sketches = zip(*kept, strict=True)
        return PerToken(np.concatenate(positions), np.concatenate(sketches))

    # -- in the user's process -----------------------------------------------------------------

    def on_result(self, output: Any, sample_index: int, result: Any) -> None:
        if result.status == "ok":
            self.received += len(result.payload.values)

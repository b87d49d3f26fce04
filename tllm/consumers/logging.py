"""Norms and row counts of hook points: what passes through a model, at a glance."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from tllm.consumers.base import Consumer
from tllm.cuda_runtime import current_stream
from tllm.inference_mode import in_inference_mode
from tllm.ports import (
    ConsumerContext,
    ConsumerFlow,
    CpuExport,
    PortBundle,
    ResidualStream,
    RowMeta,
)
from tllm.spec.layers import Layers
from tllm.spec.reading import hook_named, require_one_of, whole_number

logger = logging.getLogger(__name__)

LogWindow = Literal["background", "out_of_band"]
LogLevel = Literal["debug", "info", "warning"]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_PHASES = ("prefill", "decode")


class LoggingConsumer(Consumer):
    """Mean and largest norm of the rows of each layer, by phase.

    Norms are summed on the device; the host waits for them only when somebody asks.

    Args:
        layers: the layers to look at, the last one by default; negative ones count from the end.
            As `tllm.spec.layers.Layers` reads them, such as `"0-27"` or `"0-3 12 -1"`, but for
            those that only the model tells, such as `"all"`.
        site: hook point, or its alias.
        every_n_steps: log the figures so far every n engine steps, a line for each layer and phase;
            0 logs nothing.
        level: of these lines, of the logger `tllm.consumers.logging`.
        window: `background` works on a thread of its own, `out_of_band` on the engine's.
        consumer_id: its name, for a second one in the same engine.
    """

    def __init__(
        self,
        layers: Any = -1,
        *,
        site: str = "post_block",
        every_n_steps: int = 0,
        level: LogLevel = "info",
        window: LogWindow = "background",
        consumer_id: str = "logging",
    ) -> None:
        require_one_of("level", level, LogLevel)
        require_one_of("window", window, LogWindow)
        whole_number(every_n_steps, "every_n_steps=", 0)
        self.consumer_id = consumer_id
        point = hook_named(site, "site")
        self._site = point.value
        self._layers = Layers.parse(layers).numbers("layers") if point.has_layer else (None,)
        self._every_n_steps = every_n_steps
        self._level = _LEVELS[level]
        self._window = window
        self._tables: _Tables | None = None
        self._next_line = every_n_steps

    def flows(self) -> Sequence[ConsumerFlow]:
        """One for each layer, so that every pipeline stage has those of its own layers."""
        return [
            ConsumerFlow(
                reads=[ResidualStream.read(layer=layer or 0, site=self._site)],
                writes=[CpuExport.write(channel="line")],
                window=self._window,
                delivery="device_lease",
            )
            for layer in self._layers
        ]

    # Buffers made in inference mode can only be written in it; the delivery thread is not in it.
    @in_inference_mode
    def start(self, ctx: ConsumerContext) -> None:
        self._tables = _Tables(len(self._layers), ctx.device)

    @in_inference_mode
    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Add the rows of one layer in one phase."""
        assert self._tables is not None
        step = int(bundle.meta.steps[-1])
        if self._every_n_steps and step >= self._next_line:
            self._next_line = step + self._every_n_steps
            ctx.export("line", self._tables.snapshot())
        phase = _PHASES.index(bundle.key["phase"])
        self._tables.add(bundle.flow, phase, bundle.entries["hidden"])

    def on_export(
        self,
        channel: str,
        tensors: Mapping[str, torch.Tensor],
        meta: RowMeta | None,
        attached: Any = None,
    ) -> None:
        """Write the line."""
        for layer, phases in self._figures(tensors).items():
            for phase, figures in phases.items():
                logger.log(
                    self._level,
                    "%s layer %s %s: %d rows, mean norm %.4g, largest %.4g",
                    *(self._site, layer, phase),
                    *(figures["rows"], figures["mean_norm"], figures["max_norm"]),
                )

    @in_inference_mode
    def read_stats(self) -> Mapping[str, Any]:
        """`{"layers": {layer: {phase: {"rows", "mean_norm", "max_norm"}}}}`; waits for the device.

        Layers and phases without rows are left out; the layer of `lm_head_in` is None.
        """
        if self._tables is None:
            return {"layers": {}}
        return {"layers": self._figures(self._tables.snapshot(wait=True))}

    def merge_stats(self, stats: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Each layer from the first worker that has it: stages differ, tensor ranks do not."""
        layers: dict[int | None, Any] = {}
        for worker in stats:
            layers = {**worker["layers"], **layers}
        return {**stats[0], "layers": {n: layers[n] for n in self._layers if n in layers}}

    def _figures(self, tensors: Mapping[str, torch.Tensor]) -> dict[int | None, dict[str, Any]]:
        rows, sums, largest = (tensors[name].tolist() for name in ("rows", "sums", "largest"))
        figures: dict[int | None, dict[str, Any]] = {}
        for i, layer in enumerate(self._layers):
            for j, phase in enumerate(_PHASES):
                if rows[i][j]:
                    figures.setdefault(layer, {})[phase] = {
                        "rows": rows[i][j],
                        "mean_norm": sums[i][j] / rows[i][j],
                        "max_norm": largest[i][j],
                    }
        return figures


class _Tables:
    """`[layers, phases]` of row counts, sums of norms and largest norms.

    The counts are kept on the host and the norms on the device, so that adding never waits.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        shape = layers, len(_PHASES)
        self._rows = torch.zeros(shape, dtype=torch.int64)
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self._largest = torch.zeros(shape, dtype=torch.float32, device=device)
        self._added = torch.cuda.Event() if device.type == "cuda" else None
        # Rows may arrive on a delivery thread while the engine's reads the figures.
        self._lock = threading.Lock()

    def add(self, layer: int, phase: int, hidden: torch.Tensor) -> None:
        """Add rows `[rows, hidden]`, in any float dtype."""
        norms = torch.linalg.vector_norm(hidden, dim=-1, dtype=torch.float32)
        with self._lock:
            self._rows[layer, phase] += len(hidden)
            self._sums[layer, phase] += norms.sum(dtype=torch.float64)
            torch.maximum(self._largest[layer, phase], norms.max(), out=self._largest[layer, phase])
            if self._added is not None:
                self._added.record(current_stream(self._sums.device))

    def snapshot(self, wait: bool = False) -> dict[str, torch.Tensor]:
        """Copies of all three, taken between two additions; on the device unless `wait`."""
        with self._lock:
            if wait and self._added is not None:
                self._added.synchronize()
            return {
                "rows": self._rows.clone(),
                "sums": self._sums.cpu() if wait else self._sums.clone(),
                "largest": self._largest.cpu() if wait else self._largest.clone(),
            }

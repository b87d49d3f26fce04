"""What tLLM is made to do in each variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.workload import Shape
from tllm.consumers.base import Consumer
from tllm.ports import ConsumerContext, ConsumerFlow, PortBundle, ResidualStream


class EveryRow(Consumer):
    """Captures every row of every layer, prompt and generated, and reads one number of each step
    so that a capture of nothing would show."""

    consumer_id = "every-row"

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def flows(self) -> Sequence[ConsumerFlow]:
        reads = [
            ResidualStream.read(layer=i, site="post_block", role=f"layer{i}")
            for i in range(self.layers)
        ]
        return [ConsumerFlow(reads=reads, window="out_of_band", delivery="device_lease")]

    def start(self, ctx: ConsumerContext) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=ctx.device)
        self.rows = 0

    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        self.rows += self.layers * len(bundle.meta)
        self.total += bundle.entries[f"layer{self.layers - 1}"][0].double().norm()

    def read_stats(self) -> Mapping[str, Any]:
        return {"rows": self.rows, "sum_of_norms": float(self.total)}


def consumer_for(variant: str, shape: Shape) -> Consumer | None:
    """The consumer of a variant; None for idle taps."""
    if variant == "taps":
        return EveryRow(shape.layers)
    if variant == "esamp":
        from tllm.consumers.esamp import ESampConsumer, ESampConsumerConfig

        return ESampConsumer(ESampConsumerConfig(beta=0.1))
    return None

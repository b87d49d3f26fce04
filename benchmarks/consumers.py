"""What tLLM is made to do in each variant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.workload import Shape
from tllm.consumers.base import Consumer
from tllm.ports import (
    Action,
    Actions,
    ConsumerContext,
    ConsumerFlow,
    Note,
    PortBundle,
    ResidualStream,
    Steer,
    Window,
)


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
        return [
            ConsumerFlow(
                reads=reads,
                window="out_of_band",
                delivery="device_lease",
                split_by_stage=True,
            )
        ]

    def start(self, ctx: ConsumerContext) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=ctx.device)
        self.rows = 0

    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        layers = list(bundle.entries.values())  # those of this pipeline stage
        self.rows += len(layers) * len(bundle.meta)
        self.total += torch.linalg.vector_norm(layers[-1][0], dtype=torch.float64)

    def read_stats(self) -> Mapping[str, Any]:
        return {"rows": self.rows, "sum_of_norms": float(self.total)}


class Decider(Consumer):
    """Decides for about one generated token in 16, by its row at the middle of the model: steers
    the one after it, or in the same step, where it cannot, takes a note."""

    consumer_id = "decider"

    def __init__(self, shape: Shape, window: Window) -> None:
        self.middle = shape.layers // 2
        self.window: Window = window
        self.probe, vector = torch.randn(2, shape.hidden, generator=torch.Generator())
        self.steering = {"post_block": {self.middle: 0.01 * vector}}

    def flows(self) -> Sequence[ConsumerFlow]:
        read = ResidualStream.read(layer=self.middle, phase="decode")
        write = Actions.write("note" if self.window == "same_step" else "steer")
        return [ConsumerFlow(reads=[read], writes=[write], window=self.window)]

    def start(self, ctx: ConsumerContext) -> None:
        self.probe = self.probe.to(ctx.device)

    def decide(self, rows: PortBundle, ctx: ConsumerContext) -> Iterator[Action]:
        hidden = rows.entries["hidden"].float()
        high = torch.cosine_similarity(hidden, self.probe, dim=1) * hidden.shape[1] ** 0.5 > 1.5
        for request, chosen in zip(rows.owners, high.tolist(), strict=True):
            if chosen and self.window == "same_step":
                yield Note(request, {"high": True})
            elif chosen:
                yield Steer(request, self.steering, tokens=1)


DECIDERS: Mapping[str, Window] = {
    "decide-same-step": "same_step",
    "decide-next-step": "next_step",
    "decide-background": "background",
}


def consumer_for(variant: str, shape: Shape) -> Consumer | None:
    """The consumer of a variant; None for idle taps."""
    if variant == "taps":
        return EveryRow(shape.layers)
    if variant in DECIDERS:
        return Decider(shape, DECIDERS[variant])
    if variant == "esamp":
        from tllm.consumers.esamp import ESampConsumer, ESampConsumerConfig

        return ESampConsumer(ESampConsumerConfig(beta=0.1))
    return None

"""A controller as somebody else would write it, and start with the server by its name."""

from __future__ import annotations

from typing import Any

import torch

from tllm.consumers.base import Consumer
from tllm.ports import Actions, ConsumerFlow, Note, ResidualStream, Steer, Stop


class Turning(Consumer):
    """Steers after the row of a generated token, once told, and stops some tokens later."""

    consumer_id = "turning"
    on_request_only = True
    one_prompt_options = ("name",)

    def flows(self) -> list[ConsumerFlow]:
        read = ResidualStream.read(layer=1, phase="decode")
        write = Actions.write("steer", "stop", "note")
        return [ConsumerFlow(reads=[read], writes=[write], window="next_step")]

    def validate_options(self, options: Any) -> None:
        if options.get("after") == "exit":
            raise SystemExit(3)  # a fault of its author's
        if not isinstance(options.get("after"), int):
            raise ValueError(f"consumers['turning']['after']={options.get('after')!r}: a number")

    def decide(self, rows: Any, ctx: Any) -> Any:
        vector = torch.linspace(-9, 9, ctx.model.hidden_size)
        for request, position in zip(rows.owners, rows.meta.positions.tolist(), strict=True):
            generated = position - request.prompt_len
            if generated == request.options["after"]:
                yield Steer(request, {"post_block": {2: vector}})
                yield Note(request, {"at": position})
            if generated == request.options["after"] + 2:
                yield Stop(request, reason="enough")

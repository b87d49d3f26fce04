"""Activations on the request's own output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tllm.consumers.capture.activations import Activations
from tllm.consumers.capture.capturing import Capturing, Ending
from tllm.spec.capture import OPTIONS, CaptureSpec
from tllm.spec.reading import allow_options


class MemoryConsumer(Capturing):
    """Captures what requests ask for, and gives it back on their outputs.

    `SamplingParams(capture={"memory": {"hooks": {"post_block": [12]}, "positions": "all"}})` gives
    `output.activations["post_block"][12]`. It is in every engine, and costs nothing before it is
    asked for.
    """

    consumer_id = "memory"
    on_request_only = True
    rows_are_results = True

    def spec(self, options: Mapping[str, Any]) -> CaptureSpec:
        """Takes `hooks`, `positions`, `reduction` and `dtype`."""
        allow_options(options, OPTIONS, "capture['memory']")
        return CaptureSpec.parse(options, "capture['memory']")

    def conclude(self, ending: Ending, activations: Activations) -> None:
        ending.result.set_result(activations)

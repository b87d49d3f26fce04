"""The events of a stream for choices whose prompt a condition refused."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


def refused_choices(
    noted: Mapping[str, Any], num_samples: int, first: Mapping[str, Any], model: str
) -> list[dict[str, Any]]:
    """The last event of each choice without tokens that a condition has ended.

    Args:
        noted: the last output of each prompt, by its id, in the order of the prompts.
        first: the stream's first event; empty where there was none, as of completions.
    """
    found: list[dict[str, Any]] = []
    for number, (request_id, output) in enumerate(noted.items()):
        for sample in () if output is None else output.outputs:
            if sample.finish_reason != "abort" or sample.stop_reason is None:
                continue
            about = {name: first[name] for name in ("id", "object", "created", "model") if first}
            if not about:
                about = {
                    "id": request_id.rpartition("-")[0],
                    "object": "text_completion",
                    "created": int(time.time()),
                    "model": model,
                }
            empty: dict[str, Any] = {"text": ""}
            if about["object"].startswith("chat"):
                empty = {"delta": {}}
            choice = {
                "index": sample.index + number * num_samples,
                **empty,
                "logprobs": None,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
            }
            found.append({**about, "choices": [choice]})
    return found

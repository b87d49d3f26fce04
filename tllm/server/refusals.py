"""The events of a stream for choices whose prompt a condition refused."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from tllm.engine.handlers import Watch

_ABORTED = '"finish_reason":"abort"'
_NO_CHOICES = '"choices":[]'
"""In the event that counts the tokens of all choices."""
_DONE = "data: [DONE]"


class RefusedChoices:
    """The last events of the choices of one stream whose prompts a condition refused. vLLM has none
    for a choice without tokens, unless it echoes the prompt.

    Args:
        watch: of the HTTP request.
        model: as the request names it.
    """

    def __init__(self, watch: Watch, num_samples: int, model: str) -> None:
        self._watch = watch
        self._num_samples = num_samples
        self._model = model
        self._over = False
        #: Choices that vLLM has ended.
        self._told: set[int] = set()

    def before(self, event: str, first: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What comes before an event of vLLM's: nothing, unless all choices are over with it.

        Args:
            first: the stream's first event; empty where there was none, as of completions.
        """
        if _ABORTED in event:
            choices = json.loads(event.removeprefix("data: "))["choices"]
            self._told.update(each["index"] for each in choices if each.get("finish_reason"))
        if self._over or not (_NO_CHOICES in event or event.startswith(_DONE)):
            return []
        self._over = True
        found = []
        for number, request_id in enumerate(self._watch.outputs):
            for sample, reason in sorted(self._watch.refused.get(request_id, {}).items()):
                index = sample + number * self._num_samples
                if index not in self._told:
                    found.append(self._end(index, reason, request_id, first))
        return found

    def _end(
        self, index: int, reason: str, request_id: str, first: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The last event of a choice."""
        about = {name: first[name] for name in ("id", "object", "created", "model") if first}
        if not about:
            about = {
                "id": request_id.rpartition("-")[0],
                "object": "text_completion",
                "created": int(time.time()),
                "model": self._model,
            }
        empty: dict[str, Any] = {"text": ""}
        if about["object"].startswith("chat"):
            empty = {"delta": {}}
        choice = {
            "index": index,
            **empty,
            "logprobs": None,
            "finish_reason": "abort",
            "stop_reason": reason,
        }
        return {**about, "choices": [choice]}

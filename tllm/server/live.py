"""Scores beside the tokens of a streamed answer, while it streams."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from tllm.client.attached import Attached
from tllm.ports import PerToken

logger = logging.getLogger(__name__)

METHOD = "so_far"
"""The remote method of a consumer that can tell of sequences that run."""

_Since = dict[str, dict[int, int]]


class LiveScores:
    """Asks the workers for the new scores of all streams of a server together: what is wanted
    while they are asked waits for the next question."""

    def __init__(self, interventions: Attached) -> None:
        self._interventions = interventions
        self._wanted: dict[str, _Since] = {}
        self._next: asyncio.Future[dict[str, Any]] | None = None
        self._pump: asyncio.Task[None] | None = None

    def of(self, wanted: list[str]) -> list[str]:
        """Which of these consumers can tell of sequences that run."""
        known = self._interventions.consumers
        return [name for name in wanted if name in known and METHOD in known[name].remote_methods]

    async def ask(self, consumers: list[str], prompt_id: str, since: dict[int, int]) -> Any:
        """New scores of a prompt's samples, `PerToken` by consumer and sample."""
        for name in consumers:
            self._wanted.setdefault(name, {})[prompt_id] = since
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._pump is None or self._pump.done():
            self._pump = asyncio.ensure_future(self._run())
        found = await asyncio.shield(self._next)
        return {name: found[name].get(prompt_id, {}) for name in consumers if name in found}

    async def _run(self) -> None:
        while self._next is not None:
            wanted, self._wanted = self._wanted, {}
            answer, self._next = self._next, None
            answer.set_result({name: await self._of(name, asked) for name, asked in wanted.items()})

    async def _of(self, consumer: str, since: _Since) -> dict[str, Any]:
        """What all workers say; nothing where the last event will say why."""
        found: dict[str, Any] = {}
        try:
            answers = await self._interventions.call_consumer(consumer, METHOD, since)
        except Exception as error:
            logger.debug("%s tells nothing of running sequences: %s", consumer, error)
            return found
        for answer in answers:
            for prompt_id, samples in (answer or {}).items():
                found.setdefault(prompt_id, {}).update(samples)
        return found


class StreamScores:
    """The new scores of one streamed answer, event by event.

    Args:
        noted: the last output of each engine request, in the order of the prompts.
        wanted: the consumers that the request named.
    """

    def __init__(self, live: LiveScores, noted: Mapping[str, Any], wanted: list[str]) -> None:
        self._live = live
        self._noted = noted
        self._wanted = wanted
        self._had: dict[tuple[str, int], int] = {}

    async def beside(self, event: str, num_samples: int) -> str:
        """An event of completions or chats, each of its choices with its new scores."""
        if not self._wanted or not event.startswith('data: {"id"'):
            return event
        body = json.loads(event.removeprefix("data: "))
        changed = False
        for choice in body.get("choices", ()):
            prompt, sample = divmod(choice["index"], num_samples)
            scores = await self.of(prompt, sample)
            if scores:
                choice["consumer_results"] = scores
                changed = True
        return f"data: {json.dumps(body)}\n\n" if changed else event

    async def of(self, prompt: int, sample: int) -> dict[str, Any]:
        """`{"positions", "values"}` by consumer, of what is new."""
        outputs = list(self._noted.values())
        output = outputs[prompt] if outputs else None
        if output is None:
            return {}
        # Which consumers there are is known once a request has reached the engine.
        self._wanted = self._live.of(self._wanted)
        if not self._wanted:
            return {}
        key = output.tllm_request.prompt_id, sample
        since = self._had.get(key, 0)
        if output.finished:
            found = _final(output, sample, self._wanted)
        else:
            found = await self._live.ask(self._wanted, key[0], {sample: since})
        given = {}
        for name, samples in found.items():
            scores = samples.get(sample)
            if scores is None:
                continue
            new = scores.positions >= since
            if new.any():
                positions = scores.positions[new].tolist()
                given[name] = {"positions": positions, "values": scores.values[new].tolist()}
                self._had[key] = positions[-1] + 1
        return given


def _final(output: Any, sample: int, wanted: list[str]) -> dict[str, dict[int, PerToken]]:
    """What the last output of a request says of a sample."""
    return {
        name: {sample: result.payload}
        for each in output.outputs
        for name, result in each.consumer_results.items()
        if each.index == sample and name in wanted and isinstance(result.payload, PerToken)
    }

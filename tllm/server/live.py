"""Scores beside the tokens of a streamed answer, while it streams."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from tllm.client.attached import Attached
from tllm.ports import PerToken
from tllm.server.results import in_response

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

    async def ask(self, prompt_id: str, since: Mapping[str, dict[int, int]]) -> dict[str, Any]:
        """New scores of a prompt's samples, by consumer and sample: a `PerToken`, or a mapping that
        has some.

        Args:
            since: the first position of interest, by consumer and sample.
        """
        for name, samples in since.items():
            self._wanted.setdefault(name, {})[prompt_id] = samples
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._pump is None or self._pump.done():
            self._pump = asyncio.ensure_future(self._run())
        found = await asyncio.shield(self._next)
        return {name: found[name].get(prompt_id, {}) for name in since if name in found}

    async def _run(self) -> None:
        while self._next is not None:
            wanted, self._wanted = self._wanted, {}
            answer, self._next = self._next, None
            answer.set_result({name: await self._of(name, asked) for name, asked in wanted.items()})

    async def _of(self, consumer: str, since: _Since) -> dict[str, Any]:
        """What all workers say; nothing where the last event will say why."""
        found: dict[str, Any] = {}
        try:
            for answer in await self._interventions.call_consumer(consumer, METHOD, since):
                for prompt_id, samples in (answer or {}).items():
                    found.setdefault(prompt_id, {}).update(samples or {})
        except Exception as error:  # what it answers is the consumer's, too
            logger.debug("%s tells nothing of running sequences: %s", consumer, error)
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
        #: The first position that is not given yet, by prompt, sample and consumer: each has its
        #: own pace.
        self._had: dict[tuple[str, int, str], int] = {}

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
        """What is new, by consumer: `positions`, and `values` or those of a mapping by name."""
        outputs = list(self._noted.values())
        output = outputs[prompt] if outputs else None
        if output is None:
            return {}
        # Which consumers there are is known once a request has reached the engine.
        self._wanted = self._live.of(self._wanted)
        if not self._wanted:
            return {}
        prompt_id = output.tllm_request.prompt_id
        since = {name: self._had.get((prompt_id, sample, name), 0) for name in self._wanted}
        if output.finished:
            found = _final(output, sample, self._wanted)
        else:
            asked = {name: {sample: first} for name, first in since.items()}
            found = await self._live.ask(prompt_id, asked)
        given = {}
        for name, samples in found.items():
            try:
                new = _from(samples.get(sample), since[name])
            except Exception as error:  # it may be anything; the last event says what is wrong
                logger.debug("%s tells what cannot be read of a sequence: %s", name, error)
                continue
            if new:
                given[name] = new
                self._had[prompt_id, sample, name] = new["positions"][-1] + 1
        return given


def _from(found: Any, first: int) -> dict[str, Any]:
    """What was found of the tokens from a position on, as it stands in an event; nothing where
    there is none. What does not belong to tokens is given as it is."""
    parts = {"values": found} if isinstance(found, PerToken) else dict(found or {})
    of_tokens = {name: part for name, part in parts.items() if isinstance(part, PerToken)}
    if not of_tokens:
        return {}
    positions = next(iter(of_tokens.values())).positions
    new = positions >= first
    if not new.any():
        return {}
    arrays = {name: part.values_at(new).tolist() for name, part in of_tokens.items()}
    told: dict[str, Any] = in_response({**parts, **arrays})
    return {"positions": positions[new].tolist(), **told}


def _final(output: Any, sample: int, wanted: list[str]) -> dict[str, dict[int, Any]]:
    """What the last output of a request says of a sample."""
    return {
        name: {sample: result.payload}
        for each in output.outputs
        for name, result in each.consumer_results.items()
        if each.index == sample
        and name in wanted
        and isinstance(result.payload, (PerToken, Mapping))
    }

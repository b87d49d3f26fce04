"""Asks consumers for their results when a sequence ends, and keeps these for the user's process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tllm.ports import RequestInfo, RequestResult
from tllm.runtime.dispatch import BoundConsumer, Dispatcher
from tllm.runtime.results import Answer, Results
from tllm.runtime.slots import Sequence

#: Results nobody came for are forgotten beyond this many prompts.
_MAX_KEPT_RESULTS = 65536

_DROPPED = (
    "{rows} rows were dropped because the capture ring was full; capture less at once, raise "
    "max_capture_mib, or start the engine with overflow='block'"
)


class Endings:
    """Results of sequences that have ended.

    Args:
        consumers: those that are registered, by id.
        payloads: see `Results`.
    """

    def __init__(
        self, dispatcher: Dispatcher, consumers: Mapping[str, BoundConsumer], *, payloads: bool
    ) -> None:
        self._dispatcher = dispatcher
        self._consumers = consumers
        self._results = Results(_MAX_KEPT_RESULTS, payloads)
        #: By prompt and consumer: sequences that ended, and whose tokens are not known.
        self._late: dict[str, dict[str, list[RequestInfo]]] = {}

    @property
    def forgotten(self) -> int:
        """Prompts whose results nobody came for in time."""
        return self._results.forgotten

    def conclude(self, sequence: Sequence, step: int) -> None:
        """A sequence has ended, and its rows were handed out: make its results."""
        call = self._dispatcher.call
        results: dict[str, Any] = {}
        for owner in self._consumers.values():
            if owner.serves(sequence):
                self._dispatcher.flush(owner)
                info = replace(owner.info(sequence), missing=_missing(sequence, owner.id))
                needs_tokens = call(owner, owner.consumer.needs_tokens_of, info.options)
                if needs_tokens:
                    info = replace(info, token_ids=sequence.token_ids)
                if needs_tokens and sequence.token_ids is None and sequence.keep_results:
                    late = self._late.setdefault(info.prompt_id, {})
                    late.setdefault(owner.id, []).append(info)
                else:
                    result = self._result(owner, info, step)
                    if result is not None:
                        results[owner.id] = result
            owner.forget(sequence.info.slot)
            owner.asked.pop(sequence.info.slot, None)
        for name, error in sequence.errors.items():
            results[name] = RequestResult(None, "error", error)
        if sequence.keep_results:
            prompt_id, sample = sequence.info.prompt_id, sequence.info.sample_index
            known = None if sequence.token_ids is None else len(sequence.token_ids)
            for name, result in results.items():
                missing = _missing(sequence, name)
                self._results.keep(prompt_id, sample, name, result, missing, known)

    def conclude_late(self, prompt_id: str, tokens: Mapping[int, list[int]], step: int) -> None:
        """Ask consumers that waited for the tokens of a prompt's samples, by sample."""
        for name, infos in self._late.pop(prompt_id, {}).items():
            owner = self._consumers[name]
            for info in infos:
                given = tokens.get(info.sample_index)
                known = None if given is None else tuple(given)
                result = self._result(owner, replace(info, token_ids=known), step)
                if owner.error:
                    result = RequestResult(None, "error", owner.error)
                if result is not None:
                    sample = info.sample_index
                    self._results.keep(prompt_id, sample, name, result, info.missing)

    def give_up_waiting(self, consumer_id: str, step: int) -> None:
        """A consumer leaves: ask it now for what it waits to say."""
        for prompt_id in [p for p, late in self._late.items() if consumer_id in late]:
            self.conclude_late(prompt_id, {}, step)

    def take(self, prompt_ids: Iterable[str], wait_s: float) -> Answer:
        """Results of prompts; see `Results.take`."""
        for owner in self._consumers.values():
            if wait_s > 0:
                self._dispatcher.call(owner, owner.consumer.expedite)
            if owner.error:
                self._results.fail(owner.id, owner.error)
        return self._results.take(prompt_ids, wait_s)

    def _result(self, owner: BoundConsumer, info: RequestInfo, step: int) -> Any:
        context = owner.context.at(step)
        return self._dispatcher.call(owner, owner.consumer.on_request_finished, info, context)


def _missing(sequence: Sequence, consumer_id: str) -> str | None:
    """Which rows that a consumer wanted were given up."""
    rows = sequence.dropped.get(consumer_id)
    return _DROPPED.format(rows=rows) if rows else None

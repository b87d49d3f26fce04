"""What consumers say of sequences that have ended, until the user's process comes for it."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from tllm.ports import RequestInfo, RequestResult
from tllm.ports.payload import cut, reason_of
from tllm.runtime.dispatch import Dispatcher, ends_process
from tllm.runtime.flows import BoundConsumer
from tllm.runtime.slots import RunningSequence, Slots

PromptResults = dict[str, dict[int, dict[str, dict[str, Any]]]]
"""`{"status", "error", "payload"}` by prompt, sample and consumer."""

PENDING: dict[str, Any] = {"status": "pending", "error": None, "payload": None}
"""What is said of a result that is not made yet."""

#: Results nobody came for are forgotten beyond this many prompts.
_MAX_KEPT = 65536

#: Prompts that were given up are remembered, up to so many: sequences of theirs may still begin.
_MAX_GIVEN_UP = 4096

_CAME_ANEW = (
    "while the request ran the consumer was registered, or unregistered and registered anew, so "
    "that rows before that are missing; ask again, and register another under an id of its own"
)

_REPLACED = (
    "the consumer was unregistered, and another registered under its id, before the request began: "
    "this is of the other one; register it under an id of its own"
)

_REWRITTEN = (
    "the request was preempted, and rows of it were computed again after the consumer had written "
    "to them anew: all got the vectors of then, so that they, and what came after them, may differ "
    "from what they are where nothing is preempted; give the engine more room for its KV cache or "
    "lower max_num_seqs, or write once, when the request starts"
)

_DROPPED = (
    "{rows} rows were dropped because the capture ring was full; capture less at once, raise "
    "max_capture_mib, or start the engine with overflow='block'"
)


@dataclass(eq=False)
class _Pending:
    """What a consumer returned: a payload, a `RequestResult`, or a `Future` of either.

    Attributes:
        missing: what the runtime itself knows to be missing.
        num_tokens: of the sequence, if they are known, with the last one drawn: rows of it and of
            later ones are not its own.
    """

    result: Any
    missing: str | None
    num_tokens: int | None


class Results:
    """Asks consumers for their results when a sequence ends, and keeps these; each is given once.

    Args:
        consumers: those that are registered, by id.
        slots: of the running sequences, and of those whose consumers wait for their tokens.
        payloads: whether they are given; of tensor-parallel ranks, all but the first say only how
            it went.

    Attributes:
        forgotten: prompts whose results nobody came for in time.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        consumers: Mapping[str, BoundConsumer],
        slots: Slots,
        *,
        payloads: bool,
    ) -> None:
        self._dispatcher = dispatcher
        self._consumers = consumers
        self._slots = slots
        self._payloads = payloads
        self._kept: OrderedDict[str, dict[int, dict[str, _Pending]]] = OrderedDict()
        #: By prompt and consumer: sequences that ended, and whose tokens are not known.
        self._late: dict[str, dict[str, list[RequestInfo]]] = {}
        self._given_up: OrderedDict[str, None] = OrderedDict()
        self.forgotten = 0

    def conclude(self, sequence: RunningSequence, step: int) -> None:
        """A sequence has ended, and its rows were handed out: make its results."""
        results: dict[str, Any] = {}
        for owner in self._consumers.values():
            if owner.has_served(sequence):
                result = self._result_of(owner, sequence, step)
                if result is not None:
                    results[owner.id] = result
            owner.forget(sequence.info.slot)
        for name, error in list(sequence.errors.items()):  # export threads may add to it
            log = sequence.controlled and sequence.controlled.log(name)
            results[name] = RequestResult(log, "error", error)
        if sequence.keep_results:
            known = None
            if sequence.token_ids is not None:
                # All of a prompt passes the model, also where no token was drawn after it.
                known = max(len(sequence.token_ids), sequence.info.prompt_len + 1)
            for name, result in results.items():
                self._keep(sequence.info, name, result, _missing(sequence, name), known)

    def _result_of(self, owner: BoundConsumer, sequence: RunningSequence, step: int) -> Any:
        """What a consumer says of a sequence that has ended; None for nothing, or not yet."""
        self._dispatcher.flush(owner)
        info, missing = owner.info(sequence), _missing(sequence, owner.id)
        if missing or sequence.controlled or owner.id in sequence.let_go:
            info = info.having(
                options=sequence.let_go.get(owner.id, info.options),
                missing=missing,
                actions=sequence.controlled and sequence.controlled.log(owner.id),
            )
        if self._dispatcher.call(owner, owner.consumer.needs_tokens_of, info.options):
            info = info.having(token_ids=sequence.token_ids)
            wanted = sequence.keep_results and info.prompt_id not in self._given_up
            if sequence.token_ids is None and wanted:
                late = self._late.setdefault(info.prompt_id, {})
                late.setdefault(owner.id, []).append(info)
                self._slots.hold(info.slot)
                return None
        result = self._ask(owner, info, step)
        if result is None:
            anew = (sequence.left | sequence.replaced) & sequence.consumers.keys()
            if owner.id in anew | sequence.rewritten:
                return RequestResult(None)
        return result

    def conclude_late(self, prompt_id: str, tokens: Mapping[int, list[int]], step: int) -> None:
        """Ask consumers that waited for the tokens of a prompt's samples, by sample."""
        for name, infos in self._late.pop(prompt_id, {}).items():
            self._conclude_late(name, infos, tokens, step)

    def give_up_waiting(self, consumer_id: str, step: int) -> None:
        """A consumer leaves: ask it now for what it waits to say. Others go on waiting."""
        for prompt_id, late in list(self._late.items()):
            infos = late.pop(consumer_id, [])
            if not late:
                del self._late[prompt_id]
            self._conclude_late(consumer_id, infos, {}, step)

    def _conclude_late(
        self, name: str, infos: Sequence[RequestInfo], tokens: Mapping[int, list[int]], step: int
    ) -> None:
        owner = self._consumers[name]
        for info in infos:
            given = tokens.get(info.sample_index)
            known = None if given is None else tuple(given)
            result = self._ask(owner, info.having(token_ids=known), step)
            self._slots.let_go(info.slot)
            if owner.error:
                result = RequestResult(None, "error", owner.error)
            if result is not None:
                self._keep(info, name, result, info.missing)

    def pop(self, prompt_ids: Iterable[str], wait_s: float) -> PromptResults:
        """The results of prompts. One that is not there after `wait_s` seconds is `pending`, and
        can be asked for again."""
        for owner in self._consumers.values():
            if wait_s > 0:
                self._dispatcher.call(owner, owner.consumer.expedite)
            if owner.error:
                self.break_promises(owner.id, owner.error)
        asked = list(dict.fromkeys(prompt_ids))
        kept = [k for p in asked for s in self._kept.get(p, {}).values() for k in s.values()]
        futures = [k.result for k in kept if isinstance(k.result, Future)]
        if futures and wait_s > 0:
            wait(futures, timeout=wait_s)
        found: PromptResults = {}
        for prompt_id in asked:
            samples = self._kept.pop(prompt_id, None)
            if not samples:
                continue
            # Looked at once: what is pending here is done a moment later, and must stay.
            found[prompt_id] = {
                sample: {name: self._said(kept) for name, kept in results.items()}
                for sample, results in samples.items()
            }
            left = {
                sample: {name: results[name] for name, said in given.items() if said is PENDING}
                for (sample, given), results in zip(
                    found[prompt_id].items(), samples.values(), strict=True
                )
            }
            if any(left.values()):
                self._kept[prompt_id] = {sample: r for sample, r in left.items() if r}
        return found

    def discard(self, prompt_ids: Iterable[str]) -> None:
        """Nobody will come for the results of prompts, made or promised."""
        for prompt_id in prompt_ids:
            self._kept.pop(prompt_id, None)
            self._given_up[prompt_id] = None
        while len(self._given_up) > _MAX_GIVEN_UP:
            self._given_up.popitem(last=False)

    @property
    def num_kept(self) -> int:
        """How many prompts have results that nobody came for yet."""
        return len(self._kept)

    def _ask(self, owner: BoundConsumer, info: RequestInfo, step: int) -> Any:
        context = owner.context.at(step)
        return self._dispatcher.call(owner, owner.consumer.on_request_finished, info, context)

    def _keep(
        self,
        info: RequestInfo,
        consumer: str,
        result: Any,
        missing: str | None,
        num_tokens: int | None = None,
    ) -> None:
        if info.prompt_id in self._given_up:
            return
        samples = self._kept.setdefault(info.prompt_id, {})
        samples.setdefault(info.sample_index, {})[consumer] = _Pending(result, missing, num_tokens)
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
            self.forgotten += 1

    def break_promises(self, consumer: str, error: str) -> None:
        """What a consumer has promised, and has not made yet, will not come any more."""
        for samples in self._kept.values():
            for results in samples.values():
                kept = results.get(consumer)
                if kept and isinstance(kept.result, Future) and not kept.result.done():
                    kept.result = RequestResult(None, "error", error)

    def _said(self, kept: _Pending) -> dict[str, Any]:
        """A result as it goes to the user's process; `PENDING` itself if it is not there."""
        result = kept.result
        try:
            if isinstance(result, Future):
                if not result.done():
                    return PENDING
                result = result.result()
            if not isinstance(result, RequestResult):
                result = RequestResult(result)
            payload = result.payload if self._payloads else None
            if kept.num_tokens is not None:
                payload = cut(payload, kept.num_tokens)
        except BaseException as fault:  # one consumer's, and not of all that are asked for here
            if ends_process(fault):
                raise
            return _error(fault)
        status, error = result.status, result.error
        if kept.missing:
            status = "error" if status == "error" else "partial_error"
            error = "; ".join(filter(None, (error, kept.missing)))
        return {"status": status, "error": error, "payload": payload}


class _Sent:
    """What is said of one consumer's result, on its way to the user's process."""

    def __init__(self, body: bytes, arrays: Iterable[pickle.PickleBuffer]) -> None:
        self._made_of = (body, *arrays)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, self._made_of


def _arrived(body: bytes, *arrays: Any) -> dict[str, Any]:
    """The same in the user's process."""
    try:
        said: dict[str, Any] = pickle.loads(body, buffers=arrays)
    except Exception as fault:
        return _error(fault, "its result cannot be read in the user's process: ")
    return said


def sendable(found: PromptResults) -> PromptResults:
    """The same, to be pickled (protocol 5): a payload that cannot be, or of which nothing can be
    made again, is its consumer's error, and no other result's."""

    def sent(said: dict[str, Any]) -> Any:
        arrays: list[pickle.PickleBuffer] = []
        try:
            body = pickle.dumps(said, protocol=5, buffer_callback=arrays.append)
        except Exception as fault:
            return _error(fault, "its result cannot be sent to the user's process: ")
        return _Sent(body, arrays)

    return {
        prompt_id: {
            sample: {name: sent(said) for name, said in results.items()}
            for sample, results in samples.items()
        }
        for prompt_id, samples in found.items()
    }


def _error(fault: BaseException, what: str = "") -> dict[str, Any]:
    text = f"{what}{reason_of(fault)}"
    return {"status": "error", "error": text, "payload": None}


def _missing(sequence: RunningSequence, consumer_id: str) -> str | None:
    """Why a consumer has not all the rows that it wanted; None where it has."""
    if not (sequence.dropped or sequence.left or sequence.replaced or sequence.rewritten):
        return None
    rows = sequence.dropped.get(consumer_id)
    dropped = _DROPPED.format(rows=rows) if rows else None
    came_anew = _CAME_ANEW if consumer_id in sequence.left else None
    if came_anew is None and consumer_id in sequence.replaced:
        came_anew = _REPLACED
    rewritten = _REWRITTEN if consumer_id in sequence.rewritten else None
    return "; ".join(filter(None, (dropped, came_anew, rewritten))) or None

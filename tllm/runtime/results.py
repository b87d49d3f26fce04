"""Results of finished sequences, until the user's process comes for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any

from tllm.ports import RequestResult
from tllm.ports.request_meta import cut

Answer = dict[str, dict[int, dict[str, dict[str, Any]]]]
"""`{"status", "error", "payload"}` by prompt, sample and consumer."""

PENDING: dict[str, Any] = {"status": "pending", "error": None, "payload": None}
"""What is said of a result that is not made yet."""


class Results:
    """What consumers returned for each sequence, by prompt; each is given once.

    Args:
        limit: results of this many prompts are kept; of more, the oldest are forgotten.
        payloads: whether they are given; of tensor-parallel ranks, all but the first say only how
            it went.

    Attributes:
        forgotten: prompts whose results nobody came for in time.
    """

    def __init__(self, limit: int, payloads: bool = True) -> None:
        self._limit = limit
        self._payloads = payloads
        self._kept: OrderedDict[str, dict[int, dict[str, _Kept]]] = OrderedDict()
        self.forgotten = 0

    def keep(
        self,
        prompt_id: str,
        sample: int,
        consumer: str,
        result: Any,
        missing: str | None,
        num_tokens: int | None = None,
    ) -> None:
        """Keep what a consumer returned: a payload, a `RequestResult`, or a `Future` of either.

        Args:
            missing: what the runtime itself knows to be missing.
            num_tokens: of the sequence, if they are known: rows of later ones are not its own.
        """
        samples = self._kept.setdefault(prompt_id, {})
        kept = _Kept(result, missing, self._payloads, num_tokens)
        samples.setdefault(sample, {})[consumer] = kept
        while len(self._kept) > self._limit:
            self._kept.popitem(last=False)
            self.forgotten += 1

    def fail(self, consumer: str, error: str) -> None:
        """What a consumer has promised will not come any more."""
        for samples in self._kept.values():
            for results in samples.values():
                kept = results.get(consumer)
                if kept is not None and not kept.done:
                    kept.result = RequestResult(None, "error", error)

    def take(self, prompt_ids: Iterable[str], wait_s: float) -> Answer:
        """The results of prompts. One that is not there after `wait_s` seconds is `pending`, and
        can be taken again."""
        asked = list(dict.fromkeys(prompt_ids))
        kept = [k for p in asked for s in self._kept.get(p, {}).values() for k in s.values()]
        futures = [k.result for k in kept if isinstance(k.result, Future)]
        if futures and wait_s > 0:
            wait(futures, timeout=wait_s)
        answer: Answer = {}
        for prompt_id in asked:
            samples = self._kept.pop(prompt_id, {})
            if samples:
                answer[prompt_id] = {
                    sample: {name: kept.answer() for name, kept in results.items()}
                    for sample, results in samples.items()
                }
            left = {
                sample: {name: kept for name, kept in results.items() if not kept.done}
                for sample, results in samples.items()
            }
            if any(left.values()):
                self._kept[prompt_id] = {sample: r for sample, r in left.items() if r}
        return answer


class _Kept:
    def __init__(
        self, result: Any, missing: str | None, payload: bool, num_tokens: int | None
    ) -> None:
        self.result = result
        self._missing = missing
        self._payload = payload
        self._num_tokens = num_tokens

    @property
    def done(self) -> bool:
        return not isinstance(self.result, Future) or self.result.done()

    def answer(self) -> dict[str, Any]:
        """As it goes to the user's process."""
        if not self.done:
            return PENDING
        result = self.result
        if isinstance(result, Future):
            error = result.exception()
            if error is not None:
                text = f"{type(error).__name__}: {error}"
                return {"status": "error", "error": text, "payload": None}
            result = result.result()
        if not isinstance(result, RequestResult):
            result = RequestResult(result)
        status, error_text = result.status, result.error
        if self._missing:
            status = "error" if status == "error" else "partial_error"
            error_text = "; ".join(filter(None, (error_text, self._missing)))
        payload = result.payload if self._payload else None
        if self._num_tokens is not None:
            try:
                payload = cut(payload, self._num_tokens)
            except Exception as fault:  # one consumer's, and not of all that are asked for here
                status, error_text = "error", f"{type(fault).__name__}: {fault}"
                payload = None
        return {"status": status, "error": error_text, "payload": payload}

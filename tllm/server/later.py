"""What came of answers that are fetched later, of the newest of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Results = list[dict[str, Any]]
"""Of each sample, as it stands in a response."""

_KEPT, _TOLD = 1024, 2**16
"""Answers whose results are kept, and those of which it is known that they were."""


class LaterAnswers:
    """Outputs of answers that are computed in the background, until somebody asks for them. vLLM
    keeps the answers for ever, and we the results of the newest; of others it is told that they are
    gone.

    Args:
        written: makes results of the outputs of a request, and of the consumers that are wanted.
        most: answers that are kept.
    """

    def __init__(
        self, written: Callable[[Mapping[str, Any], list[str]], Results], most: int = _KEPT
    ) -> None:
        self._written = written
        self._most = most
        self._kept: dict[str, tuple[Mapping[str, Any], list[str]] | Results] = {}
        self._wanted: dict[str, list[str]] = {}

    def __contains__(self, answer_id: str) -> bool:
        return answer_id in self._wanted

    def keep(self, answer_id: str, outputs: Mapping[str, Any], wanted: list[str]) -> None:
        """Keep an answer; the oldest may have to go."""
        self._kept[answer_id], self._wanted[answer_id] = (outputs, wanted), wanted
        for known, most in ((self._kept, self._most), (self._wanted, _TOLD)):
            if len(known) > most:
                del known[next(iter(known))]

    def results(self, answer_id: str) -> Results:
        """What came of an answer that is over; it is looked at once."""
        found = self._kept.get(answer_id)
        if found is None:
            error = (
                f"the result is gone: the server keeps those of its newest {self._most} answers "
                "of the background; fetch them sooner"
            )
            gone = {"status": "error", "error": error, "payload": None}
            wanted = self._wanted[answer_id]
            return [{"consumer_results": dict.fromkeys(wanted, gone)}] if wanted else []
        if isinstance(found, tuple):
            found = self._kept[answer_id] = self._written(*found)
        return found

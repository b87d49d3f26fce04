"""What conversations remember of their conditions, in the scheduler: it hears of each step before
anybody is given what came of it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tllm.engine.verdicts import fired_in
from tllm.runtime.verdicts import PROMPT, Fired
from tllm.spec.conversations import ConversationUse
from tllm.spec.request import EXTRA_ARG, RequestSpec

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(eq=False)
class _Remembered:
    """One conversation: its serial, and its conditions that have held."""

    serial: int
    held: set[str] = field(default_factory=set)


class ConversationMemory:
    """The conditions that have held in each conversation.

    There are as many as the workers have places for (`Conversations`): one that is begun in the
    place of another takes that one's memory away.
    """

    def __init__(self) -> None:
        self._by_place: dict[int, _Remembered] = {}
        self._running: dict[str, ConversationUse] = {}

    def begin(self, request: Request, spec: RequestSpec) -> RequestSpec:
        """A request of a conversation begins: what it asks, with what is remembered now. The
        workers hear of that by its parameters."""
        use = spec.conversation
        assert use is not None
        known = self._by_place.get(use.place)
        if known is None or known.serial < use.serial:
            known = self._by_place[use.place] = _Remembered(use.serial)
        use = use.recalling(known.held if known.serial == use.serial else ())
        self._running[request.request_id] = use
        if not use.held:
            return spec
        spec = spec.recalling(use)
        params = copy.copy(request.sampling_params)  # samples of a prompt share one object
        assert params is not None
        params.extra_args = {**(params.extra_args or {}), EXTRA_ARG: spec.to_wire()}
        request.sampling_params = params
        return spec

    def hear(self, output: Any) -> None:
        """A step is over, and its tokens are not given out yet.

        Of a request that has ended before, rows may have been computed ahead, of its last token and
        of what was drawn after it: they are nobody's.
        """
        if not self._running:
            self.fired = {}
            return
        fired: Mapping[str, Fired] = fired_in(output)
        self.fired = {name: found for name, found in fired.items() if name in self._running}
        for request_id, found in self.fired.items():
            self._remember(request_id, (n for place, n in found if place == PROMPT))

    def settle(self, request_id: str, rows: int) -> None:
        """It is known how many rows of the step that was heard of last are a request's own.

        Args:
            rows: beside those of its prompt, from the one that its first token is drawn from.
        """
        found = self.fired.get(request_id, ())
        self._remember(request_id, (n for place, n in found if 0 <= place < rows))

    def _remember(self, request_id: str, numbers: Iterable[int | str]) -> None:
        """Conditions of a request have held."""
        use = self._running.get(request_id)
        if use is None:
            return
        known, conditions = self._by_place[use.place], dict(use.conditions)
        if known.serial == use.serial:
            known.held.update(conditions[n] for n in numbers if n in conditions)

    def forget(self, request_id: str) -> None:
        """A request has ended, however it did."""
        self._running.pop(request_id, None)

"""What controllers decided for running sequences, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tllm.ports import ActionLog, TakenAction


@dataclass(eq=False)
class DecidedAction:
    """An action on its way; attributes as in `TakenAction`.

    Attributes:
        consumer: that has decided it.
        step: the engine step of its rows.
    """

    consumer: str
    action: str
    position: int
    data: Mapping[str, Any]
    step: int
    window: str
    acts_from: int | None = None
    lag_steps: int | None = None
    error: str | None = None

    def taken(self) -> TakenAction:
        """As the user hears of it."""
        return TakenAction(
            self.action, self.position, self.data, self.acts_from, self.lag_steps, self.error
        )


@dataclass(eq=False)
class ControlledSequence:
    """What controllers did to one running sequence, and what they have still to do.

    Attributes:
        steered_from: the first position whose row they may steer: what the scheduler knows. None
            for none.
        decided: all actions, by the consumer that has decided them.
        stop: the first that ends it.
        held: the groups that it holds, and how often.
    """

    steered_from: int | None = None
    decided: dict[str, list[DecidedAction]] = field(default_factory=dict)
    stop: DecidedAction | None = None
    held: Counter[str] = field(default_factory=Counter)

    def log(self, consumer: str) -> ActionLog | None:
        """What a consumer did; None for nothing."""
        decided = self.decided.get(consumer)
        return ActionLog(tuple(each.taken() for each in decided)) if decided else None


@dataclass(eq=False)
class ActionCounts:
    """What a controller has decided so far.

    Attributes:
        refused: those among them that could not be done.
        too_late: for requests that had ended.
        raised: calls of `decide` that raised.
        lags: of those that acted, by window and engine steps after the rows' own.
    """

    by_kind: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    too_late: int = 0
    raised: int = 0
    lags: Counter[tuple[str, int]] = field(default_factory=Counter)

    def counters(self) -> dict[str, Any]:
        """As plain data."""
        lags: dict[str, dict[int, int]] = {}
        for (window, lag), count in sorted(self.lags.items()):
            lags.setdefault(window, {})[lag] = count
        return {
            "by_kind": dict(self.by_kind),
            "refused": self.refused,
            "too_late": self.too_late,
            "raised": self.raised,
            "lag_steps": lags,
        }

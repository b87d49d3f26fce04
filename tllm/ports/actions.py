"""What a controller decides for a request: a port to declare it, actions, and their log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

from tllm.ports.base import PortWrite
from tllm.ports.payload import Payload
from tllm.ports.request_meta import RequestInfo
from tllm.spec.reading import require_one_of

ActionKind: TypeAlias = Literal["steer", "stop", "note"]


class Actions:
    """Lets what a consumer's `decide(rows, ctx)` returns act on requests."""

    @staticmethod
    def write(*kinds: ActionKind, role: str = "actions") -> PortWrite:
        """Ask to act: the flow's rows go to `decide`, and not to `consume_bundle`.

        Args:
            kinds: what may be decided: `steer` (`Steer` and `SetScale`), `stop`, `note`.
            role: name of the write within the flow.
        """
        if not kinds:
            raise ValueError(
                "Actions.write() allows nothing; name one or more of steer, stop, note"
            )
        for kind in kinds:
            require_one_of("Actions.write: kind", kind, ActionKind)
        return PortWrite("actions", role, options={"kinds": frozenset(kinds)})


@dataclass(frozen=True, eq=False)
class Action:
    """What is decided for one request.

    Attributes:
        request: one of the bundle, or one that was kept from before.
    """

    kind: ClassVar[ActionKind]
    verb: ClassVar[str]
    request: RequestInfo


@dataclass(frozen=True, eq=False)
class Steer(Action):
    """Steer the tokens after those that are computed by now.

    Attributes:
        vectors: as `SamplingParams(steering_vectors=...)` takes them, entries of any method;
            without conditions and positions. None ends what was steered under the name.
        name: what was steered under the same name before is replaced.
        tokens: for how many tokens; None: to the end of the sample.
    """

    kind = "steer"
    verb = "steer"
    vectors: Mapping[Any, Any] | None
    name: str = "steer"
    tokens: int | None = None


@dataclass(frozen=True, eq=False)
class SetScale(Action):
    """Multiply the effect of what a `Steer` of this consumer gave, in place of an earlier scale."""

    kind = "steer"
    verb = "set_scale"
    scale: float
    name: str = "steer"


@dataclass(frozen=True, eq=False)
class Stop(Action):
    """End the sample: `finish_reason` is "stop", and `stop_reason` the reason given here."""

    kind = "stop"
    verb = "stop"
    reason: str


@dataclass(frozen=True, eq=False)
class Note(Action):
    """Tell the user something, and change nothing.

    Attributes:
        data: plain data.
    """

    kind = "note"
    verb = "note"
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TakenAction:
    """An action, as the user hears of it.

    Attributes:
        action: `steer`, `set_scale`, `stop` or `note`.
        position: of the last row of its request that it was decided by.
        data: what it says.
        acts_from: the position of the first row that it changes, or, of a `stop`, of the last token
            that is kept (`min_tokens` may keep more); None where it changed nothing.
        lag_steps: how many engine steps after the row's own it acted; 0 in the same.
        error: why it could not be done; None where it could.
    """

    action: str
    position: int
    data: Mapping[str, Any]
    acts_from: int | None = None
    lag_steps: int | None = None
    error: str | None = None


@dataclass(frozen=True, eq=False)
class ActionLog(Payload):
    """What a controller did to one sample, in order."""

    actions: tuple[TakenAction, ...]

    @property
    def notes(self) -> list[Mapping[str, Any]]:
        """What it noted."""
        return [a.data for a in self.actions if a.action == "note" and a.error is None]

    def up_to(self, num_tokens: int) -> ActionLog:
        """What was decided by rows of a sequence of `num_tokens` tokens. The last one has passed
        the model only where an action, or a condition, made it the last: who knows what ended it
        asks for one token less."""
        return replace(self, actions=tuple(a for a in self.actions if a.position < num_tokens))

    def stopped_by(self, reason: Any) -> bool:
        """Whether it has stopped the sample for this reason."""
        stops = (a for a in self.actions if a.action == "stop" and a.error is None)
        return any(each.data["reason"] == reason for each in stops)

    @property
    def problem(self) -> str | None:
        """What could not be done."""
        return "; ".join(dict.fromkeys(a.error for a in self.actions if a.error)) or None

    def written(self) -> Any:
        """A mapping for each action."""
        return {"actions": [vars(each) for each in self.actions]}

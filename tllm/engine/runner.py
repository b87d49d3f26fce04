"""The seam between vLLM's model runner and a session; one subclass for each of its two runners."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tllm.runtime.kernels.candidates import Collected
from tllm.runtime.session import Session

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class RunnerAttachment(ABC):
    """Overrides on one model runner instance, so that the session sees each step.

    Attributes:
        scheduler_output: of the step that the worker is about to run; None between steps, so
            that a forward pass that belongs to no request is recognized.
    """

    scheduler_output: SchedulerOutput | None = None

    def __init__(self, runner: Any, session: Session) -> None:
        self.runner = runner
        self.session = session
        self._in_sampling: list[Override] = []
        self._standing_in = False

    @staticmethod
    def attach(runner: Any, session: Session, *, v2: bool) -> RunnerAttachment:
        """Attach a session to a loaded model runner."""
        from tllm.engine.runner_v1 import V1Attachment
        from tllm.engine.runner_v2 import V2Attachment

        attachment = (V2Attachment if v2 else V1Attachment)(runner, session)
        attachment.override()
        return attachment

    @abstractmethod
    def override(self) -> None:
        """Replace methods on the runner instance and on objects that it owns."""

    def during_sampling(self, owner: Any, name: str, ours: Callable[..., Any]) -> Any:
        """Replace a method of an object in the steps in which the session looks on; returns the
        engine's own, which is there in all others."""
        override = Override(owner, name, ours)
        self._in_sampling.append(override)
        return override.theirs

    def stand_in(self) -> None:
        """Put our methods in the place of the engine's if the session looks on in the step that
        begins, and the engine's own if it does not."""
        if self.session.looks_on is not self._standing_in:
            self._standing_in = not self._standing_in
            for override in self._in_sampling:
                override.set(self._standing_in)


class Override:
    """A method of one object, and ours to stand in its place.

    Attributes:
        theirs: the object's own.
    """

    def __init__(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._ours = ours
        self.theirs = getattr(owner, name)

    def set(self, on: bool) -> None:
        """Put ours, or the object's own, in its place."""
        setattr(self._owner, self._name, self._ours if on else self.theirs)


def penalized(
    raw: torch.Tensor,
    found: Collected,
    shape: torch.Size,
    apply: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Candidate logits after the engine's own penalties, which work on whole rows.

    Args:
        apply: takes float32 `[sequences, vocab]` and returns it after penalties.
    """
    width = found.ids.shape[1]
    valid = torch.arange(width, device=raw.device) < found.counts[:, None]
    # Ids beyond the count mean nothing: point them at token 0, and add nothing there.
    ids = torch.where(valid, found.ids, 0).long()
    full = torch.zeros(shape, dtype=torch.float32, device=raw.device)
    at = found.rows.long()[:, None].expand(-1, width), ids
    full.index_put_(at, torch.where(valid, raw, 0.0), accumulate=True)
    return torch.where(valid, apply(full)[at], raw)

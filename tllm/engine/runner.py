"""A session attached to a model runner: one class for each of vLLM's two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tllm.engine.relayed_tensors import RelayedTensors, with_scores
from tllm.engine.seams import overrides
from tllm.runtime.session import Session
from tllm.spec.turns import StepTurns

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput


class RunnerAttachment(ABC):
    """A session attached to a loaded model runner, by overrides on the instance.

    Attributes:
        scheduler_output: of the step that the worker is about to run; None between steps, so
            that a forward pass that belongs to no request is recognized.
    """

    scheduler_output: SchedulerOutput | None = None
    _given: RelayedTensors | None = None

    def __init__(self, runner: Any, session: Session) -> None:
        self.runner = runner
        self.session = session
        if session.consumers.model.num_stages > 1:
            self._execute_model = runner.execute_model
            runner.execute_model = self._on_execute_model
        self._when_observed: list[_Override] = []
        self._overriding = False
        self.override()

    @staticmethod
    def guidance_refusal(runner: Any) -> str | None:
        """Why candidates cannot be guided by this model runner; None when they can."""
        return None

    def track(self, scheduler_output: SchedulerOutput) -> None:
        """A step is scheduled, maybe without tokens."""

    def draw_anew(self, request_ids: Sequence[str]) -> None:
        """What the last step of each of these requests drew is dropped by the scheduler."""

    def may_finish(self, request_ids: Iterable[str]) -> bool:
        """Whether requests may end of which it is not known yet which drafts were accepted."""
        return True

    @abstractmethod
    def feed(self, turns: StepTurns) -> None:
        """Tokens that the user chose, in the place of those that were drawn last, for the step that
        is about to run."""

    def end_step(self, output: Any) -> None:
        """Sampling is over.

        Args:
            output: what the model runner gave.
        """

    @overrides(
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner.execute_model",
        "what conditions made of rows travels with them between pipeline stages",
    )
    def _on_execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if self.scheduler_output is None:  # of no request
            return self._execute_model(scheduler_output, intermediate_tensors, *args, **kwargs)
        if intermediate_tensors is not None:
            intermediate_tensors = self._given = RelayedTensors(intermediate_tensors)
        try:
            output = self._execute_model(scheduler_output, intermediate_tensors, *args, **kwargs)
        finally:
            self._given = None
        return with_scores(output, self.session.steps.take_scores())

    @property
    def arrived(self) -> torch.Tensor | None:
        """What the pipeline stage before says of conditions, in the step that begins."""
        return None if self._given is None else self._given.scores

    @abstractmethod
    def override(self) -> None:
        """Replace methods of the runner, and of objects that it owns."""

    def _override_when_observed(self, owner: Any, name: str, ours: Callable[..., Any]) -> Any:
        """Replace a method of an object, in the steps that are observed only; returns the object's
        own, which is in its place in all others."""
        theirs = getattr(owner, name)
        self._when_observed.append(_Override(owner, name, ours, theirs))
        return theirs

    def _switch_overrides(self) -> None:
        """Put our methods in the place of the engine's if the step is observed, and the engine's
        own if it is not."""
        if self.session.steps.observed is not self._overriding:
            self._overriding = not self._overriding
            for owner, name, ours, theirs in self._when_observed:
                setattr(owner, name, ours if self._overriding else theirs)


class _Override(NamedTuple):
    """A method of one object, and ours for its place."""

    owner: Any
    name: str
    ours: Callable[..., Any]
    theirs: Callable[..., Any]

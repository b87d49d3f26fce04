"""The flows that a step has rows for, and what they want of it."""

from __future__ import annotations

from collections.abc import Sequence

from tllm.runtime.batch import Frame, ProgramSegments
from tllm.runtime.flows import BoundFlow


class StepFlows:
    """Found out once for all steps of a batch that only goes on.

    Args:
        groups: the captured segments of the step.
        registered: the flows that every sequence has.

    Attributes:
        before: those that are called before the step's tokens are sampled.
        after: those that are called afterwards.
        keep_logits: whether logits are read after the sampler has worked on them in place.
        read_logits, read_signals: whether logits are, or what conditions give.
        want_targets: whether the token after each row is.
    """

    def __init__(
        self, groups: tuple[ProgramSegments, ...] = (), registered: Sequence[BoundFlow] = ()
    ) -> None:
        self._groups, self._registered = groups, registered
        captured = dict.fromkeys(flow for group in groups for flow in group.program.flows)
        # One that waits for an n-th step counts the others, too.
        found = [
            flow
            for flow in dict.fromkeys((*registered, *captured))
            if flow in captured or flow.flow.dispatch_every_n_steps > 1
        ]
        self.before = [flow for flow in found if flow.before_sampling]
        self.after = [flow for flow in found if not flow.before_sampling]
        self.keep_logits = any(flow.keeps_logits for flow in found)
        self.read_logits = any(flow.flow.reads_port("logits") for flow in found)
        self.read_signals = any(flow.flow.reads_port("signals") for flow in found)
        self.want_targets = any(flow.after_sampling for flow in found)

    def are_of(self, frame: Frame, registered: Sequence[BoundFlow]) -> bool:
        """Whether a step has the same."""
        return frame.groups is self._groups and registered is self._registered

    def ready(self, frame: Frame) -> Sequence[BoundFlow]:
        """Those of `after` that have all that they read, in a step that is over."""
        if not self.want_targets or frame.targets is not None:
            return self.after
        return [flow for flow in self.after if not flow.after_sampling]

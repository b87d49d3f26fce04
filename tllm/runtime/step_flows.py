"""The flows that a step has rows for, what they want of it, and what they are handed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tllm.runtime.batch import Frame, ProgramRows, ProgramSegments
from tllm.runtime.flows import BoundFlow
from tllm.runtime.handover import Handover
from tllm.runtime.slots import Slots

NO_HANDOVERS: Mapping[BoundFlow, Handover] = {}


_ANY_TIME = ("out_of_band", "background")
"""Windows that no forward pass waits for."""


class StepFlows:
    """Found out once for all steps of a batch that only goes on.

    Args:
        groups: what is captured for whom.
        registered: the flows that every sequence has.

    Attributes:
        before: those that are called before the step's tokens are sampled.
        after: those that are called afterwards.
        registered: what must be the same of a later step.
        handovers: what flows are handed that have the same in each step, by the step's rows.
        keep_logits: whether logits are read after the sampler has worked on them in place.
        read_logits, read_signals: whether logits are, or what conditions give.
        want_targets: whether the token after each row is.
        can_wait: whether they may be handed rows when the next forward pass is under way.
    """

    def __init__(
        self, groups: Sequence[ProgramSegments] = (), registered: Sequence[BoundFlow] = ()
    ) -> None:
        self.registered = registered
        self.handovers: dict[tuple[ProgramRows, ...], Mapping[BoundFlow, Handover]] = {}
        self._ring: int | None = None
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
        # The logits of several steps would take much of the device's memory.
        any_time = all(flow.flow.window in _ANY_TIME for flow in found)
        self.can_wait = any_time and not self.read_logits

    def find_handovers(self, frame: Frame, slots: Slots) -> Mapping[BoundFlow, Handover]:
        """Of a step that goes on, whose rows lie where none did before."""
        if (ring := _memory(frame.rows)) != self._ring:
            self._ring = ring
            self.handovers.clear()  # they would hold the ring that it outgrew
        each = [(flow, Handover.of(flow, frame.rows, slots)) for flow in self.before]
        each += [(flow, Handover.of(flow, frame.rows, slots)) for flow in self.after]
        found = {flow: handover for flow, handover in each if handover is not None}
        if len(self.handovers) < 16:
            self.handovers[frame.rows] = found
        return found

    def ready(self, frame: Frame) -> Sequence[BoundFlow]:
        """Those of `after` that have all that they read, in a step that is over."""
        if not self.want_targets or frame.targets is not None:
            return self.after
        return [flow for flow in self.after if not flow.after_sampling]


def _memory(rows: Sequence[ProgramRows]) -> int | None:
    """Where the tensor begins that rows are views of."""
    for each in rows:
        if each.tensor is not None:
            return each.tensor.untyped_storage().data_ptr()
    return None

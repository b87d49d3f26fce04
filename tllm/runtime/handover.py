"""What a flow is handed in each step of a batch that only goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from tllm.ports import PortBundle, RowMeta
from tllm.runtime.batch import Frame, ProgramRows
from tllm.runtime.columns import DECODE
from tllm.runtime.flow_rows import no_signals, residual_rows
from tllm.runtime.flows import BoundFlow
from tllm.runtime.lent_rows import by_role
from tllm.runtime.read_rows import Roles
from tllm.runtime.slots import Slots

_PLAIN_PORTS = {"residual_stream", "request_meta", "signals"}


class Handover:
    """The bundles of one flow whose rows are one decode token of each sequence, and lie in the same
    place of the ring. Which sequences and which tensors they are is found out once.

    Bundles share what does not change, and of that nothing can be changed by whom they are given
    to, but the rows that are lent.

    Attributes:
        owner: the flow's.
    """

    def __init__(self, flow: BoundFlow, own: ProgramRows, slots: Slots) -> None:
        spec, group = flow.flow, own.group
        self.owner = flow.owner
        self.rows = group.total
        self._flow = flow
        self._group, self._slots = group, slots
        self._device = flow.owner.context.device
        self._known = flow.owner.forgotten
        self._requests, self._index = group.owners(flow.owner, slots)
        self._parts: dict[Roles, torch.Tensor] = {}
        self._signalled: list[Roles] = []
        self._signals: torch.Tensor | None = None  # of which the parts are
        for roles, (port, taps) in flow.gathered.items():
            if port == "residual_stream":
                self._parts[roles] = residual_rows(flow, own, roles, taps)
            elif port == "signals":
                self._signalled.append(roles)
        self._lasts = flow.lends and len(self._parts) == len(flow.gathered)
        self._entries: Mapping[str, Any] | None = None  # of all steps, if it lasts
        self._views: dict[str, torch.Tensor] = {}
        self._key: Mapping[str, Any] = MappingProxyType(
            {"phase": "decode"} if "phase" in spec.bundle_key else {}
        )
        self._numbered = "engine_step_id" in spec.bundle_key

    @staticmethod
    def of(flow: BoundFlow, rows: Sequence[ProgramRows], slots: Slots) -> Handover | None:
        """None for a flow whose bundles have to be made anew in each step."""
        spec = flow.flow
        own = [each for each in rows if flow in each.group.program.flows]
        if len(own) != 1 or own[0].group.program.phase != DECODE:
            return None
        if spec.dispatch_every_n_steps > 1 or flow.divides or spec.actions:
            return None
        if spec.window == "background":  # sequences may be others before the thread comes to it
            return None
        program = own[0].group.program
        for port, taps in flow.gathered.values():
            if port not in _PLAIN_PORTS or not program.has_together(taps):
                return None
            if port == "signals" and (
                flow.leaves_stream or not isinstance(own[0].group.place, slice)
            ):
                return None
        return Handover(flow, own[0], slots)

    def bundle(self, frame: Frame) -> PortBundle:
        if self._known != self.owner.forgotten:  # sequences beside these may have grown
            self._known = self.owner.forgotten
            self._requests, self._index = self._group.owners(self.owner, self._slots)
        meta = RowMeta.of_tokens(
            self._requests, self._index, frame.batch.starts, self._group.sequences, frame.step
        )
        entries, key, flow = self._entries, self._key, self._flow
        if self._signalled and (frame.signals is None or frame.signals is not self._signals):
            self._find_signals(frame.signals)
        if entries is None:
            entries = by_role(flow, self._parts, meta, self._parts, self._views)
            if self._lasts:
                entries = self._entries = MappingProxyType(dict(entries))
        if self._numbered:
            key = {"engine_step_id": frame.step, **key}
        return PortBundle(entries, meta, key, flow.number, flow.flow.label, flow.reads)

    def _find_signals(self, signals: torch.Tensor | None) -> None:
        """The rows of what conditions gave, which lie in one tensor from the first condition on; no
        numbers where another pipeline stage judges."""
        self._signals = signals
        part = (
            no_signals(self.rows, self._device) if signals is None else signals[self._group.place]
        )
        self._parts.update(dict.fromkeys(self._signalled, part))

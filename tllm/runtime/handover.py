"""Which flows a step has rows for, and what each is handed: rows that are read anew, or what was
found once for a batch that only goes on; and the entries that a consumer sees of either."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from tllm.cuda_runtime import current_stream
from tllm.ports import PortBundle, RowMeta
from tllm.runtime.batch import Frame, ProgramRows, ProgramSegments, together
from tllm.runtime.columns import DECODE, IntArray
from tllm.runtime.flows import BoundFlow
from tllm.runtime.read_rows import ReadRows, Roles
from tllm.runtime.slots import Slots
from tllm.runtime.taps import TapKey
from tllm.runtime.transfer import upload
from tllm.spec.gates import MAX_GATES

_PLAIN_PORTS = {"residual_stream", "request_meta", "signals"}

_ANY_TIME = ("out_of_band", "background")
"""Windows that no forward pass waits for."""


@dataclass(frozen=True, eq=False)
class FlowRows:
    """Rows of one program that go into a bundle.

    Attributes:
        selection: which of the program's rows, None for all.
    """

    rows: ProgramRows
    meta: RowMeta
    selection: np.ndarray | None = None

    @staticmethod
    def of_step(flow: BoundFlow, frame: Frame, slots: Slots) -> list[FlowRows]:
        """The rows of a step that a flow reads, those of a program together."""
        reads_logits = flow.flow.reads_port("logits")
        if reads_logits and frame.logits is None:
            return []
        pieces = []
        for rows in frame.rows:
            group = rows.group
            if flow not in group.program.flows:
                continue
            requests, index = group.owners(flow.owner, slots)
            steps = np.full(group.total, frame.step, np.int64)
            positions = group.by_row(group.positions(frame.batch))
            piece: FlowRows | None = FlowRows(rows, RowMeta(requests, index, positions, steps))
            if piece is not None and frame.rejected is not None:
                piece = piece.chosen(~frame.rejected)
            if piece is not None and reads_logits and not frame.batch.all_sampled:
                piece = piece.chosen(frame.batch.sampled_rows)
            if piece is not None:
                pieces.append(piece)
        return pieces

    @property
    def phase(self) -> int:
        return self.rows.group.program.phase

    @property
    def batch_rows(self) -> np.ndarray:
        """`[rows]`, where each lies in the batch."""
        rows = self.rows.group.by_row(self.rows.group.batch_rows)
        return rows if self.selection is None else rows[self.selection]

    @property
    def place(self) -> slice | IntArray:
        """The same, as `together` has it."""
        return self.rows.group.place if self.selection is None else together(self.batch_rows)

    def chosen(self, among: np.ndarray) -> FlowRows | None:
        """The rows that are chosen `among` those of the batch, `[tokens]` bool; None when there are
        none."""
        kept = np.flatnonzero(among[self.batch_rows])
        if not len(kept):
            return None
        if len(kept) == len(self.meta):
            return self
        selection = kept if self.selection is None else self.selection[kept]
        return FlowRows(self.rows, self.meta.select(kept), selection)

    def read(self, flow: BoundFlow, frame: Frame) -> ReadRows:
        parts: dict[Roles, torch.Tensor] = {}
        shared: set[Roles] = set()
        for roles, (port, taps) in flow.gathered.items():
            if port == "request_meta":
                continue
            if port == "signals" and frame.signals is None:
                parts[roles] = no_signals(len(self.meta), flow.owner.context.device)
                continue
            place: slice | np.ndarray | None
            if port == "residual_stream":
                part, place = residual_rows(flow, self.rows, roles, taps), self.selection
            else:
                part, place = self._of_batch(port, frame)
                if part.is_cuda and flow.leaves_stream:  # it was allocated on the compute stream
                    part.record_stream(current_stream(part.device))
            if isinstance(place, np.ndarray):
                parts[roles] = part[upload(place.astype(np.int64), part.device)]
            else:
                parts[roles] = part if place is None else part[place]
                shared.add(roles)
        return ReadRows(parts, self.meta, self.phase, shared)

    def _of_batch(self, port: str, frame: Frame) -> tuple[torch.Tensor, slice | IntArray]:
        """What a step has of a port for its batch, and where these rows are in it."""
        if port == "logits":
            assert frame.logits is not None
            if frame.batch.all_sampled:
                return frame.logits, self.place
            return frame.logits, together(frame.batch.logits_index[self.batch_rows])
        found = frame.targets if port == "token_target" else frame.signals
        assert found is not None, port
        return found, self.place


def residual_rows(
    flow: BoundFlow, rows: ProgramRows, roles: Roles, taps: tuple[TapKey, ...]
) -> torch.Tensor:
    """What a flow reads of the residual stream in these roles: `[rows, taps, hidden]`, and of its
    only place `[rows, hidden]`."""
    assert rows.tensor is not None
    part = rows.group.program.block(rows.tensor, taps)
    return part[:, 0] if roles == flow.single else part


def no_signals(rows: int, device: torch.device) -> torch.Tensor:
    """What conditions gave for rows that another pipeline stage judges: no numbers."""
    return torch.full((rows, 2, MAX_GATES), torch.nan, device=device)


class LentRows(Mapping[str, Any]):
    """Entries by role. Those of several roles are one tensor, of which each is made a view when it
    is asked for: what nobody looks at costs nothing.

    Args:
        rows: `[rows, roles, hidden]`.
        columns: which of the roles each is.
        views: those that were asked for before, of the same rows.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        columns: Mapping[str, int],
        others: Mapping[str, Any],
        views: dict[str, torch.Tensor],
    ) -> None:
        self._rows = rows
        self._columns = columns
        self._others = others
        self._views = views

    def __getitem__(self, role: str) -> Any:
        view = self._views.get(role)
        if view is not None:
            return view
        column = self._columns.get(role)
        if column is None:
            return self._others[role]
        view = self._views[role] = self._rows[:, column]
        return view

    def __contains__(self, role: object) -> bool:
        return role in self._columns or role in self._others

    def __iter__(self) -> Iterator[str]:
        yield from self._columns
        yield from self._others

    def __len__(self) -> int:
        return len(self._columns) + len(self._others)


def by_role(
    flow: BoundFlow,
    parts: Mapping[Roles, torch.Tensor],
    meta: RowMeta,
    shared: Collection[Roles],
    views: dict[str, torch.Tensor] | None = None,
) -> Mapping[str, Any]:
    """The entries of a bundle. Where they are the consumer's own, each has its rows side by side.

    Args:
        parts, meta, shared: as `ReadRows` has them.
        views: those of the same parts that `LentRows` has made before.
    """
    found: dict[str, Any] = {}
    lent: torch.Tensor | None = None
    for roles, (port, _) in flow.gathered.items():
        if isinstance(roles, tuple):
            if flow.lends:
                lent = parts[roles]
                continue
            part = parts[roles]
            own = part.transpose(0, 1).clone(memory_format=torch.contiguous_format)
            # Nobody else has what these share, and so autograd need not take them for views, which
            # it would not let a consumer change in place.
            each = torch.unsafe_chunk(own.flatten(0, 1), len(roles))
            found.update(zip(roles, each, strict=True))
        elif port == "request_meta":
            found[roles] = meta
        else:
            part = parts[roles]
            found[roles] = part.clone() if roles in shared and not flow.lends else part
    if lent is None:
        return found
    return LentRows(lent, flow.columns, found, {} if views is None else views)


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


NO_HANDOVERS: Mapping[BoundFlow, Handover] = {}


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

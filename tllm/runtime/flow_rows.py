"""The rows of one program that a flow reads in a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tllm.cuda_streams import current_stream
from tllm.ports import RowMeta
from tllm.runtime.batch import Frame, ProgramRows, together
from tllm.runtime.columns import IntArray
from tllm.runtime.flows import BoundFlow
from tllm.runtime.read_rows import ReadRows, Roles
from tllm.runtime.slots import Slots
from tllm.runtime.taps import TapKey
from tllm.runtime.transfer import upload
from tllm.spec.gates import MAX_GATES


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

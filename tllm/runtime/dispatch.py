"""Hands the rows of each step to the consumers that asked for them, when they asked for them."""

from __future__ import annotations

import logging
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from tllm.cuda_streams import CurrentStream, current_stream
from tllm.ports import PortBundle, RequestInfo, RowMeta
from tllm.ports.payload import reason_of
from tllm.runtime.batch import Frame, ProgramRows, together
from tllm.runtime.columns import DECODE, PREFILL
from tllm.runtime.controllers import Controllers
from tllm.runtime.flows import BoundConsumer, BoundFlow, Context, Roles
from tllm.runtime.handover import Handover
from tllm.runtime.lent_rows import apart
from tllm.runtime.ring import Span
from tllm.runtime.slots import Slots
from tllm.runtime.taps import TapKey
from tllm.runtime.transfer import upload
from tllm.spec.conditions import MAX_GATES

logger = logging.getLogger(__name__)

_PHASE_NAMES = ("prefill", "decode")


@dataclass(frozen=True, eq=False)
class FlowRows:
    """Rows of one program that go into a bundle.

    selection: which of the program's rows, None for all.
    """

    rows: ProgramRows
    meta: RowMeta
    selection: np.ndarray | None

    @property
    def batch_rows(self) -> np.ndarray:
        """`[rows]`, where each lies in the batch."""
        rows = self.rows.group.by_row(self.rows.group.batch_rows)
        return rows if self.selection is None else rows[self.selection]

    @property
    def place(self) -> slice | np.ndarray:
        """The same, as `together` has it."""
        return self.rows.group.place if self.selection is None else together(self.batch_rows)

    def sampled(self, frame: Frame) -> FlowRows | None:
        """Only the rows that a token is sampled from; None when there are none."""
        if frame.batch.all_sampled:
            return self
        return self.chosen(frame.batch.sampled_rows)

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


_Rows: TypeAlias = Handover | list[FlowRows]


class Dispatcher:
    """Calls consumers with the rows of each step, and keeps their mistakes to themselves.

    Args:
        on_failure: told when a consumer raised, after it was marked dead.
        controllers: given what consumers decide.

    Attributes:
        waiting: for the next step.
    """

    def __init__(
        self,
        slots: Slots,
        device: torch.device,
        on_failure: Callable[[BoundConsumer], None],
        controllers: Controllers,
    ) -> None:
        self._slots = slots
        self._device = device
        self._on_failure = on_failure
        self._controllers = controllers
        self.waiting: list[tuple[BoundFlow, Frame, _Rows]] = []

    # -- calls ---------------------------------------------------------------------------------

    def call(
        self, owner: BoundConsumer, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call into a consumer. What it raises is logged and counted; it is then detached."""
        if owner.error is not None:
            return None
        try:
            return function(*args, **kwargs)
        except BaseException as error:  # SystemExit too: an engine has other users
            if ends_process(error):
                raise
            self.fail(owner, error)
            return None

    @staticmethod
    def stop(owner: BoundConsumer) -> None:
        """End a consumer, also one that has raised."""
        try:
            owner.consumer.stop()
        except BaseException as error:
            if ends_process(error):
                raise
            logger.exception("consumer %r raised in stop", owner.id)

    def fail(self, owner: BoundConsumer, error: BaseException) -> None:
        """Detach a consumer because of an error; any later one of its is the same mistake."""
        if not owner.alive:
            return
        owner.error = reason_of(error)
        logger.error(
            "consumer %r raised and is detached; generation goes on without it.\n%s",
            owner.id,
            "".join(traceback.format_exception(error)),
        )
        try:
            owner.consumer.on_error(error)
        except BaseException as again:
            if ends_process(again):
                raise
            logger.exception("consumer %r raised again, in on_error", owner.id)
        self._on_failure(owner)

    # -- one step ------------------------------------------------------------------------------

    def before_sampling(
        self, flows: Sequence[BoundFlow], frame: Frame, handovers: Mapping[BoundFlow, Handover]
    ) -> None:
        """Windows that see the forward pass before its tokens are drawn.

        Args:
            handovers: what some of the flows are handed, where that is known already.
        """
        for flow in flows:
            handover = handovers.get(flow)
            if handover is None:
                self._deliver(flow, frame, self._pieces(flow, frame))
            else:
                self._hand_over(handover, frame)

    def after_sampling(
        self, flows: Sequence[BoundFlow], frame: Frame, handovers: Mapping[BoundFlow, Handover]
    ) -> None:
        """Everything else, now that the step is complete. Arguments as above."""
        for flow in flows:
            if flow.owner.error is not None:
                continue
            # Now: the slots may have new owners by the time the window opens.
            rows: _Rows | None = handovers.get(flow)
            if rows is None:
                rows = self._pieces(flow, frame)
                if not rows and flow.flow.dispatch_every_n_steps == 1:
                    continue
            window = flow.flow.window
            if window == "same_step":
                self._deliver(flow, frame, rows)
            elif window == "next_step":
                self._hold(frame)
                self.waiting.append((flow, frame, rows))
            elif window == "out_of_band":
                self._deliver_on_side_stream(flow, frame, rows)
            else:
                self._deliver_in_background(flow, frame, rows)

    def before_forward(self) -> None:
        """Deliver what waited for the next step."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        for flow, frame, rows in waiting:
            self._deliver(flow, frame, rows)
            self._release(frame)

    def flush(self, owner: BoundConsumer) -> None:
        """Hand out rows that wait for an n-th step, and wait for the delivery thread."""
        for flow in owner.flows:
            if flow.flow.dispatch_every_n_steps > 1:
                work = partial(self.call, owner, self._hand_out_held, flow)
                self._in_window(flow, work)
        owner.thread.drain()

    # -- windows -------------------------------------------------------------------------------

    def _in_window(self, flow: BoundFlow, work: Callable[[], None]) -> None:
        """Run work on the stream and thread of the flow's window."""
        if flow.flow.window == "background":
            side = flow.owner.side

            def job() -> None:
                # Rows that wait were copied on this stream, and no other one waits for it.
                with CurrentStream(side):
                    work()

            flow.owner.thread.submit(job)
        elif flow.flow.window == "out_of_band":
            with self._on_side_stream(flow.owner):
                work()
        else:
            work()

    def _on_side_stream(self, owner: BoundConsumer) -> CurrentStream:
        side, ready = owner.side, owner.side_follows
        if side is None or ready is None:
            return CurrentStream(None)
        ready.record(current_stream(self._device))
        side.wait_event(ready)
        return CurrentStream(side)

    def _deliver_on_side_stream(self, flow: BoundFlow, frame: Frame, rows: _Rows) -> None:
        if flow.owner.side is None:
            self._deliver(flow, frame, rows)
            return
        with self._on_side_stream(flow.owner):
            self._deliver(flow, frame, rows)
            self._fence(frame.span)

    def _deliver_in_background(self, flow: BoundFlow, frame: Frame, rows: _Rows) -> None:
        owner = flow.owner
        self._hold(frame)
        side = owner.side
        if side is not None:
            ready = torch.cuda.Event()
            ready.record(current_stream(self._device))

        def job() -> None:
            try:
                if side is None:
                    self._deliver(flow, frame, rows)
                else:
                    with CurrentStream(side):
                        side.wait_event(ready)
                        self._deliver(flow, frame, rows)
                        self._fence(frame.span)
            finally:
                self._release(frame)

        owner.thread.submit(job)

    def _fence(self, span: Span | None) -> None:
        if span is not None and self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record(current_stream(self._device))
            span.fences.append(event)

    @staticmethod
    def _hold(frame: Frame) -> None:
        if frame.span is not None:
            frame.span.hold()

    @staticmethod
    def _release(frame: Frame) -> None:
        if frame.span is not None:
            frame.span.release()

    # -- rows ----------------------------------------------------------------------------------

    def _deliver(self, flow: BoundFlow, frame: Frame, rows: _Rows) -> None:
        if isinstance(rows, Handover):
            self._hand_over(rows, frame)
        else:
            self.call(flow.owner, self._hand_out, flow, frame, rows)

    def _hand_over(self, handover: Handover, frame: Frame) -> None:
        """Call a consumer with what it is handed in each step, as `call` calls."""
        owner = handover.owner
        if owner.error is not None:
            return
        try:
            bundle = handover.bundle(frame)
            owner.calls += 1
            owner.rows += handover.rows
            context = owner.context.latest
            if context.step != frame.step:
                context = owner.context.at(frame.step)
            owner.consumer.consume_bundle(bundle, context)
        except BaseException as error:
            if ends_process(error):
                raise
            self.fail(owner, error)

    def _pieces(self, flow: BoundFlow, frame: Frame) -> list[FlowRows]:
        """The rows of this step that the flow reads, those of a program together."""
        if flow.flow.reads_port("logits") and frame.logits is None:
            return []
        pieces = []
        for rows in frame.rows:
            if flow in rows.group.program.flows:
                piece = FlowRows(rows, self._meta(flow.owner, rows, frame), None)
                if frame.rejected is None:
                    pieces.append(piece)
                elif own := piece.chosen(~frame.rejected):
                    pieces.append(own)
        if flow.flow.reads_port("logits"):
            pieces = [sampled for piece in pieces if (sampled := piece.sampled(frame))]
        return pieces

    def _meta(self, owner: BoundConsumer, rows: ProgramRows, frame: Frame) -> RowMeta:
        """Who the rows of a program belong to."""
        group = rows.group
        requests, index = group.owners(owner, self._slots)
        steps = np.full(group.total, frame.step, np.int64)
        return RowMeta(requests, index, group.by_row(group.positions(frame.batch)), steps)

    def _hand_out(self, flow: BoundFlow, frame: Frame, pieces: list[FlowRows]) -> None:
        """Make the step's bundles and call the consumer with them."""
        spec = flow.flow
        for group in _by_phase(pieces) if "phase" in spec.bundle_key else [pieces]:
            if not group:
                continue
            meta, order = group[0].meta, None
            if len(group) > 1:
                meta, order = _joined([piece.meta for piece in group])
            index = None if order is None else self._on_device(order)
            entries: dict[Roles, Any] = {}
            for roles in flow.gathered:
                found = self._entry(flow, roles, frame, group)
                if found is None:
                    entries[roles] = meta
                else:
                    entries[roles] = found if index is None else found[index]
            if spec.dispatch_every_n_steps > 1:
                flow.held.append((entries, meta))
            else:
                self._call_with_bundles(flow, entries, meta, group[0].rows.group.program.phase)
        if spec.dispatch_every_n_steps > 1:
            flow.steps_seen += 1
            if flow.steps_seen % spec.dispatch_every_n_steps == 0:
                self._hand_out_held(flow)

    def _hand_out_held(self, flow: BoundFlow) -> None:
        """Hand out the rows of several steps."""
        held, flow.held = flow.held, []
        if "phase" in flow.flow.bundle_key:
            by_phase = [[h for h in held if bool(h[1].is_prefill[0]) == p] for p in (True, False)]
        else:
            by_phase = [held]
        for group in by_phase:
            if not group:
                continue
            meta, order = _joined([m for _, m in group])
            index = None if order is None else self._on_device(order)
            entries: dict[Roles, Any] = {}
            for roles, value in group[0][0].items():
                if isinstance(value, RowMeta):
                    entries[roles] = meta
                    continue
                joined = torch.cat([each[roles] for each, _ in group])
                entries[roles] = joined if index is None else joined[index]
            phase = PREFILL if meta.is_prefill[0] else DECODE
            self._call_with_bundles(flow, entries, meta, phase)

    def _entry(
        self, flow: BoundFlow, roles: Roles, frame: Frame, group: list[FlowRows]
    ) -> torch.Tensor | None:
        """The tensor of what is read together, rows in the order of the group's pieces."""
        port, taps = flow.gathered[roles]
        if port == "request_meta":
            return None
        part = self._part(flow, frame, group[0], port, taps)
        if port == "residual_stream" and roles == flow.single:
            part = part[:, 0]
        if len(group) > 1:
            parts = [self._part(flow, frame, piece, port, taps) for piece in group[1:]]
            if port == "residual_stream" and roles == flow.single:
                parts = [each[:, 0] for each in parts]
            return torch.cat([part, *parts])
        own = port != "residual_stream" or group[0].selection is not None
        # Those of several roles are copied when they are taken apart, if nothing waits.
        later = isinstance(roles, tuple) and flow.flow.dispatch_every_n_steps == 1
        lent = flow.flow.delivery == "device_lease"
        return part if own or later or lent else part.clone()

    def _part(
        self, flow: BoundFlow, frame: Frame, piece: FlowRows, port: str, taps: tuple[TapKey, ...]
    ) -> torch.Tensor:
        """What a piece has of a port; of the residual stream `[rows, taps, hidden]`."""
        if port == "residual_stream":
            assert piece.rows.tensor is not None
            found = piece.rows.group.program.block(piece.rows.tensor, taps)
            return found if piece.selection is None else found[self._on_device(piece.selection)]
        if port == "logits":
            assert frame.logits is not None
            if frame.batch.all_sampled:
                return self._rows_of(flow, frame.logits, piece.place)
            index = frame.batch.logits_index[piece.batch_rows]
            return self._rows_of(flow, frame.logits, together(index))
        if port == "token_target":
            assert frame.targets is not None
            return self._rows_of(flow, frame.targets, piece.place)
        assert port == "signals"
        if frame.signals is None:  # of another pipeline stage
            shape = len(piece.meta), 2, MAX_GATES
            return torch.full(shape, torch.nan, device=self._device)
        return self._rows_of(flow, frame.signals, piece.place)

    def _rows_of(
        self, flow: BoundFlow, tensor: torch.Tensor, where: slice | np.ndarray
    ) -> torch.Tensor:
        """Rows of a tensor that was allocated on the compute stream, on the current one."""
        if tensor.is_cuda and flow.leaves_stream:
            tensor.record_stream(current_stream(self._device))
        if not isinstance(where, slice):
            return tensor[self._on_device(where)]
        rows = tensor[where]
        return rows if flow.flow.delivery == "device_lease" else rows.clone()

    def _on_device(self, index: np.ndarray) -> torch.Tensor:
        return upload(index.astype(np.int64), self._device)

    def _call_with_bundles(
        self, flow: BoundFlow, entries: dict[Roles, Any], meta: RowMeta, phase: int
    ) -> None:
        """Split rows by the rest of the bundle key and by the row limit, and call."""
        spec, owner = flow.flow, flow.owner
        step = int(meta.steps[-1])
        shared = {"engine_step_id": step, "phase": _PHASE_NAMES[phase]}
        context = owner.context.at(step)
        groups: Iterable[tuple[dict[str, Any], np.ndarray | None]] = (({}, None),)
        if flow.divides:
            groups = _split(meta, spec.bundle_key, spec.max_bundle_rows)
        for group_key, rows in groups:
            part, part_meta = entries, meta
            if rows is not None:
                part_meta = meta.select(rows)
                index = self._on_device(rows)
                part = {
                    roles: part_meta if isinstance(value, RowMeta) else value[index]
                    for roles, value in entries.items()
                }
            values = shared | group_key
            key: dict[str, Any] = {k: values[k] for k in spec.bundle_key}
            owner.calls += 1
            owner.rows += len(part_meta.positions)
            each = apart(part, flow)
            bundle = PortBundle(each, part_meta, key, flow.number, spec.label, flow.reads)
            if spec.actions:
                self._decide(flow, bundle, context)
            else:
                owner.consumer.consume_bundle(bundle, context)

    def _decide(self, flow: BoundFlow, bundle: PortBundle, context: Context) -> None:
        """Let a consumer decide. What it raises is a matter of the bundle's requests alone."""
        owner = flow.owner
        try:
            actions = owner.consumer.decide(bundle, context)
            self._controllers.hear(flow, bundle, actions or (), context.step)
        except BaseException as error:
            if ends_process(error):
                raise
            logger.error(
                "consumer %r raised in decide; the %d requests that it was given rows of go on "
                "without it.\n%s",
                owner.id,
                len(bundle.meta.requests),
                "".join(traceback.format_exception(error)),
            )
            self._controllers.fail(owner, bundle, error)


def ends_process(error: BaseException) -> bool:
    """Whether somebody wants the process to end, while it happens to be in a consumer's code."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    handlers = map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))
    codes = [getattr(handler, "__code__", None) for handler in handlers]
    return trace is not None and trace.tb_frame.f_code in codes


def _by_phase(pieces: list[FlowRows]) -> list[list[FlowRows]]:
    """Pieces of prompts, then the others."""
    if len(pieces) < 2:
        return [pieces]
    return [[p for p in pieces if p.rows.group.program.phase == n] for n in (PREFILL, DECODE)]


def _joined(metas: list[RowMeta]) -> tuple[RowMeta, np.ndarray | None]:
    """Rows after rows; a sequence that has rows in several is there once, but for one whose prompt
    has grown between: its rows are told as they were.

    Returns:
        The rows' description, and their order where they had to be moved: those of a sequence
        ascend by position, whichever program each of them had.
    """
    if len(metas) == 1:
        return metas[0], None
    numbers: dict[tuple[str, int, int], int] = {}
    requests: list[RequestInfo] = []
    indices = []
    for meta in metas:
        each = []
        for request in meta.requests:
            sequence = (request.prompt_id, request.sample_index, request.prompt_len)
            if sequence not in numbers:
                numbers[sequence] = len(requests)
                requests.append(request)
            each.append(numbers[sequence])
        indices.append(np.array(each, np.int32)[meta.request_index])
    joined = RowMeta(
        tuple(requests),
        np.concatenate(indices),
        np.concatenate([meta.positions for meta in metas]),
        np.concatenate([meta.steps for meta in metas]),
    )
    if len(requests) == sum(len(meta.requests) for meta in metas):
        return joined, None
    owner = joined.request_index
    by_owner = np.argsort(owner, kind="stable")
    back = (np.diff(joined.positions[by_owner]) < 0) & (np.diff(owner[by_owner]) == 0)
    if not back.any():
        return joined, None
    order = np.lexsort((joined.positions, owner))
    return joined.select(order), order


def _split(
    meta: RowMeta, bundle_key: Sequence[str], max_rows: int
) -> Iterator[tuple[dict[str, Any], np.ndarray | None]]:
    """Rows of each bundle, with the key values they share; None is all rows."""
    names = [k for k in ("request_id", "prompt_id") if k in bundle_key]
    if not names and not (max_rows and len(meta) > max_rows):
        yield {}, None
        return
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, request in enumerate(meta.requests):
        sequence = (request.request_id, request.sample_index) if "request_id" in names else ()
        groups.setdefault((*sequence, request.prompt_id if names else ""), []).append(i)
    for members in groups.values():
        first = meta.requests[members[0]]
        values = {"request_id": first.request_id, "prompt_id": first.prompt_id}
        rows = np.flatnonzero(np.isin(meta.request_index, members))
        for begin in range(0, len(rows), max_rows or len(rows)):
            yield values, rows[begin : begin + (max_rows or len(rows))]

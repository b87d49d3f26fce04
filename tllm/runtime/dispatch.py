"""Hands the rows of each step to the consumers that asked for them, when they asked for them."""

from __future__ import annotations

import logging
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch

from tllm.cuda_runtime import CurrentStream, current_stream
from tllm.inference_mode import advice_on
from tllm.ports import PortBundle
from tllm.ports.payload import reason_of
from tllm.runtime.batch import Frame
from tllm.runtime.columns import DECODE, PREFILL
from tllm.runtime.controllers import Controllers
from tllm.runtime.flows import BoundConsumer, BoundFlow, Context
from tllm.runtime.handover import FlowRows, Handover, by_role
from tllm.runtime.read_rows import ReadRows
from tllm.runtime.ring import Span
from tllm.runtime.slots import Slots

logger = logging.getLogger(__name__)

_PHASE_NAMES = ("prefill", "decode")


_Rows: TypeAlias = Handover | list[FlowRows]
_Piece = TypeVar("_Piece", FlowRows, ReadRows)


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
        owner.error = reason_of(error) + advice_on(error)
        logger.error(
            "consumer %r raised and is detached; generation goes on without it%s.\n%s",
            owner.id,
            advice_on(error),
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
                self._deliver(flow, frame, FlowRows.of_step(flow, frame, self._slots))
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
                rows = FlowRows.of_step(flow, frame, self._slots)
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

    def _hand_out(self, flow: BoundFlow, frame: Frame, pieces: list[FlowRows]) -> None:
        """Call the consumer with the step's rows, or keep them for the n-th step."""
        every = flow.flow.dispatch_every_n_steps
        for group in _by_phase(flow, pieces):
            rows = ReadRows.joined([piece.read(flow, frame) for piece in group])
            if every > 1:
                flow.held.append(rows.kept())
            elif flow.flow.actions and frame.batch.drafts is not None:
                for turn in rows.in_turns():
                    self._call_with_bundles(flow, turn)
            else:
                self._call_with_bundles(flow, rows)
        if every > 1:
            flow.steps_seen += 1
            if flow.steps_seen % every == 0:
                self._hand_out_held(flow)

    def _hand_out_held(self, flow: BoundFlow) -> None:
        """Call the consumer with the rows of several steps."""
        held, flow.held = flow.held, []
        for group in _by_phase(flow, held):
            self._call_with_bundles(flow, ReadRows.joined(group))

    def _call_with_bundles(self, flow: BoundFlow, rows: ReadRows) -> None:
        """Call the consumer with each of the bundles that rows are divided into."""
        spec, owner = flow.flow, flow.owner
        step = int(rows.meta.steps[-1])
        shared = {"engine_step_id": step, "phase": _PHASE_NAMES[rows.phase]}
        context = owner.context.at(step)
        for values, own in rows.divided(spec.bundle_key, spec.max_bundle_rows):
            values |= shared
            key: dict[str, Any] = {k: values[k] for k in spec.bundle_key}
            owner.calls += 1
            owner.rows += len(own.meta.positions)
            entries = by_role(flow, own.parts, own.meta, own.shared)
            bundle = PortBundle(entries, own.meta, key, flow.number, spec.label, flow.reads)
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
                "without it%s.\n%s",
                owner.id,
                len(bundle.meta.requests),
                advice_on(error),
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


def _by_phase(flow: BoundFlow, pieces: list[_Piece]) -> list[list[_Piece]]:
    """Rows that may go into the same bundle: where bundles have a phase, those of prompts, then the
    others."""
    phases = (PREFILL, DECODE) if "phase" in flow.flow.bundle_key else ()
    groups = [[p for p in pieces if p.phase == n] for n in phases] if phases else [pieces]
    return [group for group in groups if group]

"""Each step of the running sequences: the row plan before its forward pass, and what follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from tllm.inference_mode import in_inference_mode
from tllm.runtime.assignments import Assignments
from tllm.runtime.batch import Frame, StepBatch
from tllm.runtime.broken_sequences import BrokenSequences
from tllm.runtime.columns import Column, IntArray
from tllm.runtime.flows import BoundFlow
from tllm.runtime.handover import NO_HANDOVERS, Handover, StepFlows
from tllm.runtime.judged_sequences import JudgedSequences
from tllm.runtime.planner import RowPlanner
from tllm.runtime.registered import RegisteredConsumers
from tllm.runtime.sampling import SamplerStep
from tllm.runtime.slots import Slots
from tllm.runtime.transfer import upload
from tllm.runtime.verdicts import BrokenVerdicts, Fired, StepVerdicts, StoppedSequences

Decide: TypeAlias = Callable[[], tuple[IntArray, IntArray]]
"""Waits until it is known which drafted tokens of a step are accepted. Position of the first token
of each of its sequences, and how many of those computed of each are its own."""

IN_FLIGHT = 2
"""The most steps whose tokens the engine has not asked for yet."""


@dataclass(frozen=True, eq=False)
class _Undecided:
    """A step of which it is not known yet which drafted tokens are accepted.

    Attributes:
        flows: those that are handed its rows then; None where nobody is, or `end` does.
        then: what waits for that.
    """

    frame: Frame
    decide: Decide
    flows: StepFlows | None
    then: list[Callable[[], None]] = field(default_factory=list)


class Steps:
    """What an engine's model runner calls, in this order: `begin_undecided`, where tokens are
    drafted; `begin_idle`, and where neither began a step, `begin`; `take_scores`, where another
    pipeline stage follows; `before_sampling`; `guide`; `after_sampling`; `accept` or
    `accept_later`, where tokens were drafted; `end`.

    Attributes:
        rows_captured, rows_dropped, rows_steered, rows_patched: in all steps so far, without rows
            of drafted tokens that were rejected.
        ring_rows_taken: a row for each hook point that a captured row was read at.
        tokens_drafted, tokens_accepted: by speculative decoding.
        guidance: what consumers guide when the step's tokens are drawn.
        drafted: latches of the step's sequences with drafts.
        count_all_drafts: counts those of steps whose tokens nobody has waited for.
    """

    def __init__(
        self,
        slots: Slots,
        planner: RowPlanner,
        assignments: Assignments,
        consumers: RegisteredConsumers,
        judged: JudgedSequences,
        broken: BrokenSequences,
    ) -> None:
        self._slots = slots
        self._planner = planner
        self._taps = planner.taps
        self._assignments = assignments
        self._steering = assignments.steering
        self._patching = assignments.patching
        self._consumers = consumers
        self._additions = consumers.additions
        self._controllers = consumers.controllers
        self._dispatcher = consumers.dispatcher
        self.guidance = consumers.guidance
        self._judged = judged
        self._broken = broken
        self._broken_alone = BrokenVerdicts(broken)
        self._verdicts = judged.verdicts
        self._relay = judged.relay
        self._means = judged.means
        self.drafted = judged.drafted
        self.rows_captured = 0
        self.ring_rows_taken = 0
        self.rows_dropped = 0
        self.rows_steered = 0
        self.rows_patched = 0
        self.tokens_drafted = 0
        self.tokens_accepted = 0
        self.count_all_drafts: Callable[[], None] = lambda: None
        self._was_idle = False
        self._observing = False
        self._bundled = False
        self._frame: Frame | None = None
        self._drafting: Frame | None = None
        self._undecided: deque[_Undecided] = deque()
        self._flows = StepFlows()
        self._handovers: Mapping[BoundFlow, Handover] = NO_HANDOVERS
        #: What controllers stop in a step whose rows were not handed out yet.
        self._stopped: dict[str, Fired] | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is done to any row of the sequences that run."""
        changed = self._steering.users or self._patching.users or self._controllers.acting
        return not (changed or self._consumers.observe)

    @property
    def goes_on(self) -> bool:
        """Whether the step that runs is observed, and the next one of the same decoding sequences
        as the step before."""
        return self._frame is not None and self._frame.goes_on

    @property
    def observed(self) -> bool:
        """Whether the step that runs must be told of its logits and tokens."""
        return self._frame is not None or self.drafted.words is not None

    # -- before the forward pass -------------------------------------------------------------------

    def begin_idle(self) -> bool:
        """Begin a step, if nothing is done to any row of it; else nothing is begun."""
        if self._frame is not None or self._means.waiting or self._undecided:
            self.end()
        consumers = self._consumers
        if consumers.failed:
            consumers.detach_failed()
        self._observing = bool(consumers.by_id) and consumers.observe
        changed = self._steering.users or self._patching.users or self._controllers.acting
        if changed or self._observing:
            return False
        consumers.step += 1
        if not self._was_idle:
            self._judged.skip()
            self._planner.clear()
            self._steering.commit()  # taps at which nobody's rows are steered return at once again
            self._patching.commit()
            self._taps.commit()
            self._taps.separate()
            self._was_idle = True
        return True

    def begin_undecided(
        self,
        engine_ids: list[str],
        counts: IntArray,
        sampled_from: IntArray,
        drafts: IntArray,
        where: Callable[[], tuple[IntArray, IntArray] | None],
    ) -> bool:
        """Begin a step in which the same is done to each row, wherever the sequences are whose
        drafts are undecided; else nothing is begun.

        Args:
            engine_ids, counts, sampled_from, drafts: as for `begin`.
            where: asked of other sequences than in the last step. The lowest position that the
                first token of each may have, and by how many tokens it may be further on; None if
                that is not known.
        """
        consumers = self._consumers
        if (
            self.idle
            or self._frame is not None
            or self._means.waiting
            or consumers.failed
            or self._dispatcher.waiting
            or self._controllers.acting
            or self._additions.writers
            or self._judged.by_position
        ):
            return False
        slots = self._slots.of(engine_ids)
        layout = self._planner.staying(slots, counts)
        if layout is not None:
            batch = StepBatch(slots, layout.batch.starts, counts, sampled_from, drafts)
        elif (known := where()) is not None:
            batch = StepBatch(slots, known[0], counts, sampled_from, drafts)
            layout = self._planner.lay_out_anywhere(batch, known[1])
        if layout is None:
            return False
        observed, registered = bool(consumers.by_id) and consumers.observe, self._assignments.flows
        if observed and (layout.flows is None or layout.flows.registered is not registered):
            layout.flows = StepFlows(layout.groups, registered)
        if observed and not (layout.flows and layout.flows.can_wait):
            return False
        if self._steering.stale:
            self._steering.commit()
        if self._patching.stale:
            self._patching.commit()
        frame = self._planner.plan_undecided(consumers.step + 1, batch, layout)
        if frame is None:
            return False
        consumers.step += 1
        self._judged.skip()
        self._drafting = frame
        if observed and layout.flows is not None:
            self._frame, self._bundled = frame, False
            self._flows, self._handovers = layout.flows, NO_HANDOVERS
        self._taps.commit()
        self._taps.separate()
        return True

    def begin(
        self,
        engine_ids: list[str],
        starts: Any,
        counts: Any,
        sampled_from: Any,
        token_ids: torch.Tensor,
        drafts: Any = None,
        arrived: torch.Tensor | None = None,
    ) -> None:
        """What waited for the forward pass, and the row plan.

        Args:
            engine_ids: in batch order; arrays as in `StepBatch`.
            token_ids: `[tokens or more]`, of the batch, on the device.
            arrived: what the pipeline stage before gave with the rows, see `ScoreRelay`.
        """
        self._was_idle = False
        self.drafted.words = None
        self._consumers.step += 1
        observed = self._observing
        if observed:
            if self._dispatcher.waiting:
                self._dispatcher.before_forward()
                self._consumers.detach_failed()
            if self._additions.writers:
                self._additions.commit()
        if self._controllers.acting:
            self._consumers.let_act(engine_ids, starts)
        if self._steering.stale:
            self._steering.commit()
        if self._patching.stale:
            self._patching.commit()
        slots, frame = self._slots.of(engine_ids), None
        if observed or drafts is not None or not self._planner.keep(slots, starts, counts):
            batch = StepBatch(slots, starts, counts, sampled_from, drafts)
            frame = self._planner.plan(self._consumers.step, batch)
            layout = self._planner.layout
            if self._additions.writers and not frame.goes_on and layout is not None:
                self._consumers.note_computed_again(batch, layout.delivered)
            if drafts is not None:
                self.drafted.begin(batch)
            if frame.chooses:
                self._choose(int(counts.sum()), token_ids)
        if self._means.waiting:
            self._means.begin(slots, starts, counts)
        self._verdicts.begin(engine_ids, slots, starts, counts, drafts)
        if self._controllers.acting:
            self._controllers.begin(engine_ids, starts, counts, drafts, self._consumers.step)
        self._taps.commit()
        if frame is not None and observed:
            self._observe(frame)
        if not self._relay.alone:
            self._relay.begin(slots, counts, arrived)
        self._taps.separate()
        self._drafting = frame if drafts is not None else None
        if self._drafting is None:
            layout = self._planner.layout
            if layout is not None:
                self.rows_steered += layout.steered
                self.rows_patched += layout.patched
            if frame is self._frame and frame is not None:
                self._count(frame)

    def _choose(self, tokens: int, token_ids: torch.Tensor) -> None:
        """Put steering rows in the place of choices by token."""
        steering_rows = self._taps.plan[Column.STEER.plan_row, :tokens]
        self._steering.choices.apply(steering_rows, token_ids[:tokens])

    def _observe(self, frame: Frame) -> None:
        """Consumers take part in the step."""
        self._frame = frame
        self._bundled = False
        registered, layout = self._assignments.flows, self._planner.layout
        assert layout is not None
        flows = layout.flows
        known = flows is not None and flows.registered is registered
        same = known and frame.goes_on and flows is self._flows
        if flows is not None and known:
            found = flows.handovers.get(frame.rows)
            self._handovers = flows.find_handovers(frame, self._slots) if found is None else found
        else:
            flows = layout.flows = StepFlows(frame.groups, registered)
            self._handovers = NO_HANDOVERS
        self._flows = flows
        # Steps before, whose signals nobody reads, leave their scores where they are. Of a batch
        # that goes on the same is judged as in its last step, unless tokens decide.
        if flows.read_signals and (frame.chooses or not same):
            self._steering.gates.forget_scores(int(frame.batch.counts.sum()))

    def _count(self, frame: Frame) -> None:
        """Count the rows of a step that is observed, of which it is known whose they are."""
        layout = self._planner.layout
        certain = frame.rejected is None and layout is frame.layout
        self.rows_captured += layout.captured if certain and layout else frame.captured
        if frame.span is not None:
            self.ring_rows_taken += frame.span.rows
        if frame.lost:
            self._note_dropped(frame)

    def accept(self, kept: np.ndarray) -> None:
        """It is known which drafted tokens of the step are accepted.

        Until then nobody is given its rows, nor hears of them.

        Args:
            kept: int32 `[sequences]`, how many of the tokens computed of each are its own.
        """
        frame, self._drafting = self._drafting, None
        if frame is not None:
            self._accept(frame, frame.batch.starts, kept)

    def accept_later(self, decide: Decide) -> None:
        """As `accept`, when it must be known.

        Args:
            decide: asked once, after those of the steps before.
        """
        frame, self._drafting = self._drafting, None
        assert frame is not None
        flows = self._flows if frame is self._frame and self._flows.can_wait else None
        if flows is not None:
            self._frame = None
            if frame.span is not None:
                frame.span.hold()
        self._undecided.append(_Undecided(frame, decide, flows))
        while len(self._undecided) > IN_FLIGHT:
            self._decide_first()

    def _decide_first(self) -> None:
        step = self._undecided.popleft()
        self._accept(step.frame, *step.decide())
        if step.flows is not None:
            self._count(step.frame)
            self._complete(step.frame, step.flows)
            if step.frame.span is not None:
                step.frame.span.release()
        elif step.then and step.frame is self._frame:
            self._complete(step.frame)
        for call in step.then:
            call()

    def _accept(self, frame: Frame, starts: np.ndarray, kept: np.ndarray) -> None:
        self._planner.decide(frame, starts, kept)
        self.rows_steered += self._planner.own(Column.STEER, frame)
        self.rows_patched += self._planner.own(Column.PATCH, frame)
        if frame is self._frame:
            self._count(frame)

    def when_decided(self, call: Callable[[], None]) -> None:
        """Call something when the rows of all steps so far are known to be whose they are, and have
        been handed out: at once, where they are."""
        if self._undecided:
            self._undecided[-1].then.append(call)
        else:
            call()

    @property
    def undecided(self) -> bool:
        """Whether it is not known yet which drafted tokens of an earlier step are accepted."""
        return bool(self._undecided)

    @property
    def hands_out_before_tokens(self) -> bool:
        """Whether `end` hands out what consumers are given before tokens are drawn where none is
        drafted: what they write must be there before the step's tokens are told."""
        return self._frame is not None and not self._bundled and bool(self._flows.before)

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """How many tokens the step drafted, and how many of them were accepted."""
        self.tokens_drafted += drafted
        self.tokens_accepted += accepted

    def _note_dropped(self, frame: Frame) -> None:
        """Rows of this step found no place: the results of their sequences will say so."""
        for rows in frame.lost:
            group = rows.group
            owners = {flow.owner for flow in group.program.flows}
            counts = frame.own(group.batch_rows, group.counts)
            total = int(counts.sum())
            self.rows_dropped += total
            for owner in owners:
                owner.rows_dropped += total
            for slot, lost in zip(group.slots.tolist(), counts.tolist(), strict=True):
                sequence = self._slots.by_slot[slot]
                if sequence is not None and lost:
                    for owner in owners:
                        sequence.dropped[owner.id] = sequence.dropped.get(owner.id, 0) + lost

    def rest(self) -> None:
        """No sequence is left: nothing that was found out about the last batch is kept."""
        self._flows, self._handovers = StepFlows(), NO_HANDOVERS
        self._planner.forget()
        self.guidance.forget()

    def skip(self) -> None:
        """Before a forward pass that belongs to no request (profiling, warm-up, DP padding)."""
        if self._undecided:
            self.end()
        self._judged.skip()
        self._planner.clear()

    def take_scores(self) -> torch.Tensor | None:
        """What the next pipeline stage is given with the rows; None for nothing. Behind the forward
        pass, see `ScoreRelay`."""
        if self._means.waiting:
            self._means.judge()
        return self._relay.take()

    # -- sampling ----------------------------------------------------------------------------------

    def before_sampling(self, logits: torch.Tensor | None) -> None:
        """After the forward pass, before its tokens are drawn.

        Args:
            logits: `[sequences, vocab]` as the LM head gave them, or None when there are none. In
                a step with drafts, one row for each token drawn, in the order of `StepBatch.drawn`.
        """
        frame = self._frame
        if frame is None or self._bundled:
            return
        if self._means.waiting:
            self._means.judge()
        flows = self._flows
        if logits is not None and (flows.keep_logits or (frame.undecided and flows.read_logits)):
            logits = logits.clone()
        if logits is not None:
            frame.logits = logits
        if frame.undecided:  # handed out in `end`
            return
        self._bundled = True
        if flows.read_signals:
            frame.signals = self._steering.gates.state
        if flows.before:
            self._dispatcher.before_sampling(flows.before, frame, self._handovers)
        if flows.read_signals:
            self._verdicts.copy()

    @property
    def guidance_width(self) -> int:
        """The widest candidate rows that this step's guides ask for; 0 when nothing is guided."""
        return self.guidance.width(self._frame)

    def guide(self, step: SamplerStep, greedy: np.ndarray) -> None:
        """Let consumers edit the candidates of this step.

        Args:
            step: the engine's processed logits.
            greedy: `[sequences]` bool; these are not touched.
        """
        if self._frame is not None:
            self.guidance.run(step, self._frame, greedy)

    @property
    def drafts_remember(self) -> bool:
        """Whether drafted rows of the step that runs may have changed what a sequence remembers:
        then `drafted.settle` is to be called when they are compared with what was drawn."""
        return self.drafted.words is not None

    def after_sampling(self, sampled: torch.Tensor | None, input_ids: torch.Tensor | None) -> None:
        """The step's tokens are drawn.

        Args:
            sampled: `[sequences]` on the device, None when nothing was sampled here; in a step with
                drafts `[sequences, tokens]`, as many of each as `StepBatch.drawn` and more.
            input_ids: `[tokens]` of the forward pass, on the device.
        """
        frame = self._frame
        if frame is None:
            return
        if not self._bundled:
            self.before_sampling(None)
        if self._flows.want_targets and sampled is not None and input_ids is not None:
            frame.targets = self._targets(frame, sampled, input_ids)

    def _targets(
        self, frame: Frame, sampled: torch.Tensor, input_ids: torch.Tensor
    ) -> torch.Tensor:
        """The token after each token of the batch."""
        batch = frame.batch
        tokens = int(batch.counts.sum())
        targets = torch.empty(tokens, dtype=torch.int64, device=sampled.device)
        targets[:-1] = input_ids[1:tokens]
        following = np.full(len(batch.logits_rows), -1, np.int64)
        for i in np.flatnonzero(~batch.samples):
            owner = self._slots.by_slot[batch.slots[i]]
            if owner is not None and owner.prompt_token_ids is not None:
                end = int(batch.ends[i])
                if end < len(owner.prompt_token_ids):
                    following[batch.logits_index[batch.last_rows[i]]] = owner.prompt_token_ids[end]
        known = upload(following, sampled.device)
        drawn_from = upload(batch.logits_rows.astype(np.int64), sampled.device)
        targets[drawn_from] = torch.where(known >= 0, known, _drawn(batch, sampled).long())
        return targets

    def take_verdicts(self) -> StepVerdicts | None:
        """What conditions made of the step, on its way to the host; None where no sequence of it
        asks. What controllers stop, and what cannot go on, comes with it. Before `end`."""
        if self._means.waiting:
            self._means.judge()
        verdicts, stopped = self._verdicts.take(), self._controllers.take_stops()
        # What is decided by the rows of a step with drafts comes when they are handed out.
        more = self._frame is not None and self._frame.undecided and self._controllers.acting
        self._stopped = stopped if more else None
        if stopped or more:
            verdicts = StoppedSequences(stopped, verdicts)
        if not self._broken.watching:
            return verdicts
        return self._broken_alone if verdicts is None else BrokenVerdicts(self._broken, verdicts)

    # -- its end -----------------------------------------------------------------------------------

    def end(self, *, wait: bool = True) -> None:
        """Everything of the step is enqueued: hand out the rest. Safe to call again.

        Args:
            wait: until it is known which drafted tokens are accepted; else what depends on that is
                left for later.
        """
        if self._means.waiting:
            self._means.judge()
        if self._broken.watching and self._broken.told[0]:
            self._assignments.note_not_finite()
        if self._undecided:
            if not wait:
                self._stopped = None  # what its rows decide acts in a later step
                return
            while self._undecided:
                self._decide_first()
        if self._frame is not None:
            self._complete(self._frame)

    @in_inference_mode
    def _complete(self, frame: Frame, flows: StepFlows | None = None) -> None:
        """Hand out what is handed out behind a step.

        Args:
            flows: of an earlier step than the one that runs.
        """
        handovers, stopped = NO_HANDOVERS, None
        if flows is None:
            stopped, self._stopped = self._stopped, None
            if frame.nowhere:  # the engine raised before it was known: no row is anybody's
                frame.decide(np.zeros_like(frame.batch.counts))
                self._drafting = None
            elif frame.undecided:  # the same, of the drafts
                assert frame.batch.drafts is not None
                self.accept(frame.batch.counts - frame.batch.drafts)
            if not self._bundled:
                self.before_sampling(None)
            self._frame = None
            flows, handovers = self._flows, self._handovers
        ready = flows.ready(frame) if flows.want_targets else flows.after
        if ready:
            self._dispatcher.after_sampling(ready, frame, handovers)
        if stopped is not None:
            stopped.update(self._controllers.late_stops())
        for owner in self._consumers.by_id.values():
            if owner.hears_step_end:
                context = owner.context.at(frame.step)
                self._dispatcher.call(owner, owner.consumer.on_step_end, context)


def _drawn(batch: StepBatch, sampled: torch.Tensor) -> torch.Tensor:
    """`[tokens drawn]`, in the order of the logits; those after a rejected draft mean nothing."""
    if batch.drafts is None:
        return sampled.view(-1)
    sequence = np.arange(len(batch.slots)).repeat(batch.drawn)
    place = sequence * sampled.shape[1] + batch.drawn_index
    return sampled.reshape(-1)[upload(place.astype(np.int64), sampled.device)]

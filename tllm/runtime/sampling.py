"""Guidance: consumers change the logits of the candidates that survived the filters."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from tllm.ports import ModelView, PortWrite, RequestInfo
from tllm.ports.request_meta import RowMeta
from tllm.ports.sampler import Candidates
from tllm.runtime.batch import Frame
from tllm.runtime.columns import DECODE
from tllm.runtime.dispatch import Dispatcher, ends_process
from tllm.runtime.flows import PHASES, BoundFlow
from tllm.runtime.kernels import candidates as kernels
from tllm.runtime.kernels import contrast as dense
from tllm.runtime.kernels import projection
from tllm.runtime.kernels.candidates import CandidateRows
from tllm.runtime.slots import Slots
from tllm.runtime.transfer import LateCheck, upload

logger = logging.getLogger(__name__)

BoolArray = npt.NDArray[np.bool_]

_NEVER = -1, None, 0
_NO_DELTAS = (
    "guide() returned deltas that are NaN or +inf, or that are -inf for every candidate of a row, "
    "and such rows were left as they were; give finite numbers, and -inf for tokens that are not "
    "to be drawn"
)


@dataclass(frozen=True, eq=False)
class LmHead:
    """The LM head as candidates need it.

    Attributes:
        weight: `[local vocab, hidden]`, this rank's rows.
        bias: float32 `[local vocab]` or None.
        first_id: token of the first row.
        scale: factor on the logits.
        soft_cap: `c` of `c * tanh(logits / c)`, or None.
        reduce: sums a tensor over the ranks that share the vocabulary, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    first_id: int
    scale: float
    soft_cap: float | None
    reduce: Callable[[torch.Tensor], torch.Tensor] | None

    def dot(self, hidden: torch.Tensor, rows: torch.Tensor, found: CandidateRows) -> torch.Tensor:
        """Logits of the candidates for `hidden[rows]`, before cap and scale."""
        out = projection.project(hidden, rows, self.weight, self.bias, self.first_id, found)
        return out if self.reduce is None else self.reduce(out)

    def raw_logits(
        self, hidden: torch.Tensor, rows: torch.Tensor, found: CandidateRows
    ) -> torch.Tensor:
        """What the model's LM head gives, float32 `[rows, width]`."""
        one = torch.ones(len(rows), device=hidden.device)
        return projection.finish(
            self.dot(hidden, rows, found), rows, found, one, self.scale, self.soft_cap
        )

    def dense_logits(self, hidden: torch.Tensor, vocab: int) -> torch.Tensor:
        """What the model's LM head gives, float32 `[rows, vocab]`, the whole vocabulary's."""
        dots = dense.dense_dots(hidden, self.weight, self.bias)[:, : vocab - self.first_id]
        if self.reduce is not None:
            whole = torch.zeros(len(hidden), vocab, device=hidden.device)
            whole[:, self.first_id : self.first_id + dots.shape[1]] = dots
            dots = self.reduce(whole)
        if self.soft_cap is not None:
            dots = self.soft_cap * torch.tanh(dots / self.soft_cap)
        return dots * self.scale


class SamplerStep(ABC):
    """The engine's side of one step's sampling.

    Attributes:
        logits: float32 `[sequences, vocab]`, after penalties, temperature and filters; ours to
            change.
        temperature: float32 `[sequences]`, on the device.
        penalizes: whether the engine applied penalties or biases to any row.
        unfiltered: `[sequences]`, whether neither top-k, top-p nor min-p is applied to each.
        collected: the candidates of all sequences, when the filter gathered them on its way.
    """

    logits: torch.Tensor
    temperature: torch.Tensor
    penalizes: bool
    unfiltered: BoolArray
    collected: CandidateRows | None = None

    @abstractmethod
    def penalize(self, full: torch.Tensor) -> torch.Tensor:
        """Raw logits float32 `[sequences, vocab]` after the penalties and biases that the engine
        applied to its own; `full` may be changed."""


@dataclass(frozen=True, eq=False)
class GuidedRows:
    """The rows of a batch that a guide applies to. The same in each step of one that goes on, so
    of what consumers are given nothing can be written to.

    Attributes:
        indices: which sequences of the batch.
        rows: the same, int32 on the device.
        own_rows: their own numbers, int32 on the device.
        requests, request_index: whose they are, as in a `RowMeta`.
    """

    indices: npt.NDArray[np.int64]
    rows: torch.Tensor
    own_rows: torch.Tensor
    every: bool
    requests: tuple[RequestInfo, ...]
    request_index: npt.NDArray[np.int32]


class StepCandidates(Candidates):
    """The candidates of the rows that one consumer guides."""

    def __init__(
        self,
        step: SamplerStep,
        head: LmHead,
        found: CandidateRows,
        meta: RowMeta,
        guided: GuidedRows,
    ) -> None:
        self.meta = meta
        self.token_ids = found.ids
        warm = step.temperature
        self.temperature = warm if guided.every else warm[guided.rows.long()]
        self._step = step
        self._head = head
        self._found = found
        self._guided_whole = False
        self._own_rows = guided.own_rows
        self._indices = guided.indices

    @cached_property
    def logits(self) -> torch.Tensor:
        return self._found.logits

    @cached_property
    def counts(self) -> torch.Tensor:
        return self._found.counts

    def project(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        rows = self._own_rows if rows is None else rows
        head, found = self._head, self._found
        if not self._step.penalizes:
            dots = head.dot(hidden, rows, found)
            return projection.finish(dots, rows, found, self.temperature, head.scale, head.soft_cap)
        raw = self._penalized(head.raw_logits(hidden, rows, found))
        return projection.finish(raw, rows, found, self.temperature, 1.0, None)

    def _penalized(self, raw: torch.Tensor) -> torch.Tensor:
        """Raw logits of the candidates after the engine's penalties, which work on whole rows."""
        found, shape = self._found, self._step.logits.shape
        width = found.ids.shape[1]
        valid = torch.arange(width, device=raw.device) < found.counts[:, None]
        # Ids beyond the count mean nothing: point them at token 0, and add nothing there.
        ids = torch.where(valid, found.ids, 0).long()
        full = torch.zeros(shape, dtype=torch.float32, device=raw.device)
        at = found.rows.long()[:, None].expand(-1, width), ids
        full.index_put_(at, torch.where(valid, raw, 0.0), accumulate=True)
        return torch.where(valid, self._step.penalize(full)[at], raw)

    def contrast(
        self,
        hidden: torch.Tensor,
        strength: torch.Tensor,
        tally: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        rows = self._own_rows if rows is None else rows
        head, found, step = self._head, self._found, self._step
        if not step.penalizes and head.reduce is None:
            dense.contrast(
                step.logits,
                found,
                hidden,
                rows,
                strength,
                head.weight,
                head.bias,
                head.scale,
                head.soft_cap,
                self.temperature,
                tally,
            )
            return
        strength = torch.where(rows >= 0, strength, 0.0)
        dense.contrast_narrow(step.logits, found, self.project(hidden, rows), strength, tally)
        if step.unfiltered[self._indices].any():
            self._contrast_unfiltered(hidden, rows, strength, tally)

    def _contrast_unfiltered(
        self, hidden: torch.Tensor, rows: torch.Tensor, strength: torch.Tensor, tally: torch.Tensor
    ) -> None:
        """`contrast` of wide rows where other ranks hold parts of the vocabulary, or the engine
        penalizes: both work on whole rows, so only those that are wide for certain are worth it."""
        step, found = self._step, self._found
        wide = np.flatnonzero(step.unfiltered[self._indices])
        chosen = upload(wide.astype(np.int64), hidden.device)
        raw = self._head.dense_logits(
            hidden[rows[chosen].clamp(min=0).long()], step.logits.shape[1]
        )
        batch_rows = found.rows[chosen]
        if step.penalizes:
            full = torch.zeros_like(step.logits)
            full[batch_rows.long()] = raw
            raw = step.penalize(full)[batch_rows.long()]
        guided = dense.is_wide(found)[chosen]
        if not self._guided_whole:  # their counts were looked at, above: not by the consumer
            self._guided_whole = True
            found.overflow.sub_(guided.sum())
        dense.add_contrast(
            step.logits,
            batch_rows,
            raw / self.temperature[chosen, None],
            torch.where(guided, strength[chosen], 0.0),
            tally,
        )

    def apply(self, delta: torch.Tensor) -> torch.Tensor:
        """Add a consumer's deltas to the engine's logits, but in rows that could not be drawn from
        then.

        Returns:
            Bool `[]` on the device, whether there is no such row.
        """
        if not isinstance(delta, torch.Tensor):
            raise TypeError(
                f"guide() returned {type(delta).__name__}; let it return a tensor [rows, width] = "
                f"{list(self.logits.shape)}, or None"
            )
        if delta.shape != self.logits.shape:
            raise ValueError(
                f"guide() returned deltas of shape {list(delta.shape)}; it must be [rows, width] "
                f"= {list(self.logits.shape)}"
            )
        delta = delta.float()
        # What stands beyond the count of a row means nothing, and a row may have no candidates.
        valid = torch.arange(delta.shape[1], device=delta.device) < self.counts[:, None]
        best = torch.where(valid, self.logits + delta, -torch.inf).amax(1)
        sound = best.isfinite() | (self.counts == 0)
        kernels.edit(self._step.logits, self._found, torch.where(sound[:, None], delta, 0.0))
        return sound.all()


@dataclass(eq=False)
class Guide:
    """One `Sampler.write` of a consumer, and the batch it last applied to.

    Attributes:
        layout: of that batch, None for one that is not kept.
        guided: its rows, None where the guide applies to none.
        known: `BoundConsumer.forgotten`, when it was asked whose they are.
        deltas: whether a token could be drawn after all that it returned.
        warned: that what it returns does nothing to rows that have all tokens as candidates.
    """

    flow: BoundFlow
    write: PortWrite
    layout: object = None
    guided: GuidedRows | None = None
    known: int = 0
    deltas: LateCheck = field(default_factory=LateCheck)
    warned: bool = False

    @cached_property
    def width(self) -> int:
        """The most candidates a row may have and still be guided."""
        return int(str(self.write.options["width"]))

    def warn(self, step: SamplerStep, guided: GuidedRows) -> None:
        """Say once in the log that deltas are for rows that are filtered, where some are not."""
        if not step.unfiltered[guided.indices].any():
            return
        self.warned = True
        logger.warning(
            "consumer %r guides sampling by deltas, and a row with more than width=%d candidates "
            "is sampled without them, as one is that has neither top_k, top_p nor min_p and no "
            "mask of tokens: ask for one of these, or write Sampler.write(width=) as large as the "
            "vocabulary. Such rows are counted as rows_with_too_many_candidates of read_stats().",
            self.flow.owner.id,
            self.width,
        )


class Guidance:
    """All guides of a worker, and what they do in a step.

    Args:
        head: the LM head, or why there is none.

    Attributes:
        overflow: int32 `[1]` on the device, rows left unguided for too many candidates.
    """

    def __init__(
        self, head: LmHead | str | None, model: ModelView, slots: Slots, dispatcher: Dispatcher
    ) -> None:
        self._head = head
        self._model = model
        self._slots = slots
        self._dispatcher = dispatcher
        self._guides: list[Guide] = []
        self._asked: tuple[int, object, int] = _NEVER  # a step, its layout, how wide guides ask
        self._numbers = torch.zeros(0, dtype=torch.int32, device=model.device)
        self.overflow = torch.zeros(1, dtype=torch.int32, device=model.device)
        self._overflow_before = self.overflow.clone()  # when the guides were set
        self._fits: LateCheck | None = LateCheck()  # None once it was warned
        self._may_leave_rows = False  # since that was looked at

    def set_head(self, head: LmHead | str | None) -> None:
        self._head = head

    def set_flows(self, flows: Sequence[BoundFlow]) -> None:
        """The flows of the consumers that are registered now."""
        self._asked = _NEVER
        self._overflow_before = self.overflow.clone()
        self._fits = LateCheck()
        self._guides = [
            Guide(flow, write)
            for flow in flows
            for write in flow.flow.writes
            if write.port == "sampler"
        ]

    def forget(self) -> None:
        """No batch goes on."""
        self._asked = _NEVER
        for guide in self._guides:
            guide.layout = guide.guided = None

    def _indices(
        self, guide: Guide, frame: Frame, greedy: BoolArray | None = None
    ) -> npt.NDArray[np.int64]:
        """Which sequences of the batch a guide applies to."""
        batch, slots = frame.batch, self._slots
        wanted = batch.samples & slots.users(guide.flow.owner.id)[batch.slots]
        phases = PHASES[guide.write.phase]
        if len(phases) == 1:
            decoding = batch.ends > slots.prompt_len[batch.slots]
            wanted &= decoding if DECODE in phases else ~decoding
        if greedy is not None:
            wanted &= ~greedy
        return np.flatnonzero(wanted)

    def width(self, frame: Frame | None) -> int:
        """The widest candidate rows that any guide asks of this step; 0 when none applies."""
        if frame is None or not self._guides:
            return 0
        step, layout, width = self._asked
        # The engine asks several times in a step.
        if step != frame.step:
            if not (frame.goes_on and layout is frame.layout):
                width = self._widest(frame)
                # Sequences whose tokens are sampled go on like that; a prompt that is computed a
                # token at a time is sampled from at its end.
                layout = frame.layout if frame.batch.samples.all() else None
            self._asked = frame.step, layout, width
        return width

    def _widest(self, frame: Frame) -> int:
        if not isinstance(self._head, LmHead):
            return 0
        widths = [
            guide.width
            for guide in self._guides
            if guide.flow.owner.alive and len(self._indices(guide, frame))
        ]
        return min(max(widths, default=0), self._model.vocab_size)

    def filter(
        self,
        logits: torch.Tensor,
        index: torch.Tensor,
        temperature: torch.Tensor,
        min_p: torch.Tensor,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, CandidateRows]:
        """The engine's temperature and min-p, gathering the candidates in the same pass.

        See `kernels.candidates.filter_and_collect`.
        """
        if len(self._numbers) < len(logits):
            self._numbers = torch.arange(2 * len(logits), dtype=torch.int32, device=logits.device)
        rows = self._numbers[: len(logits)]
        return kernels.filter_and_collect(
            logits, rows, index, temperature, min_p, width, self.overflow
        )

    def run(self, step: SamplerStep, frame: Frame, greedy: BoolArray) -> None:
        """Let consumers edit the candidates of this step, one after the other.

        Args:
            greedy: `[sequences]`; these are not touched.
        """
        collected = step.collected
        for guide in self._guides:
            owner = guide.flow.owner
            if guide.layout is None or guide.layout is not frame.layout:
                self._warn_of_overflow()
                guide.known = owner.forgotten
                guide.guided = self._guided(guide, frame, greedy)
                # A sequence whose tokens are sampled goes on like that; greedy it is for ever.
                lasts = guide.guided is not None and bool(frame.batch.samples.all())
                guide.layout = frame.layout if lasts else None
            elif guide.guided is not None and guide.known != owner.forgotten:
                guide.known = owner.forgotten  # they may have grown
                at = frame.batch.slots[guide.guided.indices]
                guide.guided = replace(guide.guided, requests=owner.requests(at, self._slots)[0])
            if guide.guided is not None and owner.error is None:
                self._run_one(guide, guide.guided, step, frame, collected)
                collected = None  # the logits have changed

    def _warn_of_overflow(self) -> None:
        """Say once in the log that rows were left unguided, when it is known that one was."""
        if self._fits is None or not self._may_leave_rows:
            return
        self._may_leave_rows = False
        if any(guide.warned for guide in self._guides):
            return
        if _holds((self.overflow == self._overflow_before)[0], self._fits):
            return
        self._fits = None
        logger.warning(
            "a row with more candidates than the width of its guide (%s) was drawn unguided, "
            "though it is filtered: so are those that deltas are for, and others in steps in which "
            "a request has penalties or logit_bias, or with several tensor-parallel ranks. Ask for "
            "fewer (top_k), or give a larger width. Such rows are counted as "
            "rows_with_too_many_candidates of read_stats().",
            ", ".join(f"{guide.flow.owner.id!r}: {guide.width}" for guide in self._guides),
        )

    def _guided(self, guide: Guide, frame: Frame, greedy: BoolArray) -> GuidedRows | None:
        indices = self._indices(guide, frame, greedy)
        if not len(indices):
            return None
        count, slots = len(indices), frame.batch.slots
        requests, _ = guide.flow.owner.requests(slots[indices], self._slots)
        request_index = np.arange(count, dtype=np.int32)
        indices.setflags(write=False)
        request_index.setflags(write=False)
        device = self._model.device
        rows = upload(indices.astype(np.int32), device)
        own_rows = torch.arange(count, dtype=torch.int32, device=device)
        every = count == len(slots)
        return GuidedRows(indices, rows, own_rows, every, requests, request_index)

    def _run_one(
        self,
        guide: Guide,
        guided: GuidedRows,
        step: SamplerStep,
        frame: Frame,
        collected: CandidateRows | None,
    ) -> None:
        """Let a consumer guide. What it raises is a matter of the dispatcher."""
        assert isinstance(self._head, LmHead)
        owner = guide.flow.owner
        width = min(guide.width, self._model.vocab_size)
        try:
            if collected is None or collected.width != width:
                found = kernels.collect(step.logits, guided.rows, width, self.overflow)
            else:
                found = collected if guided.every else collected.select(guided.rows)
            # The token after each sequence's last row is drawn.
            meta = RowMeta.of_tokens(
                guided.requests,
                guided.request_index,
                frame.batch.ends,
                guided.indices,
                frame.step,
                before=1,
            )
            candidates = StepCandidates(step, self._head, found, meta, guided)
            context = owner.context.latest
            if context.step != frame.step:
                context = owner.context.at(frame.step)
            delta = owner.consumer.guide(candidates, context)
            if delta is not None or step.penalizes or self._head.reduce is not None:
                self._may_leave_rows = True
            if delta is not None:
                if width < self._model.vocab_size and not guide.warned:
                    guide.warn(step, guided)
                if not _holds(candidates.apply(delta), guide.deltas):
                    raise ValueError(_NO_DELTAS)
        except BaseException as error:
            if ends_process(error):
                raise
            self._dispatcher.fail(owner, error)


def _holds(sound: torch.Tensor, later: LateCheck) -> bool:
    """Whether something holds: at once on a CPU, elsewhere as far as the host knows by now."""
    return bool(sound) if sound.device.type == "cpu" else later.sound(sound)

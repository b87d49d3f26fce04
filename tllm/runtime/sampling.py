"""Guidance: consumers change the logits of the candidates that survived the filters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tllm.ports import ModelView, PortWrite
from tllm.ports.request_meta import RowMeta
from tllm.ports.sampler import Candidates
from tllm.runtime.batch import DECODE, Frame
from tllm.runtime.dispatch import PHASES, BoundFlow, Dispatcher
from tllm.runtime.kernels import candidates as kernels
from tllm.runtime.kernels.candidates import Collected
from tllm.runtime.slots import Slots
from tllm.runtime.transfer import upload

BoolArray = npt.NDArray[np.bool_]


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

    def dot(self, hidden: torch.Tensor, rows: torch.Tensor, found: Collected) -> torch.Tensor:
        """Logits of the candidates for `hidden[rows]`, before cap and scale."""
        out = kernels.project(hidden, rows, self.weight, self.bias, self.first_id, found)
        return out if self.reduce is None else self.reduce(out)

    def raw_logits(
        self, hidden: torch.Tensor, rows: torch.Tensor, found: Collected
    ) -> torch.Tensor:
        """What the model's LM head gives, float32 `[rows, width]`."""
        one = torch.ones(len(rows), device=hidden.device)
        return kernels.finish(
            self.dot(hidden, rows, found), rows, found, one, self.scale, self.soft_cap
        )


class SamplerStep(ABC):
    """The engine's side of one step's sampling.

    Attributes:
        logits: float32 `[sequences, vocab]`, after penalties, temperature and filters; ours to
            change.
        temperature: float32 `[sequences]`, on the device.
        collected: the candidates of all sequences, when the filter gathered them on its way.
    """

    logits: torch.Tensor
    temperature: torch.Tensor
    collected: Collected | None = None

    @property
    @abstractmethod
    def penalizes(self) -> bool:
        """Whether the engine applied penalties or biases to any row."""

    @abstractmethod
    def penalize(self, raw: torch.Tensor, found: Collected) -> torch.Tensor:
        """Raw candidate logits after the penalties that the engine applied to its own."""


class StepCandidates(Candidates):
    """The candidates of the rows that one consumer guides."""

    def __init__(
        self,
        step: SamplerStep,
        head: LmHead,
        found: Collected,
        meta: RowMeta,
        own_rows: torch.Tensor,
    ) -> None:
        self.meta = meta
        self.token_ids, self.logits, self.counts = found.ids, found.logits, found.counts
        every_row = len(found.rows) == len(step.temperature)
        self.temperature = step.temperature if every_row else step.temperature[found.rows.long()]
        self._step = step
        self._head = head
        self._found = found
        self._own_rows = own_rows

    def project(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        rows = self._own_rows if rows is None else rows
        head, found = self._head, self._found
        if not self._step.penalizes:
            dots = head.dot(hidden, rows, found)
            return kernels.finish(dots, rows, found, self.temperature, head.scale, head.soft_cap)
        raw = self._step.penalize(head.raw_logits(hidden, rows, found), found)
        return kernels.finish(raw, rows, found, self.temperature, 1.0, None)

    def apply(self, delta: torch.Tensor) -> None:
        """Add a consumer's deltas to the engine's logits."""
        if delta.shape != self.logits.shape:
            raise ValueError(
                f"guide() returned deltas of shape {list(delta.shape)}; it must be [rows, width] "
                f"= {list(self.logits.shape)}"
            )
        kernels.edit(self._step.logits, self._found, delta.float())


@dataclass(eq=False)
class Guide:
    """One `Sampler.write` of a consumer, and the batch it last applied to."""

    flow: BoundFlow
    write: PortWrite
    indices: npt.NDArray[np.int64] | None = None
    rows: torch.Tensor | None = None
    own_rows: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """The most candidates a row may have and still be guided."""
        return int(str(self.write.options["width"]))

    def on_device(
        self, indices: npt.NDArray[np.int64], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The guided batch rows, and their own numbering; uploaded when they change."""
        same = self.indices is not None and np.array_equal(indices, self.indices)
        if self.rows is None or self.own_rows is None or not same:
            self.indices = indices
            self.rows = upload(indices.astype(np.int32), device)
            self.own_rows = torch.arange(len(indices), dtype=torch.int32, device=device)
        return self.rows, self.own_rows


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
        self.overflow = torch.zeros(1, dtype=torch.int32, device=model.device)

    @property
    def refusal(self) -> str | None:
        """Why candidates cannot be guided here; None when they can."""
        return self._head if isinstance(self._head, str) else None

    def set_flows(self, flows: Sequence[BoundFlow]) -> None:
        """The flows of the consumers that are registered now."""
        self._guides = [
            Guide(flow, write)
            for flow in flows
            for write in flow.flow.writes
            if write.port == "sampler"
        ]

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
        if frame is None or not isinstance(self._head, LmHead):
            return 0
        widths = [
            guide.width
            for guide in self._guides
            if guide.flow.owner.alive and len(self._indices(guide, frame))
        ]
        return min(max(widths, default=0), self._model.vocab_size)

    def filter(
        self, logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, Collected]:
        """The engine's temperature and min-p, gathering the candidates in the same pass.

        See `kernels.candidates.filter_and_collect`.
        """
        return kernels.filter_and_collect(logits, temperature, min_p, width, self.overflow)

    def run(self, step: SamplerStep, frame: Frame, greedy: BoolArray) -> None:
        """Let consumers edit the candidates of this step, one after the other.

        Args:
            greedy: `[sequences]`; these are not touched.
        """
        collected = step.collected
        for guide in self._guides:
            indices = self._indices(guide, frame, greedy)
            if len(indices) and guide.flow.owner.alive:
                self._dispatcher.call(
                    guide.flow.owner, self._run_one, guide, step, frame, indices, collected
                )
                collected = None  # the logits have changed

    def _run_one(
        self,
        guide: Guide,
        step: SamplerStep,
        frame: Frame,
        indices: npt.NDArray[np.int64],
        collected: Collected | None,
    ) -> None:
        assert isinstance(self._head, LmHead)
        batch, owner = frame.batch, guide.flow.owner
        rows, own_rows = guide.on_device(indices, self._model.device)
        width = min(guide.width, self._model.vocab_size)
        if collected is None or collected.ids.shape[1] != width:
            found = kernels.collect(step.logits, rows, width, self.overflow)
        elif len(indices) == len(batch.slots):
            found = collected
        else:
            found = collected.select(rows)
        meta = RowMeta(
            owner.requests(batch.slots[indices], self._slots)[0],
            np.arange(len(indices), dtype=np.int32),
            batch.ends[indices] - 1,
            np.full(len(indices), frame.step, np.int64),
        )
        candidates = StepCandidates(step, self._head, found, meta, own_rows)
        delta = owner.consumer.guide(candidates, owner.context.at(frame.step))
        if delta is not None:
            candidates.apply(delta)

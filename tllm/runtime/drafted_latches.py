"""The latches of sequences of which a step drafts tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tllm.runtime.batch import StepBatch
from tllm.runtime.columns import DECODE, Column
from tllm.runtime.kernels import drafted
from tllm.runtime.kernels.backend import uses_triton
from tllm.runtime.kernels.drafted import DraftedWord
from tllm.runtime.latches import Latches
from tllm.runtime.slots import Slots
from tllm.runtime.transfer import upload


class DraftedLatches:
    """Sees to it that conditions which remember decide as they would without drafts.

    A step computes drafted rows together with the row before them. A row by which a latch changes
    is the last one that counts: those after it were computed without knowing. And what rows of
    rejected drafts changed is taken back. Both where the tokens are compared, on the device.

    How many tokens a sequence has must be the same on all tensor-parallel ranks, whatever their
    roundings are: they would never come together again. So the first one's latches count for all.

    Args:
        agree: see `Session`.

    Attributes:
        words: of the step that runs, as its kernel takes them; None where no sequence with a latch
            has drafts.
    """

    def __init__(
        self,
        slots: Slots,
        latches: Latches,
        device: torch.device,
        agree: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        self._slots = slots
        self._latches = latches
        self._device = device
        self._agree = agree
        self._run = drafted.launch if uses_triton(device) else drafted.reference
        self.words: torch.Tensor | None = None

    @property
    def remembers(self) -> bool:
        """Whether any running sequence has a latch."""
        return self._latches.any

    def begin(self, batch: StepBatch) -> None:
        """A step with drafts begins. Before the forward pass."""
        self.words = None
        if not self._latches.any:
            return
        assert batch.drafts is not None
        latches = self._slots.values[Column.GATE, DECODE, batch.slots]
        at = np.flatnonzero((latches >= 0) & (batch.drafts > 0))
        if not len(at):
            return
        words = np.zeros((len(at), len(DraftedWord)), np.int32)
        drafts = batch.drafts[at]
        words[:, DraftedWord.SEQUENCE] = at
        words[:, DraftedWord.LATCH] = latches[at]
        words[:, DraftedWord.FIRST] = batch.ends[at] - 1 - drafts
        words[:, DraftedWord.DRAFTS] = drafts
        words[:, DraftedWord.NEXT] = self._latches.gates_of_next[latches[at]]
        self.words = upload(words, self._device)

    def settle(self, drawn: torch.Tensor) -> None:
        """The step's tokens were compared. Behind the forward pass, on its stream.

        Args:
            drawn: int32 `[sequences]`, how many are drawn for each; made fewer where the rows of
                those after them have to be computed again.
        """
        words, self.words = self.words, None
        if words is not None:
            cells, held, _ = self._latches.tables
            if self._agree is not None:
                for table in (cells, held):
                    if len(table):
                        self._agree(table)
            self._run(words, drawn, cells, held)

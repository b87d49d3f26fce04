"""What ESamp counts, kept on the device until somebody asks."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor

from tllm.consumers.esamp.reference import LOSS_LAST, LOSS_SUM, NON_FINITE, ROWS, STEPS

#: Losses of this many finished prompts are reported one by one; older ones only in the mean.
_MAX_FINISHED = 1024


class Statistics:
    """Counters of one worker.

    Attributes:
        predictions: rows predicted.
        steps_skipped: optimiser steps of one distiller that did not happen, by reason.
        candidates: `[2]` int64 on the device: candidates seen, and changed.
    """

    def __init__(self, device: torch.device) -> None:
        self.predictions = 0
        self.steps_skipped: defaultdict[str, int] = defaultdict(int)
        self.candidates = torch.zeros(2, dtype=torch.int64, device=device)
        self._labels: dict[int, str] = {}
        self._finished: OrderedDict[str, Tensor] = OrderedDict()
        self._older = torch.zeros(5, device=device)

    def assign(self, slot: int, label: str, ledger: Tensor) -> None:
        """A slot is about to be reset for a new user: keep what its last one learned."""
        if slot in self._labels:
            last_label = self._labels[slot]
            if last_label in self._finished:
                self._older += self._finished.pop(last_label)
            self._finished[last_label] = ledger[slot].clone()
            if len(self._finished) > _MAX_FINISHED:
                self._older += self._finished.popitem(last=False)[1]
        self._labels[slot] = label

    def read(self, ledger: Tensor) -> dict[str, Any]:
        """Everything as plain data; waits for the device."""
        books = list(self._finished.items())
        books += [(label, ledger[slot]) for slot, label in self._labels.items()]
        rows = torch.stack([self._older, *(book for _, book in books)]).double().cpu()
        totals = rows.sum(0).tolist()
        per_prompt = {
            label: {
                "mean": book[LOSS_SUM] / book[STEPS],
                "last": book[LOSS_LAST],
                "count": int(book[STEPS]),
            }
            for (label, _), book in zip(books, rows[1:].tolist(), strict=True)
            if book[STEPS]
        }
        live = [per_prompt[label]["last"] for label in self._labels.values() if label in per_prompt]
        seen, changed = self.candidates.tolist()
        skipped = dict(self.steps_skipped)
        if totals[NON_FINITE]:
            skipped["non_finite_loss"] = int(totals[NON_FINITE])
        return {
            "loss_mean": totals[LOSS_SUM] / totals[STEPS] if totals[STEPS] else None,
            "loss_last": sum(live) / len(live) if live else None,
            "loss_count": int(totals[STEPS]),
            "loss_per_prompt": per_prompt,
            "rows_trained": int(totals[ROWS]),
            "predictions": self.predictions,
            "candidates_seen": seen,
            "candidates_changed": changed,
            "steps_skipped": skipped,
        }

"""Conditions on the mean of a prompt's rows: judged when the forward pass has the last of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tllm.inference_mode import in_inference_mode
from tllm.runtime.columns import IntArray
from tllm.runtime.latches import HOLDS, NEVER, Latch, Latches
from tllm.runtime.mlp_score import mlp_score
from tllm.runtime.transfer import upload
from tllm.spec.gates import MAX_GATES, Gate
from tllm.spec.probes import FEATURES, KINDS, MLPS


@dataclass(eq=False)
class _Prompt:
    """A prompt of which conditions judge the mean."""

    latch: Latch
    gates: tuple[Gate, ...]
    length: int
    begun: bool = False


class _Ended(NamedTuple):
    """A prompt whose last row the forward pass has, and where in the batch that is."""

    prompt: _Prompt
    row: int


class PromptMeans:
    """Judges conditions on the mean of a prompt, a few operations in a step in which one ends.

    Taps add rows up (`Latches`). A sequence that is preempted within its prompt begins anew.

    The order in which rows are added is not fixed, so that tensor-parallel ranks, which have the
    same rows, may have sums that differ by a rounding: what the first one finds counts for all.

    Args:
        state: see `Gates.state`.
        agree: see `Session`.

    Attributes:
        waiting: whether there is any prompt to judge, now or later.
    """

    def __init__(
        self,
        latches: Latches,
        vectors: Mapping[str, torch.Tensor],
        state: Callable[[], torch.Tensor | None],
        device: torch.device,
        agree: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        self._latches = latches
        self._vectors = vectors
        self._state = state
        self._device = device
        self._agree = agree
        self._prompts: dict[int, _Prompt] = {}
        self._ended: list[_Ended] = []
        self.waiting = False

    def ask(self, slot: int, latch: Latch, gates: Sequence[Gate], length: int) -> None:
        """A sequence begins whose prompt is to be judged.

        Args:
            gates: terms before joints; those terms that are not among them, an earlier pipeline
                stage judges.
        """
        self._prompts[slot] = _Prompt(latch, tuple(gates), length)
        self.waiting = True

    def forget(self, slot: int) -> None:
        """A sequence has ended."""
        self._prompts.pop(slot, None)
        self.waiting = bool(self._prompts or self._ended)

    def begin(self, slots: IntArray, starts: IntArray, counts: IntArray) -> None:
        """Before a forward pass, behind what `commit` brought; arrays as in `StepBatch`."""
        again: list[int] = []
        first_rows = np.cumsum(counts) - counts
        for i, slot in enumerate(slots.tolist()):
            prompt = self._prompts.get(slot)
            if prompt is None:
                continue
            start, end = int(starts[i]), int(starts[i] + counts[i])
            if start == 0 and prompt.begun:
                again += prompt.latch.sums.values()
            prompt.begun = True
            if end >= prompt.length:
                row = int(first_rows[i]) + prompt.length - 1 - start
                self._ended.append(_Ended(prompt, row))
                del self._prompts[slot]  # what was found stays, also if it is computed again
        if again:
            at = upload(np.array(again, np.int64), self._device)
            self._latches.tables[2].index_fill_(0, at, 0.0)

    @in_inference_mode
    def judge(self) -> None:
        """Behind the forward pass, on its stream. Safe to call again."""
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        self.waiting = bool(self._prompts)
        state = self._state()
        if state is None:
            return
        judged = torch.full((2, len(ended), MAX_GATES), torch.nan, device=self._device)
        scores, strengths = judged
        self._judge_probes(ended, scores, strengths)
        for i, (prompt, row) in enumerate(ended):
            here = {gate.number for gate in prompt.gates}
            for gate in prompt.gates:
                if not gate.vector:
                    terms = torch.stack(
                        [
                            strengths[i, term] if term in here else state[row, 0, term]
                            for term in gate.terms
                        ]
                    )
                    strengths[i, gate.number] = terms.amin() if gate.every else terms.amax()
                    scores[i, gate.number] = strengths[i, gate.number]
        if self._agree is not None:
            self._agree(judged)
        self._note(ended, scores, strengths, state)

    def _judge_probes(
        self, ended: Sequence[_Ended], scores: torch.Tensor, strengths: torch.Tensor
    ) -> None:
        """Scores and strengths of all probes of all prompts, `[prompts, MAX_GATES]`."""
        each = [
            (i, prompt, gate)
            for i, (prompt, _) in enumerate(ended)
            for gate in prompt.gates
            if gate.vector
        ]
        if not each:  # what joins those of earlier pipeline stages
            return
        ints = [
            (prompt.latch.sums[gate.number], i * MAX_GATES + gate.number, gate.score)
            for i, prompt, gate in each
        ]
        floats = [
            (
                prompt.length,
                gate.bias,
                gate.low,
                gate.high,
                gate.soft,
                gate.middle,
                gate.threshold,
            )
            for _, prompt, gate in each
        ]
        rows, places, kinds = upload(np.array(ints, np.int64).T.copy(), self._device)
        length, bias, low, high, soft, middle, threshold = upload(
            np.array(floats, np.float32).T.copy(), self._device
        )
        means = self._latches.tables[2][rows] / length[:, None]
        held = [self._vectors[gate.vector] for _, _, gate in each]
        vectors = torch.stack([rows.view(-1, means.shape[1])[0] for rows in held])
        score = _scores(means, vectors, kinds)
        for i, (_, _, gate) in enumerate(each):
            if gate.widths:
                score[i] = mlp_score(means[i], held[i], gate.widths, KINDS[gate.score])
        score += bias
        features = [KINDS.index(FEATURES[0]), KINDS.index(FEATURES[-1])]
        active = (kinds < features[0]) | (kinds > features[1]) | ~(score <= threshold)
        score = torch.where(active, score, 0.0)
        hard = ((score > low) & (score < high)).float()
        strength = torch.where(soft != 0, torch.sigmoid(soft * (score - middle)), hard)
        scores.view(-1).index_copy_(0, places, score)
        strengths.view(-1).index_copy_(0, places, strength)

    def _note(
        self,
        ended: Sequence[_Ended],
        scores: torch.Tensor,
        strengths: torch.Tensor,
        state: torch.Tensor,
    ) -> None:
        """Tell the signals of the prompts' last rows, and remember what holds."""
        judged = [
            (i * MAX_GATES + gate.number, row * 2 * MAX_GATES + gate.number)
            for i, (prompt, row) in enumerate(ended)
            for gate in prompt.gates
        ]
        at, told = upload(np.array(judged, np.int64).T.copy(), self._device)
        state.view(-1).index_copy_(0, told, strengths.view(-1)[at])
        state.view(-1).index_copy_(0, told + MAX_GATES, scores.view(-1)[at])
        decide = [
            (
                i * MAX_GATES + gate.number,
                prompt.latch.row * 2 * MAX_GATES + gate.number,
                prompt.length - 1,
            )
            for i, (prompt, _) in enumerate(ended)
            for gate in prompt.gates
            if gate.scope
        ]
        if not decide:  # what joins these is on a later pipeline stage
            return
        at, cell, last = upload(np.array(decide, np.int64).T.copy(), self._device)
        cells = self._latches.tables[0].view(-1)
        held = torch.where(strengths.view(-1)[at] > HOLDS, last.int(), NEVER)
        cells.index_copy_(0, cell, torch.minimum(held, cells[cell]))


def _scores(means: torch.Tensor, vectors: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Of rows and probes `[probes, hidden]`, without biases and thresholds."""
    along = (means * vectors).sum(1)
    cast = (kinds == KINDS.index("cast"))[:, None]
    vectors = torch.where(cast, torch.tanh(along[:, None] * vectors), vectors)
    ones = torch.ones_like(along)
    cosine = means.norm(dim=1) * vectors.norm(dim=1)
    lengths = {
        "dot": ones,
        "cosine": cosine,
        "cast": cosine,
        "feature": ones,
        "layer_norm_feature": means.std(dim=1) + 1e-5,
        "rescaled_feature": means.square().mean(dim=1).sqrt(),
        "centered_rescaled_feature": means.std(dim=1, correction=0),
        **dict.fromkeys(MLPS, ones),  # computed one by one
    }
    chosen = torch.stack([lengths[kind] for kind in KINDS]).gather(0, kinds[None])[0]
    return torch.where(chosen > 0, (means * vectors).sum(1) / chosen, 0.0)

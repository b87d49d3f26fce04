"""How well a direction tells the two sides apart on rows that it was not made from.

The rows are dealt into k folds, all rows of a prompt into one (and both prompts of a pair). For
each fold the direction is found anew from the other folds, and scores the fold's own rows,
`s = h @ v - middle`. So every row has one score, from a direction that has not seen it.

AUROC is the share of (positive, negative) pairs of rows of the same fold that the scores put in the
right order, ties counting half:

    AUROC = sum_f sum_{i in P_f, j in N_f} ([s_i > s_j] + [s_i = s_j] / 2) / sum_f |P_f| |N_f|

which is Mann and Whitney's U over its maximum, added up over folds. d' is the distance of the
means in units of the spread, over all held-out scores, and goes on where AUROC has reached 1:

    d' = (mean(s_P) - mean(s_N)) / sqrt((var(s_P) + var(s_N)) / 2)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tllm.steering.directions import NoDirectionError, checked_rows, finder_named, oriented

MAX_FOLDS = 5


class Separation(NamedTuple):
    """Held-out scores of one layer: AUROC in [0, 1], and d' (infinite if nothing varies)."""

    auroc: float
    d_prime: float


class HeldOutScores(NamedTuple):
    """Scores of rows, each from a direction that has not seen it, and the fold of each.

    Attributes:
        positive, negative: `h @ v - middle`; 0 where a fold's other rows define no direction.
        folds: of the positive and of the negative rows.
    """

    positive: torch.Tensor
    negative: torch.Tensor
    folds: tuple[torch.Tensor, torch.Tensor]

    @property
    def separation(self) -> Separation:
        """A fold whose other rows define no direction (equal means) counts as AUROC 1/2: there it
        knows nothing."""
        ordered = pairs = 0.0
        for fold in range(int(self.folds[0].max()) + 1):
            high = self.positive[self.folds[0] == fold]
            low = self.negative[self.folds[1] == fold]
            pairs += len(high) * len(low)
            ordered += _in_order(high, low)
        return Separation(ordered / pairs, _d_prime(self.positive, self.negative))


def held_out_scores(
    positive: torch.Tensor,
    negative: torch.Tensor,
    method: str,
    *,
    paired: bool = True,
    seed: int = 0,
    positive_groups: torch.Tensor | None = None,
    negative_groups: torch.Tensor | None = None,
) -> HeldOutScores:
    """Scores of rows `[n, hidden]` and `[m, hidden]` by a method.

    Args:
        positive, negative: the rows, of floating-point numbers.
        method: row of `FINDERS`.
        paired: row i of both belong together, and go into the same fold.
        seed: of the folds, and of the method.
        positive_groups, negative_groups: `[n]` and `[m]`, int: the prompt of each row. Every row
            is a prompt of its own if not given. Of pairs, those of the positive rows count.

    Raises:
        ValueError: fewer than two prompts on a side.
    """
    find = finder_named(method)
    positive, negative = checked_rows(positive, negative)
    groups = [
        torch.arange(len(rows)) if given is None else torch.unique(given, return_inverse=True)[1]
        for rows, given in ((positive, positive_groups), (negative, negative_groups))
    ]
    if paired:
        groups[1] = groups[0]
    sizes = [int(each.max()) + 1 for each in groups]
    if min(sizes) < 2:
        raise ValueError("a side has rows of one prompt only; held-out scores need two or more")
    folds = min(MAX_FOLDS, *sizes)
    generator = torch.Generator().manual_seed(seed)
    dealt = [torch.randperm(size, generator=generator) % folds for size in sizes]
    if paired:
        dealt[1] = dealt[0]
    fold_of = [deal[group] for deal, group in zip(dealt, groups, strict=True)]
    scores = [rows.new_zeros(len(rows)) for rows in (positive, negative)]
    for fold in range(folds):
        trained = [rows[at != fold] for rows, at in zip((positive, negative), fold_of, strict=True)]
        try:
            found = oriented(find(*trained, paired=paired, seed=seed), *trained)
        except NoDirectionError:
            continue
        vector = torch.from_numpy(found.vector).to(positive)
        for rows, at, of in zip((positive, negative), fold_of, scores, strict=True):
            of[at == fold] = rows[at == fold] @ vector - found.middle
    return HeldOutScores(scores[0], scores[1], (fold_of[0], fold_of[1]))


def _in_order(high: torch.Tensor, low: torch.Tensor) -> float:
    """How many pairs have `high > low`, ties counting half; n log n, for many rows."""
    ranked = low.sort().values
    below = torch.searchsorted(ranked, high, right=False)
    up_to = torch.searchsorted(ranked, high, right=True)
    return float((below + up_to).sum()) / 2


def _d_prime(high: torch.Tensor, low: torch.Tensor) -> float:
    gap = float(high.mean() - low.mean())
    spread = math.sqrt(float(high.var(correction=0) + low.var(correction=0)) / 2)
    if spread == 0.0:
        return math.copysign(math.inf, gap) if gap else 0.0
    return gap / spread

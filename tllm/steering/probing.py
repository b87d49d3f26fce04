"""Conditions learned from labelled prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tllm.spec.hooks import HookPoint
from tllm.spec.reading import FloatArray, whole_number
from tllm.steering.directions import NoDirectionError, find_direction
from tllm.steering.extraction import Prompt, rows_of_prompts
from tllm.steering.separation import HeldOutScores, held_out_scores

if TYPE_CHECKING:
    from tllm.client.llm import LLM


@dataclass(frozen=True)
class RocPoint:
    """What a threshold does with held-out rows.

    Attributes:
        threshold: scores above it count as positive.
        true_positives, false_positives: shares of the positive and of the negative rows above it.
    """

    threshold: float
    true_positives: float
    false_positives: float


@dataclass(frozen=True, eq=False)
class FittedProbe:
    """A probe with its threshold, and how well it does on rows that it was not made from.

    Attributes:
        condition: for `when`, `stop_when`, `abort_when` and `register_monitor`.
        layer: the layer that it looks at.
        roc: from the highest threshold to the lowest, of held-out scores.
        chosen: the point of it whose threshold the condition has.
        auroc: held-out AUROC of each layer that was looked at.
    """

    condition: dict[str, Any]
    layer: int
    roc: tuple[RocPoint, ...]
    chosen: RocPoint
    auroc: Mapping[int, float]


def fit_probe(
    llm: LLM,
    positive: Sequence[Prompt],
    negative: Sequence[Prompt],
    *,
    name: str | None = None,
    method: str = "probe",
    hook: str | HookPoint = HookPoint.POST_BLOCK,
    layers: int | Iterable[int] | str = "all",
    positions: str | Sequence[int] | Mapping[str, Any] = "last_prompt",
    max_false_positives: float | None = None,
    batch_size: int = 256,
    seed: int = 0,
) -> FittedProbe:
    """A condition that tells what `positive` says from what `negative` says.

    The score is `h . v - middle`, `v` the direction that `method` finds at a layer and `middle`
    half-way between the means. Each row's held-out score comes from a direction made without its
    prompt (five folds); the layer with the best AUROC of these is taken, and the threshold from
    their ROC: the one with the greatest `true_positives - false_positives` (Youden's J), or with
    the most true positives among those with at most `max_false_positives`.

    Args:
        llm: a `tllm.LLM`.
        positive, negative: prompts, as text or token ids; at least two of each.
        name: of the condition's signal.
        method: row of `tllm.steering.directions.FINDERS`; `probe` is a logistic regression.
        hook, layers, positions, batch_size: as `extract` takes them.
        max_false_positives: the share of negative rows that may be above the threshold, below 1.
        seed: of the folds.

    Raises:
        ValueError: an argument that is not as above, or two sides that differ at no layer.
    """
    whole_number(seed, "seed=")
    if max_false_positives is not None and not (
        isinstance(max_false_positives, Real) and 0 <= max_false_positives < 1
    ):
        raise ValueError(
            f"max_false_positives={max_false_positives!r}; give a share of at least 0 and below 1, "
            "or leave it out for the threshold with the most true less false positives"
        )
    point, high, low = rows_of_prompts(
        llm, positive, negative, method, hook, layers, positions, batch_size
    )
    scored: dict[int, HeldOutScores] = {}
    for layer in sorted(high[0]):
        rows = high[0][layer], low[0][layer]
        groups = {"positive_groups": high[1], "negative_groups": low[1]}
        scored[layer] = held_out_scores(*rows, method, paired=False, seed=seed, **groups)
    auroc = {layer: scores.separation.auroc for layer, scores in scored.items()}
    layer = max(auroc, key=lambda each: auroc[each])
    rows = high[0][layer], low[0][layer]
    try:
        found = find_direction(*rows, method, paired=False, seed=seed)
    except NoDirectionError as error:
        raise NoDirectionError(f"{point} of layer {layer}: {error}") from None
    roc = _roc(scored[layer].positive, scored[layer].negative)
    allowed = 1.0 if max_false_positives is None else max_false_positives
    within = [each for each in roc if each.false_positives <= allowed]
    if max_false_positives is None:
        chosen = max(within, key=lambda each: each.true_positives - each.false_positives)
    else:
        chosen = max(within, key=lambda each: (each.true_positives, each.threshold))
    vector: FloatArray = found.vector
    probe = {"hook": str(point), "layer": layer, "vector": vector, "bias": -found.middle}
    condition: dict[str, Any] = {"probe": probe, "above": chosen.threshold}
    if name is not None:
        condition["name"] = name
    return FittedProbe(condition, layer, roc, chosen, auroc)


def _roc(positive: torch.Tensor, negative: torch.Tensor) -> tuple[RocPoint, ...]:
    """All thresholds that make a difference: half-way between neighbouring scores, and one above
    all and one below."""
    scores = np.unique(torch.cat([positive, negative]).numpy())
    between = [(a + b) / 2 for a, b in zip(scores[1:], scores[:-1], strict=True)]
    edges = [float(scores[-1]) + 1.0, *reversed(between), float(scores[0]) - 1.0]
    return tuple(
        RocPoint(
            float(t), float((positive > t).double().mean()), float((negative > t).double().mean())
        )
        for t in edges
    )

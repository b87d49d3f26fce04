"""Compares what an engine served with what is right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from tllm.verify.batches import as_computed
from tllm.verify.certificate import BatchFigures, Certificate, row_errors
from tllm.verify.gated import Judged
from tllm.verify.patched import Patched
from tllm.verify.reference import Layer, States, Steers
from tllm.verify.served import Served
from tllm.verify.steered import Place, Steered, changes
from tllm.verify.tolerance import Tolerance


class Answers(Protocol):
    """Whoever says what is right, as `Reference` does."""

    def places(self) -> list[tuple[str, Layer]]:
        """The hook points there are, each with every layer that has it."""

    def doubts(self) -> str:
        """Why the places may be wrong, or nothing."""

    def run(self, token_ids: list[int], steers: Steers | None = None) -> tuple[States, Tensor]:
        """What arrives at every hook point, and the logits."""


class Comparison:
    """Compares sequences with a reference.

    Args:
        certificate: gets what is found.
        places: hook points by layer, that both have.
        hidden: numbers of a row.
    """

    def __init__(
        self,
        reference: Answers,
        certificate: Certificate,
        tolerance: Tolerance,
        places: Sequence[Place],
        hidden: int,
    ) -> None:
        self._reference = reference
        self._certificate = certificate
        self._tolerance = tolerance
        self._places = sorted(places, key=as_computed)
        self._hidden = hidden

    def compare(self, figures: BatchFigures, served: Served) -> None:
        """Compare all that is known of a sequence.

        Args:
            figures: of its batch.
        """
        new = list(served.completion.token_ids)
        if len(new) != served.ask.max_tokens:
            self._certificate.differences.append(
                served.difference("token", f"{len(new)} tokens were generated")
            )
        done = served.ask.changes(served.passed, self._hidden)
        states, logits = self._reference.run(served.passed, done)
        chosen = logits[served.first - 1 :]
        judged = [
            each.when.within(each.mask(served.passed, served.first), served.first)
            for each in served.ask.steering
            if each.when is not None
        ]
        if any(when.is_near(states, self._tolerance.points[when.place[0]]) for when in judged):
            figures.on_edge += 1
            judge_status(self._certificate, served)
            return
        self._compare_captures(figures, served, states)
        if served.ask.seed is None:
            self._compare_greedy(figures, served, chosen)
        self._compare_log_probabilities(served, chosen)
        for when in judged:
            self._compare_signal(served, when, states)
        if len(served.ask.steering) + len(served.ask.patches) == 1:
            self._count_seen(served, states, chosen)

    def _compare_greedy(self, figures: BatchFigures, served: Served, logits: Tensor) -> None:
        new = torch.tensor(list(served.completion.token_ids))
        regret = (logits.amax(1) - logits.gather(1, new[:, None])[:, 0]) / logits.abs().amax()
        figures.differing += int((regret > 0).sum())
        limit = self._tolerance.regret
        for step in (~(regret <= limit)).nonzero()[:1, 0].tolist():
            best, size = int(logits[step].argmax()), float(regret[step])
            what = f"token {int(new[step])} was taken, where {best} is likelier by {size:.2e}"
            at = served.first + step
            self._certificate.differences.append(
                served.difference("token", what, position=at, size=_number(size), limit=limit)
            )

    def _compare_log_probabilities(self, served: Served, logits: Tensor) -> None:
        new = torch.tensor(list(served.completion.token_ids))
        expected = torch.log_softmax(logits, -1).gather(1, new[:, None])[:, 0]
        scale = logits.abs().amax()
        errors = (served.log_probabilities - expected).abs() / scale
        judge(self._certificate, served, "logits", None, errors, served.first)
        if len(new) > 1:
            exchanged = float(((expected.roll(1) - expected).abs() / scale).max())
            self._certificate.points["logits"].exchanged.append(exchanged)

    def _compare_signal(self, served: Served, when: Judged, states: States) -> None:
        """The score of each token that it was judged for, and how many."""
        point, layer = when.place
        limit = self._tolerance.points[point]
        mask = served.ask.steering[0].mask(served.passed, served.first)
        wanted = when.meant(mask.nonzero()[:, 0].tolist())
        signal = served.completion.signals.get(when.name)
        found = [] if signal is None else signal.positions.tolist()
        cached = range(served.computed_from if when.over == "token" else 0)
        missing = [each for each in wanted if each not in found and each not in cached]
        if missing or not set(found) <= set(wanted):
            what = f"scores of positions {found}, where {wanted} are judged"
            self._certificate.differences.append(served.difference("signal", what, layer=layer))
        elif found:
            errors = when.errors(torch.tensor(signal.scores), found, states, limit)
            if bool((errors > limit).any()):
                at = int(errors.argmax())
                expected = float(when.scores(states)[found[at]])
                what = f"the score is {float(signal.scores[at]):.4g}, not {expected:.4g}"
                size = _number(float(errors[at]))
                given = {"layer": layer, "position": found[at], "size": size, "limit": limit}
                self._certificate.differences.append(served.difference("signal", what, **given))

    def _compare_captures(self, figures: BatchFigures, served: Served, states: States) -> None:
        judge_status(self._certificate, served)
        completion, ask = served.completion, served.ask
        if ask.reads is None:
            return
        low = served.first if ask.reads == "decode" else 0
        high = served.first if ask.reads == "prefill" else len(served.passed)
        wanted = list(range(low, high))
        found = completion.activations or {}
        for point, layer in self._places:
            if point not in found or layer not in found[point]:
                self._certificate.differences.append(
                    served.difference(point, "no rows came back", layer=layer)
                )
                continue
            given = found[point][layer]
            if given.positions.tolist() != wanted:
                what = f"rows of positions {given.positions.tolist()}, not {wanted}"
                self._certificate.differences.append(served.difference(point, what, layer=layer))
                continue
            if wanted:
                expected = states[point][layer][low:high]
                got = given.tensor.float().cpu()
                figures.rows += len(got)
                judge(self._certificate, served, point, layer, row_errors(got, expected), low)
                if len(got) > 1:
                    exchanged = float(row_errors(expected.roll(1, 0), expected).max())
                    self._certificate.points[point].exchanged.append(exchanged)

    def _count_seen(self, served: Served, states: States, logits: Tensor) -> None:
        """Whether the comparison would have failed had it not been steered, or patched."""
        alone: Sequence[Steered | Patched] = (*served.ask.steering, *served.ask.patches)
        figures = self._certificate.points[alone[0].place[0]]
        others: list[Steers | None] = [None]
        when = served.ask.steering[0].when if served.ask.steering else None
        if when is not None and when.remembers:
            return  # it may have decided alike for all tokens
        gated = when is not None
        if gated:
            always = replace(served.ask.steering[0], when=None)
            others.append(changes([always], served.passed, served.first))
        seen = all(
            self._is_off(served, states, logits, self._reference.run(served.passed, steers))
            for steers in others
        )
        if gated:
            figures.gated += 1
            figures.gates_seen += seen
        elif served.ask.patches:
            figures.patched += 1
            figures.patches_seen += seen
        else:
            figures.steered += 1
            figures.seen += seen

    def _is_off(
        self,
        served: Served,
        states: States,
        logits: Tensor,
        other: tuple[States, Tensor],
    ) -> bool:
        """Whether another forward pass differs from what is right by more than is accepted."""
        rows, other_logits = other[0], other[1][served.first - 1 :]
        new = torch.tensor(list(served.completion.token_ids))[:, None]
        shift = torch.log_softmax(logits, -1) - torch.log_softmax(other_logits, -1)
        off = float(shift.gather(1, new).abs().max() / logits.abs().amax())
        if off > self._tolerance.points["logits"]:
            return True
        return served.ask.reads == "any" and any(
            float(row_errors(rows[point][layer], states[point][layer]).max())
            > self._tolerance.points[point]
            for point, layer in self._places
        )


def judge_status(certificate: Certificate, served: Served) -> None:
    """What went wrong is a difference."""
    for name, result in served.completion.consumer_results.items():
        if result.status != "ok":
            what = f"{name} is {result.status}: {result.error}"
            certificate.differences.append(served.difference("result", what))


def judge(
    certificate: Certificate, served: Served, point: str, layer: Layer, errors: Tensor, first: int
) -> None:
    """Errors of the rows of one tensor, of which the first one is of position `first`."""
    figures = certificate.points[point]
    figures.rows += len(errors)
    worst = float(errors.max())
    figures.worst = max(figures.worst, worst) if math.isfinite(worst) else math.inf
    wrong = ~(errors <= figures.limit)  # what is not a number is wrong, too
    if count := int(wrong.sum()):
        at = int(errors.nan_to_num(math.inf).argmax())
        where = "log-probability" if point == "logits" else point
        what = (
            f"{count} of {len(errors)} rows are off, by up to {float(errors[at]):.2e} "
            f"(limit {figures.limit:.1e})"
        )
        certificate.differences.append(
            served.difference(
                where,
                what,
                layer=layer,
                position=first + at,
                size=_number(float(errors[at])),
                limit=figures.limit,
            )
        )


def _number(size: float) -> float | None:
    """For JSON, which knows no others."""
    return size if math.isfinite(size) else None

"""The experiments of a sweep, and what comes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tllm.client.path_ways import Place
from tllm.client.sweep_form import PromptPair, SweepForm
from tllm.patching.metrics import FloatArray, Measures
from tllm.spec.hooks import HookPoint, ModelPoints

NOWHERE = -1
"""In the place of a position: what is found there is of no experiment of the user's."""


class Experiment(NamedTuple):
    """Rows that are patched together, those of one position unless told.

    Attributes:
        at: its place in the values: pair, hook, layer, head, position.
        places: patched together; several in a window of layers.
        positions: none where nothing changes.
    """

    at: tuple[int, int, int, int, int]
    places: tuple[Place, ...]
    heads: tuple[int, ...] | None
    positions: tuple[int, ...]

    @property
    def pair(self) -> int:
        """Which pair of prompts."""
        return self.at[0]

    @property
    def counts(self) -> bool:
        """Whether it is one of the user's; else it tells what a batch does to a value."""
        return self.at[-1] != NOWHERE


class Experiments:
    """All experiments of a sweep.

    Raises `ValueError` for pairs that cannot be compared, or that lack a position.

    Attributes:
        positions: that are patched, in every pair that has them.
    """

    def __init__(self, points: ModelPoints, pairs: Sequence[PromptPair], form: SweepForm) -> None:
        self.pairs = pairs
        self.form = form
        self._points = points
        longest = max(len(pair.clean) for pair in pairs)
        given = form.positions
        self.positions = tuple(range(longest) if given is None else given)
        for number, pair in enumerate(pairs):
            pair.check(number)
            for position in given or ():
                if not -len(pair.clean) <= position < len(pair.clean):
                    raise ValueError(
                        f"positions: {position} is out of range for pair {number} of "
                        f"{len(pair.clean)} tokens; give {-len(pair.clean)} to "
                        f"{len(pair.clean) - 1}"
                    )

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """`[pairs, hooks, layers, heads, positions]`; one head where whole rows are patched."""
        form = self.form
        heads = 1 if form.heads is None else len(form.heads)
        positions = 1 if form.together else len(self.positions)
        return len(self.pairs), len(form.hooks), len(form.layers), heads, positions

    def cells(self) -> Iterator[Experiment]:
        """An experiment for every value; those that change nothing have no positions."""
        heads = [None] if self.form.heads is None else list(self.form.heads)
        for number, pair in enumerate(self.pairs):
            for index, positions in self._groups(pair):
                changed = tuple(p for p in positions if p >= pair.differs_from)
                for place in self.form.places:
                    for head_index, head in enumerate(heads):
                        if head is not None and not self._has_head(place, head):
                            continue
                        at = number, *self.form.at(place), head_index, index
                        around = self._around(place, head)
                        chosen = None if head is None else (head,)
                        yield Experiment(at, around, chosen, changed)

    def _groups(self, pair: PromptPair) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Which positions are patched at once, and where they are in the values."""
        length = len(pair.clean)
        counted = [p + length if p < 0 else p for p in self.positions if p < length]
        if self.form.together:
            yield 0, tuple(dict.fromkeys(counted))
        else:
            yield from ((index, (position,)) for index, position in enumerate(counted))

    def changes(self, experiment: Experiment) -> bool:
        """Whether it can change anything: not before the first token that differs, nor where no
        way leads to a receiver."""
        ways = self.form.ways
        return bool(experiment.positions) and (ways is None or ways.leads(experiment.places[0]))

    def idle(self) -> Iterator[Experiment]:
        """For each pair, one in which nothing is changed, in the batches of the others: the row
        before the first difference, which is the same in both runs; else nothing is patched."""
        place = self.form.places[0]
        heads = None if self.form.heads is None else (self.form.heads[0],)
        if heads is not None and not self._has_head(place, heads[0]):
            heads = (0,)
        for number, pair in enumerate(self.pairs):
            before = pair.differs_from - 1
            at = number, 0, 0, 0, NOWHERE
            around = self._around(place, None if heads is None else heads[0])
            yield Experiment(at, around, heads, (before,) if before >= 0 else ())

    def _around(self, place: Place, head: int | None = None) -> tuple[Place, ...]:
        """The window of layers that has a place in its middle; fewer at the ends of the model."""
        hook, layer = place
        assert layer is not None
        low = layer - (self.form.window - 1) // 2
        return tuple(
            (hook, each)
            for each in self._points.layers(HookPoint(hook))
            if each is not None
            and low <= each < low + self.form.window
            and (head is None or self._has_head((hook, each), head))
        )

    def read(self) -> list[Place]:
        """Every place whose rows are put somewhere."""
        return list(
            dict.fromkeys(each for place in self.form.places for each in self._around(place))
        )

    def _has_head(self, place: Place, head: int) -> bool:
        point, layer = place
        return head < self._points.heads[HookPoint(point), layer].num_heads


class SweepValues:
    """The values of a sweep as they come in; log-probabilities are let go.

    Attributes:
        known: which values have come in, or were known beforehand.
        noise_floor: by metric, the largest change where nothing was changed.
    """

    def __init__(
        self,
        measures: Measures,
        shape: tuple[int, ...],
        clean: Sequence[FloatArray],
        corrupt: Sequence[FloatArray],
    ) -> None:
        """
        Args:
            shape: see `Experiments.shape`.
            clean, corrupt: log-probabilities of the runs of each pair.
        """
        self._measures = measures
        self._clean, self._corrupt = clean, corrupt
        self.values = {name: np.full(shape, np.nan, np.float32) for name in measures.metrics}
        self.known = np.zeros(shape, np.bool_)
        self.noise_floor = dict.fromkeys(measures.metrics, 0.0)
        self._unpatched: dict[str, FloatArray] = {}

    def of(self, runs: Sequence[FloatArray]) -> dict[str, FloatArray]:
        """By metric, `[pairs]`."""
        measured = [self._measure(logprobs, pair) for pair, logprobs in enumerate(runs)]
        return {
            name: np.array([each[name] for each in measured], np.float32) for name in self.values
        }

    def fill(self, bases: Sequence[FloatArray], cells: Iterable[Experiment]) -> None:
        """Enter what is known beforehand: experiments that change nothing."""
        measured = self._unpatched = self.of(bases)
        for cell in cells:
            self.known[cell.at] = True
            for name, values in self.values.items():
                values[cell.at] = measured[name][cell.pair]

    def enter(self, experiment: Experiment, logprobs: FloatArray) -> dict[str, float]:
        """What came of an experiment, by metric."""
        measured = self._measure(logprobs, experiment.pair)
        if experiment.counts:
            self.known[experiment.at] = True
        for name, value in measured.items():
            if experiment.counts:
                self.values[name][experiment.at] = value
            else:
                change = abs(value - float(self._unpatched[name][experiment.pair]))
                self.noise_floor[name] = float(np.maximum(self.noise_floor[name], change))
        return measured

    def _measure(self, logprobs: FloatArray, pair: int) -> dict[str, float]:
        return self._measures.of(logprobs, self._clean[pair], self._corrupt[pair], pair)

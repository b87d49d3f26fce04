"""The experiments of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tllm.client.path_ways import Place
from tllm.client.sweep_form import PromptPair, SweepForm
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

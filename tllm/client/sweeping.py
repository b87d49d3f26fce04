"""`llm.patching.sweep`: from pairs of prompts to requests, and from their outputs to a `Sweep`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from tllm.client.generation import Generation, Work
from tllm.consumers.next_token import NextTokenConsumer
from tllm.params import SamplingParams
from tllm.patching.metrics import FloatArray, Measures
from tllm.patching.sweep import Sweep
from tllm.spec.patching import KeptRows

if TYPE_CHECKING:
    from tllm.client.kept_rows import PatchingControl

_AT_ONCE = 512
"""Requests whose log-probabilities are held at once."""

_WATCHED = 64
"""The same where somebody is told of each part."""

Progress: TypeAlias = Callable[[int, int], None]
"""Told how many experiments are done, and of how many."""


@dataclass(frozen=True)
class PromptPair:
    """Two prompts of one length, as token ids."""

    clean: list[int]
    corrupt: list[int]

    def check(self, number: int) -> None:
        """Refuse pairs that cannot be compared."""
        if len(self.clean) != len(self.corrupt):
            raise ValueError(
                f"pair {number}: the clean prompt has {len(self.clean)} tokens and the corrupt one "
                f"{len(self.corrupt)}; rows are put at the same positions, so give prompts of as "
                "many tokens"
            )
        if self.clean == self.corrupt:
            raise ValueError(f"pair {number}: the clean and the corrupt prompt are the same")

    @property
    def differs_from(self) -> int:
        """The first position whose tokens differ: rows before it are the same in both."""
        together = zip(self.clean, self.corrupt, strict=True)
        return next(i for i, (one, other) in enumerate(together) if one != other)


class _Experiment(NamedTuple):
    """One row patched, or those of a window of layers; `places` is empty for what changes nothing,
    which is there to be compared with."""

    pair: int
    hook: int
    layer: int
    places: tuple[tuple[str, int | None], ...]
    number: int
    position: int


class Sweeping:
    """One sweep under way.

    Args:
        control: keeps the rows of runs.
        places: hook points by layer.
        positions: None for all.
        noising, window: see `Sweep`.
        progress: called as the sweep goes on.
    """

    def __init__(
        self,
        control: PatchingControl,
        pairs: Sequence[PromptPair],
        places: Sequence[tuple[str, int | None]],
        positions: Sequence[int] | None,
        measures: Measures,
        noising: bool,
        window: int = 1,
        progress: Progress | None = None,
    ) -> None:
        self._control = control
        self._pairs = pairs
        self._measures = measures
        self._noising = noising
        self._window = window
        self._progress = progress
        self._places = list(places)
        self._hooks = tuple(dict.fromkeys(hook for hook, _ in places))
        self._layers = tuple(sorted({layer for _, layer in places if layer is not None}))
        if alone := [hook for hook, layer in places if layer is None]:
            raise ValueError(f"hooks: {alone[0]} belongs to no layer; patch it with a request")
        longest = max(len(pair.clean) for pair in pairs)
        self._positions = tuple(range(longest) if positions is None else positions)
        for number, pair in enumerate(pairs):
            pair.check(number)
            for position in () if positions is None else positions:
                if not -len(pair.clean) <= position < len(pair.clean):
                    raise ValueError(
                        f"positions: {position} is out of range for pair {number} of "
                        f"{len(pair.clean)} tokens"
                    )

    def work(self) -> Work[Sweep]:
        """Run both prompts of all pairs, then patch one row at a time."""
        control, pairs = self._control, self._pairs
        sources = [pair.corrupt if self._noising else pair.clean for pair in pairs]
        bases = [pair.clean if self._noising else pair.corrupt for pair in pairs]
        yield control.ensure(NextTokenConsumer())
        asked = [self._asked(i) for i in range(len(pairs))]
        kept, outputs = yield from control.runs(sources, self._read(), asked=asked)
        try:
            of_sources = list(map(_logprobs, outputs))
            params = [self._params(asked[i]) for i in range(len(pairs))]
            of_bases = list(map(_logprobs, (yield Generation(bases, params))))
            clean, corrupt = (of_bases, of_sources) if self._noising else (of_sources, of_bases)
            found = _Found(self, clean, corrupt)
            found.fill(of_bases)
            experiments = [*self._experiments(), *self._idle()]
            size = _AT_ONCE if self._progress is None else _WATCHED
            for low in range(0, len(experiments), size):
                part = experiments[low : low + size]
                patched = [self._params(asked[e.pair], self._patch(e, kept)) for e in part]
                outputs = yield Generation([bases[e.pair] for e in part], patched)
                for experiment, output in zip(part, outputs, strict=True):
                    found.enter(experiment, _logprobs(output))
                if self._progress is not None:
                    self._progress(low + len(part), len(experiments))
        finally:
            yield from control.forget(kept)
        return Sweep(
            self._hooks,
            self._layers,
            self._positions,
            found.values,
            found.of(clean),
            found.of(corrupt),
            tuple(map(tuple, bases)),
            self._noising,
            len(experiments) - len(pairs),
            window=self._window,
            noise_floor=found.noise_floor,
        )

    def _experiments(self) -> Iterator[_Experiment]:
        for number, pair in enumerate(self._pairs):
            length = len(pair.clean)
            for index, given in enumerate(self._positions):
                position = given + length if given < 0 else given
                if pair.differs_from <= position < length:
                    for place in self._places:
                        around = self._around(place)
                        yield _Experiment(number, *self.at(place), around, index, position)

    def _idle(self) -> Iterator[_Experiment]:
        """For each pair, one in which nothing is changed, in the batches of the others: the row
        before the first difference, which is the same in both runs; else nothing is patched."""
        for number, pair in enumerate(self._pairs):
            position = pair.differs_from - 1
            around = self._around(self._places[0]) if position >= 0 else ()
            yield _Experiment(number, 0, 0, around, _Found.NOWHERE, position)

    def _around(self, place: tuple[str, int | None]) -> tuple[tuple[str, int | None], ...]:
        """The window of layers that has a place in its middle; fewer at the ends of the model."""
        hook, layer = place
        assert layer is not None
        low = layer - (self._window - 1) // 2
        return tuple(
            (hook, each)
            for each in self._control.layers_of(hook)
            if each is not None and low <= each < low + self._window
        )

    def _read(self) -> list[tuple[str, int | None]]:
        """Every place whose rows are put somewhere."""
        return list(dict.fromkeys(each for place in self._places for each in self._around(place)))

    def at(self, place: tuple[str, int | None]) -> tuple[int, int]:
        """Where a place is in the values."""
        hook, layer = place
        assert layer is not None
        return self._hooks.index(hook), self._layers.index(layer)

    def _asked(self, pair: int) -> dict[str, Any]:
        """What a request asks of consumers: the log-probabilities that are measured."""
        tokens = self._measures.tokens(pair)
        return {NextTokenConsumer.consumer_id: {} if tokens is None else {"token_ids": tokens}}

    @staticmethod
    def _params(consumers: Any, patch: Any = None) -> SamplingParams:
        return SamplingParams(
            temperature=0, max_tokens=1, detokenize=False, consumers=consumers, patch=patch
        )

    @staticmethod
    def _patch(experiment: _Experiment, kept: Sequence[KeptRows]) -> list[dict[str, Any]] | None:
        source, positions = {"run": kept[experiment.pair]}, [experiment.position]
        return [
            {"hook": hook, "layer": layer, "positions": positions, "source": source}
            for hook, layer in experiment.places
        ] or None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`[pairs, hooks, layers, positions]`."""
        return len(self._pairs), len(self._hooks), len(self._layers), len(self._positions)

    def unchanged(self) -> Iterator[tuple[int, int, int, int]]:
        """Where patching changes nothing: before the first token that differs."""
        for number, pair in enumerate(self._pairs):
            for index, given in enumerate(self._positions):
                if (given + len(pair.clean) if given < 0 else given) < pair.differs_from:
                    for place in self._places:
                        yield (number, *self.at(place), index)

    def measured(
        self, logprobs: FloatArray, clean: FloatArray, corrupt: FloatArray, pair: int
    ) -> dict[str, float]:
        """All metrics, by name."""
        return self._measures.of(logprobs, clean, corrupt, pair)

    @property
    def metrics(self) -> list[str]:
        """Their names."""
        return list(self._measures.metrics)


class _Found:
    """The values of a sweep as they come in; log-probabilities are let go.

    Attributes:
        noise_floor: by metric, the largest change where nothing was changed.
    """

    NOWHERE = -1
    """In the place of a position: what was found there is of no experiment of the user's."""

    def __init__(
        self, sweeping: Sweeping, clean: Sequence[FloatArray], corrupt: Sequence[FloatArray]
    ) -> None:
        self._sweeping = sweeping
        self._clean, self._corrupt = clean, corrupt
        self.values = {
            name: np.full(sweeping.shape, np.nan, np.float32) for name in sweeping.metrics
        }
        self.noise_floor = dict.fromkeys(sweeping.metrics, 0.0)
        self._unpatched: dict[str, FloatArray] = {}

    def of(self, runs: Sequence[FloatArray]) -> dict[str, FloatArray]:
        """By metric, `[pairs]`."""
        measured = [self._measure(logprobs, pair) for pair, logprobs in enumerate(runs)]
        return {
            name: np.array([each[name] for each in measured], np.float32) for name in self.values
        }

    def fill(self, bases: Sequence[FloatArray]) -> None:
        """Enter what is known beforehand."""
        measured = self._unpatched = self.of(bases)
        for at in self._sweeping.unchanged():
            for name, values in self.values.items():
                values[at] = measured[name][at[0]]

    def enter(self, experiment: _Experiment, logprobs: FloatArray) -> None:
        """What came of an experiment."""
        if experiment.number == self.NOWHERE:
            for name, value in self._measure(logprobs, experiment.pair).items():
                change = abs(value - float(self._unpatched[name][experiment.pair]))
                self.noise_floor[name] = max(self.noise_floor[name], change)
            return
        at = experiment.pair, experiment.hook, experiment.layer, experiment.number
        for name, value in self._measure(logprobs, experiment.pair).items():
            self.values[name][at] = value

    def _measure(self, logprobs: FloatArray, pair: int) -> dict[str, float]:
        return self._sweeping.measured(logprobs, self._clean[pair], self._corrupt[pair], pair)


def _logprobs(output: Any) -> FloatArray:
    """The log-probabilities of the token after a prompt; raises where a worker could not say, or
    could not patch."""
    results = output.outputs[0].consumer_results
    for name, result in results.items():
        if result.status != "ok":
            raise RuntimeError(f"a request of the sweep failed in {name}: {result.error}")
    row = results[NextTokenConsumer.consumer_id].payload.values[-1]
    return np.asarray(row, np.float32)

"""`llm.patching.sweep`: from pairs of prompts to requests, and from their outputs to a `Sweep`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

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
    pair: int
    hook: int
    layer: int
    place: tuple[str, int | None]
    number: int
    position: int


class Sweeping:
    """One sweep under way.

    Args:
        control: keeps the rows of runs.
        places: hook points by layer.
        positions: None for all.
        noising: see `Sweep`.
    """

    def __init__(
        self,
        control: PatchingControl,
        pairs: Sequence[PromptPair],
        places: Sequence[tuple[str, int | None]],
        positions: Sequence[int] | None,
        measures: Measures,
        noising: bool,
    ) -> None:
        self._control = control
        self._pairs = pairs
        self._measures = measures
        self._noising = noising
        self._places = list(places)
        self._hooks = tuple(dict.fromkeys(hook for hook, _ in places))
        self._layers = tuple(sorted({layer for _, layer in places if layer is not None}))
        if not all(layer is not None for _, layer in places):
            raise ValueError("hooks: lm_head_in belongs to no layer; patch it with a request")
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
        kept, outputs = yield from control.runs(sources, self._places, asked=asked)
        try:
            of_sources = list(map(_logprobs, outputs))
            params = [self._params(asked[i]) for i in range(len(pairs))]
            of_bases = list(map(_logprobs, (yield Generation(bases, params))))
            clean, corrupt = (of_bases, of_sources) if self._noising else (of_sources, of_bases)
            found = _Found(self, clean, corrupt)
            found.fill(of_bases)
            experiments = list(self._experiments())
            for low in range(0, len(experiments), _AT_ONCE):
                part = experiments[low : low + _AT_ONCE]
                patched = [self._params(asked[e.pair], self._patch(e, kept)) for e in part]
                outputs = yield Generation([bases[e.pair] for e in part], patched)
                for experiment, output in zip(part, outputs, strict=True):
                    found.enter(experiment, _logprobs(output))
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
            len(experiments),
        )

    def _experiments(self) -> Iterator[_Experiment]:
        for number, pair in enumerate(self._pairs):
            length = len(pair.clean)
            for index, given in enumerate(self._positions):
                position = given + length if given < 0 else given
                if pair.differs_from <= position < length:
                    for place in self._places:
                        yield _Experiment(number, *self.at(place), place, index, position)

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
    def _patch(experiment: _Experiment, kept: Sequence[KeptRows]) -> list[dict[str, Any]]:
        hook, layer = experiment.place
        source = {"run": kept[experiment.pair]}
        return [
            {"hook": hook, "layer": layer, "positions": [experiment.position], "source": source}
        ]

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
    """The values of a sweep as they come in; log-probabilities are let go."""

    def __init__(
        self, sweeping: Sweeping, clean: Sequence[FloatArray], corrupt: Sequence[FloatArray]
    ) -> None:
        self._sweeping = sweeping
        self._clean, self._corrupt = clean, corrupt
        self.values = {
            name: np.full(sweeping.shape, np.nan, np.float32) for name in sweeping.metrics
        }

    def of(self, runs: Sequence[FloatArray]) -> dict[str, FloatArray]:
        """By metric, `[pairs]`."""
        measured = [self._measure(logprobs, pair) for pair, logprobs in enumerate(runs)]
        return {
            name: np.array([each[name] for each in measured], np.float32) for name in self.values
        }

    def fill(self, bases: Sequence[FloatArray]) -> None:
        """Enter what is known beforehand."""
        measured = self.of(bases)
        for at in self._sweeping.unchanged():
            for name, values in self.values.items():
                values[at] = measured[name][at[0]]

    def enter(self, experiment: _Experiment, logprobs: FloatArray) -> None:
        """What came of an experiment."""
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

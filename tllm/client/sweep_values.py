"""What comes of the experiments of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tllm.client.experiments import Experiment
from tllm.patching.metrics import FloatArray, Measures


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

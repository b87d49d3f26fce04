"""`llm.patching.sweep`: from pairs of prompts to requests, and from their outputs to a `Sweep`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tllm.client.experiments import Experiment, Experiments, SweepValues
from tllm.client.generation import Generation, Work
from tllm.client.kept_rows import RowKeeping
from tllm.consumers.next_token import NextTokenConsumer
from tllm.params import SamplingParams, with_patch
from tllm.patching.metrics import FloatArray, Measures
from tllm.patching.sweep import Sweep, experiment_row
from tllm.spec.patching import KeptRows, Patch, RequestPatch

_AT_ONCE = 512
"""Requests whose log-probabilities are held at once."""

_WATCHED = 64
"""The same where somebody is told of each part."""

_RECEIVED = 32
"""The same where each leaves rows at the receivers."""

Progress: TypeAlias = Callable[[int, int], None]
"""Told how many experiments are done, and of how many; 0 before the first."""


class SweepWatch(NamedTuple):
    """Who is told how a sweep goes on, and how much of it is computed at a time.

    Attributes:
        each: told of each experiment, as a row of `Sweep.rows`.
        at_once: the most requests at a time; None: what suits.
    """

    progress: Progress | None = None
    each: Callable[[dict[str, Any]], None] | None = None
    at_once: int | None = None

    @property
    def size(self) -> int:
        """Requests that are computed at a time."""
        watched = self.progress is not None or self.each is not None
        return max(1, min(_WATCHED if watched else _AT_ONCE, self.at_once or _AT_ONCE))


class Sweeping:
    """One sweep under way.

    Args:
        keeping: keeps the rows of runs.
        watch: told as the sweep goes on.
        adapter: that all prompts are computed with; it is loaded.
    """

    def __init__(
        self,
        keeping: RowKeeping,
        experiments: Experiments,
        measures: Measures,
        watch: SweepWatch,
        adapter: Any = None,
    ) -> None:
        self._keeping = keeping
        self._experiments = experiments
        self._form, pairs = experiments.form, experiments.pairs
        self._measures = measures
        self._watch = watch
        self._adapter = adapter
        for name, told in (("progress", watch.progress), ("each", watch.each)):
            if inspect.iscoroutinefunction(told):
                raise ValueError(
                    f"{name}={told!r:.80} is an async function, and a sweep awaits none; give a "
                    "plain one"
                )
        noising = self._form.noising
        self._sources = [pair.corrupt if noising else pair.clean for pair in pairs]
        self._bases = [pair.clean if noising else pair.corrupt for pair in pairs]
        self._asked = [self._consumers(i) for i in range(len(pairs))]
        #: Of each pair, what every request of it asks; checked once.
        self._params = [
            SamplingParams(temperature=0, max_tokens=1, detokenize=False, consumers=asked)
            for asked in self._asked
        ]

    def work(self) -> Work[Sweep]:
        """Run both prompts of all pairs, then patch one row at a time."""
        experiments = self._experiments
        kept: list[KeptRows] = []
        try:
            outputs = yield from self._runs(kept)
            of_runs = list(map(_logprobs, outputs))
            of_sources, of_bases = of_runs[: len(self._bases)], of_runs[len(self._bases) :]
            runs = of_sources, of_bases
            clean, corrupt = reversed(runs) if self._form.noising else runs
            found = SweepValues(self._measures, experiments.shape, clean, corrupt)
            cells = list(experiments.cells())
            found.fill(of_bases, [cell for cell in cells if not experiments.changes(cell)])
            changing = [cell for cell in cells if experiments.changes(cell)]
            yield from self._compute([*changing, *experiments.idle()], kept, found)
        finally:
            yield from self._keeping.forget(kept)
        return self._result(found, found.of(clean), found.of(corrupt), len(changing))

    def _runs(self, kept: list[KeptRows]) -> Work[list[Any]]:
        """Run both prompts of all pairs, the sources first; rows that are put somewhere are kept.

        Args:
            kept: is given those of all sources, then, where branches are frozen, of all bases.

        Returns:
            The outputs.
        """
        ways = self._form.ways
        count = len(self._bases)
        prompts = [*self._sources, *self._bases]
        places = [self._experiments.read()] * count + [[] if ways is None else ways.frozen] * count
        asked = [*self._asked, *self._asked]
        found: list[Any] = []
        size = self._watch.at_once or len(prompts)
        for low in range(0, len(prompts), size):
            part = slice(low, low + size)
            more, outputs = yield from self._keeping.runs(
                prompts[part], places[part], asked=asked[part], adapter=self._adapter
            )
            kept += more
            found += outputs
        return found

    def _compute(
        self, experiments: Sequence[Experiment], kept: Sequence[KeptRows], found: SweepValues
    ) -> Work[None]:
        """All experiments, part by part."""
        watch, size = self._watch, self._watch.size
        receivers = () if self._form.ways is None else self._form.ways.receivers
        if receivers:
            longest = max(len(base) for base in self._bases)
            room = yield from self._keeping.room(longest, receivers)
            size = max(1, min(size, _RECEIVED, room))
        if watch.progress is not None:
            watch.progress(0, len(experiments))
        for low in range(0, len(experiments), size):
            part = experiments[low : low + size]
            patches = [self._patch(each, kept) for each in part]
            if receivers:
                outputs = yield from self._received(part, patches)
            else:
                params = list(map(self._patched, part, patches))
                bases = [self._bases[each.pair] for each in part]
                outputs = yield Generation(bases, params, self._adapter)
            for experiment, output in zip(part, outputs, strict=True):
                measured = found.enter(experiment, _logprobs(output))
                if watch.each is not None and experiment.counts:
                    watch.each(self._row(experiment, measured))
            if watch.progress is not None:
                watch.progress(low + len(part), len(experiments))

    def _row(self, experiment: Experiment, measured: dict[str, float]) -> dict[str, Any]:
        """What came of an experiment, in words."""
        form = self._form
        pair, hook, layer, _, index = experiment.at
        head = None if experiment.heads is None else experiment.heads[0]
        position = None if form.together else self._experiments.positions[index]
        place = form.hooks[hook], form.layers[layer]
        return experiment_row(pair, place, head, position, self._bases[pair], measured)

    def _received(
        self, part: Sequence[Experiment], patches: Sequence[RequestPatch | None]
    ) -> Work[list[Any]]:
        """What arrives at the receivers in each experiment, put into runs in which nothing else is
        changed."""
        assert self._form.ways is not None
        bases = [self._bases[each.pair] for each in part]
        places = [self._form.ways.receivers] * len(bases)
        arrived, _ = yield from self._keeping.runs(
            bases, places, patches=patches, adapter=self._adapter
        )
        try:
            params = []
            for each, run in zip(part, arrived, strict=True):
                after = range(min(each.positions, default=0), run.num_positions)
                patch = RequestPatch(tuple(self._form.ways.received(run, after)))
                params.append(self._patched(each, patch))
            outputs: list[Any] = yield Generation(bases, params, self._adapter)
        finally:
            yield from self._keeping.forget(arrived)
        return outputs

    def _result(
        self,
        found: SweepValues,
        clean: dict[str, FloatArray],
        corrupt: dict[str, FloatArray],
        computed: int,
    ) -> Sweep:
        form, values, measured = self._form, found.values, found.known
        if form.heads is None:
            values = {name: each[:, :, :, 0] for name, each in values.items()}
            measured = measured[:, :, :, 0]
        return Sweep(
            form.hooks,
            form.layers,
            self._experiments.positions,
            values,
            clean,
            corrupt,
            tuple(map(tuple, self._bases)),
            form.noising,
            computed,
            window=form.window,
            noise_floor=found.noise_floor,
            heads=form.heads,
            together=form.together,
            freeze=() if form.ways is None else form.ways.freeze,
            receivers=() if form.ways is None else form.ways.receivers,
            measured=measured,
        )

    def _consumers(self, pair: int) -> dict[str, Any]:
        """What a request asks of consumers: the log-probabilities that are measured."""
        tokens = self._measures.tokens(pair)
        return {NextTokenConsumer.consumer_id: {} if tokens is None else {"token_ids": tokens}}

    def _patched(self, experiment: Experiment, patch: RequestPatch | None) -> SamplingParams:
        params = self._params[experiment.pair]
        return params if patch is None else with_patch(params, patch)

    def _patch(self, experiment: Experiment, kept: Sequence[KeptRows]) -> RequestPatch | None:
        """What is put where.

        Args:
            kept: as `_runs` gives them.
        """
        pair, positions = experiment.pair, experiment.positions
        if not positions:
            return None
        entries = [
            Patch.from_run(place, positions, kept[pair], experiment.heads)
            for place in experiment.places
        ]
        frozen = kept[len(self._bases) :]
        if self._form.ways is not None and frozen:
            after = range(min(positions), frozen[pair].num_positions)
            entries += self._form.ways.kept_still(experiment.places[0], frozen[pair], after)
        return RequestPatch(tuple(entries))


def _logprobs(output: Any) -> FloatArray:
    """The log-probabilities of the token after a prompt; raises where a worker could not say, or
    could not patch."""
    results = output.outputs[0].consumer_results
    for name, result in results.items():
        if result.status != "ok":
            raise RuntimeError(f"a request of the sweep failed in {name}: {result.error}")
    row = results[NextTokenConsumer.consumer_id].payload.values[-1]
    return np.asarray(row, np.float32)

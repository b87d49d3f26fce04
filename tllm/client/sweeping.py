"""`llm.patching.sweep`: from pairs of prompts to requests, and from their outputs to a `Sweep`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from tllm.client.generation import Generation, Work
from tllm.client.path_ways import PathWays, Place
from tllm.consumers.next_token import NextTokenConsumer
from tllm.params import SamplingParams, with_patch
from tllm.patching.metrics import FloatArray, Measures
from tllm.patching.sweep import Sweep, experiment_row
from tllm.spec.patching import KeptRows, Patch, RequestPatch
from tllm.spec.reading import require_bool, whole_number

if TYPE_CHECKING:
    from tllm.client.kept_rows import PatchingControl

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


@dataclass(frozen=True)
class SweepForm:
    """What is patched in each experiment of a sweep.

    Attributes:
        places: hook points by layer.
        positions: None for all.
        heads: of `attn_heads`, `q`, `k` or `v`, one at a time; None: whole rows.
        together: all positions in one experiment, and not one at a time.
        noising, window: see `Sweep`.
        ways: what is kept from changing, and where changes arrive; None: all changes count.
    """

    places: tuple[Place, ...]
    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    together: bool = False
    noising: bool = False
    window: int = 1
    ways: PathWays | None = None

    def __post_init__(self) -> None:
        if alone := [hook for hook, layer in self.places if layer is None]:
            raise ValueError(f"hooks: {alone[0]} belongs to no layer; patch it with a request")
        require_bool("together", self.together)
        require_bool("noising", self.noising)
        whole_number(self.window, "window=", 1)
        if self.window > 1 and self.ways is not None:
            raise ValueError(
                f"window={self.window} was given with freeze or receivers, but what lies between "
                "the layers of a window belongs to no path; leave one of them out"
            )

    @property
    def hooks(self) -> tuple[str, ...]:
        """Each hook point once."""
        return tuple(dict.fromkeys(hook for hook, _ in self.places))

    @property
    def layers(self) -> tuple[int, ...]:
        """Each layer once, in their order."""
        return tuple(sorted({layer for _, layer in self.places if layer is not None}))

    def at(self, place: Place) -> tuple[int, int]:
        """Where a place is in the values."""
        hook, layer = place
        assert layer is not None
        return self.hooks.index(hook), self.layers.index(layer)


class Sweeping:
    """One sweep under way.

    Args:
        control: keeps the rows of runs.
        watch: told as the sweep goes on.
        adapter: that all prompts are computed with; it is loaded.
    """

    def __init__(
        self,
        control: PatchingControl,
        pairs: Sequence[PromptPair],
        form: SweepForm,
        measures: Measures,
        watch: SweepWatch,
        adapter: Any = None,
    ) -> None:
        self._control = control
        self._pairs = pairs
        self._measures = measures
        self._watch = watch
        self._adapter = adapter
        for name, told in (("progress", watch.progress), ("each", watch.each)):
            if inspect.iscoroutinefunction(told):
                raise ValueError(
                    f"{name}={told!r:.80} is an async function, and a sweep awaits none; give a "
                    "plain one"
                )
        self.form = form
        longest = max(len(pair.clean) for pair in pairs)
        given = form.positions
        self._positions = tuple(range(longest) if given is None else given)
        for number, pair in enumerate(pairs):
            pair.check(number)
            for position in given or ():
                if not -len(pair.clean) <= position < len(pair.clean):
                    raise ValueError(
                        f"positions: {position} is out of range for pair {number} of "
                        f"{len(pair.clean)} tokens; give {-len(pair.clean)} to "
                        f"{len(pair.clean) - 1}"
                    )
        noising = form.noising
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
        control, form = self._control, self.form
        yield control.ensure(NextTokenConsumer())
        kept: list[KeptRows] = []
        try:
            outputs = yield from self._runs(kept)
            of_runs = list(map(_logprobs, outputs))
            of_sources, of_bases = of_runs[: len(self._pairs)], of_runs[len(self._pairs) :]
            clean, corrupt = (of_bases, of_sources) if form.noising else (of_sources, of_bases)
            found = _Found(self, clean, corrupt)
            cells = list(self._cells())
            found.fill(of_bases, [cell for cell in cells if not self._changes(cell)])
            experiments = [cell for cell in cells if self._changes(cell)]
            yield from self._compute([*experiments, *self._idle()], kept, found)
        finally:
            yield from control.forget(kept)
        return self._result(found, found.of(clean), found.of(corrupt), len(experiments))

    def _runs(self, kept: list[KeptRows]) -> Work[list[Any]]:
        """Run both prompts of all pairs, the sources first; rows that are put somewhere are kept.

        Args:
            kept: is given those of all sources, then, where branches are frozen, of all bases.

        Returns:
            The outputs.
        """
        ways = self.form.ways
        count = len(self._pairs)
        prompts = [*self._sources, *self._bases]
        places = [self._read()] * count + [[] if ways is None else ways.frozen] * count
        asked = [*self._asked, *self._asked]
        found: list[Any] = []
        size = self._watch.at_once or len(prompts)
        for low in range(0, len(prompts), size):
            part = slice(low, low + size)
            more, outputs = yield from self._control.runs(
                prompts[part], places[part], asked=asked[part], adapter=self._adapter
            )
            kept += more
            found += outputs
        return found

    def _compute(
        self, experiments: Sequence[_Experiment], kept: Sequence[KeptRows], found: _Found
    ) -> Work[None]:
        """All experiments, part by part."""
        watch, size = self._watch, self._watch.size
        receivers = () if self.form.ways is None else self.form.ways.receivers
        if receivers:
            longest = max(len(base) for base in self._bases)
            room = yield from self._control.room(longest, receivers)
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
                if watch.each is not None and experiment.at[-1] != _Found.NOWHERE:
                    watch.each(self._row(experiment, measured))
            if watch.progress is not None:
                watch.progress(low + len(part), len(experiments))

    def _row(self, experiment: _Experiment, measured: dict[str, float]) -> dict[str, Any]:
        """What came of an experiment, in words."""
        form = self.form
        pair, hook, layer, _, index = experiment.at
        head = None if experiment.heads is None else experiment.heads[0]
        position = None if form.together else self._positions[index]
        place = form.hooks[hook], form.layers[layer]
        return experiment_row(pair, place, head, position, self._bases[pair], measured)

    def _received(
        self, part: Sequence[_Experiment], patches: Sequence[RequestPatch | None]
    ) -> Work[list[Any]]:
        """What arrives at the receivers in each experiment, put into runs in which nothing else is
        changed."""
        assert self.form.ways is not None
        bases = [self._bases[each.pair] for each in part]
        places = [self.form.ways.receivers] * len(bases)
        arrived, _ = yield from self._control.runs(
            bases, places, patches=patches, adapter=self._adapter
        )
        try:
            params = []
            for each, run in zip(part, arrived, strict=True):
                after = range(min(each.positions, default=0), run.num_positions)
                patch = RequestPatch(tuple(self.form.ways.received(run, after)))
                params.append(self._patched(each, patch))
            outputs: list[Any] = yield Generation(bases, params, self._adapter)
        finally:
            yield from self._control.forget(arrived)
        return outputs

    def _result(
        self,
        found: _Found,
        clean: dict[str, FloatArray],
        corrupt: dict[str, FloatArray],
        computed: int,
    ) -> Sweep:
        form, values, measured = self.form, found.values, found.known
        if form.heads is None:
            values = {name: each[:, :, :, 0] for name, each in values.items()}
            measured = measured[:, :, :, 0]
        return Sweep(
            form.hooks,
            form.layers,
            self._positions,
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

    def _cells(self) -> Iterator[_Experiment]:
        """An experiment for every value; those that change nothing have no positions."""
        heads = [None] if self.form.heads is None else list(self.form.heads)
        for number, pair in enumerate(self._pairs):
            for index, positions in self._groups(pair):
                changed = tuple(p for p in positions if p >= pair.differs_from)
                for place in self.form.places:
                    for head_index, head in enumerate(heads):
                        if head is not None and not self._control.has_head(place, head):
                            continue
                        at = number, *self.form.at(place), head_index, index
                        around = self._around(place, head)
                        chosen = None if head is None else (head,)
                        yield _Experiment(at, around, chosen, changed)

    def _groups(self, pair: PromptPair) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Which positions are patched at once, and where they are in the values."""
        length = len(pair.clean)
        counted = [p + length if p < 0 else p for p in self._positions if p < length]
        if self.form.together:
            yield 0, tuple(dict.fromkeys(counted))
        else:
            yield from ((index, (position,)) for index, position in enumerate(counted))

    def _changes(self, experiment: _Experiment) -> bool:
        """Whether it can change anything: not before the first token that differs, nor where no
        way leads to a receiver."""
        ways = self.form.ways
        return bool(experiment.positions) and (ways is None or ways.leads(experiment.places[0]))

    def _idle(self) -> Iterator[_Experiment]:
        """For each pair, one in which nothing is changed, in the batches of the others: the row
        before the first difference, which is the same in both runs; else nothing is patched."""
        place = self.form.places[0]
        heads = None if self.form.heads is None else (self.form.heads[0],)
        if heads is not None and not self._control.has_head(place, heads[0]):
            heads = (0,)
        for number, pair in enumerate(self._pairs):
            before = pair.differs_from - 1
            at = number, 0, 0, 0, _Found.NOWHERE
            around = self._around(place, None if heads is None else heads[0])
            yield _Experiment(at, around, heads, (before,) if before >= 0 else ())

    def _around(self, place: Place, head: int | None = None) -> tuple[Place, ...]:
        """The window of layers that has a place in its middle; fewer at the ends of the model."""
        hook, layer = place
        assert layer is not None
        low = layer - (self.form.window - 1) // 2
        return tuple(
            (hook, each)
            for each in self._control.layers_of(hook)
            if each is not None
            and low <= each < low + self.form.window
            and (head is None or self._control.has_head((hook, each), head))
        )

    def _read(self) -> list[Place]:
        """Every place whose rows are put somewhere."""
        return list(
            dict.fromkeys(each for place in self.form.places for each in self._around(place))
        )

    def _consumers(self, pair: int) -> dict[str, Any]:
        """What a request asks of consumers: the log-probabilities that are measured."""
        tokens = self._measures.tokens(pair)
        return {NextTokenConsumer.consumer_id: {} if tokens is None else {"token_ids": tokens}}

    def _patched(self, experiment: _Experiment, patch: RequestPatch | None) -> SamplingParams:
        params = self._params[experiment.pair]
        return params if patch is None else with_patch(params, patch)

    def _patch(self, experiment: _Experiment, kept: Sequence[KeptRows]) -> RequestPatch | None:
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
        frozen = kept[len(self._pairs) :]
        if self.form.ways is not None and frozen:
            after = range(min(positions), frozen[pair].num_positions)
            entries += self.form.ways.kept_still(experiment.places[0], frozen[pair], after)
        return RequestPatch(tuple(entries))

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """`[pairs, hooks, layers, heads, positions]`; one head where whole rows are patched."""
        form = self.form
        heads = 1 if form.heads is None else len(form.heads)
        positions = 1 if form.together else len(self._positions)
        return len(self._pairs), len(form.hooks), len(form.layers), heads, positions

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
        known: which values have come in, or were known beforehand.
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
        self.known = np.zeros(sweeping.shape, np.bool_)
        self.noise_floor = dict.fromkeys(sweeping.metrics, 0.0)
        self._unpatched: dict[str, FloatArray] = {}

    def of(self, runs: Sequence[FloatArray]) -> dict[str, FloatArray]:
        """By metric, `[pairs]`."""
        measured = [self._measure(logprobs, pair) for pair, logprobs in enumerate(runs)]
        return {
            name: np.array([each[name] for each in measured], np.float32) for name in self.values
        }

    def fill(self, bases: Sequence[FloatArray], cells: Iterable[_Experiment]) -> None:
        """Enter what is known beforehand: experiments that change nothing."""
        measured = self._unpatched = self.of(bases)
        for cell in cells:
            self.known[cell.at] = True
            for name, values in self.values.items():
                values[cell.at] = measured[name][cell.pair]

    def enter(self, experiment: _Experiment, logprobs: FloatArray) -> dict[str, float]:
        """What came of an experiment, by metric."""
        measured = self._measure(logprobs, experiment.pair)
        nowhere = experiment.at[-1] == self.NOWHERE
        if not nowhere:
            self.known[experiment.at] = True
        for name, value in measured.items():
            if nowhere:
                change = abs(value - float(self._unpatched[name][experiment.pair]))
                self.noise_floor[name] = float(np.maximum(self.noise_floor[name], change))
            else:
                self.values[name][experiment.at] = value
        return measured

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

"""What comes of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tllm.patching.metrics import FloatArray


@dataclass(frozen=True, eq=False)
class Sweep:
    """One row patched at a time, at every place and position that was asked for.

    Attributes:
        hooks, layers, positions: what was patched; positions as they were given.
        values: by metric, `[pairs, hooks, layers, positions]`, with heads `[pairs, hooks, layers,
            heads, positions]`; not a number where a pair has no such position, or the model no such
            place, and where the metric gave none.
        clean, corrupt: by metric, `[pairs]`, of the two runs as they are.
        tokens: of each pair, the prompt that was patched.
        noising: rows of the corrupt run were put into the clean one; else the other way round.
        computed: experiments that were computed. Those before the first token that differs change
            nothing, and are not.
        window: rows of so many consecutive layers were patched together; `layers` are the middle
            ones.
        noise_floor: by metric, by how much a prompt's value changes when it is computed again among
            the experiments, and a row is replaced by an equal one: what is not above it says
            nothing.
        heads: which heads were patched, one at a time; None: whole rows.
        together: all positions were patched in one experiment: there is one value for them.
        freeze: the branches that kept the rows of the run that was patched.
        receivers: where changes arrived; the logits, where none is named.
        single_pair: the prompts were one pair, and not a list with one.
        measured: of the shape of the values: where there was something to measure. None: wherever
            they are numbers.
    """

    hooks: tuple[str, ...]
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    values: Mapping[str, FloatArray]
    clean: Mapping[str, FloatArray]
    corrupt: Mapping[str, FloatArray]
    tokens: tuple[tuple[int, ...], ...]
    noising: bool
    computed: int
    window: int = 1
    noise_floor: Mapping[str, float] = field(default_factory=dict)
    heads: tuple[int, ...] | None = None
    together: bool = False
    freeze: tuple[str, ...] = ()
    receivers: tuple[tuple[str, int | None], ...] = ()
    single_pair: bool = False
    measured: npt.NDArray[np.bool_] | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        """What was measured."""
        return tuple(self.values)

    @property
    def tensor(self) -> torch.Tensor:
        """Of the first metric: `[layers, positions]`, with heads `[layers, heads, positions]`; with
        several hooks before that, and before these the pairs of a list; without positions that were
        patched together."""
        found = torch.from_numpy(self.values[self.metrics[0]])
        if self.together:
            found = found[..., 0]
        if len(self.hooks) == 1:
            found = found[:, 0]
        return found[0] if self.single_pair else found

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A mapping for each experiment: `pair`, `hook`, `layer`, `head` where there are any,
        `position`, `token` (None for positions patched together) and each metric."""
        return list(self._rows())

    def _rows(self) -> Iterator[dict[str, Any]]:
        there = self._there
        for at in np.ndindex(there.shape):
            pair, hook, layer, *head, i = at
            tokens, position = self.tokens[pair], None if self.together else self.positions[i]
            if position is not None and not -len(tokens) <= position < len(tokens):
                continue
            if not there[at]:
                continue
            measured = {name: float(values[at]) for name, values in self.values.items()}
            place = self.hooks[hook], self.layers[layer]
            number = None if self.heads is None else self.heads[head[0]]
            yield experiment_row(pair, place, number, position, tokens, measured)

    @property
    def _there(self) -> npt.NDArray[np.bool_]:
        """Where there was something to measure."""
        if self.measured is not None:
            return self.measured
        numbers = [~np.isnan(values) for values in self.values.values()]
        return np.any(numbers, axis=0)  # type: ignore[no-any-return]

    @property
    def comparable(self) -> bool:
        """Whether a position is the same place in all pairs, so that it has a mean over them: they
        have as many tokens, or all positions count from the end, or are patched together."""
        one_length = len({len(each) for each in self.tokens}) < 2
        return one_length or self.together or max(self.positions) < 0

    @property
    def not_numbers(self) -> dict[str, int]:
        """By metric, how many rows of `rows` have NaN."""
        there = self._there
        return {name: int(np.isnan(each[there]).sum()) for name, each in self.values.items()}

    @property
    def frame(self) -> Any:
        """`rows` as a `pandas.DataFrame`. Raises `ImportError` where pandas is not installed."""
        return frame_of(self.rows)

    def top(
        self, n: int = 10, metric: str | None = None, *, smallest: bool = False
    ) -> list[dict[str, Any]]:
        """The `n` rows with the largest values; those of which there is none (NaN) come last.

        Args:
            metric: the first one by default.
            smallest: the smallest values instead.
        """
        name = self._known(metric)
        rows = self.rows
        # A comparison with NaN orders nothing.
        numbers = [row for row in rows if not np.isnan(row[name])]
        numbers.sort(key=lambda row: row[name], reverse=not smallest)
        return [*numbers, *(row for row in rows if np.isnan(row[name]))][:n]

    def heatmap(
        self,
        path: str | Path,
        *,
        metric: str | None = None,
        pair: int | None = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        """Draw a picture: layers from top to bottom, positions from left to right, a part for each
        hook point, or for each head. Heads whose positions were patched together are from left to
        right.

        Args:
            path: its ending says in which format, such as `.png`, `.jpg`, `.webp` or `.pdf`.
            metric: the first one by default.
            pair: which pair of prompts; None: the mean of all. They have to have as many tokens, or
                all positions have to count from the end.
            labels: what is written under the columns, in place of their numbers.

        Raises `ImportError` where Pillow is not installed.
        """
        from tllm.patching.heatmap import Heatmap

        values = self.values[self._known(metric)]
        if pair is not None and not -len(values) <= pair < len(values):
            raise ValueError(f"pair={pair} was not swept; give one from 0 to {len(values) - 1}")
        if pair is None and not self.comparable:
            raise ValueError(
                "the pairs have different numbers of tokens, so that their positions have no mean; "
                f"give pair=, from 0 to {len(values) - 1}"
            )
        there = self._there
        parts, columns, chosen, known = self._drawn(
            *((values.mean(0), there.any(0)) if pair is None else (values[pair], there[pair]))
        )
        names = columns if labels is None else list(labels)
        if len(names) != len(columns):
            raise ValueError(f"labels has {len(names)} entries for {len(columns)} columns")
        # Of a shorter prompt than others, only the positions that it has.
        kept = [i for i in range(len(names)) if known[..., i].any()]
        labels = [names[i] for i in kept]
        chosen = chosen[..., kept]
        Heatmap(self._known(metric), parts, self.layers, labels, chosen).save(Path(path))

    def _drawn(
        self, values: FloatArray, there: npt.NDArray[np.bool_]
    ) -> tuple[tuple[str, ...], list[str], FloatArray, npt.NDArray[np.bool_]]:
        """The parts of a picture, their columns, `[parts, layers, columns]`, and where in these
        there was something to measure."""
        columns = ["together"] if self.together else list(map(str, self.positions))
        if self.heads is None:
            return self.hooks, columns, values, there
        if self.together:
            heads = [f"head {head}" for head in self.heads]
            return self.hooks, heads, values[..., 0], there[..., 0]
        parts = [f"{hook}, head {head}" for hook in self.hooks for head in self.heads]
        rows = np.concatenate(values.swapaxes(1, 2))
        known = np.concatenate(there.swapaxes(1, 2))
        # A hook point may have fewer heads than another.
        kept = [i for i in range(len(parts)) if known[i].any()]
        return tuple(parts[i] for i in kept), columns, rows[kept], known[kept]

    def _known(self, metric: str | None) -> str:
        """A metric that was measured; the first one by default."""
        name = self.metrics[0] if metric is None else metric
        if name not in self.values:
            raise ValueError(
                f"metric={name!r} was not measured; measured were {', '.join(self.metrics)}"
            )
        return name


def experiment_row(
    pair: int,
    place: tuple[str, int],
    head: int | None,
    position: int | None,
    tokens: Sequence[int],
    measured: Mapping[str, float],
) -> dict[str, Any]:
    """An experiment in words, as it is in `Sweep.rows`.

    Args:
        head: None for whole rows.
        position: None for those that were patched together.
        tokens: of the prompt that was patched.
    """
    return {
        "pair": pair,
        "hook": place[0],
        "layer": place[1],
        **({} if head is None else {"head": head}),
        "position": None if position is None else position % len(tokens),
        "token": None if position is None else tokens[position],
        **measured,
    }


def frame_of(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Rows as a `pandas.DataFrame`. Raises `ImportError` where pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise ImportError(
            "a frame is a pandas.DataFrame, and pandas is not installed: pip install pandas, or "
            "use .rows, a list of the same"
        ) from None
    return pandas.DataFrame(rows)

"""What comes of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tllm.patching.metrics import FloatArray


@dataclass(frozen=True, eq=False)
class Sweep:
    """One row patched at a time, at every place and position that was asked for.

    Attributes:
        hooks, layers, positions: what was patched; positions as they were given.
        values: by metric, `[pairs, hooks, layers, positions]`; not a number where a pair has no
            such position, or the model no such place.
        clean, corrupt: by metric, `[pairs]`, of the two runs as they are.
        tokens: of each pair, the prompt that was patched.
        noising: rows of the corrupt run were put into the clean one; else the other way round.
        computed: experiments that were computed. Those before the first token that differs change
            nothing, and are not.
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

    @property
    def metrics(self) -> tuple[str, ...]:
        """What was measured."""
        return tuple(self.values)

    @property
    def tensor(self) -> torch.Tensor:
        """Of the first metric, `[pairs, hooks, layers, positions]`."""
        return torch.from_numpy(self.values[self.metrics[0]])

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A mapping for each experiment: `pair`, `hook`, `layer`, `position`, `token` and each
        metric."""
        return list(self._rows())

    def _rows(self) -> Iterator[dict[str, Any]]:
        first = self.values[self.metrics[0]]
        for at in np.ndindex(first.shape):
            pair, hook, layer, i = at
            tokens, position = self.tokens[pair], self.positions[i]
            if not -len(tokens) <= position < len(tokens):
                continue
            measured = {name: float(values[at]) for name, values in self.values.items()}
            if all(np.isnan(value) for value in measured.values()):
                continue
            yield {
                "pair": pair,
                "hook": self.hooks[hook],
                "layer": self.layers[layer],
                "position": position % len(tokens),
                "token": tokens[position],
                **measured,
            }

    @property
    def frame(self) -> Any:
        """`rows` as a `pandas.DataFrame`. Raises `ImportError` where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise ImportError(
                "a frame is a pandas.DataFrame, and pandas is not installed: pip install pandas, "
                "or use .rows, a list of the same"
            ) from None
        return pandas.DataFrame(self.rows)

    def top(
        self, n: int = 10, metric: str | None = None, *, smallest: bool = False
    ) -> list[dict[str, Any]]:
        """The `n` rows with the largest values.

        Args:
            metric: the first one by default.
            smallest: the smallest values instead.
        """
        name = self.metrics[0] if metric is None else metric
        if name not in self.values:
            raise ValueError(
                f"metric={name!r} was not measured; measured were {', '.join(self.metrics)}"
            )
        measured = [row for row in self._rows() if not np.isnan(row[name])]
        return sorted(measured, key=lambda row: row[name], reverse=not smallest)[:n]

"""Rows of several bundles, those of each sequence together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_T = TypeVar("_T")
_Key = TypeVar("_Key", bound=Hashable)


class RowsBySequence(Iterable[tuple[_Key, int, int]]):
    """Iterating gives each sequence with its first row, and the one after its last.

    Args:
        bundles: of each, whose its rows are, and `[rows]`, which of these.
        key: what tells one sequence from others.

    Attributes:
        order: `[rows]`, the rows of all bundles, those of a sequence in the order in which they
            came.
    """

    def __init__(
        self,
        bundles: Iterable[tuple[Sequence[_T], npt.NDArray[np.integer[Any]]]],
        key: Callable[[_T], _Key],
    ) -> None:
        numbers: dict[_Key, int] = {}
        owners: list[npt.NDArray[np.int64]] = []
        before: Sequence[_T] | None = None
        for sequences, index in bundles:
            if sequences is not before:  # those of a steady batch are one object
                before = sequences
                keys = map(key, sequences)
                own = np.array([numbers.setdefault(each, len(numbers)) for each in keys], np.int64)
            owners.append(own[index])
        owner = np.concatenate(owners)
        self.order = np.argsort(owner, kind="stable")
        self._keys = list(numbers)
        self._edges = np.searchsorted(owner[self.order], np.arange(len(numbers) + 1)).tolist()

    def __iter__(self) -> Iterator[tuple[_Key, int, int]]:
        return zip(self._keys, self._edges, self._edges[1:], strict=False)

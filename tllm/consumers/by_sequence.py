"""Rows of several bundles, those of each sequence together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_T = TypeVar("_T")
_Key = TypeVar("_Key", bound=Hashable)


def by_sequence(
    bundles: Iterable[tuple[Sequence[_T], npt.NDArray[Any]]], key: Callable[[_T], _Key]
) -> tuple[npt.NDArray[np.int64], Iterator[tuple[_Key, int, int]]]:
    """The order in which rows of a sequence lie together, as they came; and each sequence with its
    first row in that order, and the one after its last.

    Args:
        bundles: of each, whose its rows are, and `[rows]`, which of these.
        key: what tells one sequence from others.
    """
    numbers: dict[_Key, int] = {}
    owners: list[npt.NDArray[np.int64]] = []
    before: Sequence[_T] | None = None
    for sequences, index in bundles:
        if sequences is not before:  # those of a steady batch are one object
            before = sequences
            own = [numbers.setdefault(each, len(numbers)) for each in map(key, sequences)]
            number_of = np.array(own, np.int64)
        owners.append(number_of[index])
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    edges = np.searchsorted(owner[order], np.arange(len(numbers) + 1)).tolist()
    return order, zip(numbers, edges, edges[1:], strict=False)

"""Values of the tokens of running sequences, on the host, until the sequences end."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tllm.ports import PerToken, RequestInfo, RowMeta

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""By name, `[rows, ...]`."""

Since: TypeAlias = Mapping[str, Mapping[int, int]]
"""The first position of interest, by the id of a prompt and its sample."""


_Key: TypeAlias = tuple[str, int]
"""A sequence: its prompt, and which sample of it."""


@dataclass
class _Piece:
    """Some rows of one sequence."""

    positions: npt.NDArray[np.int32]
    arrays: Arrays

    def after(self, first: int) -> _Piece | None:
        """Those from a position on; None when there are none."""
        kept = self.positions >= first
        if not kept.any():
            return None
        return _Piece(self.positions[kept], {name: a[kept] for name, a in self.arrays.items()})


def check_since(method: str, args: Sequence[Any]) -> None:
    """`ValueError` for a call of `so_far` with what is no `Since`."""
    if method != "so_far" or not args or _is_since(args[0]):
        return
    raise ValueError(
        f"so_far was given {args[0]!r:.100}; give the first position of interest, by the id of a "
        'prompt and its sample, as {"cmpl-1": {0: 12}}'
    )


def _is_since(given: Any) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(prompt_id, str)
        and isinstance(samples, Mapping)
        and all(isinstance(n, (int, np.integer)) for pair in samples.items() for n in pair)
        for prompt_id, samples in given.items()
    )


class TokenRows:
    """Values by token of the running sequences.

    Adding is one append, whatever the number of rows. They are sorted by sequence only when one
    of them ends, or is asked for: each row once.
    """

    def __init__(self) -> None:
        self._unsorted: list[tuple[RowMeta, Arrays]] = []
        #: By sequence, and not by slot: one that has ended may still be asked for what it had when
        #: another has its slot.
        self._pieces: dict[_Key, list[_Piece]] = {}
        #: By prompt and sample.
        self._running: dict[str, dict[int, RequestInfo]] = {}
        #: Rows are added on one thread, and asked for on another.
        self._lock = threading.Lock()

    def begin(self, request: RequestInfo) -> None:
        with self._lock:
            self._running.setdefault(request.prompt_id, {})[request.sample_index] = request

    def add(self, meta: RowMeta, arrays: Arrays) -> None:
        """Add the values of a bundle, `[rows, ...]` each."""
        with self._lock:
            self._unsorted.append((meta, arrays))

    def take(self, request: RequestInfo, width: int | None = None) -> dict[str, PerToken] | None:
        """Everything of a sequence that has ended, by position; None when there is nothing.

        Args:
            width: how much of the last dimension of the values; all of it unless told, which is the
                same of all its tokens then.
        """
        with self._lock:
            self._sort()
            pieces = self._pieces.pop(_key(request), None)
            samples = self._running.get(request.prompt_id, {})
            samples.pop(request.sample_index, None)
            if not samples:
                self._running.pop(request.prompt_id, None)
        return None if pieces is None else _joined(pieces, width)

    def so_far(self, since: Since) -> dict[str, dict[int, tuple[RequestInfo, dict[str, PerToken]]]]:
        """What there is of sequences that run, from a position on; what is not there has nothing
        new, or has ended."""
        found: dict[str, dict[int, tuple[RequestInfo, dict[str, PerToken]]]] = {}
        with self._lock:
            self._sort()
            for prompt_id, samples in since.items():
                running = self._running.get(prompt_id, {})
                for sample in samples.keys() & running.keys():
                    request = running[sample]
                    new = _from(self._pieces.get(_key(request), ()), samples[sample])
                    if new:
                        found.setdefault(prompt_id, {})[sample] = request, _joined(new)
        return found

    def _sort(self) -> None:
        if not self._unsorted:
            return
        added, self._unsorted = self._unsorted, []
        for group in _groups(added):
            order, sequences = _by_sequence([meta for meta, _ in group])
            positions = np.concatenate([meta.positions for meta, _ in group])[order]
            joined = {
                name: np.concatenate([arrays[name] for _, arrays in group])[order]
                for name in group[0][1]
            }
            for key, start, stop in sequences:
                piece = {name: array[start:stop] for name, array in joined.items()}
                self._pieces.setdefault(key, []).append(_Piece(positions[start:stop], piece))


def _key(request: RequestInfo) -> _Key:
    return request.prompt_id, request.sample_index


def _by_sequence(
    metas: Iterable[RowMeta],
) -> tuple[npt.NDArray[np.int64], Iterator[tuple[_Key, int, int]]]:
    """The order in which rows of a sequence lie together, as they came; and each sequence with its
    first row in that order, and the one after its last."""
    numbers: dict[_Key, int] = {}
    owners: list[npt.NDArray[np.int64]] = []
    before: Sequence[RequestInfo] | None = None
    for meta in metas:
        if meta.requests is not before:  # those of a steady batch are one object
            before = meta.requests
            own = [numbers.setdefault(each, len(numbers)) for each in map(_key, before)]
            number_of = np.array(own, np.int64)
        owners.append(number_of[meta.request_index])
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    edges = np.searchsorted(owner[order], np.arange(len(numbers) + 1)).tolist()
    return order, zip(numbers, edges, edges[1:], strict=False)


def _groups(added: list[tuple[RowMeta, Arrays]]) -> Iterable[list[tuple[RowMeta, Arrays]]]:
    """Bundles whose values have one shape; those of different flows may have others.

    Where a sequence has several, only bundles that follow each other are put together: of two rows
    of one position the later counts.
    """
    groups: dict[tuple[Any, ...], list[tuple[RowMeta, Arrays]]] = {}
    for each in added:
        groups.setdefault(_shape(each), []).append(each)
    if len(groups) > 1:
        owners = [
            {_key(r) for meta, _ in group for r in meta.requests} for group in groups.values()
        ]
        if len(set().union(*owners)) < sum(map(len, owners)):
            return [list(group) for _, group in groupby(added, _shape)]
    return groups.values()


def _shape(added: tuple[RowMeta, Arrays]) -> tuple[Any, ...]:
    return tuple((name, array.shape[1:]) for name, array in added[1].items())


def _from(pieces: Sequence[_Piece], first: int) -> list[_Piece]:
    """The rows of pieces from a position on; the last pieces are looked at first, and only they."""
    found: list[_Piece] = []
    for piece in reversed(pieces):
        new = piece.after(first)
        if new is None:
            break
        found.append(new)
    return found[::-1]


def _joined(pieces: Sequence[_Piece], width: int | None = None) -> dict[str, PerToken]:
    if len(pieces) == 1:
        [piece] = pieces
        return {
            name: PerToken(piece.positions, array[..., :width])
            for name, array in piece.arrays.items()
        }
    positions = np.concatenate([piece.positions for piece in pieces])
    return {
        name: PerToken(
            positions, np.concatenate([piece.arrays[name][..., :width] for piece in pieces])
        )
        for name in pieces[0].arrays
    }

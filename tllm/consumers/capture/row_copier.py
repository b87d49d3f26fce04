"""Copies of rows in host memory, on several threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_Bytes = npt.NDArray[np.uint8]

_PIECE = 4 << 20
"""Bytes that are worth another thread's while."""

_SHARES = 2
"""Of all bytes that a thread copies in one go, at least. Few: for each, it waits until the thread
that runs the engine lets go of the interpreter, which may take longer than the copy."""


class RowCopy(NamedTuple):
    """Rows to be copied.

    Attributes:
        target, source: `[rows, ...]`, contiguous, of one dtype and row shape.
        at: which rows of the target: an index for each row of the source, or where they begin.
    """

    target: torch.Tensor
    at: npt.NDArray[np.int64] | int
    source: torch.Tensor


class RowCopier:
    """Makes many copies at once.

    One thread cannot fill memory that is new to the process as fast as rows arrive: every page is
    a fault.

    Args:
        threads: at most; by default half of the processors, and no more than eight.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._count = threads or max(1, min(8, len(os.sched_getaffinity(0)) // 2))
        self._threads: ThreadPoolExecutor | None = None

    def shares(self, nbytes: int) -> bool:
        """Whether several threads copy so many bytes."""
        return self._count > 1 and nbytes >= 2 * _PIECE

    def run(self, copies: Sequence[RowCopy]) -> None:
        """Make the copies. Their targets must not overlap."""
        total = sum(copy.source.nbytes for copy in copies)
        most = max(_PIECE, total // (_SHARES * self._count))
        pieces = [piece for copy in copies for piece in _pieces(copy, most)]
        if not self.shares(total):
            _copy_all(pieces)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._count, "tllm-copies")
        for _ in self._threads.map(_copy_all, _shares(pieces, most)):
            pass

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


_Piece = tuple[_Bytes, npt.NDArray[np.int64] | slice, _Bytes]
"""Target, which of its rows, and source; as bytes."""


def _pieces(copy: RowCopy, most: int) -> Iterator[_Piece]:
    """A copy in parts of so many bytes at most, if a row has no more."""
    target, source = row_bytes(copy.target), row_bytes(copy.source)
    rows = max(1, most // max(1, source.shape[1]))
    for low in range(0, len(source), rows):
        part = source[low : low + rows]
        if isinstance(copy.at, int):
            begin = copy.at + low
            yield target, slice(begin, begin + len(part)), part
        else:
            yield target, copy.at[low : low + rows], part


def _shares(pieces: Sequence[_Piece], most: int) -> Iterator[list[_Piece]]:
    """Pieces that one thread copies in one go: small ones together."""
    share: list[_Piece] = []
    nbytes = 0
    for piece in pieces:
        share.append(piece)
        nbytes += piece[2].nbytes
        if nbytes >= most:
            yield share
            share, nbytes = [], 0
    if share:
        yield share


def _copy_all(pieces: Sequence[_Piece]) -> None:
    # numpy lets go of the interpreter, and torch would begin threads of its own in each of these.
    for target, at, source in pieces:
        target[at] = source


def row_bytes(rows: torch.Tensor) -> _Bytes:
    """`[rows, bytes]`, the same memory where they are contiguous."""
    flat: _Bytes = rows.contiguous().view(torch.uint8).numpy()
    return flat.reshape(len(rows), rows.numel() // max(1, len(rows)) * rows.element_size())

"""The rows of many records as a stream of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from tllm.stores.catalog import IntArray
from tllm.stores.error import StoreError
from tllm.stores.format import POSITIONS, TORCH_DTYPES, to_numpy
from tllm.stores.payload import PayloadCache
from tllm.stores.record import ArrayKey

BatchFormat = Literal["torch", "numpy", "arrow"]

_CHUNK_ROWS = 64
"""Rows that stay together when rows are drawn for a shuffled pool."""

POOL_ROWS = 65536
"""Rows that are mixed with each other when shuffling; at least four batches."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one array, of one record or many.

    Attributes:
        rows: `[n, hidden]`, a CPU tensor or a numpy array.
        positions: `[n]` int32, likewise: the position of each row's token in its sequence.
        records: `[n]` int64, likewise: index of each row's record in the store that was asked.
        request_ids: the id of each row's request.
    """

    rows: Any
    positions: Any
    records: Any
    request_ids: Sequence[str]

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, eq=False)
class RowRuns:
    """All rows of one array over some records: runs of rows that follow each other in a file.

    Attributes:
        files, tensors: `[runs]`, codes into the lists of names.
        row_starts, position_starts, counts: `[runs]`, first row, first position, and how many.
        records: `[runs]`, index of the record.
    """

    file_names: Sequence[str]
    tensor_names: Sequence[str]
    files: IntArray
    tensors: IntArray
    row_starts: IntArray
    position_starts: IntArray
    counts: IntArray
    records: IntArray

    @classmethod
    def of(cls, pieces: pa.Table, records: IntArray) -> RowRuns:
        """From a table of pieces and the record of each."""
        files = pieces["file"].combine_chunks().dictionary_encode()
        tensors = pieces["tensor"].combine_chunks().dictionary_encode()
        return cls(
            files.dictionary.to_pylist(),
            tensors.dictionary.to_pylist(),
            files.indices.to_numpy().astype(np.int64),
            tensors.indices.to_numpy().astype(np.int64),
            pieces["row_start"].to_numpy(),
            pieces["position_start"].to_numpy(),
            pieces["rows"].to_numpy(),
            records,
        )

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def cut(self, size: int) -> RowRuns:
        """The same rows in runs of at most `size`."""
        times = -(-self.counts // size)
        parent = np.repeat(np.arange(len(self.counts)), times)
        number = np.arange(len(parent)) - np.repeat(np.cumsum(times) - times, times)
        offset = number * size
        counts = np.minimum(self.counts[parent] - offset, size)
        return self._moved(parent, offset, counts)

    def take(self, runs: IntArray) -> RowRuns:
        return self._moved(runs, np.zeros(len(runs), np.int64), self.counts[runs])

    def span(self, start: int, stop: int) -> RowRuns:
        """Rows `start` to `stop` of all rows, in order."""
        ends = np.cumsum(self.counts)
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, stop, side="left")) + 1
        runs = np.arange(first, min(last, len(ends)))
        begins = ends[runs] - self.counts[runs]
        offset = np.maximum(start - begins, 0)
        counts = np.minimum(ends[runs], stop) - (begins + offset)
        return self._moved(runs, offset, counts)

    def _moved(self, runs: IntArray, offset: IntArray, counts: IntArray) -> RowRuns:
        return RowRuns(
            self.file_names,
            self.tensor_names,
            self.files[runs],
            self.tensors[runs],
            self.row_starts[runs] + offset,
            self.position_starts[runs] + offset,
            counts,
            self.records[runs],
        )


@dataclass(frozen=True, eq=False)
class Batches:
    """Iterates over the rows of one array of some records, each row once.

    Attributes:
        dtype, hidden: of all of them.
        payloads: where files are mapped.
        request_ids: by record.
        size: rows of a batch; the last one may have less.
        shuffle: draw chunks of 64 rows at random into a pool of at least 65536 rows, and mix the
            pool; the order depends on `seed` and on what is in the store, and on nothing else.
            Without it rows come in the order of records and positions.
        out_dtype: convert rows to it.
    """

    key: ArrayKey
    runs: RowRuns
    dtype: str
    hidden: int
    payloads: PayloadCache
    request_ids: pa.Array
    size: int
    shuffle: bool = False
    seed: int = 0
    out_dtype: torch.dtype | None = None

    @property
    def total_rows(self) -> int:
        return self.runs.total

    def __len__(self) -> int:
        return -(-self.total_rows // self.size)

    def empty(self, rows: int = 0) -> torch.Tensor:
        """`[rows, hidden]`, of the dtype that batches have; not filled."""
        return torch.empty((rows, self.hidden), dtype=self.out_dtype or TORCH_DTYPES[self.dtype])

    def as_torch(self) -> Iterator[Batch]:
        """Batches of CPU tensors."""
        for rows, positions, records in self._raw():
            yield Batch(
                rows,
                torch.from_numpy(positions),
                torch.from_numpy(records),
                self.request_ids.take(pa.array(records)).to_pylist(),
            )

    def as_numpy(self) -> Iterator[Batch]:
        """Batches of numpy arrays; bfloat16 and float8 become float32."""
        for rows, positions, records in self._raw():
            ids = self.request_ids.take(pa.array(records)).to_pylist()
            yield Batch(to_numpy(rows), positions, records, ids)

    def as_arrow(self) -> Iterator[pa.RecordBatch]:
        """Record batches with the columns `request_id`, `record`, `position` and `rows`.

        `rows` is a list of fixed size of the array's elements; bfloat16 and float8 become float32.
        """
        for rows, positions, records in self._raw():
            flat = pa.array(to_numpy(rows).reshape(-1))
            yield pa.RecordBatch.from_arrays(
                [
                    self.request_ids.take(pa.array(records)),
                    pa.array(records),
                    pa.array(positions),
                    pa.FixedSizeListArray.from_arrays(flat, self.hidden),
                ],
                names=["request_id", "record", "position", "rows"],
            )

    def _raw(self) -> Iterator[tuple[torch.Tensor, npt.NDArray[np.int32], IntArray]]:
        if not self.shuffle:
            for start in range(0, self.total_rows, self.size):
                yield self._load(self.runs.span(start, start + self.size))
            return
        random = np.random.default_rng(self.seed)
        chunks = self.runs.cut(_CHUNK_ROWS)
        chunks = chunks.take(random.permutation(len(chunks.counts)))
        # A multiple of the batch: every batch but the last comes from one pool.
        pool_rows = max(-(-POOL_ROWS // self.size), 4) * self.size
        for start in range(0, self.total_rows, pool_rows):
            rows, positions, records = self._load(chunks.span(start, start + pool_rows))
            order = random.permutation(len(rows))
            for first in range(0, len(rows), self.size):
                chosen = order[first : first + self.size]
                yield rows[torch.from_numpy(chosen)], positions[chosen], records[chosen]

    def _load(self, runs: RowRuns) -> tuple[torch.Tensor, npt.NDArray[np.int32], IntArray]:
        """Copy the rows of some runs together."""
        total = runs.total
        rows = self.empty(total)
        positions = np.empty(total, np.int32)
        ends = np.cumsum(runs.counts)
        # Neighbours in a file are copied in one go: records of a block lie side by side.
        follows = (
            (runs.files[1:] == runs.files[:-1])
            & (runs.tensors[1:] == runs.tensors[:-1])
            & (runs.row_starts[1:] == runs.row_starts[:-1] + runs.counts[:-1])
        )
        heads = np.flatnonzero(np.r_[True, ~follows])
        tails = np.r_[heads[1:], len(runs.counts)]
        for head, tail in zip(heads.tolist(), tails.tolist(), strict=True):
            start, stop = int(ends[head] - runs.counts[head]), int(ends[tail - 1])
            payload = self.payloads.get(runs.file_names[runs.files[head]])
            name, first = runs.tensor_names[runs.tensors[head]], int(runs.row_starts[head])
            found = payload.slice(name, first, stop - start, self.dtype, (self.hidden,))
            rows[start:stop].copy_(found)
            for run in range(head, tail):
                count = int(runs.counts[run])
                found = payload.slice(POSITIONS, int(runs.position_starts[run]), count, "I32")
                positions[ends[run] - count : ends[run]] = found.numpy()
        return rows, positions, np.repeat(runs.records, runs.counts)


def one_dtype(key: ArrayKey, pieces: pa.Table) -> tuple[str, int]:
    """The dtype and width of all rows of an array.

    Raises `StoreError` when records differ in them.
    """
    dtypes = sorted(set(pieces["dtype"].unique().to_pylist()))
    widths = sorted(set(pieces["hidden"].unique().to_pylist()))
    if len(dtypes) > 1 or len(widths) > 1:
        raise StoreError(
            f"the records' {key.name} have the dtypes {dtypes} and the widths {widths}; choose "
            "records that agree with filter(), by tag or model",
            "damaged",
        )
    return dtypes[0], widths[0]


def one_kind(key: ArrayKey, heads: pa.Table) -> None:
    """Refuse records of several models, or of which rows were reduced in several ways: their rows
    mean different things, also where they are as wide."""
    for name in ("model", "reduction"):
        found = sorted(set(heads[name].unique().to_pylist()))
        if len(found) > 1:
            raise StoreError(
                f"the records' {key.name} are of the {name}s {found}; choose those of one with "
                f"filter({name}=...), or export --{name}, and take the rows of each for themselves",
                "damaged",
            )

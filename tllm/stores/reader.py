"""Reading a store: its records, and their rows when they are asked for."""

from __future__ import annotations

import logging
import math
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from tllm.spec.capture import Reduction
from tllm.spec.hooks import HookPoint
from tllm.spec.layers import Layers
from tllm.spec.reading import hook_named, one_or_several, require_one_of, whole_number
from tllm.stores.batches import Batch, Batches, BatchFormat, RowRuns, one_dtype, one_kind
from tllm.stores.catalog import (
    PIECE_SCHEMA,
    STATUSES,
    Catalog,
    Damage,
    IntArray,
    RecordTable,
    piece_bytes,
)
from tllm.stores.error import StoreError
from tllm.stores.format import PieceEntry, normal_text, require_marker, root_path
from tllm.stores.payload import PayloadCache
from tllm.stores.record import ArrayKey
from tllm.stores.stored_record import StoredRecord
from tllm.stores.verify import Verification, verify

logger = logging.getLogger(__name__)

Status = Literal["ok", "partial_error", "pending"]

_FINISHED: tuple[Status, ...] = ("ok", "partial_error")
_PAGE = 256


class Store:
    """The records under a root, or some of them, as of the moment when they were listed.

    A sequence of `StoredRecord`, in the order of files. It may be read while it is written. Stores,
    records and streams can be pickled, for processes that see the same folder.
    """

    def __init__(
        self,
        root: Path,
        table: RecordTable,
        payloads: PayloadCache,
        records: IntArray,
        keys: frozenset[int] | None,
        statuses: frozenset[str],
    ) -> None:
        self.root = root
        self._table = table
        self._payloads = payloads
        self._candidates = records
        self._keys = keys
        self._statuses = statuses
        codes = [STATUSES.index(status) for status in sorted(statuses)]
        self._records: IntArray = records[np.isin(table.status[records], codes)]

    @property
    def damages(self) -> Sequence[Damage]:
        """Sidecars that cannot be read: their records are not in this store."""
        return self._table.catalog.damages

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[StoredRecord]:
        for start in range(0, len(self._records), _PAGE):
            yield from self._load(self._records[start : start + _PAGE])

    @overload
    def __getitem__(self, index: int) -> StoredRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[StoredRecord]: ...
    def __getitem__(self, index: int | slice) -> StoredRecord | list[StoredRecord]:
        if isinstance(index, slice):
            return list(self._load(self._records[index]))
        try:
            number = operator.index(index)
        except TypeError:
            number = None
        if number is None or isinstance(index, (bool, np.bool_)):
            raise TypeError(
                f"store[{index!r:.60}]: {type(index).__name__} is no index; give a whole number or "
                "a slice, take several as [store[n] for n in numbers], or choose by name with "
                "store.record(request_id) and store.filter(...)"
            )
        if not -len(self) <= number < len(self):
            raise IndexError(f"store[{number}]: this store has {len(self)} records")
        return next(self._load(self._records[[number]]))

    def __repr__(self) -> str:
        return f"<Store {str(self.root)!r}, {len(self)} records>"

    def filter(
        self,
        *,
        tag: str | Iterable[str] | None = None,
        request_id: str | Iterable[str] | None = None,
        sample_index: int | None = None,
        hook: str | HookPoint | Iterable[str | HookPoint] | None = None,
        layers: Any = None,
        model: str | None = None,
        reduction: str | Iterable[str] | None = None,
        status: Status | Iterable[Status] | None = None,
    ) -> Store:
        """Those records that fit all that is given; one value or several of each. Texts that
        Unicode calls equal are one.

        With `hook` or `layers`, records without such an array are left out, and the others show
        only these arrays; `layers` are as `tllm.spec.layers.Layers` reads them, counted from 0, and
        never choose `lm_head_in`, which has none.

        Raises:
            ValueError: an unknown hook point, reduction or status, or what is no layer, number or
                text.
        """
        table, kept = self._table, self._candidates
        ways = None if reduction is None else one_or_several(reduction)
        for way in ways or ():
            require_one_of("reduction", way, Reduction)
        given = {"tag": tag, "request_id": request_id, "model": model, "reduction": ways}
        for name, wanted in given.items():
            if wanted is not None:
                values = [_text(name, value, ", or several") for value in one_or_several(wanted)]
                kept = kept[self._is_in(name, values)[kept]]
        if sample_index is not None:
            whole_number(sample_index, "sample_index: ")
            kept = kept[(table.heads["sample_index"].to_numpy() == sample_index)[kept]]
        keys = self._keys
        if hook is not None or layers is not None:
            keys = self._chosen_keys(hook, layers)
            if self._keys is not None:
                keys &= self._keys
            _, codes = table.piece_keys
            has = np.zeros(table.size, bool)
            has[table.piece_records[np.isin(codes, list(keys))]] = True
            kept = kept[has[kept]]
        statuses = self._statuses
        if status is not None:
            chosen = one_or_several(status)
            if unknown := [each for each in chosen if each not in STATUSES]:
                raise ValueError(
                    f"status={unknown} is not known; give one or more of {', '.join(STATUSES)}"
                )
            statuses = frozenset(chosen)
        return Store(self.root, table, self._payloads, kept, keys, statuses)

    def record(
        self, request_id: str, *, tag: str | None = None, sample_index: int | None = None
    ) -> StoredRecord:
        """The one record with this request id.

        Raises:
            StoreError: there is none (`missing`), or there are several (`collision`).
        """
        found = self.filter(request_id=request_id, tag=tag, sample_index=sample_index)
        if not len(found):
            lost = ", ".join(damage.path for damage in self.damages[:3])
            hint = f"; it may be in what cannot be read: {lost}" if lost else ""
            others = self.filter(request_id=request_id)
            if len(others):
                asked = {"tag": tag, "sample_index": sample_index}
                also = ", ".join(f"{k}={v!r}" for k, v in asked.items() if v is not None)
                hint = f" and {also}; with this id there are {_first_names(others)}{hint}"
            raise StoreError(f"no record has the request id {request_id!r}{hint}", "missing")
        if len(found) > 1:
            names = _first_names(found)
            raise StoreError(
                f"{len(found)} records have the request id {request_id!r}: {names}; give tag and "
                "sample_index, or use filter()",
                "collision",
            )
        return found[0]

    def has(
        self,
        request_id: str,
        *,
        tag: str | None = None,
        sample_index: int | None = None,
        status: Status = "ok",
    ) -> bool:
        """Whether there is such a record, whole: what a run that goes on can leave out.

        Ask for each sample on its own when requests have several. Fast: a look-up in a table that
        is made at the first call.
        """
        wanted = None if tag is None else _text("tag", tag)
        return any(
            (tag is None or wanted == t) and (sample_index is None or sample_index == s)
            for t, s in self._by_request(status).get(_text("request_id", request_id), ())
        )

    def request_ids(self, *, tag: str | None = None, status: Status = "ok") -> set[str]:
        """The request ids of all records of a status (and a tag), in Unicode's normal form C."""
        wanted = None if tag is None else _text("tag", tag)
        return {
            request_id
            for request_id, found in self._by_request(status).items()
            if tag is None or any(wanted == t for t, _ in found)
        }

    def names(self) -> dict[str, list[Any]]:
        """`request_id`, `tag` and `sample_index` of all of these records, in their order."""
        columns = self._table.heads.select(["request_id", "tag", "sample_index"])
        found: dict[str, list[Any]] = columns.take(pa.array(self._records)).to_pydict()
        return found

    def keys(self) -> list[ArrayKey]:
        """The arrays that occur in these records, by hook point and layer."""
        names, codes = self._table.piece_keys
        found = np.unique(codes[self._piece_mask()])
        return [ArrayKey(*names[code]) for code in found.tolist()]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and positions of these records."""
        return int(piece_bytes(self._table.pieces)[self._piece_mask()].sum())

    @property
    def rows(self) -> int:
        """Rows of all arrays of these records."""
        return int(self._table.pieces["rows"].to_numpy()[self._piece_mask()].sum())

    def batches(
        self,
        hook: str | HookPoint,
        layer: int | None = None,
        *,
        rows: int = 8192,
        format: BatchFormat = "torch",
        shuffle: bool = False,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Iterator[Batch] | Iterator[pa.RecordBatch]:
        """All rows of one array, over all of these records, in batches: each row once.

        Args:
            hook, layer: which array.
            rows: of a batch; the last one may have less.
            format: `torch` (CPU tensors) and `numpy` give `Batch`; `arrow` gives record batches.
                In numpy and Arrow, bfloat16 and float8 become float32.
            shuffle, seed: mix the rows, see `Batches`; give each epoch a seed of its own.
            dtype: convert rows to it.

        Raises:
            ValueError: hook point, layer, rows or format are not allowed.
            StoreError: no record has such an array, or records differ in its dtype or width, or are
                of several models; while iterating, a file is gone or damaged.
        """
        require_one_of("format", format, BatchFormat)
        stream = self.stream(hook, layer, rows=rows, shuffle=shuffle, seed=seed, dtype=dtype)
        if format == "arrow":
            return stream.as_arrow()
        return stream.as_torch() if format == "torch" else stream.as_numpy()

    def stream(
        self,
        hook: str | HookPoint,
        layer: int | None = None,
        *,
        rows: int = 8192,
        shuffle: bool = False,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Batches:
        """What `batches` iterates over: it knows its length, and can be iterated again."""
        key = ArrayKey.of(hook, layer)
        rows = whole_number(rows, "rows=", 1)
        seed = whole_number(seed, "seed=", 0, math.inf)  # as of secrets.randbits(128)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype={dtype!r:.60} is not allowed; give a torch.dtype, or none")
        names, codes = self._table.piece_keys
        mask = self._piece_mask()
        wanted = (key.hook, key.layer)
        mask &= codes == (names.index(wanted) if wanted in names else -1)
        chosen = np.flatnonzero(mask)
        if not len(chosen):
            there = ", ".join(key.name for key in self.keys()) or "none"
            raise StoreError(
                f"none of these {len(self)} records has {key.name}; there are: {there}", "missing"
            )
        pieces = self._table.pieces.take(pa.array(chosen))
        name, hidden = one_dtype(key, pieces)
        of_records = self._table.piece_records[chosen]
        heads = self._table.heads.select(["model", "reduction"])
        one_kind(key, heads.take(pa.array(np.unique(of_records))))
        place = np.full(self._table.size, -1, np.int64)
        place[self._records] = np.arange(len(self._records))
        return Batches(
            key,
            RowRuns.of(pieces, place[of_records]),
            name,
            hidden,
            self._payloads,
            self._table.heads["request_id"].take(pa.array(self._records)).combine_chunks(),
            rows,
            shuffle,
            seed,
            dtype,
        )

    def index(self, *, save: bool = True) -> pa.Table:
        """Everything under the root as a table: one row a piece, with the columns of its record.

        Of the whole root, whatever this store was filtered by; columns are described in
        doc/reference/store-format.md. Saved as `index.parquet`, from which the next `open` takes
        what it needs not read again: worth it from thousands of records on.

        Raises:
            OSError: it cannot be saved.
        """
        catalog = Catalog.read(self.root, self._table.catalog)
        if save:
            catalog.save(self.root)
        return catalog.flat()

    def verify(self, *, checksums: bool = True) -> Verification:
        """Check all files under the root, whatever this store was filtered by.

        Args:
            checksums: read all rows too.
        """
        return verify(self.root, checksums=checksums)

    def refresh(self) -> Store:
        """All records that are there now, with the statuses that this store shows.

        Other filters are not kept; only new sidecars are read, and files that are still the same
        stay mapped.
        """
        table = RecordTable(Catalog.read(self.root, self._table.catalog))
        # Looked at last: a file that takes another's place before that is found out.
        return _whole(self.root, table, self._payloads.current(), self._statuses)

    def _load(self, records: IntArray) -> Iterator[StoredRecord]:
        table = self._table
        heads = table.heads.take(pa.array(records)).to_pylist()
        _, codes = table.piece_keys
        pieces = table.pieces.select(PIECE_SCHEMA.names)
        for record, head in zip(records.tolist(), heads, strict=True):
            span = np.arange(table.piece_starts[record], table.piece_starts[record + 1])
            if self._keys is not None:
                span = span[np.isin(codes[span], list(self._keys))]
            yield StoredRecord(
                self.root,
                head,
                STATUSES[table.status[record]],
                table.errors.get(record, head["error"]),
                [PieceEntry(**row) for row in pieces.take(pa.array(span, pa.int64())).to_pylist()],
                self._payloads,
            )

    def _piece_mask(self) -> npt.NDArray[np.bool_]:
        """`[pieces]`, those of these records and arrays."""
        mine = np.zeros(self._table.size, bool)
        mine[self._records] = True
        mask = mine[self._table.piece_records]
        if self._keys is not None:
            mask &= np.isin(self._table.piece_keys[1], list(self._keys))
        return mask

    def _is_in(self, name: str, values: Sequence[str]) -> npt.NDArray[np.bool_]:
        column = self._table.heads[name]
        found = pc.is_in(column, value_set=pa.array(values, pa.string()))
        result: npt.NDArray[np.bool_] = found.to_numpy()
        return result

    def _chosen_keys(
        self,
        hook: str | HookPoint | Iterable[str | HookPoint] | None,
        layers: Any,
    ) -> frozenset[int]:
        keys = self._table.piece_keys[0]
        hooks: set[str] | None = None
        if hook is not None:
            hooks = {hook_named(point, "hook").value for point in one_or_several(hook)}
        numbers = None
        if layers is not None:
            chosen = Layers.parse(layers, may_be_empty=True)
            last = max((layer for _, layer in keys if layer is not None), default=-1)
            why = "a store does not know how many a model has"
            numbers = set(chosen.from_start("layers", why, last + 1))
        return frozenset(
            code
            for code, (name, layer) in enumerate(keys)
            if (hooks is None or name in hooks) and (numbers is None or layer in numbers)
        )

    def _by_request(self, status: Status) -> dict[str, list[tuple[str, int]]]:
        if status not in STATUSES:
            raise ValueError(f"status={status!r} is not known; give one of {', '.join(STATUSES)}")
        return self._requests[status]

    @cached_property
    def _requests(self) -> dict[str, dict[str, list[tuple[str, int]]]]:
        table = self._table
        found: dict[str, dict[str, list[tuple[str, int]]]] = {status: {} for status in STATUSES}
        names = ["request_id", "tag", "sample_index"]
        columns: list[list[Any]] = [table.column(name) for name in names]
        for record in self._candidates.tolist():
            request_id, tag, sample = (column[record] for column in columns)
            by_request = found[STATUSES[table.status[record]]]
            by_request.setdefault(request_id, []).append((tag, sample))
        return found


def _first_names(records: Store) -> str:
    return ", ".join(record.name for record in records[:5])


def _text(name: str, given: Any, or_several: str = "") -> str:
    """A text that was asked for, as it is in a store."""
    if not isinstance(given, str):
        raise ValueError(f"{name} has {given!r:.60}; give a text{or_several}")
    return normal_text(given)


def open_store(root: str | os.PathLike[str]) -> Store:
    """Open the store under a root: all records whose end is published.

    `filter(status="pending")` gives the others. Sidecars that cannot be read are logged, and listed
    in `Store.damages`.

    Raises:
        ValueError: the root names no folder.
        StoreError: the folder is no store, has a format that is not known, or cannot be read.
    """
    folder = root_path(root)
    require_marker(folder)
    catalog = Catalog.read(folder)
    for damage in catalog.damages:
        logger.warning(
            "%s %s: its records are left out; run `tllm store verify %s`",
            damage.path,
            damage.what,
            folder,
        )
    return _whole(folder, RecordTable(catalog), PayloadCache(folder), frozenset(_FINISHED))


def _whole(
    root: Path, table: RecordTable, payloads: PayloadCache, statuses: frozenset[str]
) -> Store:
    return Store(root, table, payloads, np.flatnonzero(table.status >= 0), None, statuses)

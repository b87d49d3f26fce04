"""All that the sidecars of a store say, as tables: of lines, of pieces, of records."""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tllm.stores.error import StoreError, describe, plain_text
from tllm.stores.format import (
    INDEX,
    ITEM_SIZES,
    LINE_TYPES,
    POSITION_BYTES,
    PieceEntry,
    SidecarLine,
    sidecars,
)

logger = logging.getLogger(__name__)

_ARROW = {str: pa.string(), int: pa.int32(), bool: pa.bool_()}

LINE_SCHEMA = pa.schema(
    {
        "sidecar": pa.string(),
        "sidecar_bytes": pa.int64(),
        "sidecar_mtime_ns": pa.int64(),
        "offset": pa.int64(),
        "num_tokens": pa.int32(),
        **{name: _ARROW[kind] for name, kind in LINE_TYPES.items() if kind in _ARROW},
    }
)
"""One row a sidecar line."""

_WIDE = {"str": pa.string(), "int": pa.int64(), "int | None": pa.int32()}

_LONG = {"file": pa.large_string()}
"""The names of the files of a million records with all layers come to more than the 2 GiB that a
column of `string` holds in one piece."""

PIECE_SCHEMA = pa.schema(
    {field.name: _LONG.get(field.name, _WIDE[str(field.type)]) for field in fields(PieceEntry)}
)
"""One row a piece; `file` is relative to the root here."""

_INDEX_VERSION = b"1"
_INDEX_CHECKSUM = b"tllm-store-crc32"
_NO_CHECKSUM = b"00000000"

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Damage:
    """A sidecar, or a line of one, that cannot be read.

    Attributes:
        path: relative to the root.
    """

    path: str
    what: str


@dataclass(frozen=True)
class Catalog:
    """What is published under a root, as of one moment.

    Attributes:
        lines: `LINE_SCHEMA` and `pieces`, a list of `PIECE_SCHEMA`, in the order of sidecars and
            lines.
        damages: what could not be read.
        indexed: how many of the lines came from the index file.
    """

    lines: pa.Table
    damages: tuple[Damage, ...] = ()
    indexed: int = 0

    @classmethod
    def read(cls, root: Path, known: Catalog | None = None, index: bool = True) -> Catalog:
        """Read what is there now.

        Sidecars never change, so only those are read that neither `known` nor the index file has.

        Args:
            index: use the index file. It holds nothing that the sidecars do not: one that cannot
                be used is done without.

        Raises:
            StoreError: a folder cannot be read.
        """
        if known is None and index:
            try:
                known = read_index(root)
            except StoreError as error:
                logger.warning("sidecars are read instead of the index: %s", error)
        states = sidecars(root)
        kept = known.restricted(known._whole(states)) if known is not None else None
        kept_paths = set(kept.states) if kept is not None else set()
        builder = _Builder()
        for path, state in states.items():
            if path not in kept_paths:
                builder.add_file(root, path, state)
        fresh = builder.build()
        if kept is None:
            return fresh
        lines = kept.lines
        if len(fresh.lines):
            lines = pa.concat_tables([lines, fresh.lines])
            keys = [("sidecar", "ascending"), ("offset", "ascending")]
            lines = lines.take(pc.sort_indices(lines, sort_keys=keys))
        return Catalog(lines, fresh.damages, len(kept.lines))

    def save(self, root: Path) -> Path:
        """Write the index file, in one go; returns its path. Raises `OSError`."""
        target = root / INDEX
        staged = root / f".{INDEX}.{os.getpid()}.{threading.get_ident()}"
        # A sidecar that is damaged is read, and told of, each time.
        whole = self.restricted(self._whole(self.states))
        table = whole.flat().replace_schema_metadata(
            {"tllm-store-index": _INDEX_VERSION, _INDEX_CHECKSUM: _NO_CHECKSUM}
        )
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
        data = bytearray(sink.getvalue())
        data[_checksum_place(data)] = b"%08x" % zlib.crc32(data)
        try:
            staged.write_bytes(data)
            os.replace(staged, target)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        return target

    def flat(self) -> pa.Table:
        """One row a piece with the columns of its line; nulls for a line without pieces."""
        counts = np.bincount(self.piece_lines, minlength=len(self.lines))
        rows = np.repeat(np.arange(len(self.lines)), np.maximum(counts, 1))
        first = np.r_[True, rows[1:] != rows[:-1]] if len(rows) else np.zeros(0, bool)
        take = np.full(len(rows), -1, np.int64)
        take[counts[rows] > 0] = np.arange(len(self.pieces))
        table = self.lines.select(LINE_SCHEMA.names).take(pa.array(rows))
        indices = pa.array(take, mask=take < 0)
        for name in PIECE_SCHEMA.names:
            table = table.append_column(name, self.pieces[name].take(indices))
        return table.append_column("first", pa.array(first))

    @cached_property
    def pieces(self) -> pa.Table:
        """`PIECE_SCHEMA`, in the order of lines."""
        pieces = pa.Table.from_struct_array(self.lines["pieces"].combine_chunks().flatten())
        return pieces.select(PIECE_SCHEMA.names)

    @cached_property
    def piece_lines(self) -> IntArray:
        """`[pieces]`, the line of each, ascending."""
        lines: IntArray = pc.list_parent_indices(self.lines["pieces"].combine_chunks()).to_numpy()
        return lines

    def ended(self) -> list[dict[str, Any]]:
        """Of each record's end that is published, and not void, the columns that a writer needs,
        and its number among the lines as `line`."""
        names = ["tag", "request_id", "sample_index", "stage", "record_id", "generation"]
        lines = self.lines.select([*names, "sidecar", "layout"])
        lines = lines.append_column("line", pa.array(np.arange(len(lines))))
        is_end = pc.and_(self.lines["last"], pc.not_equal(self.lines["status"], "aborted"))
        rows: list[dict[str, Any]] = lines.filter(is_end).to_pylist()
        return rows

    def record_ids(self) -> set[tuple[str, int]]:
        """Ids and stages of all records, also of those that were aborted or have not ended."""
        columns = (self.lines[name].to_pylist() for name in ("record_id", "stage"))
        return set(zip(*columns, strict=True))

    def bytes_of(self, writer_ids: Iterable[str]) -> int:
        """Bytes of rows and positions that these writers have published."""
        wanted = pa.array(writer_ids, pa.string())
        mine = pc.is_in(self.lines["writer"], value_set=wanted).to_numpy()
        pieces = self.pieces.filter(pa.array(mine[self.piece_lines]))
        return int(piece_bytes(pieces).sum())

    @property
    def states(self) -> dict[str, tuple[int, int]]:
        """The sidecars that were read: size and time of modification by path."""
        names = ("sidecar", "sidecar_bytes", "sidecar_mtime_ns")
        paths, sizes, times = (self.lines[name].to_pylist() for name in names)
        return {p: (s, t) for p, s, t in zip(paths, sizes, times, strict=True)}

    def _whole(self, states: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Those of sidecars of which every line could be read."""
        damaged = {damage.path for damage in self.damages}
        return {path: state for path, state in states.items() if path not in damaged}

    def restricted(self, states: Mapping[str, tuple[int, int]]) -> Catalog:
        """What of this is of sidecars in one of these states."""
        paths = self.lines["sidecar"].to_pylist()
        current = {path for path, state in self.states.items() if states.get(path) == state}
        keep = np.fromiter((path in current for path in paths), bool, len(paths))
        return self if keep.all() else Catalog(self.lines.filter(pa.array(keep)))


def read_index(root: Path) -> Catalog | None:
    """What the index file says; None when there is none, or one without a checksum.

    Raises:
        StoreError: it cannot be read, or is not as it was written.
    """
    path = root / INDEX
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError.from_os_error(f"{path} cannot be read", error) from None
    try:
        if _INDEX_CHECKSUM not in data:
            metadata = pq.read_schema(pa.BufferReader(data)).metadata
            if b"tllm-store-index" in metadata:
                return None  # of a tLLM that wrote none
        content = bytearray(data)
        place = _checksum_place(content)
        wanted, content[place] = bytes(content[place]), _NO_CHECKSUM
        if b"%08x" % zlib.crc32(content) != wanted:
            raise ValueError("its checksum does not match")
        return _index_catalog(pq.read_table(pa.BufferReader(data), page_checksum_verification=True))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} is damaged: {error}; remove it, or make another with `tllm store index`",
            "damaged",
        ) from None


def _index_catalog(table: pa.Table) -> Catalog:
    if table.schema.metadata.get(b"tllm-store-index") != _INDEX_VERSION:
        raise ValueError("it is of another version")
    if pc.any(pc.match_substring_regex(table["file"], r"^/|(^|/)\.\.(/|$)")).as_py():
        raise ValueError("it names payloads outside of the store")
    first = table["first"].to_numpy()
    lines = table.filter(pa.array(first)).select(LINE_SCHEMA.names).cast(LINE_SCHEMA)
    has_piece = table["hook"].is_valid().to_numpy()
    pieces = table.filter(pa.array(has_piece)).select(PIECE_SCHEMA.names).cast(PIECE_SCHEMA)
    return Catalog(_with_pieces(lines, (np.cumsum(first) - 1)[has_piece], pieces))


def _with_pieces(lines: pa.Table, of_line: IntArray | list[int], pieces: pa.Table) -> pa.Table:
    """`lines` with the pieces of each, given the line of each piece, ascending."""
    ends = np.cumsum(np.bincount(np.asarray(of_line, np.int64), minlength=len(lines)))
    columns = [column.combine_chunks() for column in pieces.columns]
    rows = pa.StructArray.from_arrays(columns, fields=list(PIECE_SCHEMA))
    lists = pa.ListArray.from_arrays(pa.array(np.r_[0, ends], pa.int32()), rows)
    return lines.append_column("pieces", lists)


def _checksum_place(data: bytes | bytearray) -> slice:
    """Where the index file has its checksum: eight digits in the metadata at its end.

    Raises `ValueError` when it has none.
    """
    name = data.rfind(_INDEX_CHECKSUM)
    # Between name and digits are the type and the length of the value, in Thrift's compact form.
    start = name + len(_INDEX_CHECKSUM) + 2
    if name < 0 or data[start - 1] != len(_NO_CHECKSUM):
        raise ValueError("it has no checksum")
    return slice(start, start + len(_NO_CHECKSUM))


def piece_bytes(pieces: pa.Table) -> npt.NDArray[np.int64]:
    """`[pieces]`, bytes of rows and positions of each."""
    sizes = pieces["dtype"].combine_chunks().dictionary_encode()
    items = np.array([ITEM_SIZES[name] for name in sizes.dictionary.to_pylist()], np.int64)
    per_row = items[sizes.indices.to_numpy()] if len(pieces) else np.zeros(0, np.int64)
    hidden, rows = pieces["hidden"].to_numpy(), pieces["rows"].to_numpy()
    result: npt.NDArray[np.int64] = rows * (hidden * per_row + POSITION_BYTES)
    return result


class _Builder:
    """Reads sidecars into columns."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Any]] = {name: [] for name in LINE_SCHEMA.names}
        self._pieces: dict[str, list[Any]] = {name: [] for name in PIECE_SCHEMA.names}
        self._piece_lines: list[int] = []
        self._damages: list[Damage] = []

    def add_file(self, root: Path, path: str, state: tuple[int, int]) -> None:
        """One sidecar; nothing when it is gone meanwhile."""
        if plain_text(path) != path:
            self._damages.append(Damage(plain_text(path), "has a name that is not UTF-8"))
            return
        try:
            data = (root / path).read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            self._damages.append(Damage(path, f"cannot be read: {describe(error)}"))
            return
        offset = 0
        for number, text in enumerate(data.splitlines(keepends=True)):
            try:
                self._add_line(path, state, offset, SidecarLine.decode(text))
            except ValueError as error:
                self._damages.append(Damage(path, f"line {number + 1}: {error}"))
            offset += len(text)
        if not data:
            self._damages.append(Damage(path, "is empty"))

    def build(self) -> Catalog:
        """The tables."""
        pieces = pa.table(self._pieces, schema=PIECE_SCHEMA)
        lines = pa.table(self._lines, schema=LINE_SCHEMA)
        return Catalog(_with_pieces(lines, self._piece_lines, pieces), tuple(self._damages))

    def _add_line(self, path: str, state: tuple[int, int], offset: int, line: SidecarLine) -> None:
        columns = self._lines
        number = len(columns["sidecar"])
        columns["sidecar"].append(path)
        columns["sidecar_bytes"].append(state[0])
        columns["sidecar_mtime_ns"].append(state[1])
        columns["offset"].append(offset)
        columns["num_tokens"].append(len(line.token_ids))
        for name in columns.keys() & LINE_TYPES.keys():
            columns[name].append(getattr(line, name))
        folder = PurePosixPath(path).parent.as_posix()
        for piece in line.arrays:
            self._piece_lines.append(number)
            for name in PIECE_SCHEMA.names:
                value = getattr(piece, name)
                self._pieces[name].append(f"{folder}/{value}" if name == "file" else value)


def read_line(root: Path, sidecar: str, offset: int) -> SidecarLine:
    """One line of a sidecar. Raises `OSError`, or `ValueError` for what is none."""
    with (root / sidecar).open("rb") as file:
        file.seek(offset)
        return SidecarLine.decode(file.readline())


def _records_of(lines: pa.Table) -> IntArray:
    """`[lines]`, the record of each line, numbered in the order of their first lines.

    Lines of one record id that differ in a name are of several records: consumers of one engine
    once wrote records of their own under the id of the request.
    """
    ids = _codes(lines["record_id"])
    _, first = np.unique(ids, return_index=True)
    names = [_codes(lines[name]) for name in ("tag", "request_id", "sample_index")]
    if all((codes == codes[first[ids]]).all() for codes in names):
        return ids
    numbers: dict[tuple[int, ...], int] = {}
    keys = zip(*(codes.tolist() for codes in (ids, *names)), strict=True)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _codes(column: pa.ChunkedArray) -> IntArray:
    """A number for each value, the same for equal ones, in the order of first appearance."""
    codes: IntArray = column.combine_chunks().dictionary_encode().indices.to_numpy()
    return codes.astype(np.int64)


STATUSES = ("ok", "partial_error", "pending")
"""What a record that can be read may be; `pending`: its end was not published (yet)."""

_HIDDEN = -1


class RecordTable:
    """One row a record; its parts, and those of its pipeline stages, are joined.

    Records are in the order of their first lines. Those that were aborted, or that another record
    replaced, are there with the status code -1.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        lines = catalog.lines
        group = self._records = _records_of(lines)
        self._stage: IntArray = lines["stage"].to_numpy().astype(np.int64)
        self._part: IntArray = lines["part"].to_numpy().astype(np.int64)
        self._last = lines["last"].to_numpy()
        self._num_stages: IntArray = lines["num_stages"].to_numpy().astype(np.int64)
        order = np.lexsort((self._part, self._stage, group))
        self.size = int(group.max()) + 1 if len(group) else 0
        starts = np.searchsorted(group[order], np.arange(self.size + 1))
        self.status: npt.NDArray[np.int8] = np.full(self.size, _HIDDEN, np.int8)
        self.errors: dict[int, str] = {}
        self.doubles: list[int] = []
        """Lines of parts that are there already, of the same names: they are not used."""
        head = order[starts[:-1]] if self.size else np.zeros(0, np.int64)
        codes = self._line_codes()
        alone = (np.diff(starts) == 1) & (self._num_stages[head] == 1) & (self._part[head] == 0)
        alone &= self._last[head] if self.size else False
        self.status[alone] = codes[head[alone]]
        for record in np.flatnonzero(~alone):
            head[record] = self._join(
                int(record), order[starts[record] : starts[record + 1]], codes
            )
        self.head: IntArray = head
        """`[records]`, the line that describes each: the last of the first stage there is."""
        self._hide_replaced()
        used = np.ones(len(lines), bool)
        used[self.doubles] = False
        line = catalog.piece_lines
        kept = np.flatnonzero(used[line])
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        by_record = kept[np.argsort(rank[line[kept]], kind="stable")]
        self.pieces: pa.Table = catalog.pieces.take(pa.array(by_record))
        """`PIECE_SCHEMA`, in the order of records, stages and parts."""
        self.piece_records: IntArray = group[line[by_record]]
        """`[pieces]`, the record of each, ascending."""
        self.piece_starts: IntArray = np.searchsorted(self.piece_records, np.arange(self.size + 1))
        """`[records + 1]`, the first piece of each."""

    @cached_property
    def heads(self) -> pa.Table:
        """One row a record: `LINE_SCHEMA` of the line that describes it."""
        return self.catalog.lines.select(LINE_SCHEMA.names).take(pa.array(self.head))

    @cached_property
    def piece_keys(self) -> tuple[list[tuple[str, int | None]], IntArray]:
        """The arrays that occur, as `(hook, layer)`, and `[pieces]`, which one each belongs to."""
        hooks = self.pieces["hook"].combine_chunks().dictionary_encode()
        names = hooks.dictionary.to_pylist()
        layers: IntArray = self.pieces["layer"].fill_null(-1).to_numpy().astype(np.int64)
        if not len(layers):
            return [], layers
        wide = int(layers.max()) + 2
        numbers, codes = np.unique(
            hooks.indices.to_numpy() * wide + layers + 1, return_inverse=True
        )
        keys = [(names[n // wide], None if n % wide == 0 else int(n % wide) - 1) for n in numbers]
        return keys, codes.astype(np.int64)

    @property
    def whole(self) -> npt.NDArray[np.bool_]:
        """`[lines]`, whether each is of a record that readers see whole."""
        found: npt.NDArray[np.bool_] = (self.status == STATUSES.index("ok"))[self._records]
        return found

    def column(self, name: str) -> list[Any]:
        return self.heads[name].to_pylist()

    def _line_codes(self) -> npt.NDArray[np.int8]:
        encoded = self.catalog.lines["status"].combine_chunks().dictionary_encode()
        names = encoded.dictionary.to_pylist()
        known = np.array([STATUSES.index(n) if n in STATUSES else _HIDDEN for n in names], np.int8)
        return known[encoded.indices.to_numpy()] if len(names) else np.zeros(0, np.int8)

    def _join(self, record: int, lines: IntArray, codes: npt.NDArray[np.int8]) -> int:
        """Work out a record of several lines; returns the line that describes it."""
        parts: dict[tuple[int, int], int] = {}
        for line in lines.tolist():
            place = int(self._stage[line]), int(self._part[line])
            if place in parts:
                self.doubles.append(line)
            parts.setdefault(place, line)
        errors = self.catalog.lines["error"].take(pa.array(list(parts.values()))).to_pylist()
        texts = list(dict.fromkeys(error for error in errors if error))
        ends = {stage: part for (stage, part), line in parts.items() if self._last[line]}
        missing = [
            f"part {part} of stage {stage}"
            for stage, end in ends.items()
            for part in range(end)
            if (stage, part) not in parts
        ]
        if missing:
            texts.append(f"{', '.join(missing)} is missing on disk")
        num_stages = int(self._num_stages[lines].max())
        partial = STATUSES.index("partial_error")
        if any(codes[line] == _HIDDEN for line in parts.values()):
            self.status[record] = _HIDDEN
        elif any(stage not in ends for stage in range(num_stages)):
            self.status[record] = STATUSES.index("pending")
        elif texts or any(codes[parts[place]] == partial for place in ends.items()):
            self.status[record] = partial
        else:
            self.status[record] = STATUSES.index("ok")
        self.errors[record] = "; ".join(texts)
        first = min(stage for stage, _ in parts)
        return parts[first, ends[first]] if first in ends else int(lines[0])

    def _hide_replaced(self) -> None:
        """A record hides those of lower generations once it is whole."""
        generations = self.heads["generation"].to_numpy()
        finished = (self.status >= 0) & (self.status != STATUSES.index("pending"))
        replaces = self.heads["replaces"].to_numpy() & finished & (generations > 1)
        if not replaces.any():
            return
        names = [self.column(name) for name in ("tag", "request_id", "sample_index")]
        identities = list(zip(*names, strict=True))
        newest: dict[tuple[Any, ...], int] = {}
        for record in np.flatnonzero(replaces).tolist():
            identity = identities[record]
            newest[identity] = max(newest.get(identity, 0), int(generations[record]))
        for record, identity in enumerate(identities):
            if generations[record] < newest.get(identity, 0):
                self.status[record] = _HIDDEN

"""All that the sidecars of a store say, as tables."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tllm.stores.dtype import ITEM_SIZES
from tllm.stores.ledger import Identity, Known
from tllm.stores.paths import INDEX, WriterPaths, sidecars
from tllm.stores.sidecar import POSITION_BYTES, SidecarLine

logger = logging.getLogger(__name__)

LINE_SCHEMA = pa.schema(
    [
        ("sidecar", pa.string()),
        ("sidecar_bytes", pa.int64()),
        ("sidecar_mtime_ns", pa.int64()),
        ("offset", pa.int64()),
        ("record_id", pa.string()),
        ("request_id", pa.string()),
        ("tag", pa.string()),
        ("sample_index", pa.int32()),
        ("generation", pa.int32()),
        ("replaces", pa.bool_()),
        ("stage", pa.int32()),
        ("num_stages", pa.int32()),
        ("part", pa.int32()),
        ("last", pa.bool_()),
        ("status", pa.string()),
        ("error", pa.string()),
        ("prompt_len", pa.int32()),
        ("num_tokens", pa.int32()),
        ("model", pa.string()),
        ("reduction", pa.string()),
        ("created", pa.string()),
        ("layout", pa.string()),
        ("writer", pa.string()),
    ]
)
"""One row a sidecar line."""

PIECE_SCHEMA = pa.schema(
    [
        ("hook", pa.string()),
        ("layer", pa.int32()),
        ("dtype", pa.string()),
        ("rows", pa.int64()),
        ("hidden", pa.int64()),
        ("file", pa.string()),
        ("tensor", pa.string()),
        ("row_start", pa.int64()),
        ("position_start", pa.int64()),
        ("crc32", pa.int64()),
    ]
)
"""One row a piece; `file` is relative to the root here."""

_FROM_LINE = [
    name
    for name in LINE_SCHEMA.names
    if name not in ("sidecar", "sidecar_bytes", "sidecar_mtime_ns", "offset", "num_tokens")
]

_INDEX_VERSION = b"1"


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
        lines: `LINE_SCHEMA`, in the order of sidecars and lines.
        pieces: `PIECE_SCHEMA` and `line`, the row of `lines` that a piece belongs to, ascending.
        damages: what could not be read.
        indexed: how many of the lines came from the index file.
    """

    lines: pa.Table
    pieces: pa.Table
    damages: tuple[Damage, ...] = ()
    indexed: int = 0

    @classmethod
    def read(cls, root: Path, known: Catalog | None = None) -> Catalog:
        """Read what is there now.

        Sidecars never change, so only those are read that neither `known` nor the index file has.
        """
        known = known or cls._load_index(root)
        states = {path: (state.st_size, state.st_mtime_ns) for path, state in sidecars(root)}
        kept, kept_paths = known._restrict(states) if known is not None else (None, set())
        builder = _Builder()
        for path, state in states.items():
            if path not in kept_paths:
                builder.add_file(root, path, state)
        fresh = builder.build()
        if kept is None:
            return fresh
        if not len(fresh.lines):
            return Catalog(kept.lines, kept.pieces, fresh.damages, len(kept.lines))
        return kept._and(fresh)

    def save(self, root: Path) -> Path:
        """Write the index file, in one go; returns its path. Raises `OSError`."""
        target = root / INDEX
        staged = root / f".{INDEX}.{os.getpid()}.{threading.get_ident()}"
        try:
            pq.write_table(
                self.flat().replace_schema_metadata({"tllm-store-index": _INDEX_VERSION}),
                staged,
                compression="zstd",
            )
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
        table = self.lines.take(pa.array(rows))
        indices = pa.array(take, mask=take < 0)
        for name in PIECE_SCHEMA.names:
            table = table.append_column(name, self.pieces[name].take(indices))
        return table.append_column("first", pa.array(first))

    @cached_property
    def piece_lines(self) -> npt.NDArray[np.int64]:
        """`[pieces]`, the line of each."""
        return self.pieces["line"].to_numpy()

    def known(self, paths: WriterPaths) -> Iterator[tuple[Identity, Known]]:
        """The identities that exist, for the writer of `paths`."""
        prefix = f"{paths.folder.relative_to(paths.root).as_posix()}/"
        ended = self.lines.filter(
            pc.and_(self.lines["last"], pc.not_equal(self.lines["status"], "aborted"))
        )
        names = ["tag", "request_id", "sample_index", "stage", "record_id", "generation"]
        for row in ended.select([*names, "sidecar", "layout"]).to_pylist():
            own = row["sidecar"].startswith(prefix) and row["layout"] != "sharded"
            yield (
                (row["tag"], row["request_id"], row["sample_index"], row["stage"]),
                Known(
                    row["record_id"],
                    row["generation"],
                    paths.root / row["sidecar"] if own else None,
                ),
            )

    def bytes_of(self, paths: WriterPaths) -> int:
        """Bytes of rows and positions that a writer has published."""
        mine = pc.equal(self.lines["writer"], paths.writer_id).to_numpy()
        pieces = self.pieces.filter(pa.array(mine[self.piece_lines]))
        return int(piece_bytes(pieces).sum())

    def _restrict(self, states: Mapping[str, tuple[int, int]]) -> tuple[Catalog, set[str]]:
        """What of this is still as it was, and the sidecars that it covers."""
        paths = self.lines["sidecar"].to_pylist()
        sizes = self.lines["sidecar_bytes"].to_pylist()
        times = self.lines["sidecar_mtime_ns"].to_pylist()
        keep = np.fromiter(
            (states.get(p) == (s, t) for p, s, t in zip(paths, sizes, times, strict=True)),
            bool,
            len(paths),
        )
        if keep.all():
            return self, set(paths)
        lines = self.lines.filter(pa.array(keep))
        mask = keep[self.piece_lines]
        pieces = self.pieces.filter(pa.array(mask))
        renumbered = (np.cumsum(keep) - 1)[self.piece_lines[mask]]
        place = pieces.schema.get_field_index("line")
        pieces = pieces.set_column(place, "line", pa.array(renumbered, pa.int64()))
        return Catalog(lines, pieces), set(lines["sidecar"].to_pylist())

    def _and(self, fresh: Catalog) -> Catalog:
        """Both, in the order of sidecars."""
        lines = pa.concat_tables([self.lines, fresh.lines])
        shifted = pa.concat_arrays(
            [
                pa.array(self.piece_lines, pa.int64()),
                pa.array(fresh.piece_lines + len(self.lines), pa.int64()),
            ]
        )
        pieces = pa.concat_tables(
            [self.pieces.select(PIECE_SCHEMA.names), fresh.pieces.select(PIECE_SCHEMA.names)]
        ).append_column("line", shifted)
        order = pc.sort_indices(
            lines, sort_keys=[("sidecar", "ascending"), ("offset", "ascending")]
        ).to_numpy()
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order), dtype=order.dtype)
        numbers = rank[shifted.to_numpy()].astype(np.int64)
        by_line = np.argsort(numbers, kind="stable")
        pieces = pieces.take(pa.array(by_line))
        place = pieces.schema.get_field_index("line")
        pieces = pieces.set_column(place, "line", pa.array(numbers[by_line], pa.int64()))
        return Catalog(lines.take(pa.array(order)), pieces, fresh.damages, len(self.lines))

    @classmethod
    def _load_index(cls, root: Path) -> Catalog | None:
        """From the index file; None when there is none, or none that can be used."""
        try:
            table = pq.read_table(root / INDEX)
        except FileNotFoundError:
            return None
        except (OSError, pa.ArrowException) as error:
            # It holds nothing that the sidecars do not.
            logger.warning("%s cannot be used, sidecars are read instead: %s", root / INDEX, error)
            return None
        metadata = table.schema.metadata or {}
        if metadata.get(b"tllm-store-index") != _INDEX_VERSION:
            logger.warning("%s is of another version, sidecars are read instead", root / INDEX)
            return None
        first = table["first"].to_numpy()
        lines = table.filter(pa.array(first)).select(LINE_SCHEMA.names).cast(LINE_SCHEMA)
        has_piece = table["hook"].is_valid().to_numpy()
        number = np.cumsum(first) - 1
        pieces = table.filter(pa.array(has_piece)).select(PIECE_SCHEMA.names).cast(PIECE_SCHEMA)
        line = pa.array(number[has_piece], pa.int64())
        return cls(lines, pieces.append_column("line", line))


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
        try:
            data = (root / path).read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            self._damages.append(Damage(path, f"cannot be read: {error.strerror}"))
            return
        offset = 0
        for number, text in enumerate(data.splitlines(keepends=True)):
            try:
                self._add_line(path, state, offset, SidecarLine.decode(text, checksum=False))
            except ValueError as error:
                self._damages.append(Damage(path, f"line {number + 1}: {error}"))
            offset += len(text)
        if not data:
            self._damages.append(Damage(path, "is empty"))

    def build(self) -> Catalog:
        """The tables."""
        pieces = pa.table(self._pieces, schema=PIECE_SCHEMA)
        line = pa.array(self._piece_lines, pa.int64())
        lines = pa.table(self._lines, schema=LINE_SCHEMA)
        return Catalog(lines, pieces.append_column("line", line), tuple(self._damages))

    def _add_line(self, path: str, state: tuple[int, int], offset: int, line: SidecarLine) -> None:
        columns = self._lines
        number = len(columns["sidecar"])
        columns["sidecar"].append(path)
        columns["sidecar_bytes"].append(state[0])
        columns["sidecar_mtime_ns"].append(state[1])
        columns["offset"].append(offset)
        columns["num_tokens"].append(len(line.token_ids))
        for name in _FROM_LINE:
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
        return SidecarLine.decode(file.readline(), checksum=False)

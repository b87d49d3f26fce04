"""Payloads: safetensors files, while they are written, and mapped to be read."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from tllm.stores.error import StoreError
from tllm.stores.format import (
    ITEM_SIZES,
    POSITIONS,
    TORCH_DTYPES,
    PieceEntry,
    as_bytes,
    parse_json,
)

_PREFIX_BYTES = 8
"""The length of the header, little endian, before the header itself."""

_MAX_HEADER_BYTES = 100_000_000
"""What safetensors itself accepts."""

_IOV_MAX = 1024
"""Buffers of one `writev`; Linux takes no more."""

_ENTRY_BYTES = 208
"""More than one tensor and the padding before it take in the header, its name excepted."""

_FIXED_BYTES = 1024
"""More than all else takes in the header: `__metadata__`, and the tensor of positions."""


@dataclass(slots=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        dtype: by safetensors' name.
        begin, end: byte offsets from the end of the header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes, by dtype and shape; `ValueError` for what no store has."""
        if self.dtype not in ITEM_SIZES:
            raise ValueError(f"tensor {self.name!r} has the unknown dtype {self.dtype!r}")
        size = ITEM_SIZES[self.dtype]
        for dim in self.shape:
            if type(dim) is not int or dim < 0:
                raise ValueError(f"tensor {self.name!r} has the shape {self.shape}")
            size *= dim
        return size


def encode_header(
    entries: list[TensorEntry], metadata: Mapping[str, str], capacity: int | None = None
) -> bytes:
    """Prefix and header, padded with spaces to a multiple of 8 or to exactly `capacity` bytes.

    Raises `ValueError` when it is longer than `capacity`.
    """
    # Names and dtypes are of this package's making: nothing in them is to be escaped.
    fields = [
        f'"{entry.name}":{{"dtype":"{entry.dtype}","shape":[{",".join(map(str, entry.shape))}],'
        f'"data_offsets":[{entry.begin},{entry.end}]}}'
        for entry in entries
    ]
    if metadata:
        named = json.dumps(dict(metadata), separators=(",", ":"), ensure_ascii=True)
        fields.insert(0, f'"__metadata__":{named}')
    text = f"{{{','.join(fields)}}}".encode()
    length = -(-len(text) // 8) * 8 if capacity is None else capacity - _PREFIX_BYTES
    if len(text) > length:
        raise ValueError(f"a header of {len(text)} bytes does not fit in {length}")
    return length.to_bytes(_PREFIX_BYTES, "little") + text.ljust(length)


def decode_header(data: memoryview) -> tuple[dict[str, TensorEntry], int]:
    """What is in a file, by name, and the offset at which the tensors' bytes begin.

    Raises `ValueError` saying what is wrong: the tensors must cover the data without holes, and
    shapes must agree with offsets.
    """
    if len(data) < _PREFIX_BYTES:
        raise ValueError(f"only {len(data)} bytes long")
    length = int.from_bytes(data[:_PREFIX_BYTES], "little")
    data_start = _PREFIX_BYTES + length
    if length > _MAX_HEADER_BYTES or data_start > len(data):
        raise ValueError(f"its header would have {length} bytes, the file has {len(data)}")
    try:
        fields = parse_json(bytes(data[_PREFIX_BYTES:data_start]))
        fields.pop("__metadata__", None)
        entries = {
            name: TensorEntry(name, field["dtype"], tuple(field["shape"]), *field["data_offsets"])
            for name, field in fields.items()
        }
        in_order = sorted(entries.values(), key=lambda e: (e.begin, e.end))
        sizes = [entry.size for entry in in_order]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is not safetensors': {error}") from None
    end = 0
    for entry, size in zip(in_order, sizes, strict=True):
        if entry.begin != end or entry.end != end + size:
            raise ValueError(
                f"tensor {entry.name!r} lies at {entry.begin} to {entry.end}, but {size} bytes "
                f"from {end} on were expected"
            )
        end = entry.end
    if data_start + end != len(data):
        raise ValueError(f"the file has {len(data)} bytes where its header says {data_start + end}")
    return entries, data_start


@dataclass(frozen=True)
class PayloadMark:
    """A state of a `PayloadFile` to which it can be rolled back."""

    entries: int
    last: TensorEntry | None
    size: int
    names: Mapping[str, int]


class RowPlace(NamedTuple):
    """Where rows of several arrays were put: by array, in which tensor, from which row on."""

    tensors: tuple[str, ...]
    row_starts: tuple[int, ...]


class PayloadFile:
    """Appends rows to a file that becomes valid safetensors when it is finished.

    Rows of one name that follow each other become one tensor `[rows, width]`. Nothing touches the
    disk before `write` or `finish`; when all fits in memory until `finish`, the header has its
    exact size, else `header_bytes` are kept free for it at the start.

    Between writes the file is not open: a store may be filling thousands of files.

    Args:
        path: file to create; it must not exist.
        header_bytes: room for the header when the file is written in several goes.
        sync: `finish` waits until the file's content is on the device.
    """

    def __init__(self, path: Path, header_bytes: int, sync: bool = False) -> None:
        self.path = path
        self._sync = sync
        self._capacity = -(-header_bytes // 8) * 8
        self._entries: list[TensorEntry] = []
        self._names: dict[str, int] = {}
        self._pending: list[memoryview] = []
        self._header_used = _FIXED_BYTES
        self.data_bytes = 0
        """Bytes of tensors so far, written or pending."""
        self.begun = False
        """Whether there is a file on disk."""

    def has_room(self, tensors: int, name_bytes: int) -> bool:
        """Whether the header has room for more tensors with names of `name_bytes` in all."""
        return self._header_used + tensors * _ENTRY_BYTES + name_bytes <= self._capacity

    def add(
        self,
        names: Sequence[str],
        dtype: str,
        width: int | None,
        rows: int,
        buffers: Sequence[memoryview],
    ) -> RowPlace:
        """Append rows `[rows, width]` (`[rows]` when `width` is None) of each name.

        The first continues the last tensor when that has the same name, dtype and width; a name
        that was used before otherwise gets `+1`, `+2`, ... appended.

        Args:
            buffers: the bytes of `[names, rows, width]`, in order.
        """
        tail = () if width is None else (width,)
        length = rows * (1 if width is None else width) * ITEM_SIZES[dtype]
        last = self._entries[-1] if self._entries else None
        tensors, starts = [], [0] * len(names)
        continued = 0
        if last is not None and (last.name.partition("+")[0], last.dtype, last.shape[1:]) == (
            names[0],
            dtype,
            tail,
        ):
            continued, starts[0] = 1, last.shape[0]
            tensors.append(last.name)
            last.shape = (last.shape[0] + rows, *tail)
            last.end += length
            self.data_bytes += length
        else:
            self._align(ITEM_SIZES[dtype])
        # The others are aligned: each follows rows of the same element size.
        counts, entries, size, shape = self._names, self._entries, self.data_bytes, (rows, *tail)
        used = 0
        for name in names[continued:]:
            count = counts.get(name, 0)
            counts[name] = count + 1
            full = f"{name}+{count}" if count else name
            entries.append(TensorEntry(full, dtype, shape, size, size + length))
            tensors.append(full)
            used += _ENTRY_BYTES + len(full)
            size += length
        self.data_bytes = size
        self._header_used += used
        self._pending += [buffer for buffer in buffers if len(buffer)]
        return RowPlace(tuple(tensors), tuple(starts))

    def mark(self) -> PayloadMark:
        """The present state, for `rollback`; only between writes, with nothing pending."""
        last = self._entries[-1] if self._entries else None
        copy = last and TensorEntry(last.name, last.dtype, last.shape, last.begin, last.end)
        return PayloadMark(len(self._entries), copy, self.data_bytes, dict(self._names))

    def rollback(self, mark: PayloadMark) -> None:
        """Forget what was added since `mark`, on disk too."""
        del self._entries[mark.entries :]
        if mark.last is not None:
            self._entries[-1] = mark.last
        self._header_used = _FIXED_BYTES + sum(_ENTRY_BYTES + len(e.name) for e in self._entries)
        self._names = dict(mark.names)
        self.data_bytes = mark.size
        self._pending.clear()
        if self.begun:
            # Also when only a part of the placeholder was written: the rest is a hole of zeros,
            # and the header overwrites it.
            os.truncate(self.path, self._capacity + self.data_bytes)

    def write(self) -> None:
        """Write what is pending. After an `OSError`, `rollback` or `discard`."""
        if not self.begun:
            # The first block decides: a header that has no room for it would have none ever.
            self._capacity = max(self._capacity, -(-2 * self._header_used // 8) * 8)
            self._create([memoryview(b" " * self._capacity)])
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            write_all(fd, self._pending)
        finally:
            os.close(fd)
        self._pending.clear()

    def finish(self, metadata: Mapping[str, str]) -> int:
        """Write all that is missing, the header last; returns the file's size in bytes."""
        if not self.begun:
            header = encode_header(self._entries, metadata)
            self._create([memoryview(header), *self._pending], self._sync)
            self._pending.clear()
            return len(header) + self.data_bytes
        if self._pending:
            self.write()
        fd = os.open(self.path, os.O_WRONLY)
        try:
            write_all(fd, [memoryview(encode_header(self._entries, metadata, self._capacity))])
            if self._sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        return self._capacity + self.data_bytes

    def discard(self) -> None:
        self._pending.clear()
        if self.begun:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _create(self, buffers: list[memoryview], sync: bool = False) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self.begun = True
        try:
            write_all(fd, buffers)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _align(self, size: int) -> None:
        """Keep elements at multiples of their size: a tensor of padding, where need be."""
        if gap := -self.data_bytes % size:
            name, begin = f"padding.{len(self._entries)}", self.data_bytes
            self._entries.append(TensorEntry(name, "U8", (gap,), begin, begin + gap))
            self._header_used += _ENTRY_BYTES + len(name)
            self._pending.append(memoryview(bytes(gap)))
            self.data_bytes += gap


class MappedPayload:
    """A published safetensors file, mapped.

    It is mapped twice: what is handed out can be written to, and lies in a mapping of its own.
    Both are private: writing changes neither the file nor what others see, nor what is read here.

    Raises:
        StoreError: there is no such file (`missing`), it cannot be read (`io`), or it is not
            safetensors (`damaged`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checked: set[tuple[str, int, int, int]] = set()
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise StoreError(
                f"{path} is gone: its record was replaced or removed; Store.refresh() sees what is "
                "there now",
                "missing",
            ) from None
        except OSError as error:
            raise StoreError.from_os_error(f"{path} cannot be read", error) from None
        try:
            self._identity = _identity(os.fstat(fd))
            # Writable, too: torch warns of memory that is not.
            self._map = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
            self._handed_out = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
            self._entries, self._data_start = decode_header(memoryview(self._map))
        except ValueError as error:
            raise StoreError(f"{path} is damaged: {error}", "damaged") from None
        except OSError as error:
            raise StoreError.from_os_error(f"{path} cannot be mapped", error) from None
        finally:
            os.close(fd)

    @property
    def current(self) -> bool:
        """Whether its path still names the file that is mapped, unchanged. Calls `stat` once."""
        try:
            return _identity(os.stat(self.path)) == self._identity
        except OSError:
            return False

    def read(self, piece: PieceEntry, checksum: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[rows, hidden]` and positions `[rows]` of a piece, as views of the file: to be
        copied, not to be changed or handed out.

        Args:
            checksum: compare it, the first time that the piece is read.

        Raises:
            StoreError: they are not there, or not as they were written (`damaged`).
        """
        count = piece.rows
        rows = self.slice(piece.tensor, piece.row_start, count, piece.dtype, (piece.hidden,))
        positions = self.slice(POSITIONS, piece.position_start, count, "I32")
        place = piece.tensor, piece.row_start, piece.position_start, count
        if checksum and place not in self._checked:
            if zlib.crc32(as_bytes(positions), zlib.crc32(as_bytes(rows))) != piece.crc32:
                layer = "" if piece.layer is None else f".{piece.layer}"
                raise StoreError(
                    f"{self.path} is damaged: {piece.hook}{layer}: the checksum of its rows and "
                    "positions does not match",
                    "damaged",
                )
            self._checked.add(place)
        return rows, positions

    def hand_out(self, piece: PieceEntry) -> torch.Tensor:
        """Rows `[rows, hidden]` of a piece, as a view of the file that its user may change.

        What was changed is there when they are handed out again, and in nothing else. Raises as
        `read` does.
        """
        self.read(piece)
        place = piece.tensor, piece.row_start, piece.rows, piece.dtype, (piece.hidden,)
        return self._view(self._handed_out, *place)

    def slice(
        self, name: str, start: int, count: int, dtype: str, tail: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """`[count, *tail]` of a tensor, from row `start` on, as a view of the file: as of `read`.

        Raises `StoreError` (`damaged`) unless there is such a tensor with that many rows.
        """
        return self._view(self._map, name, start, count, dtype, tail)

    def _view(
        self,
        mapping: mmap.mmap,
        name: str,
        start: int,
        count: int,
        dtype: str,
        tail: tuple[int, ...],
    ) -> torch.Tensor:
        entry = self._entries.get(name)
        if entry is None or (entry.dtype, entry.shape[1:]) != (dtype, tail):
            found = "none" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            raise StoreError(
                f"{self.path}: tensor {name!r} should be {dtype} [rows, *{list(tail)}] and is "
                f"{found}",
                "damaged",
            )
        if start + count > entry.shape[0]:
            raise StoreError(
                f"{self.path}: rows {start} to {start + count} of tensor {name!r} are asked for, "
                f"it has {entry.shape[0]}",
                "damaged",
            )
        width = tail[0] if tail else 1
        kind = TORCH_DTYPES[dtype]
        if not count:
            return torch.empty((0, *tail), dtype=kind)
        row_bytes = width * kind.itemsize
        flat = torch.frombuffer(
            mapping,
            dtype=torch.uint8,
            count=count * row_bytes,
            offset=self._data_start + entry.begin + start * row_bytes,
        )
        return flat.view(kind).view(count, *tail)


class PayloadCache:
    """Keeps the files that were used last mapped, for several threads.

    Args:
        capacity: files; tensors keep theirs mapped as long as they live.
    """

    def __init__(self, root: Path, capacity: int = 64) -> None:
        self._root = root
        self._capacity = capacity
        self._files: OrderedDict[str, MappedPayload] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[PayloadCache], tuple[Path, int]]:
        return PayloadCache, (self._root, self._capacity)  # another process maps files anew

    def current(self) -> PayloadCache:
        """Another cache, with those files that are still the ones under their paths."""
        with self._lock:
            mapped = list(self._files.items())
        found = PayloadCache(self._root, self._capacity)
        found._files.update((file, payload) for file, payload in mapped if payload.current)
        return found

    def get(self, file: str) -> MappedPayload:
        """A payload by its path relative to the root; raises as `MappedPayload` does."""
        with self._lock:
            if found := self._files.get(file):
                self._files.move_to_end(file)
                return found
        opened = MappedPayload(self._root / file)
        with self._lock:
            self._files[file] = opened
            while len(self._files) > self._capacity:
                self._files.popitem(last=False)
        return opened


def _identity(stat: os.stat_result) -> tuple[int, int, int, int]:
    # No other file gets the inode number while this one is mapped.
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def write_all(fd: int, buffers: Sequence[memoryview]) -> None:
    """Write buffers one after the other, without joining them."""
    waiting = [buffer for buffer in buffers if len(buffer)]
    first = 0
    while first < len(waiting):
        written = os.writev(fd, waiting[first : first + _IOV_MAX])
        while first < len(waiting) and written >= len(waiting[first]):
            written -= len(waiting[first])
            first += 1
        if written:
            waiting[first] = waiting[first][written:]

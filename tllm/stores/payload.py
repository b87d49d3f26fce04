"""A safetensors file while it is being written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tllm.stores.dtype import ITEM_SIZES
from tllm.stores.header import TensorEntry, encode_header

_IOV_MAX = 1024
"""Buffers of one `writev`; Linux takes no more."""

_ENTRY_BYTES = 208
"""More than one tensor and the padding before it take in the header, its name excepted."""

_FIXED_BYTES = 1024
"""More than all else takes in the header: `__metadata__`, and the tensor of positions."""


class Span(NamedTuple):
    """Where rows were put: in which tensor, and from which of its rows on."""

    tensor: str
    row_start: int


@dataclass(frozen=True)
class Mark:
    """A state of a `PayloadFile` to which it can be rolled back."""

    entries: int
    last: TensorEntry | None
    size: int
    names: Mapping[str, int]


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
        self._size = 0
        self._header_used = _FIXED_BYTES
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether there is a file on disk."""
        return self._begun

    @property
    def data_bytes(self) -> int:
        """Bytes of tensors so far, written or pending."""
        return self._size

    def has_room(self, tensors: int, name_bytes: int) -> bool:
        """Whether the header has room for more tensors with names of `name_bytes` in all."""
        return self._header_used + tensors * _ENTRY_BYTES + name_bytes <= self._capacity

    def add(
        self, name: str, dtype: str, width: int | None, rows: int, buffers: Sequence[memoryview]
    ) -> Span:
        """Append rows `[rows, width]` (`[rows]` when `width` is None), given as their bytes.

        They continue the last tensor when it was given the same name, dtype and width; a name that
        was used before that gets `+1`, `+2`, ... appended.
        """
        last = self._entries[-1] if self._entries else None
        tail = () if width is None else (width,)
        nbytes = sum(map(len, buffers))
        if last is not None and (self._base(last), last.dtype, last.shape[1:]) == (
            name,
            dtype,
            tail,
        ):
            span = Span(last.name, last.shape[0])
            last.shape = (last.shape[0] + rows, *tail)
            last.end += nbytes
        else:
            self._align(ITEM_SIZES[dtype])
            count = self._names.get(name, 0)
            self._names[name] = count + 1
            full = f"{name}+{count}" if count else name
            begin = self._size
            self._append(TensorEntry(full, dtype, (rows, *tail), begin, begin + nbytes))
            span = Span(full, 0)
        self._pending += [buffer for buffer in buffers if len(buffer)]
        self._size += nbytes
        return span

    def add_each(
        self, names: Sequence[str], dtype: str, width: int, rows: int, data: memoryview
    ) -> list[Span]:
        """`add` for arrays of one shape, given as the bytes of `[names, rows, width]`."""
        length = len(data) // len(names)
        spans = [self.add(names[0], dtype, width, rows, [data[:length]])]
        size, entries, counts = self._size, self._entries, self._names
        shape, used = (rows, width), 0
        # Aligned: each follows rows of the same element size.
        for name in names[1:]:
            count = counts.get(name, 0)
            counts[name] = count + 1
            full = f"{name}+{count}" if count else name
            entries.append(TensorEntry(full, dtype, shape, size, size + length))
            used += _ENTRY_BYTES + len(full)
            size += length
            spans.append(Span(full, 0))
        self._header_used += used
        self._size = size
        if length and len(names) > 1:
            self._pending.append(data[length:])
        return spans

    def mark(self) -> Mark:
        """The present state, for `rollback`; only between writes, with nothing pending."""
        last = self._entries[-1] if self._entries else None
        copy = last and TensorEntry(last.name, last.dtype, last.shape, last.begin, last.end)
        return Mark(len(self._entries), copy, self._size, dict(self._names))

    def rollback(self, mark: Mark) -> None:
        """Forget what was added since `mark`, on disk too."""
        del self._entries[mark.entries :]
        if mark.last is not None:
            self._entries[-1] = mark.last
        self._header_used = self._used()
        self._names = dict(mark.names)
        self._size = mark.size
        self._pending.clear()
        if self._begun:
            # Also when only a part of the placeholder was written: the rest is a hole of zeros,
            # and the header overwrites it.
            os.truncate(self.path, self._capacity + self._size)

    def write(self) -> None:
        """Write what is pending. After an `OSError`, `rollback` or `discard`."""
        if not self._begun:
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
        if not self._begun:
            header = encode_header(self._entries, metadata)
            self._create([memoryview(header), *self._pending], self._sync)
            self._pending.clear()
            return len(header) + self._size
        if self._pending:
            self.write()
        fd = os.open(self.path, os.O_WRONLY)
        try:
            write_all(fd, [memoryview(encode_header(self._entries, metadata, self._capacity))])
            if self._sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        return self._capacity + self._size

    def discard(self) -> None:
        """Remove the file, if there is one, as far as the file system lets us."""
        self._pending.clear()
        if self._begun:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _create(self, buffers: list[memoryview], sync: bool = False) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._begun = True
        try:
            write_all(fd, buffers)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _used(self) -> int:
        """At least as many bytes as the header needs for what was added."""
        return _FIXED_BYTES + sum(_ENTRY_BYTES + len(entry.name) for entry in self._entries)

    def _append(self, entry: TensorEntry) -> None:
        self._entries.append(entry)
        self._header_used += _ENTRY_BYTES + len(entry.name)

    def _align(self, size: int) -> None:
        """Keep elements at multiples of their size: a tensor of padding, where need be."""
        if gap := -self._size % size:
            name = f"padding.{len(self._entries)}"
            begin = self._size
            self._append(TensorEntry(name, "U8", (gap,), begin, begin + gap))
            self._pending.append(memoryview(bytes(gap)))
            self._size += gap

    @staticmethod
    def _base(entry: TensorEntry) -> str:
        return entry.name.partition("+")[0]


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


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the device."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""How records appear in a store: whole, or not at all.

A *publisher* belongs to one writer thread. It stages rows in volumes, and moves these into place
with the sidecars that make them count.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tllm.stores.error import StoreError, describe, plain_text
from tllm.stores.format import LINE_TYPES, PAYLOAD_SUFFIX, Layout, SidecarLine, WriterPaths
from tllm.stores.payload import write_all
from tllm.stores.record import ArrayKey, CheckedStack, RecordMeta
from tllm.stores.volume import Buffer, StackPiece, Volume
from tllm.version import __version__

logger = logging.getLogger(__name__)

_SHARD_HEADER_BYTES = 128 << 10
"""Kept free at the start of a shard: several hundred tensors."""

_PACKED_HEADER_BYTES = 256 << 10
"""Kept free at the start of a packed record that is written in several goes."""

_ARRAY_HEADER_BYTES = 4096
"""The same for a file with one array, which is one tensor."""

_ROWS = "rows"
"""Name of that tensor."""

_SAME = LINE_TYPES.keys() & {field.name for field in fields(RecordMeta)}
"""What a line of a sidecar repeats of the record's description."""

_VERSIONS = {"tllm": __version__, "torch": torch.__version__}


# -- files -----------------------------------------------------------------------------------------


def publish_files(
    payloads: Sequence[tuple[Path, Path]], sidecar: Path, text: bytes, staging: Path, sync: bool
) -> None:
    """Move payloads into place, then the sidecar; after an `OSError` nothing of it is there.

    Payloads without a sidecar are not part of the store.

    Args:
        payloads: `(staged, final)` files, or folders of files.
        sidecar, text: its final path, and its content.
        staging: folder for unfinished files, on the same file system.
        sync: wait until all is on the device. The payloads' content must be there already.
    """
    make_folder(sidecar.parent, sync)
    staged = staging / f"sidecar-{threading.get_ident()}"
    moved: list[Path] = []
    try:
        write_file(staged, text, sync)
        for source, target in payloads:
            if source.is_dir():
                if sync:
                    sync_folder(source)
                # Left by a writer that was killed before its sidecar was there.
                remove(target)
            os.replace(source, target)
            moved.append(target)
        os.replace(staged, sidecar)
        moved.append(sidecar)
        if sync:
            sync_folder(sidecar.parent)
    except OSError:
        # The sidecar first: what it names must be there as long as it is.
        for path in (staged, *reversed(moved)):
            with contextlib.suppress(OSError):
                remove(path)
        raise


def write_file(path: Path, data: bytes, sync: bool) -> None:
    """Write a small file; what is there is overwritten."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(fd, [memoryview(data)])
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path, sync: bool) -> None:
    """Make a folder and those above it that are missing."""
    if folder.is_dir():
        return
    make_folder(folder.parent, sync)
    folder.mkdir(exist_ok=True)
    if sync:
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the device."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it; nothing when it is not there."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        # Which of the two errors a folder gives depends on the system.
        if not path.is_dir():
            raise
        shutil.rmtree(path)


def remove_replaced(sidecar: Path) -> None:
    """Remove a record that another one replaced; readers do not see it any more anyway."""
    try:
        line = SidecarLine.decode(sidecar.read_bytes())
        remove(sidecar)
        for name in {entry.file.partition("/")[0] for entry in line.arrays}:
            remove(sidecar.parent / name)
    except (OSError, ValueError) as error:
        logger.warning("%s was replaced, but not removed: %s", sidecar, error)


# -- records on their way --------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """What became of a record.

    Attributes:
        status: `ok`, `partial_error` (on disk, but rows are missing), or `skipped` (it was there
            already and `on_collision="skip"`).
        error: what is missing and why; empty unless partial.
        paths: its payload files, then its sidecars. A shard holds other records too.
        rows: of all arrays together.
        bytes: of rows and positions.
    """

    record_id: str
    status: Literal["ok", "partial_error", "skipped"]
    error: str
    paths: tuple[Path, ...]
    rows: int
    bytes: int


@dataclass(eq=False)
class Recording:
    """The state of one record in the writer. Used by one thread at a time.

    Attributes:
        generation: which record of its identity this is, from 1.
        replaces: readers must not see those of lower generations any more.
        layout, writer: for the sidecar.
        on_resolved: called once, with the result or None for a failure, before the future.
        future: resolved with what became of it.
        part: number of the next part to be published.
        ended: nothing more will come.
        aborted: its caller gave it up.
        resolved: the future is.
        lost: why rows are missing, and the error that a record without any rows fails with.
        payloads, sidecars, rows, bytes: of the parts that are published.
        reserved: bytes of rows that count against the writer's limit on its behalf.
    """

    meta: RecordMeta
    generation: int
    replaces: bool
    layout: Layout
    writer: str
    on_resolved: Callable[[Recording, Published | None], None]
    future: Future[Published] = field(default_factory=Future)
    part: int = 0
    ended: bool = False
    aborted: bool = False
    resolved: bool = False
    lost: dict[str, StoreError] = field(default_factory=dict)
    payloads: list[Path] = field(default_factory=list)
    sidecars: list[Path] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0
    reserved: int = 0

    def __post_init__(self) -> None:
        # A future that runs cannot be cancelled: its record is on its way already.
        self.future.set_running_or_notify_cancel()

    @property
    def what(self) -> str:
        """For messages."""
        tag = f" of tag {self.meta.tag!r}" if self.meta.tag else ""
        return f"record {self.meta.request_id!r} sample {self.meta.sample_index}{tag}"

    def end(self, meta: RecordMeta) -> None:
        """Nothing more will come; `meta` is the final description."""
        self.meta, self.ended = meta, True

    def lose(self, error: Exception) -> None:
        """Note that rows could not be written."""
        if isinstance(error, OSError):
            failure = StoreError.from_os_error(f"{self.what} was not written", error)
            reason = f"rows were lost: {describe(error)}"
        else:
            text = f"{type(error).__name__}: {error}"
            failure = StoreError(f"{self.what} was not written: {text}", "io")
            reason = f"rows were lost: {text}"
        self.lost.setdefault(plain_text(reason), failure)

    def fail(self) -> None:
        """Nothing of the record can be read, and nothing more will come."""
        self._resolve(next(iter(self.lost.values())))

    def abort(self) -> None:
        """Its caller gave it up."""
        self._resolve(StoreError(f"{self.what} was aborted", "aborted"))

    def final_meta(self) -> RecordMeta:
        """The record's description with what was lost on the way."""
        if not self.lost:
            return self.meta
        error = "; ".join(text for text in (self.meta.error, *self.lost) if text)
        return replace(self.meta, status="partial_error", error=error)

    def line(self) -> SidecarLine:
        """The sidecar line of the part that is being published."""
        meta = self.final_meta()
        status = ("aborted" if self.aborted else meta.status) if self.ended else "pending"
        ended: dict[str, Any] = {"error": "", "token_ids": (), "metadata": {}}
        if self.ended:
            ended = {name: getattr(meta, name) for name in ended}
        given = {name: getattr(meta, name) for name in _SAME}
        given |= ended | {"status": status, "versions": {**_VERSIONS, **meta.versions}}
        return SidecarLine(
            **given,
            generation=self.generation,
            replaces=self.replaces,
            part=self.part,
            last=self.ended,
            layout=self.layout,
            writer=self.writer,
        )

    def published_part(
        self, payloads: Sequence[Path], sidecar: Path, pieces: Sequence[StackPiece]
    ) -> None:
        """A part is on disk; resolves the future when it was the last."""
        self.part += 1
        self.payloads += payloads
        self.sidecars.append(sidecar)
        self.rows += sum(piece.total_rows for piece in pieces)
        self.bytes += sum(piece.nbytes for piece in pieces)
        if not self.ended:
            return
        if self.aborted:
            self.abort()
            return
        meta = self.final_meta()
        paths = (*self.payloads, *self.sidecars)
        self._resolve(
            Published(meta.record_id, meta.status, meta.error, paths, self.rows, self.bytes)
        )

    def _resolve(self, outcome: Published | StoreError) -> None:
        self.resolved = True
        if isinstance(outcome, StoreError):
            self.on_resolved(self, None)
            self.future.set_exception(outcome)
        else:
            self.on_resolved(self, outcome)
            self.future.set_result(outcome)


@dataclass(eq=False)
class QueuedRows:
    """Rows of a record, its end, or both, on the way to a publisher.

    Attributes:
        stacks: rows, each of its own arrays; those of a record come in their order.
        end: the record's final description, when nothing more will come.
        lost: why rows are missing that should have come before, and the error behind it.
        abort: the record is given up.
        nbytes: of rows and positions.
    """

    recording: Recording
    stacks: Sequence[CheckedStack] = ()
    end: RecordMeta | None = None
    lost: Mapping[str, StoreError] = field(default_factory=dict)
    abort: bool = False
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(stack.nbytes for stack in self.stacks)


# -- publishers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Publishing:
    """What the publishers of one writer share.

    Attributes:
        sync: wait for the device.
        shard_bytes: size at which a shard is published.
        block_bytes: bytes to collect before they are written.
        interval: seconds after which a shard is published though it is not full.
        numbers: of shards.
        names: of staged files.
        release: called with the bytes of rows that need no memory any more.
    """

    paths: WriterPaths
    layout: Layout
    sync: bool
    shard_bytes: int
    block_bytes: int
    interval: float
    numbers: Iterator[int]
    names: Iterator[int]
    release: Callable[[int], None]

    def publish(
        self, payloads: Sequence[tuple[Path, Path]], sidecar: Path, lines: Sequence[bytes]
    ) -> None:
        publish_files(payloads, sidecar, b"".join(lines), self.paths.staging, self.sync)


@dataclass
class Publisher(ABC):
    """Writes the records of one thread. All methods are called from that thread."""

    room: Publishing
    deadline: float | None = field(default=None, init=False)
    """When `publish_due` should be called, by `time.monotonic`."""

    @property
    @abstractmethod
    def holding(self) -> bool:
        """Whether rows are staged in memory."""

    @abstractmethod
    def accept(self, item: QueuedRows) -> None:
        """Take rows or a record's end. Errors of the system end up in the record."""

    @abstractmethod
    def relieve(self) -> None:
        """Write all staged rows: somebody waits for memory."""

    @abstractmethod
    def publish_due(self) -> None:
        """Publish what has waited for `Publishing.interval`."""

    @abstractmethod
    def flush(self) -> None:
        """Publish all records that have ended."""

    @abstractmethod
    def give_up(self, recording: Recording, error: Exception) -> None:
        """Let go of a record's staged rows after an error; when it has ended, resolve it."""


@dataclass
class ShardPublisher(Publisher):
    """Fills one shard after the other: many records in large files.

    Rows go to the staged shard in blocks; when it is full, or old, it is published with a sidecar
    of one line for each record. A record that goes on after that continues in the next shard, as
    its next part.
    """

    _volume: Volume | None = field(default=None, init=False)
    _present: dict[Recording, None] = field(default_factory=dict, init=False)
    _spare: list[Buffer] = field(default_factory=list, init=False)

    @property
    def holding(self) -> bool:
        return self._volume is not None and self._volume.staged_bytes > 0

    def accept(self, item: QueuedRows) -> None:
        recording = item.recording
        recording.lost.update(item.lost)
        if item.abort:
            self._abort(recording)
            return
        if self._volume is not None and not self._volume.has_room(item.stacks):
            self.flush()
        volume = self._shard()
        self._present[recording] = None
        for stack in item.stacks:
            volume.stage(recording, stack)
        if item.end is not None:
            recording.end(item.end)
        if volume.staged_bytes >= self.room.block_bytes:
            self.relieve()
        if volume is self._volume and volume.nbytes >= self.room.shard_bytes:
            self.flush()

    def relieve(self) -> None:
        """What was whole before an error is published at once."""
        if self._volume is None or not self._volume.staged_bytes:
            return
        try:
            self.room.release(self._volume.write())
        except OSError as error:
            for recording in self._volume.staged_owners():
                self.give_up(recording, error)
            self._publish()

    def publish_due(self) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self.flush()

    def flush(self) -> None:
        """Records that go on are published as far as they are."""
        if self._volume is not None and self._volume.begun:
            # On its own, because a block that cannot be written costs only its own records.
            self.relieve()
        self._publish()

    def give_up(self, recording: Recording, error: Exception) -> None:
        """It is resolved with its shard."""
        recording.lose(error)
        self.room.release(self._shard().unstage(recording))
        self._present[recording] = None

    def _shard(self) -> Volume:
        if self._volume is None:
            path = self.room.paths.staging / f"{next(self.room.names)}{PAYLOAD_SUFFIX}"
            self._volume = Volume(path, _SHARD_HEADER_BYTES, self.room.sync, spare=self._spare)
            self.deadline = time.monotonic() + self.room.interval
        return self._volume

    def _abort(self, recording: Recording) -> None:
        recording.ended = recording.aborted = True
        self.room.release(self._shard().unstage(recording))
        if recording.part:
            # Readers must learn that its earlier parts are void.
            self._present[recording] = None
        else:
            self._present.pop(recording, None)
            recording.abort()

    def _publish(self) -> None:
        if self._volume is None:
            return
        volume, self._volume = self._volume, None
        present, self._present = self._present, {}
        self.deadline = None
        staged = volume.staged_bytes
        shard = self.room.paths.shard(next(self.room.numbers))
        sidecar = shard.with_suffix(".jsonl")
        parts: dict[Recording, list[StackPiece]] = {}
        try:
            volume.seal()
            for recording in present:
                pieces = [] if recording.aborted else volume.pieces(recording, shard.name)
                if pieces or (recording.ended and (recording.part or not recording.lost)):
                    parts[recording] = pieces
            has_rows = any(parts.values())
            if parts:
                payloads = [(volume.path, shard)] if has_rows else []
                lines = [
                    r.line().encode(map(StackPiece.encode, pieces)) for r, pieces in parts.items()
                ]
                self.room.publish(payloads, sidecar, lines)
        except Exception as error:  # whatever it is, the writer lives on
            parts.clear()
            has_rows = False
            for recording in present:
                recording.lose(error)
        if not has_rows:
            volume.discard()
        self.room.release(staged)
        for recording in present:
            if recording in parts:
                pieces = parts[recording]
                recording.published_part([shard] if pieces else [], sidecar, pieces)
            elif recording.ended:
                recording.fail()


class SinglePublisher(Publisher):
    """The layouts `packed` (a file a record) and `per_file` (a file a hook point and layer).

    A record is published when it ends; until then its files are staged.
    """

    def __init__(self, room: Publishing) -> None:
        super().__init__(room)
        self._files: dict[Recording, _RecordFiles] = {}

    @property
    def holding(self) -> bool:
        return any(files.staged_bytes for files in self._files.values())

    def accept(self, item: QueuedRows) -> None:
        recording = item.recording
        recording.lost.update(item.lost)
        files = self._files.get(recording)
        if files is None:
            folder = Path(f"{self.room.paths.staging}/{next(self.room.names)}")
            files = self._files[recording] = _RecordFiles(recording, folder, self.room)
        if item.abort:
            self._drop(files)
            recording.ended = recording.aborted = True
            recording.abort()
            return
        for stack in item.stacks:
            files.stage(stack)
        if item.end is not None:
            recording.end(item.end)
            self._publish(files)
        elif files.staged_bytes >= self.room.block_bytes:
            self._write(files)

    def relieve(self) -> None:
        for files in list(self._files.values()):
            self._write(files)

    def publish_due(self) -> None:
        """Here a record is published when it ends, and never later."""

    def flush(self) -> None:
        self.relieve()

    def give_up(self, recording: Recording, error: Exception) -> None:
        recording.lose(error)
        if files := self._files.get(recording):
            self._drop(files)
        if recording.ended and not recording.resolved:
            recording.fail()

    def _write(self, files: _RecordFiles) -> None:
        """Write staged rows; what cannot be written is lost, and the record goes on."""
        for volume in files.volumes():
            if not volume.staged_bytes:
                continue
            try:
                files.make_folder()
                self.room.release(volume.write())
            except OSError as error:
                files.recording.lose(error)
                self.room.release(volume.unstage(files.recording))

    def _publish(self, files: _RecordFiles) -> None:
        recording, room = files.recording, self.room
        if any(volume.begun for volume in files.volumes()):
            self._write(files)
        sidecar = room.paths.sidecar(room.layout, recording.meta.identity, recording.generation)
        try:
            payloads, pieces = files.seal(sidecar)
            if recording.lost and not pieces:
                self._drop(files)
                recording.fail()
                return
            line = recording.line().encode(map(StackPiece.encode, pieces))
            room.publish(payloads, sidecar, [line])
        except Exception as error:  # whatever it is, the writer lives on
            self.give_up(recording, error)
            return
        self._drop(files, published=True)
        names = dict.fromkeys(piece.file for piece in pieces)
        recording.published_part([sidecar.parent / name for name in names], sidecar, pieces)

    def _drop(self, files: _RecordFiles, published: bool = False) -> None:
        """Forget a record's volumes, and remove what of them is still staged."""
        del self._files[files.recording]
        self.room.release(files.staged_bytes)
        if files.packed:
            for volume in () if published else files.volumes():
                volume.discard()
            return
        try:
            remove(files.folder)
        except OSError as error:
            # It costs only space, and is removed when the writer starts again.
            logger.warning("%s could not be removed: %s", files.folder, describe(error))


class _RecordFiles:
    """The files of one record while they are staged."""

    def __init__(self, recording: Recording, folder: Path, room: Publishing) -> None:
        self.recording = recording
        self.folder = folder
        self.packed = room.layout == "packed"
        self._sync = room.sync
        self._volumes: dict[ArrayKey | None, list[Volume]] = {}

    @property
    def staged_bytes(self) -> int:
        return sum(volume.staged_bytes for volume in self.volumes())

    def volumes(self) -> Iterator[Volume]:
        """In the order in which their arrays came."""
        for volumes in self._volumes.values():
            yield from volumes

    def make_folder(self) -> None:
        if not self.packed:
            self.folder.mkdir(exist_ok=True)

    def stage(self, stack: CheckedStack) -> None:
        """Take rows into the volume where they belong."""
        for rows in [stack] if self.packed else stack.unstacked():
            key = None if self.packed else rows.keys[0]
            volumes = self._volumes.setdefault(key, [])
            if not volumes or not volumes[-1].has_room([rows]):
                volumes.append(self._volume(key, len(volumes)))
            volumes[-1].stage(self.recording, rows)

    def seal(self, sidecar: Path) -> tuple[list[tuple[Path, Path]], list[StackPiece]]:
        """Finish the files: what to move where, and what is in them."""
        stem = sidecar.stem
        pieces: list[StackPiece] = []
        payloads: list[tuple[Path, Path]] = []
        self.make_folder()
        for volume in self.volumes():
            if not volume.seal():
                volume.discard()
                continue
            name = f"{stem}/{volume.path.name}"
            if self.packed:
                number = f"+{len(payloads)}" if payloads else ""
                name = f"{stem}{number}{PAYLOAD_SUFFIX}"
                payloads.append((volume.path, sidecar.parent / name))
            pieces += volume.pieces(self.recording, name)
        if pieces and not self.packed:
            payloads.append((self.folder, sidecar.parent / stem))
        return payloads, pieces

    def _volume(self, key: ArrayKey | None, number: int) -> Volume:
        if key is None:
            path = Path(f"{self.folder}-{number}{PAYLOAD_SUFFIX}")
            return Volume(path, _PACKED_HEADER_BYTES, self._sync)
        path = self.folder / f"{key.name}{PAYLOAD_SUFFIX}"
        return Volume(path, _ARRAY_HEADER_BYTES, self._sync, _ROWS)

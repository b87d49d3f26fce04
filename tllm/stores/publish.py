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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tllm.stores.error import describe
from tllm.stores.format import PAYLOAD_SUFFIX, Layout, SidecarLine, WriterPaths
from tllm.stores.payload import write_all
from tllm.stores.record import ArrayKey, CheckedStack
from tllm.stores.recording import QueuedRows, Recording
from tllm.stores.volume import Buffer, StackPiece, Volume

logger = logging.getLogger(__name__)

_SHARD_HEADER_BYTES = 128 << 10
"""Kept free at the start of a shard: several hundred tensors."""
_PACKED_HEADER_BYTES = 256 << 10
"""Kept free at the start of a packed record that is written in several goes."""
_ARRAY_HEADER_BYTES = 4096
"""The same for a file with one array, which is one tensor."""
_ROWS = "rows"
"""Name of that tensor."""


@dataclass(frozen=True)
class Publishing:
    """What the publishers of one writer share.

    Attributes:
        sync: wait for the device.
        shard_bytes: size at which a shard is published.
        block_bytes: bytes to collect before they are written.
        interval: seconds after which a shard is published though it is not full.
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
        """Move payloads into place, then the sidecar; after an `OSError` nothing of it is there.

        Payloads without a sidecar are not part of the store. With `sync` their content must be on
        the device already.

        Args:
            payloads: `(staged, final)` files, or folders of files.
            sidecar, lines: its final path, and its content.
        """
        make_folder(sidecar.parent, self.sync)
        staged = self.paths.staging / f"sidecar-{threading.get_ident()}"
        moved: list[Path] = []
        try:
            write_file(staged, b"".join(lines), self.sync)
            for source, target in payloads:
                if source.is_dir():
                    if self.sync:
                        sync_folder(source)
                    # Left by a writer that was killed before its sidecar was there.
                    remove(target)
                os.replace(source, target)
                moved.append(target)
            os.replace(staged, sidecar)
            moved.append(sidecar)
            if self.sync:
                sync_folder(sidecar.parent)
        except OSError:
            # The sidecar first: what it names must be there as long as it is.
            for path in (staged, *reversed(moved)):
                with contextlib.suppress(OSError):
                    remove(path)
            raise


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


def remove_replaced(sidecar: Path) -> int:
    """Remove a record that another one replaced; readers do not see it any more anyway. Returns the
    bytes of rows and positions that are gone."""
    try:
        line = SidecarLine.decode(sidecar.read_bytes())
        remove(sidecar)
        for name in {entry.file.partition("/")[0] for entry in line.arrays}:
            remove(sidecar.parent / name)
    except (OSError, ValueError) as error:
        logger.warning("%s was replaced, but not removed: %s", sidecar, error)
        return 0
    return sum(entry.nbytes for entry in line.arrays)


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

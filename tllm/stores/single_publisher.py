"""Records in files of their own: the layouts packed and per_file."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from tllm.stores.error import describe
from tllm.stores.files import remove
from tllm.stores.format import PAYLOAD_SUFFIX, SidecarLine
from tllm.stores.publish import Publisher, Publishing
from tllm.stores.record import ArrayKey, CheckedStack
from tllm.stores.recording import QueuedRows, Recording
from tllm.stores.volume import StackPiece, Volume

logger = logging.getLogger(__name__)

_PACKED_HEADER_BYTES = 256 << 10
"""Kept free at the start of a packed record that is written in several goes."""
_ARRAY_HEADER_BYTES = 4096
"""The same for a file with one array, which is one tensor."""
_ROWS = "rows"
"""Name of that tensor."""


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

"""Records with files of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from tllm.stores.error import describe
from tllm.stores.paths import PAYLOAD_SUFFIX
from tllm.stores.publication import Publication, remove
from tllm.stores.publisher import Item, Publisher, Publishing
from tllm.stores.record import ArrayKey, CheckedRows, CheckedStack
from tllm.stores.recording import Recording
from tllm.stores.sidecar import Entry, SidecarLine
from tllm.stores.volume import Volume

logger = logging.getLogger(__name__)

PACKED_HEADER_BYTES = 256 << 10
"""Kept free at the start of a packed record that is written in several goes."""

ARRAY_HEADER_BYTES = 4096
"""The same for a file with one array, which is one tensor."""

ROWS = "rows"
"""Name of that tensor."""


class SinglePublisher(Publisher):
    """The layouts `packed` (a file a record) and `per_file` (a file a hook point and layer).

    A record is published when it ends; until then its files are staged.
    """

    def __init__(self, room: Publishing) -> None:
        super().__init__(room)
        self._works: dict[Recording, _Work] = {}

    @property
    def holding(self) -> bool:
        """See `Publisher`."""
        return any(work.staged_bytes for work in self._works.values())

    def accept(self, item: Item) -> None:
        """See `Publisher`."""
        recording = item.recording
        recording.lost.update(item.lost)
        work = self._works.get(recording)
        if work is None:
            folder = Path(f"{self.room.paths.staging}/{next(self.room.names)}")
            work = self._works[recording] = _Work(recording, folder, self.room)
        if item.abort:
            self._drop(work)
            recording.ended = recording.aborted = True
            recording.abort()
            return
        for rows in item.arrays:
            if work.packed or isinstance(rows, CheckedRows):
                work.stage(rows)
            else:
                for alone in rows.unstacked():
                    work.stage(alone)
        if item.end is not None:
            recording.meta = item.end
            recording.ended = True
            self._publish(work)
        elif work.staged_bytes >= self.room.block_bytes:
            self._write(work)

    def relieve(self) -> None:
        """See `Publisher`."""
        for work in list(self._works.values()):
            self._write(work)

    def publish_due(self) -> None:
        """See `Publisher`: here a record is published when it ends, and never later."""

    def flush(self) -> None:
        """See `Publisher`."""
        self.relieve()

    def give_up(self, recording: Recording, error: Exception) -> None:
        """See `Publisher`."""
        recording.lose(error)
        if work := self._works.get(recording):
            self._drop(work)
        if recording.ended and not recording.settled:
            recording.fail()

    def _write(self, work: _Work) -> None:
        """Write staged rows; what cannot be written is lost, and the record goes on."""
        for volume in work.volumes():
            if not volume.staged_bytes:
                continue
            try:
                work.make_folder()
                self.room.release(volume.write())
            except OSError as error:
                work.recording.lose(error)
                self.room.release(volume.unstage(work.recording))

    def _publish(self, work: _Work) -> None:
        recording = work.recording
        if any(volume.begun for volume in work.volumes()):
            self._write(work)
        sidecar = self.room.paths.sidecar(self.room.layout, recording.meta, recording.generation)
        try:
            payloads, entries = self._seal(work, sidecar)
            if recording.lost and not entries:
                self._drop(work)
                recording.fail()
                return
            text = recording.line(entries).encode()
            Publication(payloads, sidecar, text).publish(self.room.paths.staging, self.room.sync)
        except Exception as error:  # whatever it is, the writer lives on
            self.give_up(recording, error)
            return
        self._drop(work, published=True)
        files = [sidecar.parent / name for name in dict.fromkeys(e.file for e in entries)]
        recording.published_part(files, sidecar, entries)

    def _seal(self, work: _Work, sidecar: Path) -> tuple[list[tuple[Path, Path]], list[Entry]]:
        """Finish the record's files: what to move where, and what is in them."""
        stem = sidecar.stem
        entries: list[Entry] = []
        payloads: list[tuple[Path, Path]] = []
        work.make_folder()
        for volume in work.volumes():
            if not volume.seal():
                volume.discard()
                continue
            name = volume.path.name
            if work.packed:
                number = f"+{len(payloads)}" if payloads else ""
                name = f"{stem}{number}{PAYLOAD_SUFFIX}"
                payloads.append((volume.path, sidecar.parent / name))
            entries += volume.entries(
                work.recording, name if work.packed else f"{stem}/{volume.path.name}"
            )
        if entries and not work.packed:
            payloads.append((work.folder, sidecar.parent / stem))
        return payloads, entries

    def _drop(self, work: _Work, published: bool = False) -> None:
        """Forget a record's volumes, and remove what of them is still staged."""
        del self._works[work.recording]
        self.room.release(work.staged_bytes)
        if work.packed:
            for volume in () if published else work.volumes():
                volume.discard()
            return
        try:
            remove(work.folder)
        except OSError as error:
            # It costs only space, and is removed when the writer starts again.
            logger.warning("%s could not be removed: %s", work.folder, describe(error))


class _Work:
    """The files of one record while they are staged."""

    def __init__(self, recording: Recording, folder: Path, room: Publishing) -> None:
        self.recording = recording
        self.folder = folder
        self.packed = room.layout == "packed"
        self._sync = room.sync
        self._volumes: dict[ArrayKey | None, list[Volume]] = {}

    @property
    def staged_bytes(self) -> int:
        """Bytes that wait to be written."""
        return sum(volume.staged_bytes for volume in self.volumes())

    def volumes(self) -> Iterator[Volume]:
        """In the order in which their arrays came."""
        for volumes in self._volumes.values():
            yield from volumes

    def make_folder(self) -> None:
        """Make the folder of a record that has one."""
        if not self.packed:
            self.folder.mkdir(exist_ok=True)

    def stage(self, rows: CheckedRows | CheckedStack) -> None:
        """Take rows into the volume where they belong; packed, also stacks."""
        key = rows.key if isinstance(rows, CheckedRows) and not self.packed else None
        volumes = self._volumes.setdefault(key, [])
        if not volumes or not volumes[-1].has_room([rows]):
            volumes.append(self._volume(key, len(volumes)))
        volumes[-1].stage(self.recording, rows)

    def _volume(self, key: ArrayKey | None, number: int) -> Volume:
        if key is None:
            path = Path(f"{self.folder}-{number}{PAYLOAD_SUFFIX}")
            return Volume(path, PACKED_HEADER_BYTES, self._sync)
        path = self.folder / f"{key.name}{PAYLOAD_SUFFIX}"
        return Volume(path, ARRAY_HEADER_BYTES, self._sync, lambda _: ROWS)


def remove_replaced(sidecar: Path) -> None:
    """Remove a record that another one replaced; readers do not see it any more anyway."""
    try:
        line = SidecarLine.decode(sidecar.read_bytes(), checksum=False)
        remove(sidecar)
        for name in {entry.file.partition("/")[0] for entry in line.arrays}:
            remove(sidecar.parent / name)
    except (OSError, ValueError) as error:
        logger.warning("%s was replaced, but not removed: %s", sidecar, error)

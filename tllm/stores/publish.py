"""How records appear in a store: whole, or not at all.

A *publisher* belongs to one writer thread. It stages rows in volumes, and moves these into place
with the sidecars that make them count.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tllm.stores.files import publish_files
from tllm.stores.format import PAYLOAD_SUFFIX, Layout, WriterPaths
from tllm.stores.recording import QueuedRows, Recording
from tllm.stores.volume import Buffer, StackPiece, Volume

_SHARD_HEADER_BYTES = 128 << 10
"""Kept free at the start of a shard: several hundred tensors."""


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

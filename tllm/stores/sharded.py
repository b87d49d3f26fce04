"""Many records in large files."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tllm.stores.paths import PAYLOAD_SUFFIX
from tllm.stores.publication import Publication
from tllm.stores.publisher import Item, Publisher
from tllm.stores.recording import Recording
from tllm.stores.sidecar import Entry
from tllm.stores.stack import Buffer
from tllm.stores.volume import Volume

HEADER_BYTES = 128 << 10
"""Kept free at the start of a shard: several hundred tensors."""


@dataclass
class ShardPublisher(Publisher):
    """Fills one shard after the other.

    Rows go to the staged shard in blocks; when it is full, or old, it is published with a sidecar
    of one line for each record. A record that goes on after that continues in the next shard, as
    its next part.
    """

    _volume: Volume | None = field(default=None, init=False)
    _present: dict[Recording, None] = field(default_factory=dict, init=False)
    _spare: list[Buffer] = field(default_factory=list, init=False)

    @property
    def holding(self) -> bool:
        """See `Publisher`."""
        return self._volume is not None and self._volume.staged_bytes > 0

    def accept(self, item: Item) -> None:
        """See `Publisher`."""
        recording = item.recording
        recording.lost.update(item.lost)
        if item.abort:
            self._abort(recording)
            return
        if self._volume is not None and not self._volume.has_room(item.arrays):
            self.flush()
        volume = self._shard()
        self._present[recording] = None
        for rows in item.arrays:
            volume.stage(recording, rows)
        if item.end is not None:
            recording.meta = item.end
            recording.ended = True
        if volume.staged_bytes >= self.room.block_bytes:
            self.relieve()
        if volume is self._volume and volume.nbytes >= self.room.shard_bytes:
            self.flush()

    def relieve(self) -> None:
        """See `Publisher`. What was whole before an error is published at once."""
        if self._volume is None or not self._volume.staged_bytes:
            return
        try:
            self.room.release(self._volume.write())
        except OSError as error:
            for recording in self._volume.staged_recordings():
                self.give_up(recording, error)
            self._publish()

    def publish_due(self) -> None:
        """See `Publisher`."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self.flush()

    def flush(self) -> None:
        """See `Publisher`. Records that go on are published as far as they are."""
        if self._volume is not None and self._volume.begun:
            # On its own, because a block that cannot be written costs only its own records.
            self.relieve()
        self._publish()

    def give_up(self, recording: Recording, error: Exception) -> None:
        """See `Publisher`; settled with its shard."""
        recording.lose(error)
        self.room.release(self._shard().unstage(recording))
        self._present[recording] = None

    def _shard(self) -> Volume:
        if self._volume is None:
            path = self.room.paths.staging / f"{next(self.room.names)}{PAYLOAD_SUFFIX}"
            self._volume = Volume(path, HEADER_BYTES, self.room.sync, spare=self._spare)
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
        parts: dict[Recording, list[Entry]] = {}
        try:
            volume.seal()
            for recording in present:
                entries = [] if recording.aborted else volume.entries(recording, shard.name)
                if entries or (recording.ended and (recording.part or not recording.lost)):
                    parts[recording] = entries
            has_rows = any(parts.values())
            if parts:
                Publication(
                    payloads=[(volume.path, shard)] if has_rows else [],
                    sidecar=sidecar,
                    text=b"".join(r.line(entries).encode() for r, entries in parts.items()),
                ).publish(self.room.paths.staging, self.room.sync)
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
                entries = parts[recording]
                recording.published_part([shard] if entries else [], sidecar, entries)
            elif recording.ended:
                recording.fail()

"""Writing records into a store."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from tllm.spec.reading import require_one_of, whole_number
from tllm.stores.error import StoreError
from tllm.stores.format import Layout, WriterPaths, checked_text, root_path
from tllm.stores.ledger import REPLACES, Claim, Ledger, OnCollision
from tllm.stores.publish import (
    Publisher,
    Publishing,
    ShardPublisher,
    SinglePublisher,
    remove_replaced,
)
from tllm.stores.queue import Barrier, Intake, Overflow, SpillFile, closed_error
from tllm.stores.record import Record, RecordMeta, checked_arrays
from tllm.stores.recording import Published, QueuedRows, Recording, RecordStream
from tllm.stores.writer_root import open_root

logger = logging.getLogger(__name__)


_BLOCK_BYTES = 8 << 20

Durability = Literal["rename", "fsync"]


@dataclass(frozen=True)
class WriterOptions:
    """How a `StoreWriter` writes. Raises `ValueError` naming what is not allowed.

    Attributes:
        layout: `sharded` (many records a file), `packed` (a file a record), or `per_file` (a file
            a record, hook point and layer).
        durability: `rename` survives the death of the process; `fsync` also that of the machine.
        threads: of this writer.
        on_collision: when a record of the same tag, request id and sample exists: `error` refuses
            the new one, `overwrite` replaces the old one, `suffix` keeps both. `skip` leaves the
            new one out without an error when the old one is whole. When that is incomplete
            (`partial_error`), the new one is written, and hides it from readers once it is whole
            itself. A record that several pipeline stages write is written anew only after the
            store was opened again: before, a stage does not know what the others lost.
        max_bytes: of rows and positions that this writer may leave under the root, those of its
            earlier runs included; None for no limit. Records that would exceed it are refused, and
            streams lose the rows beyond it.
        shard_bytes: a shard is published when it has that much.
        queue_bytes: of rows in memory, submitted and not written.
        overflow: when they are reached: `block` makes the caller wait, `drop` loses the rows,
            `spill` keeps them in a nameless file until it has `spill_bytes`, and then loses them.
            Whatever is lost is counted and marked.
        spill_bytes: for `spill`.
        spill_folder: for `spill`; by default the writer's own folder. Better on another disk.
        publish_interval: seconds after which a shard is published though it is not full.
    """

    layout: Layout = "sharded"
    durability: Durability = "rename"
    threads: int = 2
    on_collision: OnCollision = "error"
    max_bytes: int | None = None
    shard_bytes: int = 256 << 20
    queue_bytes: int = 512 << 20
    overflow: Overflow = "block"
    spill_bytes: int = 8 << 30
    spill_folder: str | os.PathLike[str] | None = None
    publish_interval: float = 2.0

    def __post_init__(self) -> None:
        """Check each."""
        for name, allowed in (
            ("layout", Layout),
            ("durability", Durability),
            ("on_collision", OnCollision),
            ("overflow", Overflow),
        ):
            require_one_of(name, getattr(self, name), allowed)
        for name in ("threads", "shard_bytes", "queue_bytes", "spill_bytes", "max_bytes"):
            value = getattr(self, name)
            if value is None and name == "max_bytes":
                continue
            whole_number(value, f"{name}=", 1)
        interval = self.publish_interval
        if (
            isinstance(interval, bool)
            or not isinstance(interval, (int, float))
            or not 0 < interval < threading.TIMEOUT_MAX
        ):
            raise ValueError(f"publish_interval={interval!r} must be a time above 0, in s")
        if self.spill_folder is not None and not isinstance(self.spill_folder, (str, os.PathLike)):
            raise ValueError(f"spill_folder={self.spill_folder!r} is not allowed; give a path")


@dataclass(frozen=True)
class WriterStats:
    """Counters of a `StoreWriter`, since it was opened.

    Attributes:
        submitted: records submitted or begun.
        published: records on disk, those with rows missing among them.
        partial: of those, the ones with rows missing (`partial_error`).
        failed: records of which nothing can be read.
        dropped: of those and of the partial ones, how many lost rows to a full queue.
        skipped: records that were there already, with `on_collision="skip"`.
        rows, bytes: of what was published: rows, and bytes of rows and positions.
        spilled, spilled_bytes: records or chunks of records that waited on disk.
        queued_bytes, peak_queued_bytes: of rows in memory: now, and the most there were.
        blocked_seconds: time that `submit` and `append` waited for room.
    """

    submitted: int = 0
    published: int = 0
    partial: int = 0
    failed: int = 0
    dropped: int = 0
    skipped: int = 0
    rows: int = 0
    bytes: int = 0
    spilled: int = 0
    spilled_bytes: int = 0
    queued_bytes: int = 0
    peak_queued_bytes: int = 0
    blocked_seconds: float = 0.0

    def to_dict(self) -> dict[str, int | float]:
        return asdict(self)


class StoreWriter:
    """Writes records under a root, on threads of its own.

    Records are checked, queued and written in the background; what became of one is in the future
    that `submit` gives. An error of the system (a full disk, a lost permission) fails the records
    that it hits, with its text and number, and nothing else: the writer lives on, and what was
    published stays whole. A record is *published* when its sidecar is in place: from then on
    readers see it, and a killed process cannot take it away.

    Several writers may share a root, in one or many processes, each with its own `writer_id`.

    Args:
        root: folder of the store; made when missing.
        writer_id: name of this writer; unique under the root, and the same when it comes back.
        ledger: of several writers of one process under this root, for which a name exists once and
            whose bytes are limited together. Its `on_collision` and `max_bytes` hold instead of
            those of `options`. By default, one of its own.
        options: see `WriterOptions`, by name.

    Raises:
        ValueError: an argument is not allowed, the root is no folder, or the store has a format
            that is not known.
        WriterInUseError: another process writes under the same `writer_id`. A `ValueError`.
        PermissionError: the root cannot be written.
        OSError: what else the system says.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        writer_id: str = "main",
        ledger: Ledger | None = None,
        **options: Any,
    ) -> None:
        taken = [each.name for each in fields(WriterOptions)]
        if unknown := sorted(options.keys() - set(taken)):
            raise TypeError(
                f"StoreWriter has no {unknown}; it takes writer_id, ledger, {', '.join(taken)}"
            )
        chosen = WriterOptions(**options)
        if not (writer_id := checked_text("writer_id", writer_id)):
            raise ValueError("writer_id='' is not allowed; give this writer a name")
        self.layout: Layout = chosen.layout
        self.paths = WriterPaths(root_path(root), writer_id)
        self._options = chosen
        folder = chosen.spill_folder
        spill_place = self.paths.staging if folder is None else Path(folder)
        self._lock_fd, catalog = open_root(
            self.paths,
            sync=chosen.durability == "fsync",
            spill_place=spill_place if chosen.overflow == "spill" else None,
        )
        self._ledger = ledger or Ledger(chosen.on_collision, chosen.max_bytes, [writer_id])
        self._ledger.read(self.paths, catalog)
        self._spill = SpillFile(spill_place, chosen.spill_bytes)
        self._intake = Intake(chosen.threads, chosen.queue_bytes, chosen.overflow, self._spill)
        self._counts = {field.name: 0 for field in fields(WriterStats)}
        self._lock = threading.Lock()
        self._streams: dict[RecordStream, None] = {}
        self._closed = False
        # A forked process has neither the threads nor the lock of this one.
        self._process = os.getpid()
        self._last = [Barrier(stop=True) for _ in range(chosen.threads)]
        self._threads = [
            threading.Thread(
                target=self._work, args=(i, publisher), name=f"tllm-store-{writer_id}-{i}"
            )
            for i, publisher in enumerate(self._publishers(chosen))
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()
        # The threads die with the interpreter; what is queued must not.
        atexit.register(self.close)

    def submit(self, record: Record) -> Future[Published]:
        """Hand a whole record over.

        Its tensors are not copied: they must not change before the future is done.

        Returns:
            A future of what became of it. It raises `StoreError` when nothing of the record is on
            disk; rows that are missing from a record that is, are told in `Published.error`.

        Raises:
            ValueError: the record is malformed.
            StoreError: the writer is closed.
        """
        arrays = checked_arrays(record)
        self._require_open()
        recording, future = self._begin(record.meta)
        if recording is None:
            return future
        item = QueuedRows(recording, arrays, end=recording.meta)
        error: StoreError | None = StoreError(
            f"{recording.what} was given up while it waited for room", "aborted"
        )
        try:
            error = self._put(self._intake.lightest(), item)
        finally:  # who waits may be interrupted, and submit it again
            if error is not None and not item.queued:
                recording.lost[str(error)] = error
                recording.fail()
        return future

    def begin(self, meta: RecordMeta) -> RecordStream:
        """Begin a record whose rows come in pieces.

        Sharded, they are published as shards fill, and readers see the record as `pending`; in the
        other layouts it is published when it is finished. A record that may not be written is told
        in the stream's future.

        Raises:
            ValueError: the record id was used before.
            StoreError: the writer is closed.
        """
        self._require_open()
        recording, future = self._begin(meta)
        thread = self._intake.lightest()

        def put(item: QueuedRows) -> StoreError | None:
            self._require_own_process()
            error = self._put(thread, item)
            # Not before: `close` waits for a stream that it knows.
            if item.end is not None or item.abort:
                with self._lock:
                    self._streams.pop(stream, None)
            return error

        stream = RecordStream(meta, future, recording, put)
        if recording is not None:
            with self._lock:
                closed = self._closed
                if not closed:
                    self._streams[stream] = None
            if closed:  # since it was asked
                error = closed_error()
                recording.lost[str(error)] = error
                recording.fail()
        return stream

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that was submitted or finished before is published or failed.

        Raises:
            TimeoutError: it took longer than `timeout` seconds. It still goes on.
            StoreError: the writer is closed.
        """
        self._require_open()
        barriers = [Barrier() for _ in self._threads]
        for thread, barrier in enumerate(barriers):
            self._intake.put_barrier(thread, barrier)
        _wait(barriers, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Publish what is there, and end the threads. Safe to call again.

        Records that were begun and not finished are published as `partial_error`. Nothing happens
        in a process that was forked from the writer's.

        Raises:
            TimeoutError: it took longer than `timeout` seconds. It still goes on; call again.
        """
        if self._process != os.getpid():
            return
        with self._lock:
            first = not self._closed
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            # Its owner may finish it at the same time.
            with contextlib.suppress(StoreError):
                stream.finish("partial_error", "the writer was closed before the record ended")
        if first:
            atexit.unregister(self.close)
            self._intake.close(self._last)
        _wait(self._last, timeout)
        for worker in self._threads:
            worker.join()
        with self._lock:
            if self._lock_fd >= 0:
                self._spill.close()
                # Also for processes that were forked meanwhile: they hold the same lock.
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
                os.close(self._lock_fd)
                self._lock_fd = -1

    @property
    def room(self) -> int:
        """Bytes of rows that can be submitted now without waiting, spilling or loss."""
        return self._intake.room

    def stats(self) -> WriterStats:
        """What was done so far."""
        intake = self._intake
        of_queue: dict[str, Any] = {
            "spilled": intake.spilled_items,
            "spilled_bytes": intake.spilled_bytes,
            "queued_bytes": intake.used,
            "peak_queued_bytes": intake.peak,
            "blocked_seconds": intake.blocked_seconds,
        }
        with self._lock:
            return WriterStats(**{**self._counts, **of_queue})

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _publishers(self, options: WriterOptions) -> list[Publisher]:
        """One for each thread."""
        room = Publishing(
            paths=self.paths,
            layout=self.layout,
            sync=options.durability == "fsync",
            shard_bytes=options.shard_bytes,
            block_bytes=min(_BLOCK_BYTES, options.queue_bytes // (4 * options.threads)),
            interval=options.publish_interval,
            numbers=itertools.count(self.paths.next_shard()),
            names=itertools.count(),
            release=self._intake.release,
        )
        kind = ShardPublisher if self.layout == "sharded" else SinglePublisher
        return [kind(room) for _ in range(options.threads)]

    def _begin(self, meta: RecordMeta) -> tuple[Recording | None, Future[Published]]:
        """Claim a record's identity; no recording when it may not be written."""
        if not isinstance(meta, RecordMeta):
            raise ValueError(f"meta={meta!r:.60} is {type(meta).__name__}; give a RecordMeta")
        future: Future[Published] = Future()
        try:
            claim = self._ledger.claim(meta, future)
        except StoreError as error:
            self._count(submitted=1, failed=1)
            future.set_exception(error)
            return None, future
        self._count(submitted=1)
        if claim.record_id != meta.record_id:
            self._skip(meta, claim, future)
            return None, future
        recording = Recording(
            meta,
            claim.generation,
            REPLACES[self._ledger.on_collision],
            self.layout,
            self.paths.writer_id,
            lambda recording, result: self._resolved(recording, claim, result),
            future,
        )
        return recording, future

    def _skip(self, meta: RecordMeta, known: Claim, future: Future[Published]) -> None:
        """Resolve the future of a record that is there already, or on its way."""

        def resolve(other: Future[Published] | None) -> None:
            if other is not None and (why := _shortcoming(other)):
                self._count(failed=1)
                error = StoreError(
                    f"record {meta.request_id!r} was skipped for one of the same name that then "
                    f"{why}; give it again"
                    + (" after the store was opened anew" if meta.num_stages > 1 else ""),
                    "collision",
                )
                future.set_exception(error)
                return
            self._count(skipped=1)
            paths = other.result().paths if other is not None else ()
            future.set_result(Published(known.record_id, "skipped", "", paths, 0, 0))

        if known.future is None:
            resolve(None)
        else:
            known.future.add_done_callback(resolve)

    def _resolved(self, recording: Recording, claim: Claim, result: Published | None) -> None:
        self._ledger.give_back(recording.reserved - recording.bytes)
        dropped = any(error.reason == "dropped" for error in recording.lost.values())
        self._count(dropped=int(dropped))
        if result is None:
            self._ledger.failed(recording.meta, claim)
            self._count(failed=1)
            return
        own = recording.sidecars[-1] if self.layout != "sharded" else None
        whole = result.status == "ok"
        for sidecar in self._ledger.published(recording.meta, claim, own, whole):
            self._ledger.give_back(remove_replaced(sidecar))
        self._count(
            published=1,
            partial=int(not whole),
            rows=result.rows,
            bytes=result.bytes,
        )

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def _put(self, thread: int, item: QueuedRows) -> StoreError | None:
        """Queue an item within the limits; the error when it is not."""
        nbytes, recording, ledger = item.nbytes, item.recording, self._ledger
        if not ledger.reserve(nbytes):
            return StoreError(
                f"{recording.what}: {nbytes} bytes more would exceed max_bytes={ledger.max_bytes}, "
                f"of which {ledger.num_bytes} are used; raise it, or use another root",
                "limit",
            )
        with self._lock:
            recording.reserved += nbytes
        error = self._intake.put(thread, item)
        if error is not None:
            ledger.give_back(nbytes)
            with self._lock:
                recording.reserved -= nbytes
        return error

    def _work(self, index: int, publisher: Publisher) -> None:
        """What a thread does."""
        while True:
            item = self._intake.pop(index, publisher.deadline, publisher.holding)
            try:
                if item is None:
                    if self._intake.crowded:
                        publisher.relieve()
                    publisher.publish_due()
                elif isinstance(item, Barrier):
                    publisher.flush()
                else:
                    publisher.accept(item)
                    publisher.publish_due()
            except Exception as error:  # the writer outlives its own defects
                logger.exception("a record was not written")
                if isinstance(item, QueuedRows):
                    if item.end is not None:
                        item.recording.end(item.end)
                    publisher.give_up(item.recording, error)
            if isinstance(item, Barrier):
                item.passed.set()
                if item.stop:
                    return

    def _require_open(self) -> None:
        if self._closed:
            raise closed_error()
        self._require_own_process()

    def _require_own_process(self) -> None:
        if self._process != os.getpid():
            raise StoreError(
                f"the writer belongs to process {self._process}, from which this one was forked; "
                "open another one, under a writer_id of its own",
                "closed",
            )


def _shortcoming(other: Future[Published]) -> str:
    """Why a record that is done does not stand for another of its name; empty when it does."""
    if failure := other.exception():
        return f"failed: {failure}"
    error = other.result().error
    return f"was incomplete: {error}" if error else ""


def _wait(barriers: Sequence[Barrier], timeout: float | None) -> None:
    end = None if timeout is None else time.monotonic() + timeout
    for barrier in barriers:
        left = None if end is None else max(0.0, end - time.monotonic())
        if not barrier.passed.wait(left):
            raise TimeoutError(f"records were not all written within {timeout} s")

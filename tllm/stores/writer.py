"""Writing records into a store."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

from tllm.stores.catalog import Catalog
from tllm.stores.error import StoreError, describe
from tllm.stores.intake import Barrier, Intake, Overflow
from tllm.stores.ledger import Claim, Known, Ledger, OnCollision
from tllm.stores.marker import write_marker
from tllm.stores.name import checked_text
from tllm.stores.paths import Layout, WriterPaths
from tllm.stores.publication import make_folder, remove
from tllm.stores.publisher import Item, Publisher, Publishing
from tllm.stores.record import Record, RecordMeta, checked_arrays
from tllm.stores.recording import Published, Recording
from tllm.stores.sharded import ShardPublisher
from tllm.stores.single import SinglePublisher, remove_replaced
from tllm.stores.spill import SpillFile
from tllm.stores.stats import Counters, WriterStats
from tllm.stores.stream import RecordStream

logger = logging.getLogger(__name__)

Durability = Literal["rename", "fsync"]

_BLOCK_BYTES = 8 << 20


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
        layout: `sharded` (many records a file), `packed` (a file a record), or `per_file` (a file
            a record, hook point and layer).
        durability: `rename` survives the death of the process; `fsync` also that of the machine.
        threads: of this writer.
        on_collision: when a record of the same tag, request id and sample exists: `error` refuses
            the new one, `skip` leaves it out without an error, `overwrite` replaces the old one,
            `suffix` keeps both.
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
        writer_id: name of this writer; unique under the root, and the same when it comes back.

    Raises:
        ValueError: an argument is not allowed, the root is no folder, another process writes under
            the same `writer_id`, or the store has a format that is not known.
        PermissionError: the root cannot be written.
        OSError: what else the system says.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        layout: Layout = "sharded",
        durability: Durability = "rename",
        threads: int = 2,
        on_collision: OnCollision = "error",
        max_bytes: int | None = None,
        shard_bytes: int = 256 << 20,
        queue_bytes: int = 512 << 20,
        overflow: Overflow = "block",
        spill_bytes: int = 8 << 30,
        spill_folder: str | os.PathLike[str] | None = None,
        publish_interval: float = 2.0,
        writer_id: str = "main",
    ) -> None:
        _require_one_of("layout", layout, get_args(Layout))
        _require_one_of("durability", durability, get_args(Durability))
        _require_one_of("on_collision", on_collision, get_args(OnCollision))
        _require_one_of("overflow", overflow, get_args(Overflow))
        for name, value in (
            ("threads", threads),
            ("shard_bytes", shard_bytes),
            ("queue_bytes", queue_bytes),
            ("spill_bytes", spill_bytes),
            ("max_bytes", 1 if max_bytes is None else max_bytes),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} is not allowed; give an integer from 1 on")
        if not 0 < publish_interval < threading.TIMEOUT_MAX:
            raise ValueError(f"publish_interval={publish_interval!r} must be a time above 0, in s")
        if not checked_text("writer_id", writer_id):
            raise ValueError("writer_id='' is not allowed; give this writer a name")

        self.layout: Layout = layout
        self.paths = WriterPaths(Path(root).absolute(), checked_text("writer_id", writer_id))
        self._max_bytes = max_bytes
        sync = durability == "fsync"
        with contextlib.ExitStack() as undo:
            with _opening(self.paths.root):
                self._lock_fd = _prepare(self.paths, sync)
                undo.callback(os.close, self._lock_fd)
                catalog = Catalog.read(self.paths.root)
                _remove_unpublished(self.paths)
            spill = Path(spill_folder) if spill_folder is not None else self.paths.staging
            if overflow == "spill" and not os.access(spill, os.W_OK | os.X_OK):
                raise PermissionError(
                    errno.EACCES, f"spill_folder={str(spill)!r} cannot be written; give another"
                )
            undo.pop_all()
        self._ledger = Ledger(on_collision, catalog.known(self.paths))
        self._spent = catalog.bytes_of(self.paths)
        self._spill = SpillFile(spill, spill_bytes)
        self._intake = Intake(threads, queue_bytes, overflow, self._spill)
        self._counters = Counters()
        self._lock = threading.Lock()
        self._streams: dict[RecordStream, None] = {}
        self._closed = False
        self._last = [Barrier(stop=True) for _ in range(threads)]
        room = Publishing(
            paths=self.paths,
            layout=layout,
            sync=sync,
            shard_bytes=shard_bytes,
            block_bytes=min(_BLOCK_BYTES, queue_bytes // (4 * threads)),
            interval=publish_interval,
            numbers=itertools.count(self.paths.next_shard()),
            names=itertools.count(),
            release=self._intake.release,
        )
        publisher = ShardPublisher if layout == "sharded" else SinglePublisher
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(index, publisher(room)),
                name=f"tllm-store-{self.paths.writer_id}-{index}",
                daemon=True,
            )
            for index in range(threads)
        ]
        for thread in self._threads:
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
        item = Item(recording, arrays, end=recording.meta)
        error = self._put(self._intake.lightest(), item)
        if error is not None:
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

        def put(item: Item) -> StoreError | None:
            if item.end is not None or item.abort:
                with self._lock:
                    self._streams.pop(stream, None)
            return self._put(thread, item)

        stream = RecordStream(recording.meta if recording else meta, future, recording, put)
        if recording is not None:
            with self._lock:
                self._streams[stream] = None
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

        Records that were begun and not finished are published as `partial_error`.

        Raises:
            TimeoutError: it took longer than `timeout` seconds. It still goes on; call again.
        """
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
            for thread, barrier in enumerate(self._last):
                self._intake.put_barrier(thread, barrier)
        _wait(self._last, timeout)
        for worker in self._threads:
            worker.join()
        with self._lock:
            if self._lock_fd >= 0:
                self._spill.close()
                os.close(self._lock_fd)
                self._lock_fd = -1

    @property
    def room(self) -> int:
        """Bytes of rows that can be submitted now without waiting, spilling or loss."""
        return self._intake.room

    def stats(self) -> WriterStats:
        """What was done so far."""
        intake = self._intake
        return self._counters.snapshot(
            spilled=intake.spilled_items,
            spilled_bytes=intake.spilled_bytes,
            queued_bytes=intake.used,
            peak_queued_bytes=intake.peak,
            blocked_seconds=intake.blocked_seconds,
        )

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self, meta: RecordMeta) -> tuple[Recording | None, Future[Published]]:
        """Claim a record's identity; no recording when it may not be written."""
        future: Future[Published] = Future()
        try:
            claim = self._ledger.claim(meta, future)
        except StoreError as error:
            self._counters.add(submitted=1, failed=1)
            future.set_exception(error)
            return None, future
        self._counters.add(submitted=1)
        if isinstance(claim, Known):
            self._skip(meta, claim, future)
            return None, future
        recording = Recording(
            meta,
            claim.generation,
            claim.replaces,
            self.layout,
            self.paths.writer_id,
            lambda recording, result: self._settled(recording, claim, result),
            future,
        )
        return recording, future

    def _skip(self, meta: RecordMeta, known: Known, future: Future[Published]) -> None:
        """Resolve the future of a record that is there already, or on its way."""

        def resolve(other: Future[Published] | None) -> None:
            if other is not None and other.exception() is not None:
                self._counters.add(failed=1)
                error = StoreError(
                    f"record {meta.request_id!r} was skipped for one of the same name that then "
                    f"failed: {other.exception()}",
                    "collision",
                )
                future.set_exception(error)
                return
            self._counters.add(skipped=1)
            paths = other.result().paths if other is not None else ()
            future.set_result(Published(known.record_id, "skipped", "", paths, 0, 0))

        if known.future is None:
            resolve(None)
        else:
            known.future.add_done_callback(resolve)

    def _settled(self, recording: Recording, claim: Claim, result: Published | None) -> None:
        with self._lock:
            self._spent += recording.bytes - recording.reserved
        dropped = any(error.reason == "dropped" for error in recording.lost.values())
        self._counters.add(dropped=int(dropped))
        if result is None:
            self._ledger.failed(recording.meta, claim)
            self._counters.add(failed=1)
            return
        alone = self.layout != "sharded"
        own = recording.sidecars[-1] if alone else None
        for sidecar in self._ledger.published(recording.meta, claim, own):
            remove_replaced(sidecar)
        self._counters.add(
            published=1,
            partial=int(result.status == "partial_error"),
            rows=result.rows,
            bytes=result.bytes,
        )

    def _put(self, thread: int, item: Item) -> StoreError | None:
        """Queue an item within the limits; the error when it is not."""
        nbytes, recording = item.nbytes, item.recording
        with self._lock:
            if self._max_bytes is not None and self._spent + nbytes > self._max_bytes:
                return StoreError(
                    f"{recording.what}: {nbytes} bytes more would exceed max_bytes="
                    f"{self._max_bytes}, of which {self._spent} are used; raise it, or use another "
                    "root",
                    "limit",
                )
            self._spent += nbytes
            recording.reserved += nbytes
        error = self._intake.put(thread, item)
        if error is not None:
            with self._lock:
                self._spent -= nbytes
                recording.reserved -= nbytes
        return error

    def _work(self, index: int, publisher: Publisher) -> None:
        """What a thread does."""
        while True:
            item = self._intake.take(index, publisher.deadline, publisher.holding)
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
                if isinstance(item, Item):
                    if item.end is not None:
                        item.recording.meta, item.recording.ended = item.end, True
                    publisher.give_up(item.recording, error)
            if isinstance(item, Barrier):
                item.passed.set()
                if item.stop:
                    return

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError("the writer is closed; open another one", "closed")


def _wait(barriers: Sequence[Barrier], timeout: float | None) -> None:
    end = None if timeout is None else time.monotonic() + timeout
    for barrier in barriers:
        left = None if end is None else max(0.0, end - time.monotonic())
        if not barrier.passed.wait(left):
            raise TimeoutError(f"records were not all written within {timeout} s")


def _require_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not allowed; give one of {', '.join(allowed)}")


@contextlib.contextmanager
def _opening(root: Path) -> Iterator[None]:
    """Say of errors of the system what they mean for the root."""
    try:
        yield
    except (NotADirectoryError, FileExistsError) as error:
        raise ValueError(
            f"root={str(root)!r} cannot be a store, {describe(error)}; give a folder"
        ) from error
    except OSError as error:
        denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        kind = PermissionError if denied else OSError
        raise kind(
            error.errno,
            f"root={str(root)!r} cannot be written, {describe(error)}; give a folder that "
            f"user {os.geteuid()} may write",
        ) from error


def _prepare(paths: WriterPaths, sync: bool) -> int:
    """Make the writer's folder and lock it; returns the lock's file descriptor."""
    make_folder(paths.folder, sync)
    fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 200, 0).decode(errors="replace").strip()
            raise ValueError(
                f"writer_id={paths.writer_id!r} is in use under {str(paths.root)!r} by {owner}; "
                "give each writer an id of its own"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        remove(paths.staging)
        paths.staging.mkdir()
        write_marker(paths.root, paths.staging, sync)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _remove_unpublished(paths: WriterPaths) -> None:
    """Remove shards whose writer was killed before their sidecar was there."""
    for payload in paths.shards():
        if not payload.with_suffix(".jsonl").exists():
            payload.unlink()

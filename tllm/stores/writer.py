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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt
import torch

from tllm.spec.hooks import HookPoint
from tllm.spec.reading import require_one_of, whole_number
from tllm.stores.catalog import Catalog
from tllm.stores.error import StoreError, WriterInUseError, describe
from tllm.stores.format import (
    MARKER,
    Identity,
    Layout,
    WriterPaths,
    checked_text,
    marker_text,
    require_marker,
    root_path,
)
from tllm.stores.publish import (
    Published,
    Publisher,
    Publishing,
    QueuedRows,
    Recording,
    ShardPublisher,
    SinglePublisher,
    make_folder,
    remove,
    remove_replaced,
    sync_folder,
    write_file,
)
from tllm.stores.queue import Barrier, Intake, Overflow, SpillFile
from tllm.stores.record import (
    ArrayKey,
    CheckedStack,
    Record,
    RecordMeta,
    RecordStatus,
    StackedRows,
    checked_arrays,
    checked_positions,
)

logger = logging.getLogger(__name__)

Durability = Literal["rename", "fsync"]
OnCollision = Literal["error", "overwrite", "suffix", "skip"]

_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class WriterOptions:
    """How a `StoreWriter` writes. Raises `ValueError` naming what is not allowed.

    Attributes:
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


@dataclass(frozen=True)
class Claim:
    """A record that is on disk, or that has leave to be written: the newest of its identity.

    Attributes:
        generation: which record of its identity it is, from 1.
        sidecar: of a record in files of its own that this writer may remove.
        future: what becomes of it, while it is being written.
        before: the newest record until then, while it is being written.
    """

    record_id: str
    generation: int
    sidecar: Path | None = None
    future: Future[Published] | None = None
    before: Claim | None = None


class Ledger:
    """Which records exist, and what happens to one more of the same identity.

    It knows those that were there when the store was opened, and its writer's own. What other
    writers publish meanwhile is not seen.
    """

    def __init__(self, policy: OnCollision, known: Iterable[tuple[Identity, Claim]]) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._newest: dict[Identity, Claim] = {}
        self._ids: set[tuple[str, int]] = set()
        self._replaceable: dict[Identity, list[tuple[int, Path]]] = {}
        for identity, claim in known:
            self._ids.add((claim.record_id, identity[3]))
            if self._newest.get(identity, claim).generation <= claim.generation:
                self._newest[identity] = claim
            if claim.sidecar is not None and policy == "overwrite":
                self._replaceable.setdefault(identity, []).append((claim.generation, claim.sidecar))

    def claim(self, meta: RecordMeta, future: Future[Published]) -> Claim:
        """Leave to write a record; of another record id: the record that is there and stays.

        Raises:
            ValueError: the record id was used before.
            StoreError: the record exists, and the policy is `error`.
        """
        with self._lock:
            if (meta.record_id, meta.stage) in self._ids:
                raise ValueError(
                    f"record_id={meta.record_id!r} (stage {meta.stage}) was used before; give each "
                    "capture an id of its own, or none"
                )
            before = self._newest.get(meta.identity)
            if before is not None and self._policy == "skip":
                return before
            if before is not None and self._policy == "error":
                raise StoreError(
                    f"record {meta.request_id!r} sample {meta.sample_index} of tag {meta.tag!r} "
                    "exists already and on_collision='error'; give another request id or tag, or "
                    "on_collision 'overwrite', 'suffix' or 'skip'",
                    "collision",
                )
            generation = before.generation + 1 if before is not None else 1
            claim = Claim(meta.record_id, generation, future=future, before=before)
            self._ids.add((meta.record_id, meta.stage))
            self._newest[meta.identity] = claim
            return claim

    def published(self, meta: RecordMeta, claim: Claim, sidecar: Path | None) -> list[Path]:
        """A claimed record is on disk; the sidecars of records that may be removed now.

        Args:
            sidecar: when the record has files of its own.
        """
        with self._lock:
            if self._newest[meta.identity] is claim:
                self._newest[meta.identity] = Claim(meta.record_id, claim.generation, sidecar)
            # The files of several stages cannot be removed in one go: they stay.
            if self._policy != "overwrite" or sidecar is None or meta.num_stages > 1:
                return []
            files = self._replaceable.pop(meta.identity, [])
            files.append((claim.generation, sidecar))
            newest = max(generation for generation, _ in files)
            self._replaceable[meta.identity] = [file for file in files if file[0] == newest]
            return [path for generation, path in files if generation < newest]

    def failed(self, meta: RecordMeta, claim: Claim) -> None:
        """A claimed record will not come."""
        with self._lock:
            if self._newest[meta.identity] is not claim:
                return
            if claim.before is None:
                del self._newest[meta.identity]
            else:
                self._newest[meta.identity] = claim.before


_ArrayEnd = tuple[str | None, int, int]
"""Of an array's rows so far: dtype, width and last position."""

_NEW: _ArrayEnd = None, 0, -1


class RecordStream:
    """Takes a record's rows as they come. Made by `StoreWriter.begin`.

    What happens to the record on the way (a full disk, a full queue, a limit) raises nothing here:
    it is in what `future` gives. Calls of one array's rows must come in the order of positions;
    several threads may call.
    """

    def __init__(
        self,
        meta: RecordMeta,
        future: Future[Published],
        recording: Recording | None,
        put: Callable[[QueuedRows], StoreError | None],
    ) -> None:
        self.meta = meta
        self.future = future
        self._recording = recording
        self._put = put
        self._ended = False
        self._stacked: bool | None = None
        self._arrays: dict[ArrayKey, _ArrayEnd] = {}
        self._lost: dict[str, StoreError] = {}
        self._told: set[tuple[str, str]] = set()
        self._lock = threading.RLock()

    @property
    def active(self) -> bool:
        """Whether rows still go anywhere: False once it ended, and when it was refused or skipped
        from the start."""
        return self._recording is not None and not self._ended

    def append(
        self,
        hook: str | HookPoint,
        layer: int | None,
        positions: torch.Tensor | npt.NDArray[Any] | Sequence[int],
        tensor: torch.Tensor,
    ) -> None:
        """Add rows of one array.

        Args:
            hook, layer: which array; the layer of `lm_head_in` is None.
            positions: `[rows]`, above all that this array was given before.
            tensor: `[rows, hidden]` on the CPU, of the array's dtype; it is not copied and must not
                change before `future` is done or `StoreWriter.flush` came back.

        Raises:
            ValueError: the rows are not fit to be stored, or do not go with those before.
            StoreError: the record has ended.
        """
        with self._lock:
            self._require(stacked=False)
            key = ArrayKey.of(hook, layer)
            checked = checked_positions(key.name, positions, self._arrays.get(key, _NEW)[2])
            self._give(CheckedStack.single(key, tensor, checked))

    def append_stack(self, rows: StackedRows) -> None:
        """`append` for several arrays whose rows have the same positions; raises as it does. A
        record takes either."""
        with self._lock:
            self._require(stacked=True)
            ends = [self._arrays.get(ArrayKey.of(*place), _NEW)[2] for place in rows.places]
            self._give(CheckedStack.of(rows, max(ends, default=-1)))

    def finish(
        self,
        status: RecordStatus = "ok",
        error: str = "",
        *,
        prompt_len: int | None = None,
        token_ids: Sequence[int] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Future[Published]:
        """Nothing more will come; returns `future`.

        Args:
            status, error: see `RecordMeta`.
            prompt_len, token_ids, metadata: instead of those given at the beginning.

        Raises:
            ValueError: status, error or metadata are malformed; the record is still open.
            StoreError: the record has ended.
        """
        given = {"prompt_len": prompt_len, "token_ids": token_ids, "metadata": metadata}
        changes: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
        with self._lock:
            self._require()
            self._end(end=replace(self.meta, status=status, error=error, **changes))
            return self.future

    def abort(self) -> None:
        """Give the record up: nothing of it is kept. `future` raises `StoreError` (`aborted`)."""
        with self._lock:
            self._require()
            self._end(abort=True)

    def _end(self, end: RecordMeta | None = None, abort: bool = False) -> None:
        self._ended = True
        if self._recording is not None:
            # Ends are never refused: they have no rows.
            self._put(QueuedRows(self._recording, end=end, abort=abort, lost=self._pop_lost()))

    def _give(self, stack: CheckedStack) -> None:
        """Queue rows. When they find no place, that is said with what comes next; the first of them
        stand for all that follow for the same reason.

        Raises `ValueError` when they do not go with those before.
        """
        _, dtype, hidden = stack.kind
        ends = [self._arrays.get(key, _NEW) for key in stack.keys]
        for known, width, _ in ends:
            if known is not None and (known, width) != (dtype, hidden):
                raise ValueError(
                    f"{stack.what} were given after {known} rows of {width}; an array has one "
                    "dtype and one width"
                )
        for key, (*_, after) in zip(stack.keys, ends, strict=True):
            self._arrays[key] = dtype, hidden, int(stack.positions[-1]) if stack.rows else after
        if self._recording is None:
            return
        lost = self._pop_lost()
        error = self._put(QueuedRows(self._recording, [stack], lost=lost))
        if error is not None:
            self._lost = lost
            others = f" and {len(stack.keys) - 1} more" if len(stack.keys) > 1 else ""
            what = stack.keys[0].name + others
            if (what, error.reason) not in self._told:
                self._told.add((what, error.reason))
                lost[f"rows of {what} were not kept: {error.reason} ({error})"] = error

    def _pop_lost(self) -> dict[str, StoreError]:
        lost, self._lost = self._lost, {}
        return lost

    def _require(self, stacked: bool | None = None) -> None:
        """That the record goes on, and takes rows in this form."""
        if self._ended:
            raise StoreError(
                f"record {self.meta.request_id!r} has ended; begin another one", "closed"
            )
        if stacked is None:
            return
        if self._stacked not in (None, stacked):
            raise ValueError(
                f"record {self.meta.request_id!r} was given rows by "
                f"{'append_stack' if self._stacked else 'append'} before; go on with that"
            )
        self._stacked = stacked


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
        **options: Any,
    ) -> None:
        chosen = WriterOptions(**options)
        if not (writer_id := checked_text("writer_id", writer_id)):
            raise ValueError("writer_id='' is not allowed; give this writer a name")
        self.layout: Layout = chosen.layout
        self.paths = WriterPaths(root_path(root), writer_id)
        self._options = chosen
        self._lock_fd, catalog, spill_place = _open_root(self.paths, chosen)
        self._ledger = Ledger(chosen.on_collision, _known(self.paths, catalog))
        self._spent = catalog.bytes_of(writer_id)
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

        def put(item: QueuedRows) -> StoreError | None:
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
            for thread, barrier in enumerate(self._last):
                self._intake.put_barrier(thread, barrier)
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
            self._options.on_collision == "overwrite",
            self.layout,
            self.paths.writer_id,
            lambda recording, result: self._resolved(recording, claim, result),
            future,
        )
        return recording, future

    def _skip(self, meta: RecordMeta, known: Claim, future: Future[Published]) -> None:
        """Resolve the future of a record that is there already, or on its way."""

        def resolve(other: Future[Published] | None) -> None:
            if other is not None and other.exception() is not None:
                self._count(failed=1)
                error = StoreError(
                    f"record {meta.request_id!r} was skipped for one of the same name that then "
                    f"failed: {other.exception()}",
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
        with self._lock:
            self._spent += recording.bytes - recording.reserved
        dropped = any(error.reason == "dropped" for error in recording.lost.values())
        self._count(dropped=int(dropped))
        if result is None:
            self._ledger.failed(recording.meta, claim)
            self._count(failed=1)
            return
        own = recording.sidecars[-1] if self.layout != "sharded" else None
        for sidecar in self._ledger.published(recording.meta, claim, own):
            remove_replaced(sidecar)
        self._count(
            published=1,
            partial=int(result.status == "partial_error"),
            rows=result.rows,
            bytes=result.bytes,
        )

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def _put(self, thread: int, item: QueuedRows) -> StoreError | None:
        """Queue an item within the limits; the error when it is not."""
        nbytes, recording = item.nbytes, item.recording
        with self._lock:
            limit = self._options.max_bytes
            if limit is not None and self._spent + nbytes > limit:
                return StoreError(
                    f"{recording.what}: {nbytes} bytes more would exceed max_bytes={limit}, of "
                    f"which {self._spent} are used; raise it, or use another root",
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
            raise StoreError("the writer is closed; open another one", "closed")
        if self._process != os.getpid():
            raise StoreError(
                f"the writer belongs to process {self._process}, from which this one was forked; "
                "open another one, under a writer_id of its own",
                "closed",
            )


def _wait(barriers: Sequence[Barrier], timeout: float | None) -> None:
    end = None if timeout is None else time.monotonic() + timeout
    for barrier in barriers:
        left = None if end is None else max(0.0, end - time.monotonic())
        if not barrier.passed.wait(left):
            raise TimeoutError(f"records were not all written within {timeout} s")


def _open_root(paths: WriterPaths, options: WriterOptions) -> tuple[int, Catalog, Path]:
    """Lock the writer's folder and see what is there.

    Returns:
        The lock's file descriptor, all records under the root, and the folder to spill to.
    """
    root, sync = paths.root, options.durability == "fsync"
    with _opening(root), contextlib.ExitStack() as undo:
        lock = _lock(paths, sync)
        undo.callback(os.close, lock)
        remove(paths.staging)
        paths.staging.mkdir()
        _write_marker(paths, sync)
        catalog = Catalog.read(root)
        _remove_unpublished(paths)
        undo.pop_all()
    spill = Path(options.spill_folder) if options.spill_folder is not None else paths.staging
    if options.overflow == "spill" and not os.access(spill, os.W_OK | os.X_OK):
        os.close(lock)
        raise PermissionError(
            errno.EACCES, f"spill_folder={str(spill)!r} cannot be written; give another"
        )
    return lock, catalog, spill


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
        hint = (
            f"give a folder that user {os.geteuid()} may write"
            if denied
            else "mend that, or give another"
        )
        what = f"root={str(root)!r} cannot be written, {describe(error)}; {hint}"
        raise kind(error.errno, what) from error
    except StoreError as error:
        raise ValueError(f"root={str(root)!r} cannot be gone on with: {error}") from error


def _lock(paths: WriterPaths, sync: bool) -> int:
    """Make the writer's folder and lock it; returns the lock's file descriptor."""
    make_folder(paths.folder, sync)
    fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 200, 0).decode(errors="replace").strip()
            raise WriterInUseError(
                f"writer_id={paths.writer_id!r} is in use under {str(paths.root)!r} by {owner}; "
                "give each writer an id of its own, or a root of its own; where that process is "
                "left of a run that was killed, end it",
                owner,
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_marker(paths: WriterPaths, sync: bool) -> None:
    """Mark the root as a store, unless it is one; `StoreError` when it is one of a version that is
    not known."""
    if (paths.root / MARKER).exists():
        require_marker(paths.root)
        return
    # Several writers may do this at once: they write the same, each in one go.
    write_file(paths.staging / MARKER, marker_text(), sync)
    os.replace(paths.staging / MARKER, paths.root / MARKER)
    if sync:
        sync_folder(paths.root)


def _known(paths: WriterPaths, catalog: Catalog) -> Iterator[tuple[Identity, Claim]]:
    prefix = f"{paths.folder.relative_to(paths.root).as_posix()}/"
    for row in catalog.ended():
        own = row["sidecar"].startswith(prefix) and row["layout"] != "sharded"
        sidecar = paths.root / row["sidecar"] if own else None
        identity = row["tag"], row["request_id"], row["sample_index"], row["stage"]
        yield identity, Claim(row["record_id"], row["generation"], sidecar)


def _remove_unpublished(paths: WriterPaths) -> None:
    """Remove shards whose writer was killed before their sidecar was there."""
    for payload in paths.shards():
        if not payload.with_suffix(".jsonl").exists():
            payload.unlink()

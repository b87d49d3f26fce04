"""A record on its way to disk, whole or in pieces, and what became of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt
import torch

from tllm.spec.hooks import HookPoint
from tllm.stores.error import StoreError, describe, plain_text
from tllm.stores.format import LINE_TYPES, Layout, SidecarLine
from tllm.stores.record import (
    ArrayKey,
    CheckedStack,
    RecordMeta,
    RecordStatus,
    StackedRows,
    checked_positions,
    keys_of,
)
from tllm.stores.volume import StackPiece
from tllm.version import __version__

_SAME = LINE_TYPES.keys() & {field.name for field in fields(RecordMeta)}
"""What a line of a sidecar repeats of the record's description."""
_VERSIONS = {"tllm": __version__, "torch": torch.__version__}

_ArrayEnd = tuple[str | None, int, int]
"""Of an array's rows so far: dtype, width and last position."""
_NEW: _ArrayEnd = None, 0, -1


@dataclass(frozen=True)
class Published:
    """What became of a record.

    Attributes:
        status: `ok`, `partial_error` (on disk, but rows are missing), or `skipped` (it was there
            already, whole, and `on_collision="skip"`).
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
        replaces: with which of these statuses at its end readers must not see those of lower
            generations any more.
        on_resolved: called once, with the result or None for a failure, before the future.
        future: resolved with what became of it.
        part: number of the next part to be published.
        ended: nothing more will come.
        aborted: its caller gave it up.
        lost: why rows are missing, and the error that a record without any rows fails with.
        payloads, sidecars, rows, bytes: of the parts that are published.
        reserved: bytes of rows that count against the writer's limit on its behalf.
    """

    meta: RecordMeta
    generation: int
    replaces: Sequence[RecordStatus]
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
            replaces=meta.status in self.replaces,
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
        queued: a thread will come to it.
        nbytes: of rows and positions.
    """

    recording: Recording
    stacks: Sequence[CheckedStack] = ()
    end: RecordMeta | None = None
    lost: Mapping[str, StoreError] = field(default_factory=dict)
    abort: bool = False
    queued: bool = field(default=False, init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(stack.nbytes for stack in self.stacks)


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
            ends = [self._arrays.get(key, _NEW)[2] for key in keys_of(rows)]
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
        try:
            error = self._put(QueuedRows(self._recording, [stack], lost=lost))
        except BaseException:  # who waits for room may be interrupted, and the record goes on
            what = f"rows of {stack.keys[0].name} were given up while they waited for room"
            self._lost = {**lost, what: StoreError(f"{self._recording.what}: {what}", "aborted")}
            raise
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

"""A record on its way to disk, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tllm.stores.error import StoreError, describe, plain_text
from tllm.stores.format import LINE_TYPES, Layout, SidecarLine
from tllm.stores.record import CheckedStack, RecordMeta
from tllm.stores.volume import StackPiece
from tllm.version import __version__

_SAME = LINE_TYPES.keys() & {field.name for field in fields(RecordMeta)}
"""What a line of a sidecar repeats of the record's description."""
_VERSIONS = {"tllm": __version__, "torch": torch.__version__}


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

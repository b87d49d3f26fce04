"""A record on its way through the writer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from tllm.stores.error import StoreError, describe
from tllm.stores.paths import Layout
from tllm.stores.record import RecordMeta
from tllm.stores.sidecar import Entry, SidecarLine
from tllm.version import __version__

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
        layout, writer: for the sidecar.
        future: resolved with what became of it.
        on_settled: called once, with the result or None for a failure, before the future.
        part: number of the next part to be published.
        ended: nothing more will come.
        aborted: its caller gave it up.
        settled: the future is resolved.
        payloads, sidecars, rows, bytes: of the parts that are published.
        reserved: bytes of rows that count against the writer's limit on its behalf.
        lost: why rows are missing, and the error that a record without any rows fails with.
    """

    meta: RecordMeta
    generation: int
    replaces: bool
    layout: Layout
    writer: str
    on_settled: Callable[[Recording, Published | None], None]
    future: Future[Published] = field(default_factory=Future)
    part: int = 0
    ended: bool = False
    aborted: bool = False
    settled: bool = False
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

    def lose(self, error: Exception) -> None:
        """Note that rows could not be written."""
        if isinstance(error, OSError):
            failure = StoreError.from_os_error(f"{self.what} was not written", error)
            reason = f"rows were lost: {describe(error)}"
        else:
            text = f"{type(error).__name__}: {error}"
            failure = StoreError(f"{self.what} was not written: {text}", "io")
            reason = f"rows were lost: {text}"
        self.lost.setdefault(reason, failure)

    def fail(self) -> None:
        """Nothing of the record can be read, and nothing more will come."""
        self._settle(None)
        self.future.set_exception(next(iter(self.lost.values())))

    def abort(self) -> None:
        """Its caller gave it up."""
        self._settle(None)
        self.future.set_exception(StoreError(f"{self.what} was aborted", "aborted"))

    def final_meta(self) -> RecordMeta:
        """The record's description with what was lost on the way."""
        if not self.lost:
            return self.meta
        error = "; ".join(text for text in (self.meta.error, *self.lost) if text)
        return replace(self.meta, status="partial_error", error=error)

    def line(self, arrays: Sequence[Entry]) -> SidecarLine:
        """The sidecar line of the part that is being published."""
        meta = self.final_meta()
        status = ("aborted" if self.aborted else meta.status) if self.ended else "pending"
        return SidecarLine(
            record_id=meta.record_id,
            request_id=meta.request_id,
            tag=meta.tag,
            sample_index=meta.sample_index,
            generation=self.generation,
            replaces=self.replaces,
            stage=meta.stage,
            num_stages=meta.num_stages,
            part=self.part,
            last=self.ended,
            status=status,
            error=meta.error if self.ended else "",
            prompt_len=meta.prompt_len,
            token_ids=meta.token_ids if self.ended else (),
            model=meta.model,
            versions={**_VERSIONS, **meta.versions},
            reduction=meta.reduction,
            metadata=meta.metadata if self.ended else {},
            created=meta.created,
            layout=self.layout,
            writer=self.writer,
            arrays=arrays,
        )

    def published_part(
        self, payloads: Sequence[Path], sidecar: Path, entries: Sequence[Entry]
    ) -> None:
        """A part is on disk; settles the record when it was the last."""
        self.part += 1
        self.payloads += payloads
        self.sidecars.append(sidecar)
        self.rows += sum(entry.rows for entry in entries)
        self.bytes += sum(entry.nbytes for entry in entries)
        if not self.ended:
            return
        if self.aborted:
            self.abort()
            return
        meta = self.final_meta()
        result = Published(
            meta.record_id,
            meta.status,
            meta.error,
            (*self.payloads, *self.sidecars),
            self.rows,
            self.bytes,
        )
        self._settle(result)
        self.future.set_result(result)

    def _settle(self, result: Published | None) -> None:
        self.settled = True
        self.on_settled(self, result)

"""Activations in a store on disk, written by the workers while they serve."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from tllm.consumers.capture.activations import Activations, CapturedRows
from tllm.consumers.capture.capturing import Capturing, Ending
from tllm.consumers.capture.reductions import sequence_key
from tllm.ports import (
    ConsumerContext,
    Payload,
    Place,
    PortBundle,
    RequestInfo,
    RequestResult,
    RowMeta,
)
from tllm.spec.capture import OPTIONS, CaptureSpec
from tllm.spec.reading import allow_options, require_one_of, said_of, whole_number
from tllm.stores import (
    Layout,
    Published,
    Record,
    RecordMeta,
    RecordStream,
    StackedRows,
    StoreError,
    StoreWriter,
    WriterInUseError,
    WriterOptions,
)
from tllm.stores.format import checked_text, root_path
from tllm.stores.ledger import Ledger
from tllm.stores.record import require_json

_OWN_OPTIONS = ("request_id", "tag", "layout", "metadata")


@dataclass(frozen=True)
class StoredCapture(Payload):
    """Where a capture is on disk. `tllm.stores.open(root)` reads it.

    Attributes:
        root: of the store.
        record_id, request_id, tag: what it is called there.
        paths: its files; a shard holds other records too.
        rows, bytes: of all hook points together.
        skipped: a whole record of this name was there already, and the store keeps that one.
    """

    root: str
    record_id: str
    request_id: str
    tag: str
    paths: tuple[str, ...]
    rows: int
    bytes: int
    skipped: bool = False

    def joined(self, other: Any) -> StoredCapture:
        """With the layers that another pipeline stage wrote."""
        if not isinstance(other, StoredCapture):
            return self
        return replace(
            self,
            paths=(*self.paths, *other.paths),
            rows=self.rows + other.rows,
            bytes=self.bytes + other.bytes,
            skipped=self.skipped and other.skipped,
        )


class FilesystemConsumer(Capturing):
    """Writes captures into a store (`tllm.stores`) under `root`.

    Without `hooks`, requests ask for themselves: `SamplingParams(capture={"filesystem": {"hooks":
    {"post_block": [12]}, "positions": "all", "tag": "run-1"}})`. With `hooks`, every request is
    captured, and one that asks for itself gets what it asks. The result of a request is there once
    its record is published; the engine goes on meanwhile. Large prompts are written while their
    request runs: the record is `pending` until it ends, and its name is taken from then on.

    With n > 1, the record of sample 0 has the prompt's rows, those of the others only their own.

    Args:
        root: folder of the store, made when missing; refused at start-up if it cannot be written.
        hooks, positions, reduction, dtype: of every request, as in a request's options.
        tag: of requests that give none.
        layout: `sharded`, `packed` or `per_file`, unless the request says.
        durability, threads, on_collision, max_bytes, shard_bytes, publish_interval: see
            `tllm.stores.WriterOptions`. `on_collision` and `max_bytes` are for the records of a
            worker in all layouts together.
        overflow: what happens when the disk is slower than the captures and `queue_mib` of rows
            wait for it: `block` makes the engine wait, `drop` gives rows up, `spill` keeps up to
            `spill_mib` in a file in `spill_folder`. What is given up is counted, and the results
            are `partial_error`.
        queue_mib, spill_mib, spill_folder: see `overflow`.
        host_mib: rows of running requests in host memory, by default half of the machine's memory;
            beyond it, `overflow` decides (see `Capturing`).
        consumer_id: its name, for a second one in the same engine. Neither knows the other's
            records: give each a `tag`, so that names stay apart.
    """

    needs_tokens = True
    takes_early = True
    one_prompt_options = ("request_id",)

    def __init__(
        self,
        root: str | Path,
        *,
        hooks: Any = None,
        positions: Any = "all",
        reduction: str = "none",
        dtype: str = "model",
        tag: str = "",
        layout: Layout = "sharded",
        durability: str = "rename",
        threads: int = 2,
        on_collision: str = "error",
        max_bytes: int | None = None,
        shard_bytes: int = 256 << 20,
        publish_interval: float = 0.5,
        overflow: str = "block",
        queue_mib: int = 512,
        spill_mib: int = 8192,
        spill_folder: str | Path | None = None,
        host_mib: int | None = None,
        consumer_id: str = "filesystem",
    ) -> None:
        super().__init__(
            overflow=overflow, host_mib=host_mib, spill_mib=spill_mib, spill_folder=spill_folder
        )
        whole_number(queue_mib, "queue_mib=", 1)
        self.consumer_id = consumer_id
        self.on_request_only = hooks is None
        self._root = str(root_path(root))
        self._tag = checked_text("tag", tag)
        self._layout = layout
        self._defaults: dict[str, Any] = {
            "positions": positions,
            "reduction": reduction,
            "dtype": dtype,
        }
        if hooks is not None:
            self._defaults["hooks"] = hooks
            CaptureSpec.parse(self._defaults, consumer_id)
        self._queue_bytes = queue_mib << 20
        self._writing: dict[str, Any] = {
            "durability": durability,
            "threads": threads,
            "on_collision": on_collision,
            "max_bytes": max_bytes,
            "shard_bytes": shard_bytes,
            "publish_interval": publish_interval,
            "overflow": overflow,
            "queue_bytes": self._queue_bytes,
            "spill_bytes": spill_mib << 20,
            "spill_folder": spill_folder,
        }
        # Before a model is loaded for nothing.
        WriterOptions(layout, **self._writing)

    def spec(self, options: Mapping[str, Any]) -> CaptureSpec:
        """Takes `hooks`, `positions`, `reduction`, `dtype`, `request_id`, `tag`, `layout` and
        `metadata`."""
        name = f"capture[{self.consumer_id!r}]"
        allow_options(options, (*OPTIONS, *_OWN_OPTIONS), name)
        for field_name in ("request_id", "tag"):
            if field_name in options:
                given = options[field_name]
                if not isinstance(given, str):
                    raise ValueError(f"{name}[{field_name!r}]={given!r} is not text")
                with said_of(f"{name}[{field_name!r}]"):
                    checked_text(field_name, given)
        if "layout" in options:
            require_one_of(f"{name}['layout']", options["layout"], Layout)
        metadata = options.get("metadata", {})
        if not isinstance(metadata, Mapping):
            raise ValueError(f"{name}['metadata']={metadata!r} is not a mapping")
        require_json(f"{name}['metadata']", metadata)
        return CaptureSpec.parse({**self._defaults, **options}, name)

    # -- in the worker -------------------------------------------------------------------------

    def start(self, ctx: ConsumerContext) -> None:
        """Open the store; `ValueError` when it cannot be written, `WriterInUseError` when another
        engine's captures of this name are."""
        super().start(ctx)
        self._writers: dict[str, StoreWriter] = {}
        self._ledger = Ledger(
            self._writing["on_collision"],
            self._writing["max_bytes"],
            map(self._writer_id, get_args(Layout)),
        )
        # Of long prompts: the record that is being written, or why it cannot be.
        self._begun: dict[tuple[str, int], RecordStream | Exception] = {}
        self._expedited_until = 0.0
        self._waiting_bytes = 0
        self._has_failed = False
        self._room = threading.Condition()
        self._counts = {"records": 0, "partial": 0, "failed": 0}
        if ctx.model.first_rank:
            self._writer(self._layout)

    def _writer(self, layout: str) -> StoreWriter:
        writer = self._writers.get(layout)
        if writer is None:
            try:
                writer = StoreWriter(
                    self._root,
                    layout=layout,  # type: ignore[arg-type]
                    writer_id=self._writer_id(layout),
                    ledger=self._ledger,
                    **self._writing,
                )
            except WriterInUseError as error:
                raise WriterInUseError(
                    f"consumer_id={self.consumer_id!r} is that of another engine's captures into "
                    f"{str(self._root)!r}, of {error.owner}; give this one a consumer_id of its "
                    "own, or a root of its own; where that process is left of a run that was "
                    "killed, end it",
                    error.owner,
                ) from error
            except OSError as error:
                raise ValueError(error.strerror or str(error)) from error  # it names the root
            self._writers[layout] = writer
        return writer

    def _writer_id(self, layout: str) -> str:
        return f"{self._model.worker}-{self.consumer_id}-{layout}"

    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Send rows to the host, within the limit of what may wait there for the disk."""
        self._wait_for_room()
        before = self._captured_bytes
        super().consume_bundle(bundle, ctx)
        with self._room:
            self._waiting_bytes += self._captured_bytes - before

    def _wait_for_room(self) -> None:
        """With `block`, the engine waits here until the writer has caught up."""
        if self._overflow == "block":
            what = f"its store {self._root} (queue_mib={self._queue_bytes >> 20})"
            self._wait(self._room, self._has_room, what)

    def _has_room(self) -> bool:
        return self._waiting_bytes < self._queue_bytes or self._has_failed

    def on_error(self, error: BaseException) -> None:
        """Nothing will be written any more: the engine need not wait for it."""
        super().on_error(error)
        with self._room:
            self._has_failed = True
            self._room.notify_all()

    def on_export(
        self,
        channel: str,
        tensors: Mapping[str, torch.Tensor],
        meta: RowMeta | None,
        attached: Any = None,
    ) -> None:
        """Rows have arrived, or all of a sequence that has ended."""
        try:
            super().on_export(channel, tensors, meta, attached)
        finally:
            if channel == "rows":
                with self._room:
                    self._waiting_bytes -= sum(tensor.nbytes for tensor in tensors.values())
                    self._room.notify_all()

    def conclude(self, ending: Ending, activations: Activations) -> None:
        """Hand the record to the store's writer."""
        request = ending.request
        begun = self._begun.pop(sequence_key(request), None)
        problems = [request.missing]
        if request.token_ids is None:
            problems.append("the request was aborted; this is what was captured until then")
        else:
            activations = activations.up_to(len(request.token_ids))
        problems.append(activations.problem)
        error = "; ".join(filter(None, problems))
        spec = ending.spec
        try:
            meta = self._meta(request, spec, error)
            published = self._hand_over(begun, meta, request, _pieces(activations, spec))
        except (ValueError, StoreError) as failure:
            _give_up(begun)
            self._fail(ending.result, failure)
            return
        published.add_done_callback(lambda future: self._settle(ending.result, meta, future))
        if self._num_ending == 1 and time.monotonic() < self._expedited_until:
            self._publish()

    def take_early(
        self, request: RequestInfo, spec: CaptureSpec, places: tuple[Place, ...], rows: CapturedRows
    ) -> None:
        """Begin to write the record of a long prompt."""
        key = sequence_key(request)
        begun = self._begun.get(key)
        if isinstance(begun, Exception):
            return
        try:
            if begun is None:
                meta = self._meta(request, spec, "")
                begun = self._begun[key] = self._writer_for(request).begin(meta)
            for positions, piece in rows.pieces():
                begun.append_stack(StackedRows(places, piece, positions))
        except (ValueError, StoreError) as failure:
            _give_up(begun)
            self._begun[key] = failure.with_traceback(None)  # which has the rows

    def room_for_early(self, request: RequestInfo) -> int:
        """What fits into the writer's queue: what does not is better kept in memory."""
        writer = self._writers.get(request.options.get("layout", self._layout))
        return self._queue_bytes if writer is None else writer.room

    def _hand_over(
        self,
        begun: RecordStream | Exception | None,
        meta: RecordMeta,
        request: RequestInfo,
        pieces: list[StackedRows],
    ) -> Future[Published]:
        """The last rows of a record, or all; raises what went wrong before."""
        if begun is None:
            return self._writer_for(request).submit(Record(meta, pieces))
        if isinstance(begun, Exception):
            raise begun
        for piece in pieces:
            if len(piece.tensor):
                begun.append_stack(piece)
        return begun.finish(
            meta.status,
            meta.error,
            prompt_len=meta.prompt_len,
            token_ids=meta.token_ids,
            metadata=meta.metadata,
        )

    def _writer_for(self, request: RequestInfo) -> StoreWriter:
        return self._writer(request.options.get("layout", self._layout))

    def _meta(self, request: RequestInfo, spec: CaptureSpec, error: str) -> RecordMeta:
        options = request.options
        name = options.get("request_id", f"{request.request_id}-{request.prompt_id[:8]}")
        metadata = dict(options.get("metadata", {}))
        if request.num_samples > 1 and request.sample_index:
            metadata["prompt_rows_in_sample"] = 0
        return RecordMeta(
            request_id=name,
            tag=options.get("tag", self._tag),
            sample_index=request.sample_index,
            prompt_len=request.prompt_len,
            token_ids=request.token_ids or (),
            model=f"{self._model.name}+{request.adapter}" if request.adapter else self._model.name,
            reduction=spec.reduction,
            status="partial_error" if error else "ok",
            error=error,
            metadata=metadata,
            record_id=f"{request.prompt_id}-{request.sample_index}-{self.consumer_id}",
            stage=self._model.stage,
            num_stages=self._model.num_stages,
        )

    def _settle(self, result: Future[Any], meta: RecordMeta, future: Future[Published]) -> None:
        """The record is on disk, or will never be."""
        failure = future.exception()
        if failure is not None:
            self._fail(result, failure)
            return
        done = future.result()
        stored = StoredCapture(
            self._root,
            done.record_id,
            meta.request_id,
            meta.tag,
            tuple(map(str, done.paths)),
            done.rows,
            done.bytes,
            done.status == "skipped",
        )
        partial = done.status == "partial_error"
        with self._room:
            self._counts["records"] += 1
            self._counts["partial"] += int(partial)
        result.set_result(
            RequestResult(stored, "partial_error" if partial else "ok", done.error or None)
        )

    def _fail(self, result: Future[Any], failure: BaseException) -> None:
        with self._room:
            self._counts["failed"] += 1
        result.set_result(RequestResult(None, "error", str(failure)))

    def synchronize(self) -> None:
        """Wait until everything that ended is on disk."""
        for writer in list(self._writers.values()):
            writer.flush()

    def expedite(self) -> None:
        """Publish shards that are not full, now and for the next second."""
        self._expedited_until = time.monotonic() + 1.0
        self._publish()

    def _publish(self) -> None:
        for writer in list(self._writers.values()):
            with suppress(TimeoutError, StoreError):  # it goes on; or it is closed
                writer.flush(timeout=0)

    def stop(self) -> None:
        super().stop()
        for writer in self._writers.values():
            writer.close()

    def read_stats(self) -> Mapping[str, Any]:
        """Records published, partial and failed; rows and bytes captured; the writers' own."""
        writers = {layout: writer.stats() for layout, writer in self._writers.items()}
        return {**super().read_stats(), **self._counts, "writers": writers}


def _give_up(begun: RecordStream | Exception | None) -> None:
    if isinstance(begun, RecordStream) and begun.active:
        begun.abort()


def _pieces(activations: Activations, spec: CaptureSpec) -> list[StackedRows]:
    """The rows of a record; of a reduction, at the last position that it was made of."""
    places, pieces = activations.stacked()
    if spec.reduction != "none":
        pieces = [(positions[-1:], rows) for positions, rows in pieces]
    return [StackedRows(places, rows, positions) for positions, rows in pieces]

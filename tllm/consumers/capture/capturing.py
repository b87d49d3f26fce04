"""What every capture shares: from a request's options to its rows on the host."""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch

from tllm.consumers.base import Consumer
from tllm.consumers.capture.activations import Activations, CapturedRows, Reduced, StageRows
from tllm.consumers.capture.host_rows import Chunk, HostRows
from tllm.consumers.capture.landing import Landed, Landing, LandingPart
from tllm.consumers.capture.reductions import Reductions, Taken, sequence_key
from tllm.cuda_runtime import CurrentStream
from tllm.inference_mode import in_inference_mode
from tllm.ports import (
    ConsumerContext,
    ConsumerFlow,
    CpuExport,
    Place,
    PortBundle,
    PortRead,
    RequestInfo,
    ResidualStream,
    RowMeta,
)
from tllm.result_memory import ResultMemory
from tllm.spec.capture import CaptureSpec, Reduction
from tllm.spec.reading import require_one_of, whole_number
from tllm.spec.selection import intersected
from tllm.stores.queue import SpillFile

HostOverflow = Literal["block", "drop", "spill"]

logger = logging.getLogger(__name__)

#: Seconds that an engine waits before that is said.
_PATIENCE_S = 5.0

_EARLY_BYTES = 8 << 20
"""Rows of a sequence that are worth a part of their own in what they are written to."""

_SHARE_UNDER_WAY = 4
"""What part of `host_mib` rows on their way may take beside it, where they may have to wait for a
disk: one in so many."""

_MAX_PLACES = 4096
"""Sets of places that are remembered."""

_Key = tuple[str, int]
_Kind = tuple[str, tuple[Place, ...]]
"""Dtype and places of rows."""

_STREAMED = (
    "the prompt was streamed: token_ids chose rows as if all of it had been the prompt from the "
    "beginning; give positions without token_ids of generated tokens"
)
_NONE = np.zeros(0, np.int32)
_ONE = np.zeros(1, np.int32)


class Capturing(Consumer):
    """Brings the rows that requests ask for to the host, and hands each sequence's to `conclude`.

    Rows leave the ring on a side stream, into page-locked host memory. Sorting them by sequence is
    the delivery thread's, so the engine's thread does the same work for one hook point of one
    sequence as for all of all.

    Args:
        overflow: what happens to rows of running requests beyond `host_mib`: `drop` gives them up,
            `spill` keeps up to `spill_mib` of them in a file in `spill_folder`, and makes the
            engine wait while rows on their way there take a quarter of `host_mib`; `block` makes
            the engine wait for requests that have ended to be handed over, and then gives them up:
            those that run free little before they end. What is given up is counted, and the results
            are `partial_error`.
        host_mib: rows of running requests in host memory; by default half of the machine's memory.
        spill_mib, spill_folder: see `overflow`.
    """

    #: Whether the rows themselves go to the user's process.
    rows_are_results: bool = False
    #: Whether `take_early` has a use for large prompts while they are captured.
    takes_early: bool = False

    def __init__(
        self,
        *,
        overflow: str = "block",
        host_mib: int | None = None,
        spill_mib: int = 8192,
        spill_folder: str | Path | None = None,
    ) -> None:
        require_one_of("overflow", overflow, HostOverflow)
        for name, given in (("host_mib", host_mib), ("spill_mib", spill_mib)):
            if given is not None:
                whole_number(given, f"{name}=", 1)
        self._overflow = overflow
        self._host_bytes = None if host_mib is None else host_mib << 20
        self._spill_bytes = spill_mib << 20
        self._spill_folder = None if spill_folder is None else Path(spill_folder)

    @abstractmethod
    def spec(self, options: Mapping[str, Any]) -> CaptureSpec:
        """What a request's options ask for; `ValueError` names the field."""

    @abstractmethod
    def conclude(self, ending: Ending, activations: Activations) -> None:
        """All rows of a sequence are on the host: give `ending.result` its value, now or later.

        On the delivery thread.
        """

    def take_early(
        self, request: RequestInfo, spec: CaptureSpec, places: tuple[Place, ...], rows: CapturedRows
    ) -> None:
        """Rows of the prompt of a sequence that runs; they will not be in what `conclude` gets.

        On the delivery thread, in the order of positions, and only with `takes_early`.
        """

    def room_for_early(self, request: RequestInfo) -> int:
        """How many bytes `take_early` may be given now. On the delivery thread."""
        return 0

    def flows(self) -> Sequence[ConsumerFlow]:
        """No rows of everybody's; the way to the host."""
        return [
            ConsumerFlow(writes=[CpuExport.write(channel="rows"), CpuExport.write(channel="end")])
        ]

    def validate_options(self, options: Mapping[str, Any]) -> None:
        """As `spec` has it."""
        self.spec(options)

    def request_flows(self, options: Mapping[str, Any], num_layers: int) -> Sequence[ConsumerFlow]:
        """One flow for all hook points, or two that make one of another's rows."""
        spec = self.spec(options)
        return _flows(spec, spec.places(num_layers, f"capture[{self.consumer_id!r}]['hooks']"))

    def needs_tokens_of(self, options: Mapping[str, Any]) -> bool:
        """Also when which token was generated decides whether its row is wanted."""
        return self.needs_tokens or self.spec(options).chooses_late

    def start(self, ctx: ConsumerContext) -> None:
        """Nothing is allocated before somebody asks; `ValueError` when it could not spill."""
        self._model = ctx.model
        self._specs: dict[_Key, CaptureSpec] = {}
        # At first, of sequences whose tokens choose rows: streamed prompts grow.
        self._prompt_lens: dict[_Key, int] = {}
        # What this pipeline stage has of the places that sequences ask for.
        self._places: dict[tuple[Place, ...], tuple[Place, ...]] = {}
        self._reads: Sequence[PortRead] = ()  # of the last bundle
        # Of the last rows that arrived: those of a steady batch are one object.
        self._requests: Sequence[RequestInfo] = ()
        self._sequences: Sequence[_Key] = ()
        self._reductions: dict[tuple[str, tuple[Place, ...]], Reductions] = {}
        # Sequences that have ended, and were not handed over.
        self._num_ending = 0
        # Large prompts that may be handed over before their request ends.
        self._early: dict[_Key, tuple[RequestInfo, tuple[Place, ...]]] = {}
        self._concluded = threading.Condition()
        self._stalls = 0
        self._blocked_seconds = 0.0
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        self._limit = half if self._host_bytes is None else self._host_bytes
        spill = None
        if self._overflow == "spill":
            folder = self._spill_folder
            if folder is not None and not os.access(folder, os.W_OK | os.X_OK):
                raise ValueError(
                    f"spill_folder={str(folder)!r} cannot be written; give a folder that the "
                    "workers may write"
                )
            spill = SpillFile(self._spill_folder, self._spill_bytes)
        memory = ctx.result_memory if self.rows_are_results else ResultMemory(0)
        self._rows = HostRows(self._limit, memory, spill, leave=not self.rows_are_results)
        self._landing = Landing(memory, ctx.device) if self.rows_are_results else None
        self._captured_rows = 0
        self._captured_bytes = 0
        # Of those, what the delivery thread has taken.
        self._arrived_bytes = 0

    def on_request_started(self, request: RequestInfo, ctx: ConsumerContext) -> None:
        if self._model.first_rank:
            spec = self._specs[sequence_key(request)] = self.spec(request.options)
            if spec.chooses_late:
                self._prompt_lens[sequence_key(request)] = request.prompt_len

    # Tables made in inference mode can only be written in it.
    @in_inference_mode
    def consume_bundle(self, bundle: PortBundle, ctx: ConsumerContext) -> None:
        """Send rows to the host, or reduce them here; on the side stream."""
        meta, rows = bundle.meta, bundle.entries["rows"]
        places = bundle.reads[0].places
        if bundle.reads is not self._reads:  # of one flow, and all of it asked for the same places
            spec = self._specs[sequence_key(meta.requests[0])]
            self._reads, self._kept = bundle.reads, spec.kept
            self._note_places(spec, places)
        reduction, dtype = self._kept
        if reduction != "none":
            self._table(reduction, places).add(bundle, ctx)
            return
        under_way = self._captured_bytes - self._arrived_bytes
        if self._overflow == "block" and self._rows.held + under_way > self._limit - rows.nbytes:
            self._wait_for_host()
        if self._overflow == "spill" and under_way:
            self._wait_for_spilling(self._limit // _SHARE_UNDER_WAY - rows.nbytes)
        if dtype != "model":
            rows = rows.to(getattr(torch, dtype))
        self._captured_rows += len(meta)
        self._captured_bytes += rows.nbytes
        kind = bundle.label, places
        parts = () if self._landing is None else self._landing.parts(kind, meta, rows)
        for part in parts:
            self._export(kind, meta, rows, part, ctx)
        if not parts:
            ctx.export("rows", {"rows": rows}, meta, attach=(kind, None))

    @staticmethod
    def _export(
        kind: _Kind, meta: RowMeta, rows: torch.Tensor, part: LandingPart, ctx: ConsumerContext
    ) -> None:
        if part.stop - part.first < len(meta):
            meta = meta.select(np.arange(part.first, part.stop))
            rows = rows[part.first : part.stop]
        into = None if part.into is None else {"rows": part.into}
        ctx.export("rows", {"rows": rows}, meta, attach=(kind, part.landed), into=into)

    def _note_places(self, spec: CaptureSpec, places: tuple[Place, ...]) -> None:
        """This stage has these of the places that are asked for."""
        asked = spec.places(self._model.num_layers)
        if asked not in self._places:
            if len(self._places) >= _MAX_PLACES:
                self._places.clear()
            self._places[asked] = places

    def _wait_for_host(self) -> None:
        """Wait until all rows have arrived, and all sequences that have ended were handed over."""

        def done() -> bool:
            return not self._num_ending and self._arrived_bytes >= self._captured_bytes

        self._wait(self._concluded, done, "rows on their way, and requests that ended, to be taken")

    def _wait_for_spilling(self, room: int) -> None:
        """Wait until no more bytes than that are on their way to the host, or none are: those that
        arrive are written to the spill file by the thread that takes them."""

        def done() -> bool:
            return self._captured_bytes - self._arrived_bytes <= max(0, room)

        self._wait(self._concluded, done, "rows on their way to be spilled")

    def _wait(self, change: threading.Condition, done: Callable[[], bool], what: str) -> None:
        """Make the engine wait, and say so when that takes long."""
        with change:
            if done():
                return
            begin, patience = time.monotonic(), _PATIENCE_S
            while not change.wait_for(done, patience):
                self._stalls += patience == _PATIENCE_S
                logger.warning(
                    "consumer %r: for %.1f s the engine, with all its requests, has waited for %s. "
                    "Is a disk stalled? With overflow='drop' the engine does not wait.",
                    self.consumer_id,
                    time.monotonic() - begin,
                    what,
                )
                patience = 12 * _PATIENCE_S
            self._blocked_seconds += time.monotonic() - begin

    def on_error(self, error: BaseException) -> None:
        """Nothing will be handed over any more: the engine need not wait for it."""
        with self._concluded:
            self._num_ending = 0
            self._arrived_bytes = self._captured_bytes
            self._concluded.notify_all()

    def _table(self, reduction: Reduction, places: tuple[Place, ...]) -> Reductions:
        key = (reduction, places)
        found = self._reductions.get(key)
        if found is None:
            found = self._reductions[key] = Reductions(
                reduction, len(places), self._model.hidden_size, self._model.device
            )
        return found

    @in_inference_mode
    def on_request_finished(self, request: RequestInfo, ctx: ConsumerContext) -> Future[Any] | None:
        """A promise: the rows are still under way."""
        spec = self._specs.pop(sequence_key(request), None)
        if spec is None:
            return None
        asked = spec.places(self._model.num_layers)
        places = self._places.get(asked, asked)
        before = self._prompt_lens.pop(sequence_key(request), request.prompt_len)
        ending = Ending(request, spec, places, streamed=before != request.prompt_len)
        if self._landing is not None:
            self._landing.forget()
        tensors: dict[str, torch.Tensor] = {}
        with CurrentStream(ctx.side_stream()):
            table = self._reductions.get((spec.kept[0], places))
            if table is not None:
                ending.taken = taken = table.take(request, ctx)
                if table.unused:
                    del self._reductions[spec.kept[0], places]
                tensors["totals"] = taken.totals
                if taken.tail is not None:
                    tensors["tail"] = taken.tail
            with self._concluded:
                self._num_ending += 1
            ctx.export("end", tensors, attach=ending)
        return ending.result

    def on_export(
        self,
        channel: str,
        tensors: Mapping[str, torch.Tensor],
        meta: RowMeta | None,
        attached: Any = None,
    ) -> None:
        """Rows have arrived on the host, or all of a sequence that has ended."""
        if channel == "rows":
            assert meta is not None
            kind, landed = cast(tuple[_Kind, Landed | None], attached)
            if meta.requests is not self._requests:
                self._requests = meta.requests
                self._sequences = list(map(sequence_key, meta.requests))
            chunk = Chunk(
                self._sequences, meta.request_index, meta.positions, tensors["rows"], landed
            )
            self._rows.add(kind, chunk)
            if self.takes_early:
                self._note_large(kind, chunk, meta.requests)
                self._give_early()
            with self._concluded:
                self._arrived_bytes += chunk.rows.nbytes
                self._concluded.notify_all()
            return
        assert isinstance(attached, Ending)
        self._requests = self._sequences = ()  # the batch is another one, if there is one
        ending, missing = attached, ""
        self._early.pop(sequence_key(ending.request), None)
        spec = ending.spec
        if spec.kept[0] == "none":
            block, missing = self._kept_rows(ending)
        else:
            block = self._reduced(ending, tensors)
            missing = _dropped_in(block)
        dtype = self._model.dtype if spec.dtype == "model" else getattr(torch, spec.dtype)
        activations = Activations(
            [block],
            reduction=spec.reduction,
            dtype=dtype,
            num_layers=self._model.num_layers,
            problem=missing or None,
        )
        self.conclude(ending, activations)
        with self._concluded:
            self._num_ending -= 1
            self._concluded.notify_all()

    def _note_large(self, kind: _Kind, chunk: Chunk, requests: Sequence[RequestInfo]) -> None:
        """Remember the sequences of which a chunk has many rows."""
        counts = np.bincount(chunk.index, minlength=len(requests))
        large = counts * (chunk.rows.nbytes // max(1, len(chunk.index))) >= _EARLY_BYTES
        if large.any():
            self._rows.sort(kind)
            for request in (requests[number] for number in np.flatnonzero(large).tolist()):
                self._early[sequence_key(request)] = request, kind[1]

    def _give_early(self) -> None:
        """Hand over large prompts while there is room for them. Rows of generated tokens wait: the
        engine may have computed some that will not belong to the sequence."""
        for key, (request, places) in list(self._early.items()):
            room = self.room_for_early(request)
            if room < _EARLY_BYTES:
                return
            spec = self._specs.get(key)
            if spec is None or spec.chooses_late:  # it has ended, and all will come at once; or may
                del self._early[key]
                continue
            rows = self._rows.take_before(key, request.prompt_len, room)
            if rows is not None:
                del self._early[key]
                self.take_early(request, spec, places, rows)

    def _kept_rows(self, ending: Ending) -> tuple[StageRows, str]:
        """Its rows, and what is missing."""
        spec, places, request = ending.spec, ending.places, ending.request
        rows, missing = self._rows.take((_label(spec), places), sequence_key(request))
        if rows is None:
            kept = spec.kept[1]
            dtype = self._model.dtype if kept == "model" else getattr(torch, kept)
            empty = torch.empty((0, len(places), self._model.hidden_size), dtype=dtype)
            rows = CapturedRows(_NONE, [empty])
        prompt, generated = rows.split(request.prompt_len)
        if not spec.chooses_late:
            return StageRows(places, prompt, generated), missing
        if request.token_ids is None:
            generated = generated.up_to(0)
            missing = missing or (
                "the request was given up: which tokens it generated is not known, and no rows of "
                "theirs were chosen"
            )
        else:
            tokens = request.token_ids[:-1]  # the last one has no row
            meant = spec.positions.intervals(request.prompt_len, tokens)
            generated = generated.within(intersected(meant, ((0, len(tokens)),)))
            if ending.streamed:
                prompt = prompt.within(meant)
                missing = missing or _STREAMED
        if spec.reduction == "none":
            return StageRows(places, prompt, generated), missing
        how = spec.reduction
        return StageRows(places, Reduced.of(prompt, how), Reduced.of(generated, how)), missing

    def _reduced(self, ending: Ending, tensors: Mapping[str, torch.Tensor]) -> StageRows:
        places, taken = ending.places, ending.taken
        shape = (1, len(places), self._model.hidden_size)
        none = CapturedRows(_NONE, [torch.empty((0, *shape[1:]), dtype=self._model.dtype)])
        if taken is None:
            nothing = Reduced(_NONE, CapturedRows(_NONE, [torch.zeros(shape)]), none)
            return StageRows(places, nothing, nothing)
        totals = [CapturedRows(_ONE, [tensors["totals"][phase : phase + 1]]) for phase in (0, 1)]
        tail = CapturedRows(taken.tail_positions, [tensors["tail"]]) if "tail" in tensors else none
        return StageRows(
            places,
            Reduced(taken.positions[0], totals[0], none),
            Reduced(taken.positions[1], totals[1], tail),
        )

    def synchronize(self) -> None:
        """Nothing beyond what the runtime waits for."""

    def read_stats(self) -> Mapping[str, Any]:
        """Reductions aside: `rows` and `bytes` that were brought to the host, `host_bytes` of
        running requests there, and `host_rows_dropped` and `host_bytes_spilled` beyond the limit;
        `blocked_seconds` that the engine waited, and `stalls`: how often for more than a few."""
        return {
            "rows": self._captured_rows,
            "bytes": self._captured_bytes,
            "host_bytes": self._rows.held,
            "host_rows_dropped": self._rows.dropped,
            "host_bytes_spilled": self._rows.spilled,
            "blocked_seconds": self._blocked_seconds,
            "stalls": self._stalls,
        }

    def merge_stats(self, stats: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return dict(_summed(stats)) if stats else {}

    def merge_replicas(self, stats: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return self.merge_stats(stats)

    def stop(self) -> None:
        self._rows.close()


@dataclass(eq=False)
class Ending:
    """A sequence that has ended, while the last of its rows are under way.

    Attributes:
        streamed: its prompt has grown, and some of the tokens chose rows.
    """

    request: RequestInfo
    spec: CaptureSpec
    places: tuple[Place, ...]
    streamed: bool = False
    taken: Taken | None = None
    result: Future[Any] = field(default_factory=Future)


@lru_cache(4096)
def _flows(spec: CaptureSpec, places: tuple[Place, ...]) -> tuple[ConsumerFlow, ...]:
    positions = spec.positions
    return tuple(
        ConsumerFlow(
            reads=[ResidualStream.read_block(places, role="rows")],
            window="out_of_band",
            delivery="device_lease",
            positions=each,
            label=_label(spec),
            prompt_rows="once",
            ranks="first",
            split_by_stage=True,
        )
        for each in (positions.in_prompt_and_after() if spec.chooses_late else (positions,))
    )


def _dropped_in(block: StageRows) -> str:
    """Of a reduction whose prompt was streamed: what is wrong with it."""
    parts = [part for part in (block.prompt, block.generated) if isinstance(part, Reduced)]
    positions = np.concatenate([each for p in parts for each in (p.positions, p.tail.positions)])
    dropped = len(positions) - len(np.unique(positions))
    if not dropped:
        return ""
    return (
        f"the prompt was streamed: {dropped} tokens that the engine dropped between its parts are "
        "in the reduction; use reduction 'none'"
    )


def _summed(values: Sequence[Any]) -> Any:
    """Counts together, also in mappings and dataclasses; of anything else, the first that is
    something."""
    first = values[0]
    if isinstance(first, Mapping):
        present = dict.fromkeys(key for each in values for key in each)
        return {key: _summed([each[key] for each in values if key in each]) for key in present}
    if is_dataclass(first) and not isinstance(first, type):
        return type(first)(**_summed([vars(each) for each in values]))
    if isinstance(first, int | float):
        return sum(values)
    return next(filter(None, values), first)


def _label(spec: CaptureSpec) -> str:
    return " ".join(spec.kept)

"""Residual writes of consumers: vectors per sequence, summed where several write at one tap."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tllm.cuda_runtime import current_stream
from tllm.ports import RequestInfo, ResidualWriter
from tllm.runtime.columns import Column
from tllm.runtime.slots import Slots
from tllm.runtime.taps import TapKey, Taps
from tllm.runtime.transfer import LateCheck, upload


@dataclass(eq=False)
class WrittenVectors:
    """`[hidden]`, or one for each of some requests `[n, hidden]`."""

    vectors: torch.Tensor


Written = tuple[WrittenVectors, int | None]
"""Vectors, and which of them is meant where there is one for each request."""


def _vector(written: Written) -> torch.Tensor:
    vectors, index = written[0].vectors, written[1]
    return vectors if index is None else vectors[index]


@dataclass(frozen=True, eq=False)
class Repetition:
    """How vectors for the same requests are written again, as they are in each step of a decode.

    Attributes:
        requests: the very object that the last write was for.
        version: of the additions at the tap, right after it.
        add_rows: `[rows]` on the device; nobody else adds to them at this tap.
        of_row: `[rows]` on the device, whose vector each has; None where each has the next one.
    """

    requests: tuple[RequestInfo, ...]
    written: WrittenVectors
    version: int
    add_rows: torch.Tensor
    of_row: torch.Tensor | None


class Additions:
    """All writers of a worker, and the sums that the taps add.

    A sequence's rows of phase p have add row `2 * slot + p`.
    """

    def __init__(self, taps: Taps, slots: Slots) -> None:
        self._taps = taps
        self._slots = slots
        self.writers: dict[TapKey, list[TapWriter]] = {}
        #: By tap: changes whenever the rows that something is added to may be others.
        self._versions: Counter[TapKey] = Counter()
        self._staged: list[
            tuple[TapWriter, Sequence[RequestInfo], torch.Tensor | None, object]
        ] = []
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        self._stream = self._current_stream()

    def _current_stream(self) -> torch.cuda.Stream | None:
        if self._taps.device.type != "cuda":
            return None
        return current_stream(self._taps.device)

    def add_writer(self, tap: TapKey, phases: tuple[int, ...]) -> TapWriter:
        """A writer for one declared `ResidualStream.write`."""
        writer = TapWriter(self, tap, phases)
        self.writers.setdefault(tap, []).append(writer)
        return writer

    def remove_writer(self, writer: TapWriter) -> None:
        """Forget a writer and all it added."""
        self.writers[writer.tap].remove(writer)
        self._versions[writer.tap] += 1
        self._refresh(writer.tap, sorted(writer.values))
        if not self.writers[writer.tap]:
            del self.writers[writer.tap]  # steps without any writer ask nothing here
        with self._lock:
            self._staged = [each for each in self._staged if each[0] is not writer]

    def submit(
        self, writer: TapWriter, requests: Sequence[RequestInfo], vectors: torch.Tensor | None
    ) -> None:
        """Apply a write now, or before the next forward pass when another thread or stream made
        it: a forward pass in flight must not see half of it. Later writes are applied later."""
        if writer not in self.writers.get(writer.tap, ()):
            return  # removed: a thread of its consumer goes on
        stream = self._current_stream()
        if threading.get_ident() == self._thread and stream == self._stream:
            self._apply_staged()
            self._apply(writer, requests, vectors)
            return
        fence = None
        if stream is not None:
            fence = torch.cuda.Event()
            fence.record(stream)
        with self._lock:
            self._staged.append((writer, tuple(requests), vectors, fence))

    def commit(self) -> None:
        """Apply what other threads and streams wrote. On the engine's thread, before a forward."""
        if not self.writers:
            return
        self._thread, self._stream = threading.get_ident(), self._current_stream()
        self._apply_staged()

    def _apply_staged(self) -> None:
        if not self._staged:
            return
        with self._lock:
            staged, self._staged = self._staged, []
        for writer, requests, vectors, fence in staged:
            if isinstance(fence, torch.cuda.Event):
                assert self._stream is not None
                self._stream.wait_event(fence)
                if vectors is not None:
                    vectors.record_stream(self._stream)
            self._apply(writer, requests, vectors)

    def _apply(
        self, writer: TapWriter, requests: Sequence[RequestInfo], vectors: torch.Tensor | None
    ) -> None:
        if writer not in self.writers.get(writer.tap, ()):
            return  # it was removed in the meantime
        if vectors is not None and self._repeated(writer, requests, vectors):
            return
        running = [i for i, r in enumerate(requests) if self._serves(r)]
        if not running:
            return
        self._versions[writer.tap] += 1
        self._note_repeats(writer)
        written = None if vectors is None else WrittenVectors(vectors)
        of_each = vectors is not None and vectors.dim() == 2
        touched, of_row = [], []
        for i in running:
            for phase in writer.phases:
                add_row = 2 * requests[i].slot + phase
                touched.append(add_row)
                of_row.append(i)
                if add_row in writer.values or self._computed(requests[i], phase):
                    writer.renewed.add(add_row)
                if written is None:
                    writer.values.pop(add_row, None)
                else:
                    writer.values[add_row] = written, i if of_each else None
        add_rows = self._refresh(writer.tap, touched)
        writer.repetition = None
        if add_rows is None or not isinstance(requests, tuple) or not of_each:
            return
        once = len(add_rows) == len(touched)
        if once and all(len(self._written(writer.tap, row)) == 1 for row in touched):
            assert written is not None
            in_order = of_row == list(range(len(requests)))
            which = None if in_order else upload(np.array(of_row, np.int64), self._taps.device)
            version = self._versions[writer.tap]
            writer.repetition = Repetition(requests, written, version, add_rows, which)

    def _repeated(
        self, writer: TapWriter, requests: Sequence[RequestInfo], vectors: torch.Tensor
    ) -> bool:
        """Write for the requests of the last write, if nothing else has changed; nothing is done
        for each of them then."""
        last = writer.repetition
        if last is None or last.requests is not requests or vectors.dim() != 2:
            return False
        if last.version != self._versions[writer.tap]:
            return False
        last.written.vectors = vectors
        writer.repeats = True
        rows = vectors if last.of_row is None else vectors.index_select(0, last.of_row)
        self._taps.replace_additions(writer.tap, last.add_rows, rows)
        return True

    def _serves(self, request: RequestInfo) -> bool:
        """Whether a sequence may be written to: not when its results were made, even if the engine
        has not let go of it, since nobody would take that back."""
        sequence = self._slots.running(request)
        return sequence is not None and not sequence.ended

    def _computed(self, request: RequestInfo, phase: int) -> bool:
        """Whether rows of a phase of a sequence are computed already."""
        return bool(self._slots.delivered[request.slot] > phase * request.prompt_len)

    def _note_repeats(self, writer: TapWriter) -> None:
        """Its last write was made again, with other vectors: note that before it is forgotten."""
        if writer.repeats and writer.repetition is not None:
            running = filter(self._serves, writer.repetition.requests)
            writer.renewed.update(2 * r.slot + phase for r in running for phase in writer.phases)
        writer.repeats = False

    def renewed(self, writers: Sequence[TapWriter], slot: int, phases: Sequence[int]) -> bool:
        """Whether some writer has not added the same to all rows of these phases of a sequence."""
        for writer in writers:
            self._note_repeats(writer)
        add_rows = {2 * slot + phase for phase in phases}
        return any(writer.renewed & add_rows for writer in writers)

    def _written(self, tap: TapKey, add_row: int) -> list[Written]:
        """What the writers at a tap add to the rows of an add row."""
        return [w.values[add_row] for w in self.writers[tap] if add_row in w.values]

    def _refresh(self, tap: TapKey, add_rows: Sequence[int]) -> torch.Tensor | None:
        """Bring the sums of these add rows at a tap to the device.

        Returns:
            Those to which something is added, on the device; None for none.
        """
        self._taps.reserve_additions(max(add_rows, default=-1) + 1)
        found = {i: self._written(tap, i) for i in add_rows}
        added = None
        if present := [i for i, written in found.items() if written]:
            added = self._taps.set_additions(tap, present, self._sums([found[i] for i in present]))
        self._taps.clear_additions(tap, [i for i, written in found.items() if not written])
        for i in add_rows:
            used = bool(found[i]) or any(
                i in w.values for writers in self.writers.values() for w in writers
            )
            self._slots.assign(i // 2, i % 2, Column.ADD, i if used else Column.ADD.neutral)
        return added

    def _sums(self, written: list[list[Written]]) -> torch.Tensor:
        """`[rows, hidden]`, the sum of what was written for each row."""
        parts = len(written[0])
        if any(len(of_row) != parts for of_row in written):
            return torch.stack([torch.stack([_vector(w) for w in each]).sum(0) for each in written])
        columns = [self._gathered([of_row[part] for of_row in written]) for part in range(parts)]
        return columns[0] if parts == 1 else torch.stack(columns).sum(0)

    def _gathered(self, written: list[Written]) -> torch.Tensor:
        """`[rows, hidden]`, with one operator where all were written together."""
        together = written[0][0]
        if any(each is not together for each, _ in written):
            return torch.stack([_vector(each) for each in written])
        vectors = together.vectors
        if vectors.dim() == 1:
            return vectors.expand(len(written), -1)
        index = [i for _, i in written]
        if index == list(range(len(vectors))):
            return vectors
        return vectors.index_select(0, upload(np.array(index, np.int64), vectors.device))

    def forget(self, slot: int, of: Sequence[TapWriter] | None = None) -> None:
        """A sequence ended: nothing is added to whoever has its slot next. Or it does not use some
        writers any more: what they added is not."""
        for tap, all_writers in self.writers.items():
            self._versions[tap] += 1
            writers = [writer for writer in all_writers if of is None or writer in of]
            for writer in writers:
                writer.renewed -= {2 * slot, 2 * slot + 1}
            stale = [2 * slot + p for p in (0, 1) if any(2 * slot + p in w.values for w in writers)]
            if stale:
                for writer in writers:
                    for add_row in stale:
                        writer.values.pop(add_row, None)
                self._refresh(tap, stale)


_NO_NUMBERS = (
    "vectors have values that are NaN, infinite or beyond the model's dtype; they were not added. "
    "Has what makes them diverged?"
)


class TapWriter(ResidualWriter):
    """The writer of one flow at one tap.

    Attributes:
        values: what was written, by add row.
        repetition: how the last write may be made again.
        repeats: whether it was.
        renewed: add rows of sequences to some of whose rows something else was added, or nothing.
    """

    def __init__(self, additions: Additions, tap: TapKey, phases: tuple[int, ...]) -> None:
        self.tap = tap
        self.phases = phases
        self.values: dict[int, Written] = {}
        self.repetition: Repetition | None = None
        self.repeats = False
        self.renewed: set[int] = set()
        self._additions = additions
        self._numbers = LateCheck()

    def set(self, requests: Sequence[RequestInfo], vectors: torch.Tensor) -> None:
        if not isinstance(vectors, torch.Tensor):
            raise TypeError(
                f"vectors are {type(vectors).__name__}; give a tensor, [hidden] for all requests "
                "or [requests, hidden]"
            )
        self._refuse_what_is_no_request(requests)
        hidden = self._additions._taps.hidden_size
        shape = list(vectors.shape)
        if shape not in ([hidden], [len(requests), hidden]):
            raise ValueError(
                f"vectors have shape {shape}; give [{hidden}] for all requests or "
                f"[{len(requests)}, {hidden}], one row a request"
            )
        if vectors.is_complex():
            raise TypeError(f"vectors are {vectors.dtype}; a residual stream has real numbers")
        # A copy: the caller may use its tensor again, and rows of the ring are others soon.
        kept = vectors.detach().to(self._additions._taps.device, copy=True)
        if vectors.device.type == "cpu":
            self._refuse_what_is_no_number(vectors.detach())
        elif kept.is_floating_point() and kept.numel():
            kept = self._without_what_is_no_number(kept)
        self._additions.submit(self, requests, kept)

    # A row of NaN would not stay with its own sequence: attention multiplies what is left in the
    # unused places of a block by zero.

    def _refuse_what_is_no_number(self, vectors: torch.Tensor) -> None:
        vectors = vectors.to(self._additions._taps.dtype)
        finite = math.isfinite(float(vectors.sum(dtype=torch.float32)))  # one operator, and sure
        if not finite and not bool(vectors.isfinite().all()):
            raise ValueError(_NO_NUMBERS)

    def _without_what_is_no_number(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors on a device, which is not waited for: what is not finite in the model's dtype
        becomes zero, and a write that comes when the host knows of it is refused."""
        dtype = self._additions._taps.dtype
        limit = torch.finfo(dtype).max
        if torch.finfo(vectors.dtype).max > limit:
            vectors = vectors.to(dtype)
        if not self._numbers.sound(vectors.abs().amax() <= limit):
            raise ValueError(_NO_NUMBERS)
        return vectors.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _refuse_what_is_no_request(self, requests: Sequence[RequestInfo]) -> None:
        if self.repetition is not None and self.repetition.requests is requests:
            return  # as in the last step
        if isinstance(requests, RequestInfo):
            raise TypeError("requests are one RequestInfo; give a list of them: [request]")
        for number, given in enumerate(requests):
            if not isinstance(given, RequestInfo):
                raise TypeError(
                    f"requests[{number}]={given!r:.60} is {type(given).__name__}; give RequestInfo "
                    "of the rows, such as bundle.meta.requests"
                )

    def clear(self, requests: Sequence[RequestInfo]) -> None:
        self._refuse_what_is_no_request(requests)
        self._additions.submit(self, requests, None)


class AbsentWriter(ResidualWriter):
    """The writer of a hook point that another pipeline stage has; its copy there does the work."""

    def set(self, requests: Sequence[RequestInfo], vectors: torch.Tensor) -> None:
        pass

    def clear(self, requests: Sequence[RequestInfo]) -> None:
        pass

"""Work on the device that comes again in every step, recorded once and replayed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

#: Recordings that are kept: each holds device memory.
_MAX_RECORDED = 64
#: How often work is enqueued launch by launch before it is recorded: kernels are compiled by then,
#: and what comes once or twice is not worth a recording.
_RUNS_BEFORE = 2
_MAX_COUNTED = 1024


class Recorder(Protocol):
    """Makes recordings of work that is enqueued."""

    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        """Something that enqueues what `work` enqueues, with the same addresses, on the stream
        that is current then. Nothing is computed by this."""

    def wait(self) -> None:
        """Wait until no recording runs that was replayed on the current stream."""


class CudaGraphs:
    """Records CUDA graphs.

    Args:
        stream: where work is recorded, since that cannot be on the default stream. It is left idle
            by that. What is recorded on one stream shares cuBLAS's workspace, so two recordings of
            one stream must not run at the same time.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        # `torch.cuda.graph` would wait for the whole device first; the work allocates nothing and
        # its kernels have run before, so recording it needs no such pause. Other threads may go on
        # using CUDA meanwhile.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay

    def wait(self) -> None:
        torch.cuda.current_stream(self._stream.device).synchronize()


class Replays:
    """Runs work launch by launch at first, and as a recording from then on.

    Args:
        recorder: None runs all work launch by launch.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._recorded: dict[Hashable, Callable[[], object]] = {}
        self._counted: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Enqueue work.

        Args:
            key: all that the work depends on but the content of device memory: sizes, addresses.
        """
        replay = self._recorded.get(key)
        if replay is not None:
            replay()
            return
        work()
        if self._recorder is not None:
            self._count(self._recorder, key, work)

    def forget(self) -> None:
        """Memory that recordings use is about to be freed."""
        if self._recorded and self._recorder is not None:
            # A recording must not be destroyed while it runs. This is rare.
            self._recorder.wait()
        self._recorded.clear()
        self._counted.clear()

    def _count(self, recorder: Recorder, key: Hashable, work: Callable[[], None]) -> None:
        """Record work that has been run often enough."""
        if len(self._counted) >= _MAX_COUNTED:
            self._counted.clear()
        runs = self._counted[key] = self._counted.get(key, 0) + 1
        if runs < _RUNS_BEFORE:
            return
        if len(self._recorded) >= _MAX_RECORDED:
            self.forget()
        try:
            with _no_collection():
                self._recorded[key] = recorder.record(work)
        except RuntimeError:
            # The work itself has been done.
            logger.exception("a CUDA graph could not be recorded; ESamp goes on without graphs")
            self._recorder = None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage collector does not run: what it finds may be a kernel or a graph, and to
    destroy one makes CUDA give up what the same thread records, of which torch's allocator is not
    told."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()

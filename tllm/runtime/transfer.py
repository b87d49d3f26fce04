"""Between host and device without waiting: small uploads, pinned copies, delivery threads."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from tllm.cuda_runtime import current_stream, rows_to_host
from tllm.ports import HostTensor

logger = logging.getLogger(__name__)

#: Seconds that somebody waits for a thread before that is said.
_PATIENCE_S = 5.0


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device; enqueued on the current stream, never waited for."""
    array = np.ascontiguousarray(array)
    # Of one that cannot be written to, as those that steps share, torch warns.
    return uploaded(torch.from_numpy(array if array.flags.writeable else array.copy()), device)


def uploaded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same of a tensor on the host."""
    if device.type == "cpu":
        return tensor
    # The caching host allocator reuses a pinned block only once the copies from it are done.
    return tensor.pin_memory().to(device, non_blocking=True)


class PinnedCopy(HostTensor):
    """A host copy of a tensor, in page-locked memory, under way on the current stream.

    Args:
        sleeps: a thread that waits for it leaves its core to others; it goes on some microseconds
            later than one that asks the device again and again.
    """

    def __init__(self, tensor: torch.Tensor, sleeps: bool = False) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{type(tensor).__name__} cannot be brought to the host; give a tensor")
        self._fence: torch.cuda.Event | None = None
        if tensor.device.type == "cpu":
            self._copy = tensor.clone()
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._fence = torch.cuda.Event(blocking=sleeps)
        self._fence.record(current_stream(tensor.device))

    @property
    def arrived(self) -> bool:
        """Whether `wait` has nothing to wait for."""
        return self._fence is None or self._fence.query()

    def wait(self) -> torch.Tensor:
        if self._fence is not None:
            self._fence.synchronize()
        return self._copy


class CopyInto(PinnedCopy):
    """A tensor's values, under way into memory that is there already."""

    def __init__(self, tensor: torch.Tensor, target: torch.Tensor, sleeps: bool = False) -> None:
        if tensor.shape != target.shape or tensor.dtype != target.dtype:
            raise ValueError(
                f"a tensor of shape {list(tensor.shape)} and {tensor.dtype} cannot go into memory "
                f"of shape {list(target.shape)} and {target.dtype}; give memory that is alike"
            )
        self._copy = target
        self._fence = None
        if tensor.device.type == "cpu":
            target.copy_(tensor)
            return
        rows_to_host(tensor.contiguous(), target)
        self._fence = torch.cuda.Event(blocking=sleeps)
        self._fence.record(current_stream(tensor.device))


class LateCheck:
    """What is computed on a device is checked there, and the host, which does not wait, hears of it
    in a later call."""

    def __init__(self) -> None:
        self._since: torch.Tensor | None = None  # whether all was sound since the copy was made
        self._copy: PinnedCopy | None = None

    def sound(self, sound: torch.Tensor) -> bool:
        """Whether all was sound, as far as the host knows by now.

        Args:
            sound: bool `[]` on the device, whether this is.
        """
        self._since = sound if self._since is None else self._since & sound
        before = self._copy
        if before is not None and not before.arrived:
            return True
        self._copy, self._since = PinnedCopy(self._since), None
        return before is None or bool(before.wait())


class DeliveryThread:
    """Runs jobs in order on a thread of its own.

    A job must not raise. The thread is made with the first job and ends with `close`.

    Args:
        device: that jobs work on; None for the host.
    """

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self._name = name
        self._device = device
        self._jobs: deque[Callable[[], None]] = deque()
        self._since: deque[float] = deque()  # of the jobs that have not ended
        self._changed = threading.Condition()
        self._running = False
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        return len(self._since)

    @property
    def lag_s(self) -> float:
        """For how long the oldest job that has not ended has been here."""
        with self._changed:
            return time.monotonic() - self._since[0] if self._since else 0.0

    def submit(self, job: Callable[[], None]) -> None:
        """Enqueue a job; returns at once."""
        with self._changed:
            self._jobs.append(job)
            self._since.append(time.monotonic())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait_for_one(self) -> bool:
        """Wait until a job has ended; False at once when there is none."""
        with self._changed:
            if not (self._jobs or self._running):
                return False
            before = len(self._jobs)
            self._wait(lambda: len(self._jobs) < before or not (self._jobs or self._running))
            return True

    def drain(self) -> None:
        """Wait until all jobs have ended. From the thread itself it returns at once."""
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            self._wait(lambda: not (self._jobs or self._running))

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait, with the lock held, and say so when it takes long."""
        begin, patience = time.monotonic(), _PATIENCE_S
        while not self._changed.wait_for(done, patience):
            logger.warning(
                "%s: for %.1f s the engine, with all its requests, has waited for this thread. "
                "Does its consumer wait for something?",
                self._name,
                time.monotonic() - begin,
            )
            patience = 12 * _PATIENCE_S

    def close(self) -> None:
        """End the thread after the jobs it has."""
        self.drain()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            # Else it would have the first GPU, and whatever it calls makes a context there.
            torch.cuda.set_device(self._device)
        while True:
            with self._changed:
                if self._running:
                    self._running = False
                    self._since.popleft()
                    self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._jobs) or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._running = True
            job()
            del job  # and what it refers to, which may be large

"""What torch does not offer of CUDA's runtime, or only with detours: the current stream,
page-locking, and copies to host memory.

`torch.cuda.current_stream`, and with it `Event.record()` and `torch.cuda.stream`, looks the device
up by name and makes an object each time: fifty calls of Python, on a thread whose caches vLLM has
filled since. On the host of an H100 the detours were a fifth to a third of what a step cost us.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_DEVICE_TO_HOST = 2
_PORTABLE = 1

_known: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and handle


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """`torch.cuda.current_stream(device)`."""
    index = torch.cuda.current_device() if device.index is None else device.index
    handle = torch._C._cuda_getCurrentRawStream(index)  # as Triton asks at each launch
    stream = _known.get((index, handle))
    if stream is None:
        stream = _known[index, handle] = torch.cuda.current_stream(device)
    return stream


class CurrentStream:
    """`torch.cuda.stream(stream)`, for a stream of the thread's own device.

    Args:
        stream: None changes nothing.
    """

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._before: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        stream = self._stream
        if stream is not None:
            self._before = current_stream(stream.device)
            torch.cuda.set_stream(stream)

    def __exit__(self, *raised: object) -> None:
        if self._before is not None:
            torch.cuda.set_stream(self._before)


@cache
def _library() -> ctypes.CDLL | None:
    """The library that torch has loaded; None where it has another, or none."""
    version = torch.version.cuda
    if version is None:
        return None
    try:
        return ctypes.CDLL(f"libcudart.so.{version.split('.')[0]}")
    except OSError:
        return None


def _failed(status: int) -> bool:
    """Whether a call failed. CUDA remembers the last failure, and torch would take it for one of
    its next kernel's."""
    library = _library()
    if status and library is not None:
        library.cudaGetLastError()
    return status != 0


def page_lock(address: int, nbytes: int, device: torch.device) -> bool:
    """Let GPUs write into host memory without the host; False when they cannot.

    It takes 0.3 s for a GiB, in which other calls of CUDA in the process may have to wait.

    Args:
        device: that the process uses. A thread that has none yet would make a context on the first
            GPU for it, which costs hundreds of MiB there.
    """
    with torch.cuda.device(device):
        status: Any = torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)
        return not _failed(int(status))


def page_unlock(address: int, device: torch.device) -> None:
    """Undo `page_lock`. Arguments as there."""
    with torch.cuda.device(device):
        status: Any = torch.cuda.cudart().cudaHostUnregister(address)
        _failed(int(status))


def rows_to_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """Begin to copy rows from a GPU into page-locked memory, on the current stream.

    Args:
        source: `[rows, ...]`, contiguous, on a GPU.
        target: the same on the host. Rows may lie apart; each of them is contiguous.
    """
    if not len(source):
        return
    library = _library()
    if target.is_contiguous():
        target.copy_(source, non_blocking=True)
        return
    if library is None:
        for row, place in zip(source, target, strict=True):
            place.copy_(row, non_blocking=True)
        return
    width = source[0].nbytes
    status = library.cudaMemcpy2DAsync(
        ctypes.c_void_p(target.data_ptr()),
        ctypes.c_size_t(target.stride(0) * target.element_size()),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_size_t(width),
        ctypes.c_size_t(width),
        ctypes.c_size_t(len(source)),
        _DEVICE_TO_HOST,
        ctypes.c_void_p(current_stream(source.device).cuda_stream),
    )
    if _failed(status):
        raise RuntimeError(f"CUDA error {status} where rows are copied to the host")

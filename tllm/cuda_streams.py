"""CUDA's current stream, asked for and changed without torch's detours.

`torch.cuda.current_stream`, and with it `Event.record()` and `torch.cuda.stream`, looks the device
up by name and makes an object each time: fifty calls of Python, on a thread whose caches vLLM has
filled since. On the host of an H100 the detours were a fifth to a third of what a step cost us.
"""

from __future__ import annotations

import torch

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

"""Which implementation of a kernel a tensor gets."""

from __future__ import annotations

from functools import cache

import torch

try:
    import triton
except ImportError:  # a CPU build of torch has no Triton unless it was installed beside it
    INTERPRETED = False
    HAS_TRITON = False
else:
    HAS_TRITON = True
    INTERPRETED = bool(triton.knobs.runtime.interpret)


def uses_triton(device: torch.device) -> bool:
    """Whether kernels run as Triton on this device: CUDA, or anywhere when interpreted."""
    return HAS_TRITON and (device.type == "cuda" or INTERPRETED)


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel on this device may begin while the one before it ends (programmatic
    dependent launch: CUDA, compute capability 9.0 and above)."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)

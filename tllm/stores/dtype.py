"""The element types that a store keeps, by their names in safetensors."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What rows may be made of."""

ITEM_SIZES = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}
"""Bytes of one element."""

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_WITHOUT_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

_SAME_SIZE = {1: torch.uint8, 2: torch.int16}


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name; `ValueError` for what a store does not keep."""
    try:
        return _NAMES[dtype]
    except KeyError:
        allowed = ", ".join(str(known) for known in _NAMES)
        raise ValueError(
            f"rows of {dtype} cannot be stored; convert them to one of {allowed}"
        ) from None


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A CPU tensor as numpy: shared memory, except where numpy has no such type.

    bfloat16 and both float8 types become float32, in which all of their values are exact.
    """
    if tensor.dtype in _WITHOUT_NUMPY:
        tensor = tensor.to(torch.float32)
    return tensor.numpy()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    if tensor.numel() == 0:
        return memoryview(b"")
    if tensor.dtype in _WITHOUT_NUMPY:
        tensor = tensor.view(_SAME_SIZE[tensor.dtype.itemsize])
    return memoryview(tensor.numpy()).cast("B")

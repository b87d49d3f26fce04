"""Rows and words of tables that are found by their address, on the device and on the host."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import torch

from tllm.runtime.columns import IntArray
from tllm.runtime.kernels.backend import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def elements_at(start, offsets, HIDDEN: tl.constexpr):
        """Where the elements of a row lie that was found by its address.

        Rows that fill units of 16 bytes are aligned to them (every table is a tensor's memory, or
        begins at one of its rows). The compiler cannot know, and would move one element at a time.
        """
        at = start + offsets
        if HIDDEN * start.dtype.element_ty.primitive_bitwidth % 128 == 0:
            at = tl.multiple_of(at, [16])
        return at

    @triton.jit
    def row_at(table, row, offsets, HIDDEN: tl.constexpr):
        """Where the elements of a row of a table lie that was found by its address."""
        return elements_at(table + row.to(tl.int64) * HIDDEN, offsets, HIDDEN)


def view_at(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A view of host memory, as the kernel sees device memory."""
    count = math.prod(shape)
    buffer = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)


def words_at(address: int, *shape: int) -> IntArray:
    """Integers of 32 bits, likewise."""
    buffer = (ctypes.c_uint8 * (4 * math.prod(shape))).from_address(address)
    return np.frombuffer(memoryview(buffer), np.int32).reshape(shape)

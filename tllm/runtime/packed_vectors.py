"""Vectors on their way to the workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from tllm.spec.conditions import PROBE
from tllm.spec.reading import FloatArray

_AT_ONCE = 128
"""Vectors that are converted together: few enough for their memory to be warm."""


@dataclass(frozen=True)
class PackedVectors:
    """Arrays by digest, of which most are one large array, in the dtype that the model has them in.
    What is done with thousands of small ones, and each time that fresh memory is filled, takes
    longer than all else.

    Attributes:
        digests, bits: of vectors `[hidden]`, and all of them one after the other, as bytes.
        width, dtype: of these vectors, the latter as torch calls it.
        others: float32 arrays: the vectors of probes, arrays of several rows, and of other widths.
    """

    digests: tuple[str, ...]
    bits: npt.NDArray[np.uint8]
    width: int
    dtype: str
    others: Mapping[str, FloatArray]

    @classmethod
    def of(cls, vectors: Mapping[str, FloatArray], dtype: str) -> PackedVectors:
        """From float32 arrays by digest."""
        single = {d: v for d, v in vectors.items() if v.ndim == 1 and not d.startswith(PROBE)}
        width = len(next(iter(single.values()), ()))
        alike = {digest: vector for digest, vector in single.items() if len(vector) == width}
        others = {digest: array for digest, array in vectors.items() if digest not in alike}
        bits = _bits_of([*alike.values()], width, dtype)
        return cls(tuple(alike), bits, width, dtype, others)

    def __iter__(self) -> Iterator[str]:
        return chain(self.digests, self.others)

    @property
    def rows(self) -> torch.Tensor:
        """`[vectors, hidden]`, those of `digests`."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        if not self.digests:
            return torch.empty((0, self.width), dtype=dtype)
        return torch.from_numpy(self.bits).view(dtype).view(len(self.digests), self.width)


def _bits_of(vectors: list[FloatArray], width: int, dtype: str) -> npt.NDArray[np.uint8]:
    rows = torch.empty((len(vectors), width), dtype=getattr(torch, dtype))
    together = np.empty((min(len(vectors), _AT_ONCE), width), np.float32)
    for low in range(0, len(vectors), _AT_ONCE):
        part = vectors[low : low + _AT_ONCE]
        np.concatenate(part, out=together[: len(part)].reshape(-1))
        rows[low : low + len(part)] = torch.from_numpy(together[: len(part)])
    bits: npt.NDArray[np.uint8] = rows.view(-1).view(torch.uint8).numpy()
    return bits

"""The vectors that steer, on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from tllm.runtime.consecutive_places import ConsecutivePlaces
from tllm.runtime.gates import Gates
from tllm.runtime.packed_vectors import PackedVectors
from tllm.runtime.staged import StagedTable, room
from tllm.runtime.taps import Taps
from tllm.spec.conditions import PROBE
from tllm.spec.reading import FloatArray


class VectorTable:
    """Vectors by digest, from when they are brought until they were dropped and no configuration
    uses them. What several rows of the table hold together is one vector here.

    Args:
        gates: keeps those of probes, which no operation reads.
        max_vectors: to allocate room for ahead of need.

    Attributes:
        rows: of each, its first row.
    """

    def __init__(self, taps: Taps, gates: Gates, max_vectors: int) -> None:
        self._taps = taps
        self._gates = gates
        self._max_vectors = max_vectors
        self.rows: dict[str, int] = {}
        self._lengths: dict[str, int] = {}
        self._users: Counter[str] = Counter()  # configurations
        self._dropped: set[str] = set()
        self._placed = ConsecutivePlaces()
        self._table = StagedTable((0, taps.hidden_size), 1, taps.dtype, taps.device)

    @property
    def tensor(self) -> torch.Tensor:
        return self._table.tensor

    def put(self, vectors: PackedVectors | Mapping[str, FloatArray]) -> bool:
        """Add vectors; those that are here are left alone. Whether `commit` has anything to do.

        Raises `ValueError` for another width than the model's.
        """
        hidden, dtype = self._taps.hidden_size, self._taps.dtype
        if not isinstance(vectors, PackedVectors):
            vectors = PackedVectors.of(vectors, str(dtype).removeprefix("torch."))
        single = vectors.rows
        for array in (*([single] if vectors.digests else []), *vectors.others.values()):
            if array.shape[-1] != hidden or array.ndim > 2:
                raise ValueError(
                    f"steering vectors have shape {tuple(array.shape)}; hidden is {hidden}"
                )
        self._dropped.difference_update(vectors)
        new = [i for i, digest in enumerate(vectors.digests) if digest not in self.rows]
        if new:
            held = single if len(new) == len(single) else single[new]
            self._hold([vectors.digests[i] for i in new], held.to(dtype), length=1)
        for digest, array in vectors.others.items():
            if digest.startswith(PROBE):
                self._gates.hold(digest, array)
            elif digest not in self.rows:
                held = torch.tensor(array.reshape(-1, hidden), dtype=dtype)
                self._hold([digest], held, length=len(held))
        return bool(self._table)

    def _hold(self, digests: Sequence[str], held: torch.Tensor, length: int) -> None:
        """Take in vectors of as many rows each."""
        firsts = np.array([self._placed.acquire(length) for _ in digests], np.int64)
        self.rows.update(zip(digests, firsts.tolist(), strict=True))
        self._lengths.update(dict.fromkeys(digests, length))
        self._table.stage_all((firsts[:, None] + np.arange(length)).reshape(-1), held)

    def use(self, digests: Iterable[str]) -> None:
        """One more configuration has these."""
        self._users.update(digests)

    def leave(self, digests: Iterable[str]) -> None:
        """One configuration that had these is gone."""
        users, left = self._users, []
        for digest in digests:
            users[digest] -= 1
            if not users[digest]:  # there is no end to the vectors that requests bring
                users.pop(digest)  # `del` of a counter takes twice as long or more
                left.append(digest)
        self.drop(self._dropped.intersection(left))

    def drop(self, digests: Iterable[str]) -> None:
        """Forget vectors, as soon as no configuration has them."""
        for digest in digests:
            if digest in self._users:
                self._dropped.add(digest)
                continue
            self._dropped.discard(digest)
            if digest in self.rows:
                self._placed.release(self.rows.pop(digest), self._lengths.pop(digest))
            else:
                self._gates.let_go(digest)

    def grow(self) -> bool:
        """Make room for what is here; whether it is another tensor now."""
        held = self._placed.end
        vectors = max(held, min(room(held, 16), self._max_vectors))
        return self._table.grow((vectors, self._taps.hidden_size))

    def commit(self) -> None:
        """Bring what is new to the device."""
        self._table.commit()

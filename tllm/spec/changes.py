"""What is done to the rows of a sequence, whatever does it: what the keys of its blocks see."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from tllm.spec.selection import stretches_of
from tllm.spec.stretches import Stretches

Changes: TypeAlias = Sequence[tuple[int, bytes]]
"""`(first position, digest of what is done)` of each stretch of positions; no bytes where nothing
is. The first begins at 0, the last has no end. Digests are alike where rows are changed alike."""


def steering_changes(stretches: Stretches, history: str) -> Changes:
    """What steering does to a sequence.

    Args:
        history: what else decides on what is done, beside the tokens and what is done to them.
    """
    kinds = {applied for _, applied in stretches if applied}
    digests = {a: hashlib.sha256(f"{history}{a!r}".encode()).digest() for a in kinds}
    return [(start, digests.get(applied, b"")) for start, applied in stretches]


def decided_changes(start: int) -> Changes:
    """What controllers do to a sequence from a position on: nobody knows it beforehand, so that it
    is like nothing else."""
    return [(0, b""), (start, os.urandom(16))] if start else [(0, os.urandom(16))]


def combined(parts: Mapping[str, Changes]) -> Changes:
    """All that is done to a sequence, by the names of what does it."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    names = sorted(parts)

    def told(done: tuple[bytes, ...]) -> bytes:
        said = [(name, digest) for name, digest in zip(names, done, strict=True) if digest]
        return repr(said).encode()

    return joined([parts[name] for name in names], told)


def joined(parts: Sequence[Changes], told: Callable[[tuple[bytes, ...]], bytes]) -> Changes:
    """All that parts do to a sequence.

    Args:
        told: says what is done where each of the parts does something, or nothing.
    """
    starts = [[start for start, _ in part] for part in parts]
    edges = sorted({0}.union(*starts))
    at = [
        [part[i][1] for i in stretches_of(own, edges)]
        for part, own in zip(parts, starts, strict=True)
    ]
    digests: dict[tuple[bytes, ...], bytes] = {}
    found: list[tuple[int, bytes]] = []
    for start, done in zip(edges, zip(*at, strict=True), strict=True):
        if done not in digests:
            digests[done] = hashlib.sha256(told(done)).digest() if any(done) else b""
        if not found or found[-1][1] != digests[done]:
            found.append((start, digests[done]))
    return found

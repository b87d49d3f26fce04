"""What is done to the rows of a sequence, whatever does it: what the keys of its blocks see."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tllm.spec.stretches import Stretches

Changes: TypeAlias = Sequence[tuple[int, bytes]]
"""`(first position, digest of what is done)` of each stretch of positions; no bytes where nothing
is. The first begins at 0, the last has no end. Digests are alike where rows are changed alike."""


def steering_changes(stretches: Stretches, history: str) -> Changes:
    """What steering does to a sequence.

    Args:
        history: what else decides on what is done, beside the tokens and what is done to them.
    """
    return [
        (start, hashlib.sha256(f"{history}{applied!r}".encode()).digest() if applied else b"")
        for start, applied in stretches
    ]


def decided_changes(start: int) -> Changes:
    """What controllers do to a sequence from a position on: nobody knows it beforehand, so that it
    is like nothing else."""
    return [(0, b""), (start, os.urandom(16))] if start else [(0, os.urandom(16))]


def combined(parts: Mapping[str, Changes]) -> Changes:
    """All that is done to a sequence, by the names of what does it."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    edges = {name: [start for start, _ in changes] for name, changes in parts.items()}
    found: list[tuple[int, bytes]] = []
    for start in sorted({0, *(edge for starts in edges.values() for edge in starts)}):
        at = {
            name: parts[name][bisect_right(starts, start) - 1][1] for name, starts in edges.items()
        }
        done = repr(sorted((name, digest) for name, digest in at.items() if digest))
        digest = hashlib.sha256(done.encode()).digest() if any(at.values()) else b""
        if not found or found[-1][1] != digest:
            found.append((start, digest))
    return found

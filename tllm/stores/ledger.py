"""Which records exist already, and what happens to one more of the same name."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tllm.stores.error import StoreError
from tllm.stores.record import RecordMeta
from tllm.stores.recording import Published

OnCollision = Literal["error", "overwrite", "suffix", "skip"]

Identity = tuple[str, str, int, int]
"""Tag, request id, sample index, stage."""


@dataclass(frozen=True)
class Known:
    """The newest record of an identity.

    Attributes:
        sidecar: of a record in files of its own that this writer may remove.
        future: what becomes of it, while it is being written.
    """

    record_id: str
    generation: int
    sidecar: Path | None = None
    future: Future[Published] | None = None


@dataclass(frozen=True)
class Claim:
    """Leave to write a record.

    Attributes:
        generation: which record of its identity it is, from 1.
        replaces: readers must not see those of lower generations any more.
        before: the newest record until now.
    """

    generation: int
    replaces: bool
    before: Known | None


class Ledger:
    """Known identities of a store: those that were there when it was opened, and its writer's own.

    What other writers publish meanwhile is not seen.
    """

    def __init__(self, policy: OnCollision, known: Iterable[tuple[Identity, Known]]) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._known: dict[Identity, Known] = {}
        self._ids: set[tuple[str, int]] = set()
        self._replaceable: dict[Identity, list[tuple[int, Path]]] = {}
        for identity, entry in known:
            self._ids.add((entry.record_id, identity[3]))
            if self._known.get(identity, entry).generation <= entry.generation:
                self._known[identity] = entry
            if entry.sidecar is not None and policy == "overwrite":
                self._replaceable.setdefault(identity, []).append((entry.generation, entry.sidecar))

    def claim(self, meta: RecordMeta, future: Future[Published]) -> Claim | Known:
        """Leave to write a record; or the record that is there, when that one stays.

        Raises:
            ValueError: the record id was used before.
            StoreError: the record exists, and the policy is `error`.
        """
        with self._lock:
            if (meta.record_id, meta.stage) in self._ids:
                raise ValueError(
                    f"record_id={meta.record_id!r} (stage {meta.stage}) was used before; give each "
                    "capture an id of its own, or none"
                )
            before = self._known.get(meta.identity)
            if before is not None and self._policy == "skip":
                return before
            if before is not None and self._policy == "error":
                raise StoreError(
                    f"record {meta.request_id!r} sample {meta.sample_index} of tag {meta.tag!r} "
                    "exists already and on_collision='error'; give another request id or tag, or "
                    "on_collision 'overwrite', 'suffix' or 'skip'",
                    "collision",
                )
            generation = before.generation + 1 if before is not None else 1
            self._ids.add((meta.record_id, meta.stage))
            self._known[meta.identity] = Known(meta.record_id, generation, future=future)
            return Claim(generation, self._policy == "overwrite", before)

    def published(self, meta: RecordMeta, claim: Claim, sidecar: Path | None) -> list[Path]:
        """A claimed record is on disk; the sidecars of records that may be removed now.

        Args:
            sidecar: when the record has files of its own.
        """
        with self._lock:
            if self._known[meta.identity].record_id == meta.record_id:
                self._known[meta.identity] = Known(meta.record_id, claim.generation, sidecar)
            # The files of several stages cannot be removed in one go: they stay.
            if not claim.replaces or sidecar is None or meta.num_stages > 1:
                return []
            files = self._replaceable.pop(meta.identity, [])
            files.append((claim.generation, sidecar))
            newest = max(generation for generation, _ in files)
            self._replaceable[meta.identity] = [file for file in files if file[0] == newest]
            return [path for generation, path in files if generation < newest]

    def failed(self, meta: RecordMeta, claim: Claim) -> None:
        """A claimed record will not come."""
        with self._lock:
            if self._known[meta.identity].record_id != meta.record_id:
                return
            if claim.before is None:
                del self._known[meta.identity]
            else:
                self._known[meta.identity] = claim.before

"""What a store has: which records, what happens to one more of a name, and how many bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tllm.stores.catalog import Catalog
from tllm.stores.error import StoreError
from tllm.stores.format import Identity, WriterPaths, normal_text
from tllm.stores.record import RecordMeta
from tllm.stores.recording import Published

OnCollision = Literal["error", "overwrite", "suffix", "skip"]
"""See `WriterOptions`."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A record that is on disk, or that has leave to be written: the newest of its identity.

    Attributes:
        generation: which record of its identity it is, from 1.
        sidecar: of a record in files of its own that this writer may remove.
        future: what becomes of it, while it is being written.
        before: the newest record until then, while it is being written.
    """

    record_id: str
    generation: int
    sidecar: Path | None = None
    future: Future[Published] | None = None
    before: Claim | None = None


class Ledger:
    """Which records exist, what happens to one more of the same identity, and how many bytes a
    writer may still leave.

    It is one writer's, or that of several under one root that count as one. It knows what was there
    when each was opened, and what they write. What others publish meanwhile is not seen.

    Args:
        on_collision, max_bytes: see `WriterOptions`.
        writer_ids: of all of these writers; what they left in earlier runs counts from the first
            `read` on.
    """

    def __init__(
        self, on_collision: OnCollision, max_bytes: int | None, writer_ids: Iterable[str]
    ) -> None:
        self.on_collision = on_collision
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes of rows and positions, published or on their way."""
        self._uncounted = frozenset(map(normal_text, writer_ids))
        self._lock = threading.Lock()
        self._newest: dict[Identity, Claim] = {}
        self._ids: set[tuple[str, int]] = set()
        self._replaceable: dict[Identity, list[tuple[int, Path]]] = {}

    def read(self, paths: WriterPaths, catalog: Catalog) -> None:
        """Take up what is under the root, for a writer that has its folder from now on."""
        known = list(_known_records(paths, catalog))
        with self._lock:
            if self._uncounted:
                self.num_bytes += catalog.bytes_of(self._uncounted)
                self._uncounted = frozenset()
            self._ids |= catalog.record_ids()
            for identity, claim in known:
                newest = self._newest.get(identity)
                if newest is None or newest.generation < claim.generation:
                    self._newest[identity] = claim
                if claim.sidecar is not None and self.on_collision == "overwrite":
                    replaceable = self._replaceable.setdefault(identity, [])
                    replaceable.append((claim.generation, claim.sidecar))

    def reserve(self, nbytes: int) -> bool:
        """Count bytes that are to be written; False, and none counted, where they would exceed the
        limit. The end of a record has none, and comes through also where more are used already."""
        with self._lock:
            total = self.num_bytes + nbytes
            if nbytes and self.max_bytes is not None and total > self.max_bytes:
                return False
            self.num_bytes = total
            return True

    def give_back(self, nbytes: int) -> None:
        """Bytes that were counted are not there, or not any more."""
        with self._lock:
            self.num_bytes -= nbytes

    def claim(self, meta: RecordMeta, future: Future[Published]) -> Claim:
        """Leave to write a record; of another record id: the record that is there and stays.

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
            before = self._newest.get(meta.identity)
            if before is not None and self.on_collision == "skip":
                return before
            if before is not None and self.on_collision == "error":
                raise StoreError(
                    f"record {meta.request_id!r} sample {meta.sample_index} of tag {meta.tag!r} "
                    "exists already and on_collision='error'; give another request id or tag, or "
                    "on_collision 'overwrite', 'suffix' or 'skip'",
                    "collision",
                )
            generation = before.generation + 1 if before is not None else 1
            claim = Claim(meta.record_id, generation, future=future, before=before)
            self._ids.add((meta.record_id, meta.stage))
            self._newest[meta.identity] = claim
            return claim

    def published(self, meta: RecordMeta, claim: Claim, sidecar: Path | None) -> list[Path]:
        """A claimed record is on disk; the sidecars of records that may be removed now.

        Args:
            sidecar: when the record has files of its own.
        """
        with self._lock:
            if self._newest[meta.identity] is claim:
                self._newest[meta.identity] = Claim(meta.record_id, claim.generation, sidecar)
            # The files of several stages cannot be removed in one go: they stay.
            if self.on_collision != "overwrite" or meta.num_stages > 1:
                return []
            files = self._replaceable.pop(meta.identity, [])
            if sidecar is not None:
                files.append((claim.generation, sidecar))
            newest = max([claim.generation, *(generation for generation, _ in files)])
            if kept := [file for file in files if file[0] == newest]:
                self._replaceable[meta.identity] = kept
            return [path for generation, path in files if generation < newest]

    def failed(self, meta: RecordMeta, claim: Claim) -> None:
        """A claimed record will not come."""
        with self._lock:
            if self._newest[meta.identity] is not claim:
                return
            if claim.before is None:
                del self._newest[meta.identity]
            else:
                self._newest[meta.identity] = claim.before


def _known_records(paths: WriterPaths, catalog: Catalog) -> Iterator[tuple[Identity, Claim]]:
    prefix = f"{paths.folder.relative_to(paths.root).as_posix()}/"
    for row in catalog.ended():
        own = row["sidecar"].startswith(prefix) and row["layout"] != "sharded"
        sidecar = paths.root / row["sidecar"] if own else None
        identity = row["tag"], row["request_id"], row["sample_index"], row["stage"]
        yield identity, Claim(row["record_id"], row["generation"], sidecar)

"""What a store has: which records, what happens to one more of a name, and how many bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tllm.stores.catalog import Catalog, RecordTable
from tllm.stores.error import StoreError
from tllm.stores.format import Identity, WriterPaths, normal_text
from tllm.stores.record import RecordMeta, RecordStatus
from tllm.stores.recording import Published

OnCollision = Literal["error", "overwrite", "suffix", "skip"]
"""See `WriterOptions`."""

REPLACES: dict[OnCollision, tuple[RecordStatus, ...]] = {
    "error": (),
    "overwrite": ("ok", "partial_error"),
    "suffix": (),
    "skip": ("ok",),
}
"""The statuses with which a record takes the place of those that were there."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A record that is on disk, or that has leave to be written: the newest of its identity.

    Attributes:
        generation: which record of its identity it is, from 1.
        sidecar: of a record in files of its own that this writer may remove.
        whole: it is there, readers see it, and nothing of it is missing; found out for `skip` only.
        future: what becomes of it, while it is being written.
        before: the newest record until then, while it is being written.
    """

    record_id: str
    generation: int
    sidecar: Path | None = None
    whole: bool = False
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
        self._whole: dict[Identity, Claim] = {}
        """For `skip`: the newest of each identity of which nothing is missing."""
        self._ids: set[tuple[str, int]] = set()
        self._replaceable: dict[Identity, list[tuple[int, Path]]] = {}

    def read(self, paths: WriterPaths, catalog: Catalog) -> None:
        """Take up what is under the root, for a writer that has its folder from now on."""
        skips = self.on_collision == "skip"
        known = list(_known_records(paths, catalog, RecordTable(catalog) if skips else None))
        with self._lock:
            if self._uncounted:
                self.num_bytes += catalog.bytes_of(self._uncounted)
                self._uncounted = frozenset()
            self._ids |= catalog.record_ids()
            for identity, claim in known:
                _keep_newest(self._newest, identity, claim)
                if claim.whole:
                    _keep_newest(self._whole, identity, claim)
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
            if self.on_collision == "skip":
                on_its_way = before if before is not None and before.future is not None else None
                if there := self._whole.get(meta.identity, on_its_way):
                    return there
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

    def published(
        self, meta: RecordMeta, claim: Claim, sidecar: Path | None, whole: bool
    ) -> list[Path]:
        """A claimed record is on disk; the sidecars of records that may be removed now.

        Args:
            sidecar: when the record has files of its own.
            whole: nothing of it is missing, in this stage.
        """
        with self._lock:
            done = Claim(meta.record_id, claim.generation, sidecar, whole)
            skips = self.on_collision == "skip"
            if skips and whole:
                self._whole[meta.identity] = done
            # Other stages, which may have lost nothing, skip for this record: so must this one.
            stays = skips and not whole and meta.num_stages > 1
            if self._newest[meta.identity] is claim and not stays:
                self._newest[meta.identity] = done
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


def _keep_newest(claims: dict[Identity, Claim], identity: Identity, claim: Claim) -> None:
    newest = claims.get(identity)
    if newest is None or newest.generation < claim.generation:
        claims[identity] = claim


def _known_records(
    paths: WriterPaths, catalog: Catalog, table: RecordTable | None
) -> Iterator[tuple[Identity, Claim]]:
    """What is under the root; which of it is whole, when there is a table of it."""
    prefix = f"{paths.folder.relative_to(paths.root).as_posix()}/"
    whole = None if table is None else table.whole
    for row in catalog.ended():
        own = row["sidecar"].startswith(prefix) and row["layout"] != "sharded"
        sidecar = paths.root / row["sidecar"] if own else None
        identity = row["tag"], row["request_id"], row["sample_index"], row["stage"]
        is_whole = whole is not None and bool(whole[row["line"]])
        yield identity, Claim(row["record_id"], row["generation"], sidecar, is_whole)

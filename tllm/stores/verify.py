"""Checking that a store is what it says."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from tllm.stores.catalog import STATUSES, Catalog, RecordTable, read_index
from tllm.stores.error import StoreError, describe
from tllm.stores.format import (
    INDEX,
    PAYLOAD_SUFFIX,
    WRITERS,
    PieceEntry,
    SidecarLine,
    sidecars,
)
from tllm.stores.payload import MappedPayload
from tllm.stores.record import ArrayKey


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with a store.

    Attributes:
        path: the file, relative to the root.
        what: what is wrong with it.
        record: the request id that it concerns; empty when it is not one record.
    """

    path: str
    what: str
    record: str = ""


@dataclass
class Verification:
    """What checking a store found.

    Attributes:
        records: that can be read, those that another record replaced not among them.
        pending: records whose end was not published.
        sidecars, payloads, bytes: what was checked; bytes of rows and positions.
        problems: what is wrong.
        unpublished: payloads that no sidecar names, and staged files: of a writer that is at work
            or was killed; they are not part of the store.
    """

    records: int = 0
    pending: int = 0
    sidecars: int = 0
    payloads: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    unpublished: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(root: Path, *, checksums: bool) -> Verification:
    """Check every sidecar and payload under a root; see `Store.verify`."""
    found = Verification()
    named: set[str] = set()
    for path in sidecars(root):
        found.sidecars += 1
        _verify_sidecar(root, path, checksums, found, named)
    found.payloads = len(named)
    payloads = (root / WRITERS).rglob(f"*{PAYLOAD_SUFFIX}")
    found.unpublished = sorted({path.relative_to(root).as_posix() for path in payloads} - named)
    catalog = Catalog.read(root, index=False)
    _verify_index(root, catalog, found)
    table = RecordTable(catalog)
    found.records = int((table.status >= 0).sum())
    found.pending = int((table.status == STATUSES.index("pending")).sum())
    found.records -= found.pending
    for line in table.doubles:
        row = catalog.lines.slice(line, 1).to_pylist()[0]
        what = f"part {row['part']} of stage {row['stage']} is in the store twice"
        found.problems.append(Problem(row["sidecar"], what, row["request_id"]))
    for record, error in table.errors.items():
        if "is missing on disk" in error:
            head = table.heads.slice(record, 1).to_pylist()[0]
            found.problems.append(Problem(head["sidecar"], error, head["request_id"]))
    return found


def _verify_index(root: Path, catalog: Catalog, found: Verification) -> None:
    """Compare what the index repeats of sidecars with these."""
    try:
        index = read_index(root)
    except StoreError as error:
        found.problems.append(Problem(INDEX, str(error)))
        return
    if index is None:
        return
    damaged = {damage.path for damage in catalog.damages}
    states = {path: state for path, state in index.states.items() if path not in damaged}
    current = catalog.restricted(states)
    if not index.restricted(current.states).flat().equals(current.flat()):
        what = "it does not say what the sidecars say; remove it, or run `tllm store index`"
        found.problems.append(Problem(INDEX, what))


def _verify_sidecar(
    root: Path, path: str, checksums: bool, found: Verification, named: set[str]
) -> None:
    try:
        data = (root / path).read_bytes()
    except FileNotFoundError:
        return  # replaced since it was listed
    except OSError as error:
        found.problems.append(Problem(path, f"cannot be read: {describe(error)}"))
        return
    if not data.endswith(b"\n"):
        found.problems.append(Problem(path, "does not end with a whole line"))
    folder = PurePosixPath(path).parent
    opened: dict[str, MappedPayload | None] = {}
    for number, text in enumerate(data.splitlines()):
        try:
            line = SidecarLine.decode(text)
        except ValueError as error:
            found.problems.append(Problem(path, f"line {number + 1}: {error}"))
            continue
        last: dict[ArrayKey, int] = {}
        for piece in line.arrays:
            file = (folder / piece.file).as_posix()
            named.add(file)
            if file not in opened:
                opened[file] = _open(root, file, line.request_id, found)
            payload = opened[file]
            if payload is None:
                continue
            try:
                _verify_piece(payload, piece, checksums, last)
            except (StoreError, ValueError) as error:
                found.problems.append(Problem(file, str(error), line.request_id))
            else:
                found.bytes += piece.nbytes


def _open(root: Path, file: str, request_id: str, found: Verification) -> MappedPayload | None:
    try:
        return MappedPayload(root / file)
    except StoreError as error:
        found.problems.append(Problem(file, str(error), request_id))
        return None


def _verify_piece(
    payload: MappedPayload, piece: PieceEntry, checksums: bool, last: dict[ArrayKey, int]
) -> None:
    key = ArrayKey.of(piece.hook, piece.layer)
    _, positions = payload.read(piece, checksums)
    values = positions.numpy()
    if len(values):
        if values[0] <= last.get(key, -1) or (np.diff(values) <= 0).any():
            raise ValueError(f"{key.name}: its positions do not ascend")
        last[key] = int(values[-1])

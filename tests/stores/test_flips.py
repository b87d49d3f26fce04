"""Whatever bit of a store is flipped: what is read is right, or an error names the file."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stores.kept_store import KEPT
from tests.stores.samples import bits
from tllm import stores
from tllm.stores import Store, StoredRecord, StoreError
from tllm.stores.catalog import Catalog

FLIPS = 6
"""Of each sidecar and payload; the index gets more."""


def facts(record: StoredRecord) -> dict[str, Any]:
    """All that a record says of itself, and of its arrays without their rows."""
    known = {name: value for name, value in vars(record).items() if not name.startswith("_")}
    return {**known, **{str(key): record.shape(*key) for key in record.keys}}


def texts(record: StoredRecord) -> tuple[Any, ...]:
    """What is read from the sidecar when it is asked for."""
    return record.token_ids, record.metadata, record.versions


def everything(store: Store) -> Iterator[StoredRecord]:
    yield from store.filter(status=("ok", "partial_error", "pending"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kept store with an index that covers all of it."""
    root = shutil.copytree(KEPT, tmp_path_factory.mktemp("flips") / "store")
    store = stores.open(root)
    store.index()
    assert Catalog.read(root).indexed == len(Catalog.read(root, index=False).lines)
    return root


@pytest.fixture(scope="module")
def wanted(root: Path) -> dict[str, Any]:
    """By record id: its facts, what its sidecar says, and its rows with their positions."""
    return {
        record.record_id: (
            facts(record),
            texts(record),
            {key: (record.tensor(*key), record.positions(*key)) for key in record.keys},
        )
        for record in everything(stores.open(root))
    }


def flips(path: Path, count: int) -> Iterator[tuple[bytes, int]]:
    """The file with one bit changed, `count` times, and which; it is put back in the end."""
    data = path.read_bytes()
    pick = random.Random(path.name)
    try:
        for _ in range(count):
            bit = pick.randrange(8 * len(data))
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            yield data, bit
    finally:
        path.write_bytes(data)


def assert_right_or_named(root: Path, wanted: dict[str, Any], path: Path) -> None:
    """Every record is as it was; or is not there, and the file is named; or raises an error that
    names the file."""
    store = stores.open(root)
    damaged = {damage.path for damage in store.damages}
    assert damaged <= {path.relative_to(root).as_posix()}
    found = {record.record_id: record for record in everything(store)}
    assert set(found) <= set(wanted)
    if not damaged:
        assert set(found) == set(wanted)
    for record_id, record in found.items():
        known, read, arrays = wanted[record_id]
        # A record of which a part is damaged says itself that rows are missing.
        if facts(record) == known:
            assert set(record.keys) == set(arrays)
        else:
            assert damaged
            assert record.status != "ok"
            continue
        try:
            assert texts(record) == read
            for key, (rows, positions) in arrays.items():
                assert bits(record.tensor(*key)).equal(bits(rows))
                assert record.positions(*key).equal(positions)
        except StoreError as error:
            assert path.name in str(error)
            assert error.reason in ("damaged", "missing")


def test_a_flipped_index_is_done_without(root: Path, wanted: dict[str, Any]) -> None:
    path = root / "index.parquet"
    for _ in flips(path, 90):
        assert_right_or_named(root, wanted, path)
        assert "index.parquet" in {problem.path for problem in stores.open(root).verify().problems}
    assert stores.open(root).verify().ok


@pytest.mark.parametrize("indexed", [True, False], ids=["with index", "without"])
def test_a_flipped_sidecar_costs_its_own_records(
    root: Path, wanted: dict[str, Any], indexed: bool, tmp_path: Path
) -> None:
    if not indexed:
        root = shutil.copytree(root, tmp_path / "store")
        (root / "index.parquet").unlink()
    for path in sorted((root / "writers").rglob("*.json*")):
        for _ in flips(path, FLIPS):
            assert_right_or_named(root, wanted, path)


def test_a_flipped_sidecar_of_the_same_age_is_believed_by_its_checksum_alone(
    root: Path, wanted: dict[str, Any], tmp_path: Path
) -> None:
    root = shutil.copytree(root, tmp_path / "store")
    for path in sorted((root / "writers").rglob("*.json*")):
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        for _ in flips(path, FLIPS):
            os.utime(path, ns=times)
            assert_right_or_named(root, wanted, path)


def test_a_flipped_payload_is_right_or_refused(root: Path, wanted: dict[str, Any]) -> None:
    for path in sorted(root.rglob("*.safetensors")):
        for _ in flips(path, FLIPS):
            assert_right_or_named(root, wanted, path)


def test_a_flipped_marker_is_refused(root: Path) -> None:
    for _ in flips(root / "tllm-store.json", 60):
        try:
            assert len(stores.open(root)) == len(stores.open(root))
        except StoreError as error:
            assert "tllm-store.json" in str(error)


def test_an_index_of_another_store_is_found(root: Path, tmp_path: Path) -> None:
    root = shutil.copytree(root, tmp_path / "store")
    path = next(iter(sorted((root / "writers").rglob("*.jsonl"))))
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) > 1
    stores.open(root).index()
    # Another sidecar of the same size and age: only who compares the two can tell.
    path.write_bytes(b"".join(reversed(lines)))
    os.utime(path, ns=times)
    problems = stores.open(root).verify().problems
    assert [problem.path for problem in problems] == ["index.parquet"]
    assert "does not say what the sidecars say" in problems[0].what

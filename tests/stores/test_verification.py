"""Whatever is changed in a file is found."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from pathlib import Path

import pytest

from tests.stores.samples import LAYOUTS, payloads, record_of
from tllm import stores
from tllm.stores import RecordMeta, StoreError, StoreWriter


@pytest.fixture(params=LAYOUTS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with StoreWriter(tmp_path, layout=request.param) as writer:
        for number in range(3):
            writer.submit(record_of(str(number)))
    return tmp_path


def sidecar(root: Path) -> Path:
    return sorted((root / "writers").rglob("*.json*"))[0]


def test_a_changed_byte_anywhere_is_found(root: Path) -> None:
    pick = random.Random(0)
    for path in [*payloads(root), sidecar(root)]:
        data = path.read_bytes()
        for place in [0, 9, len(data) - 2, *(pick.randrange(len(data)) for _ in range(25))]:
            changed = bytearray(data)
            changed[place] ^= 1 << pick.randrange(8)
            path.write_bytes(changed)
            found = stores.open(root).verify()
            if not found.ok:
                continue
            # Only what carries no meaning may change: the header's padding and metadata.
            assert path.suffix == ".safetensors"
            length = 8 + int.from_bytes(data[:8], "little")
            assert place < length, (path, place)
            header, other = json.loads(data[8:length]), json.loads(changed[8:length])
            header.pop("__metadata__"), other.pop("__metadata__", None)
            assert header == other
        path.write_bytes(data)
    assert stores.open(root).verify().ok


def test_without_checksums_only_structure_is_checked(root: Path) -> None:
    path = payloads(root)[0]
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 1] ^= 1
    path.write_bytes(data)
    assert stores.open(root).verify(checksums=False).ok
    problem = stores.open(root).verify().problems[0]
    assert "checksum of its rows and positions does not match" in problem.what
    assert problem.record


def test_a_missing_payload_is_found(root: Path) -> None:
    path = payloads(root)[0]
    path.unlink()
    problems = stores.open(root).verify().problems
    assert problems
    assert all(problem.path == path.relative_to(root).as_posix() for problem in problems)


def test_a_truncated_payload_is_found_and_refused(root: Path) -> None:
    path = payloads(root)[0]
    path.write_bytes(path.read_bytes()[:-3])
    store = stores.open(root)
    assert not store.verify().ok
    with pytest.raises(StoreError, match="is damaged") as caught:
        for record in store:
            for key in record.keys:
                record.tensor(*key)
    assert caught.value.reason == "damaged"


def test_a_sidecar_that_cannot_be_read_costs_its_records_only(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = sidecar(root)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0][: len(lines[0]) // 2])
    store = stores.open(root)
    assert len(store) == 3 - len(lines)
    assert [damage.path for damage in store.damages] == [path.relative_to(root).as_posix()]
    assert "run `tllm store verify" in caplog.text
    assert not store.verify().ok


def test_a_damaged_line_of_a_sidecar_is_told_of_each_time(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, threads=1) as writer:
        for name in ("a", "b", "c"):
            writer.submit(record_of(name))
    path = sidecar(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"request_id":"b"', b'"request_id":"d"'))
    store = stores.open(tmp_path)
    refreshed = store.refresh()
    refreshed.index()
    for found in (store, refreshed, refreshed.refresh(), stores.open(tmp_path)):
        assert found.request_ids() == {"a", "c"}
        assert [damage.what for damage in found.damages] == ["line 2: its checksum does not match"]
    path.write_bytes(data)
    assert stores.open(tmp_path).request_ids() == {"a", "b", "c"}


def test_a_sidecar_that_names_files_outside_is_refused(root: Path) -> None:
    path = sidecar(root)
    line = json.loads(path.read_bytes().splitlines()[0])
    del line["crc32"]
    for file in ("../../../../etc/passwd", "/etc/passwd"):
        line["arrays"][0]["file"] = file
        canonical = json.dumps(line, sort_keys=True, separators=(",", ":"))
        path.write_text(json.dumps({"crc32": zlib.crc32(canonical.encode()), **line}) + "\n")
        store = stores.open(root)
        assert "lies outside of the store" in store.damages[0].what


def test_a_writers_folder_that_is_there_twice_is_found(root: Path) -> None:
    shutil.copytree(root / "writers" / "main", root / "writers" / "copy")
    store = stores.open(root)
    assert len(store) == 3
    assert all(record.shape("post_block", 0) == (3, 16) for record in store)
    assert "is in the store twice" in store.verify().problems[0].what


def test_a_part_that_is_gone_makes_the_record_partial(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, publish_interval=1000) as writer:
        stream = writer.begin(RecordMeta("r"))
        for number in range(3):
            rows = record_of("x").arrays["post_block", 0].tensor
            stream.append("post_block", 0, range(number * 3, number * 3 + 3), rows)
            writer.flush()
        stream.finish()
    (tmp_path / "writers/main/sharded/shard-00000001.jsonl").unlink()
    store = stores.open(tmp_path)
    assert store[0].status == "partial_error"
    assert store[0].error == "part 1 of stage 0 is missing on disk"
    assert store[0].positions("post_block", 0).tolist() == [0, 1, 2, 6, 7, 8]
    assert not store.verify().ok

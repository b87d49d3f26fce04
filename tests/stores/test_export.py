"""Exports hold what the store holds."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from tests.stores.samples import record_of
from tllm import stores
from tllm.stores import Record, RecordMeta, Rows, Store, StoreError, StoreWriter, export
from tllm.stores.export import ExportFormat


@pytest.fixture
def store(tmp_path: Path) -> Store:
    with StoreWriter(tmp_path / "store") as writer:
        for number in range(4):
            writer.submit(record_of(f"r{number}", tag="t", rows=2 + number, sample_index=number))
    return stores.open(tmp_path / "store")


def wanted(store: Store, layer: int) -> tuple[torch.Tensor, list[str], list[int], list[int]]:
    rows = torch.cat([record.tensor("post_block", layer) for record in store])
    ids = [record.request_id for record in store for _ in range(record.prompt_len)]
    samples = [record.sample_index for record in store for _ in range(record.prompt_len)]
    positions = [p for record in store for p in record.positions("post_block", layer).tolist()]
    return rows, ids, samples, positions


def test_parquet(store: Store, tmp_path: Path) -> None:
    paths = export(store, tmp_path / "out", "parquet")
    assert [path.name for path in paths] == ["post_block.0.parquet", "post_block.1.parquet"]
    for layer, path in enumerate(paths):
        table = pq.read_table(path)
        rows, ids, samples, positions = wanted(store, layer)
        assert torch.equal(torch.tensor(table["rows"].to_pylist()), rows.float())
        assert table["request_id"].to_pylist() == ids
        assert table["sample_index"].to_pylist() == samples
        assert table["position"].to_pylist() == positions
        assert set(table["tag"].to_pylist()) == {"t"}


def test_an_array_without_rows_is_a_file_without_rows(tmp_path: Path) -> None:
    nothing = Rows(torch.ones(0, 4, dtype=torch.bfloat16), [])
    with StoreWriter(tmp_path / "empty") as writer:
        writer.submit(Record(RecordMeta("a"), {("post_block", 0): nothing}))
    (path,) = export(stores.open(tmp_path / "empty"), tmp_path / "out", "parquet")
    table = pq.read_table(path)
    assert table.num_rows == 0
    assert table.column_names == ["request_id", "tag", "sample_index", "position", "rows"]


def test_npz(store: Store, tmp_path: Path) -> None:
    (path,) = export(store.filter(layers=1), tmp_path / "out", "npz")
    rows, ids, samples, positions = wanted(store, 1)
    with np.load(path, allow_pickle=False) as found:
        assert np.array_equal(found["rows"], rows.float().numpy())
        assert found["request_id"].tolist() == ids
        assert found["sample_index"].tolist() == samples
        assert found["position"].tolist() == positions
        assert set(found["tag"].tolist()) == {"t"}


def test_safetensors_keeps_the_dtype(store: Store, tmp_path: Path) -> None:
    (path,) = export(store.filter(layers=0), tmp_path / "out", "safetensors")
    rows, ids, samples, positions = wanted(store, 0)
    found = load_file(path)
    names = json.loads(path.with_suffix(".json").read_text())
    assert found["rows"].dtype == torch.bfloat16
    assert torch.equal(found["rows"], rows)
    assert found["positions"].tolist() == positions
    assert [names["request_id"][n] for n in found["records"].tolist()] == ids
    assert [names["sample_index"][n] for n in found["records"].tolist()] == samples


def test_rows_that_a_user_changed_are_exported_as_stored(store: Store, tmp_path: Path) -> None:
    rows, _, _, positions = wanted(store, 1)
    for record in store:
        record.tensor("post_block", 1).zero_()
        record.positions("post_block", 1).zero_()
    [file] = export(store.filter(layers=1), tmp_path / "out", "safetensors")
    assert torch.equal(load_file(file)["rows"], rows)
    assert load_file(file)["positions"].tolist() == positions


def test_nothing_is_overwritten_and_nothing_is_left_half_done(store: Store, tmp_path: Path) -> None:
    export(store, tmp_path / "out", "npz")
    with pytest.raises(ValueError, match="is there already"):
        export(store, tmp_path / "out", "npz")
    mine = tmp_path / "named" / "post_block.1.json"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(ValueError, match=r"post_block\.1\.json is there already"):
        export(store, mine.parent, "safetensors")
    assert [*mine.parent.iterdir()] == [mine] and mine.read_text() == "mine"
    with pytest.raises(ValueError, match="format='csv'"):
        export(store, tmp_path / "out", "csv")
    with pytest.raises(StoreError, match="have no arrays to export"):
        export(store.filter(layers=9), tmp_path / "out")
    payload = next((tmp_path / "store").rglob("*.safetensors"))
    payload.unlink()
    with pytest.raises(StoreError, match="is gone"):
        export(stores.open(tmp_path / "store"), tmp_path / "other", "parquet")
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize("format", ["parquet", "npz", "safetensors"])
def test_an_array_that_cannot_be_written_leaves_no_files_of_others(
    tmp_path: Path, format: ExportFormat
) -> None:
    """Those before it were there, and looked like an export."""
    record = record_of("r", layers=2, rows=4)
    key = ("post_block", 1)
    long = Rows(torch.randn(20000, 16), torch.arange(20000))
    with StoreWriter(tmp_path / "store") as writer:
        writer.submit(Record(record.meta, {**record.arrays, key: long}))
    store = stores.open(tmp_path / "store")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            export(store, tmp_path / "out", format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "out").iterdir()) == []


def test_records_that_differ_in_one_array_leave_no_files_of_others(tmp_path: Path) -> None:
    """`post_block.0` was written, and the next export was refused because it was there."""
    one, other = record_of("one"), record_of("other")
    second = {key: rows for key, rows in other.arrays.items() if key[1] == 1}
    with StoreWriter(tmp_path / "store") as writer:
        writer.submit(Record(replace(one.meta, model="a/model"), one.arrays))
        writer.submit(Record(replace(other.meta, model="b/model"), second))
    mixed = stores.open(tmp_path / "store")
    with pytest.raises(StoreError, match=r"post_block\.1 are of the models"):
        export(mixed, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert len(export(mixed.filter(model="a/model"), tmp_path / "out")) == 2

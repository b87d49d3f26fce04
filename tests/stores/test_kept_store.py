"""A store that the first writer of this format left is read whole."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from tests.stores.kept_store import KEPT, STAGED, WANTED, Wanted
from tests.stores.samples import assert_whole, bits
from tllm import stores
from tllm.stores import ArrayKey, Record, Store, StoredRecord, StoreWriter


@pytest.fixture(params=["sidecars", "its index", "an index of today"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, read from its sidecars alone; beside the index that came with it, which has no
    checksum and is not believed; or with another one."""
    root = shutil.copytree(KEPT, tmp_path / "store")
    if request.param == "its index":
        # A checkout does not keep the times by which the index knows its sidecars.
        index = pq.read_table(root / "index.parquet", columns=["sidecar", "sidecar_mtime_ns"])
        for path, time in zip(*index.to_pydict().values(), strict=True):
            os.utime(root / path, ns=(time, time))
        return root
    (root / "index.parquet").unlink()
    if request.param != "sidecars":
        stores.open(root).index()
    return root


def open_all(root: Path) -> Store:
    return stores.open(root).filter(status=("ok", "partial_error", "pending"))


def assert_is(stored: StoredRecord, wanted: Wanted, record_id: str = "") -> None:
    """All that is known of a record, and all of its rows."""
    meta = wanted.meta()
    for name in ("request_id", "tag", "sample_index", "prompt_len", "model", "reduction"):
        assert getattr(stored, name) == getattr(meta, name)
    assert stored.record_id == (record_id or meta.record_id)
    assert stored.created == meta.created
    assert (stored.status, stored.error) == (wanted.status, wanted.error)
    assert stored.generation == wanted.generation
    assert stored.writer == wanted.writer
    assert stored.layout == wanted.writer.partition("-")[0]
    if wanted.status != "pending":
        assert stored.token_ids == meta.token_ids
        assert stored.metadata == wanted.metadata
    assert stored.versions == {"tllm": "0.1.0", "torch": "2.0"}
    assert stored.keys == [ArrayKey(*key) for key in wanted.keys]
    for key in wanted.keys:
        tensor = stored.tensor(*key)
        assert tensor.dtype == wanted.dtype
        assert torch.equal(bits(tensor), bits(wanted.tensor(key)))
        assert stored.positions(*key).tolist() == wanted.positions


def test_every_record_is_read_as_it_was_given(root: Path) -> None:
    store = open_all(root)
    by_name = {record.name: record for record in store}
    assert set(by_name) == {wanted.name for wanted in WANTED} | {"stages#0"}
    assert len(store) == len(by_name) == len(WANTED) + 1
    for wanted in WANTED:
        assert_is(by_name[wanted.name], wanted)
    staged = by_name["stages#0"]
    for wanted in STAGED:
        [key] = wanted.keys
        assert torch.equal(staged.tensor(*key), wanted.tensor(key))
    assert_whole(store)
    assert store.verify().pending == 1


def test_a_writer_goes_on_with_it(root: Path) -> None:
    taken, cut_off = WANTED[0], next(w for w in WANTED if w.status == "pending")
    options = {"on_collision": "skip", "publish_interval": 0.05}
    with StoreWriter(root, writer_id="sharded", **options) as writer:
        again = replace(taken.singles().meta, record_id="again")
        assert writer.submit(Record(again, {})).result(60).status == "skipped"
        whole = replace(cut_off.meta(), record_id="whole")
        assert writer.submit(Record(whole, cut_off.singles().arrays)).result(60).status == "ok"
    store = open_all(root)
    assert len(store) == len(WANTED) + 2
    assert_is(store.filter(status="ok").record("pending"), replace(cut_off, status="ok"), "whole")
    assert_whole(store)

"""Reading: listing, filtering, batches, the index, and reading while others write."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.stores.processes import FORKS, write_many
from tests.stores.samples import LAYOUTS, assert_same, assert_whole, record_of, rows_of
from tllm import stores
from tllm.stores import ArrayKey, Record, RecordMeta, Rows, Store, StoreError, StoreWriter
from tllm.stores.payload import MappedPayload

KEY = ("post_block", 0)


def write(root: Path, records, layout="sharded", writer_id="main", **options) -> None:
    with StoreWriter(root, layout=layout, writer_id=writer_id, **options) as writer:
        futures = [writer.submit(record) for record in records]
        writer.flush()
        assert all(future.result(0).status == "ok" for future in futures)


@pytest.fixture
def mixed(tmp_path: Path) -> Store:
    """Three tags, three layouts, three writers; 4 records each with 3 layers and `lm_head_in`."""
    for layout, tag in zip(LAYOUTS, ("a", "b", ""), strict=True):
        records = []
        for number in range(4):
            record = record_of(f"r{number}", tag=tag, layers=3, rows=2 + number)
            head = Rows(rows_of(f"{tag}{number}", 2, 24, torch.float16), [0, 9])
            records.append(Record(record.meta, {**record.arrays, ("lm_head_in", None): head}))
        write(tmp_path, records, layout=layout, writer_id=layout)
    return stores.open(tmp_path)


def test_all_layouts_under_one_root_are_one_store(mixed: Store) -> None:
    assert len(mixed) == 12
    assert {record.layout for record in mixed} == set(LAYOUTS)
    assert [record.record_id for record in mixed] == [mixed[n].record_id for n in range(12)]
    assert len(mixed[2:5]) == 3
    assert mixed[-1].record_id == list(mixed)[-1].record_id
    for record in mixed:
        wanted = record_of(record.request_id, tag=record.tag, layers=3, rows=record.prompt_len)
        for layer in range(3):
            rows = wanted.arrays["post_block", layer].tensor
            assert torch.equal(record.tensor("post_block", layer), rows)
    assert_whole(mixed)


@pytest.mark.parametrize(
    "index", [[0, 1], (0, 1), np.array([0, 1]), np.arange(12) > 3, True, 1.0, "r1", None, []]
)
def test_what_is_no_index_of_a_record_is_refused_with_what_is(mixed: Store, index: object) -> None:
    with pytest.raises(TypeError, match=r"is no index; give a whole number or a slice, take sever"):
        mixed[index]


@pytest.mark.parametrize("index", [12, -13, np.int64(12)])
def test_an_index_beyond_the_records_is_told_with_how_many_there_are(
    mixed: Store, index: int
) -> None:
    with pytest.raises(IndexError, match="this store has 12 records"):
        mixed[index]
    assert mixed[np.uint8(3)].name == mixed[3].name


def test_filters_combine(mixed: Store) -> None:
    assert len(mixed.filter(tag="a")) == 4
    assert len(mixed.filter(tag=["a", ""])) == 8
    assert len(mixed.filter(tag="a").filter(request_id="r1")) == 1
    assert len(mixed.filter(request_id=["r1", "r2", "none"])) == 6
    assert len(mixed.filter(sample_index=1)) == 0
    assert len(mixed.filter(model="a/model")) == 12
    assert len(mixed.filter(model="other")) == 0
    assert len(mixed.filter(layers=7)) == 0
    assert len(mixed.filter(layers=np.int64(7))) == len(mixed.filter(layers=[])) == 0
    assert len(mixed.filter(reduction=iter(["none"]), status=iter(["ok"]))) == 12
    assert len(mixed.filter(status="partial_error")) == 0
    narrow = mixed.filter(tag="b", hook="block_output", layers=[1, 2, 50])
    assert len(narrow) == 4
    assert narrow.keys() == [ArrayKey("post_block", 1), ArrayKey("post_block", 2)]
    assert narrow[0].hooks == {"post_block": [1, 2]}
    assert mixed.filter(hook="lm_head_in")[0].keys == [ArrayKey("lm_head_in", None)]
    for form in ("1:3", "1-2", "1,2", "1:"):
        assert len(mixed.filter(tag="b", hook="block_output", layers=form)) == len(narrow)
    assert narrow.filter(layers=2)[0].hooks == {"post_block": [2]}
    assert narrow.nbytes == sum(record.nbytes for record in narrow)
    with pytest.raises(ValueError, match="unknown hook point"):
        mixed.filter(hook="nowhere")
    with pytest.raises(ValueError, match="status="):
        mixed.filter(status="done")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": "a"}, "layers: 'a' is not a layer"),
        ({"layers": [0, 1.5]}, "layers: 1.5 is not a layer"),
        ({"layers": True}, "layers: True is not a layer"),
        ({"layers": -1}, "layers=-1 has negative numbers; layers count from 0 here"),
        ({"sample_index": "a"}, "sample_index: 'a' is not a whole number"),
        ({"hook": 5}, "hook: unknown hook point 5"),
        ({"tag": 5}, "tag has 5; give a text, or several"),
        ({"request_id": ["r1", 5]}, "request_id has 5; give a text, or several"),
        ({"model": 5}, "model has 5; give a text, or several"),
        ({"status": [3]}, r"status=\[3\] is not known"),
    ],
)
def test_filters_that_no_record_could_fit_are_refused_by_name(
    mixed: Store, given: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mixed.filter(**given)


def test_a_question_for_what_is_no_text_is_refused(mixed: Store) -> None:
    with pytest.raises(ValueError, match="request_id has 5; give a text"):
        mixed.has(5)
    with pytest.raises(ValueError, match="tag has 7; give a text"):
        mixed.request_ids(tag=7)


def test_what_is_not_there_is_told_with_what_is(mixed: Store) -> None:
    with pytest.raises(StoreError, match=r"has no post_block.9; its arrays are: .*post_block.0"):
        mixed[0].tensor("post_block", 9)
    with pytest.raises(StoreError, match="no record has the request id 'x'"):
        mixed.record("x")
    with pytest.raises(
        StoreError,
        match=r"the request id 'r1' and tag='c', sample_index=7; with this id there are b/",
    ):
        mixed.record("r1", tag="c", sample_index=7)
    with pytest.raises(StoreError, match="3 records have the request id 'r1'"):
        mixed.record("r1")
    assert mixed.record("r1", tag="b").tag == "b"
    with pytest.raises(
        StoreError, match=r"none of these 12 records has attn_out.0; there are: post_block.0"
    ):
        mixed.batches("attn_out", 0)
    with pytest.raises(ValueError, match="unknown hook point"):
        mixed.batches("nowhere", 0)
    with pytest.raises(ValueError, match="format='csv'"):
        mixed.batches("post_block", 0, format="csv")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"rows": 0}, "rows=0 must be 1 or more"),
        ({"rows": 1.5}, "rows=1.5 is not a whole number"),
        ({"seed": -1}, "seed=-1 must be 0 or more"),
        ({"seed": "a"}, "seed='a' is not a whole number"),
        ({"dtype": "float16"}, "dtype='float16' is not allowed; give a torch.dtype"),
        ({"dtype": np.float16}, "dtype=.*float16.* is not allowed"),
        ({"layer": [0]}, r"layer=\[0\] name no array"),
        ({"hook": ["post_block"]}, r"hook=\['post_block'\] and layer=0 name no array"),
        ({"layer": True}, "layer=True is not a layer of post_block"),
    ],
)
def test_batches_that_cannot_be_are_refused_by_name(
    mixed: Store, given: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        mixed.batches(**{"hook": "post_block", "layer": 0, **given})


def test_rows_of_several_models_are_not_in_one_batch(tmp_path: Path) -> None:
    """They were, where the models are as wide."""
    records = [record_of(name) for name in ("a", "b")]
    metas = [replace(each.meta, model=f"{each.meta.request_id}/model") for each in records]
    write(tmp_path, [Record(meta, each.arrays) for meta, each in zip(metas, records, strict=True)])
    store = stores.open(tmp_path)
    problem = r"post_block.* are of the models \['a/model', 'b/model'\]; .*filter\(model=\.\.\.\)"
    with pytest.raises(StoreError, match=problem):
        store.batches("post_block", 0)
    for name in ("a", "b"):
        [batch] = store.filter(model=f"{name}/model").batches("post_block", 0)
        assert batch.request_ids == [name] * 3


def test_rows_that_were_reduced_and_rows_that_were_not_are_not_in_one_batch(
    tmp_path: Path,
) -> None:
    """They were: a mean of a prompt beside the rows of another."""
    records = [record_of(name) for name in ("a", "b")]
    metas = [replace(records[0].meta, reduction="mean"), records[1].meta]
    write(tmp_path, [Record(meta, each.arrays) for meta, each in zip(metas, records, strict=True)])
    store = stores.open(tmp_path)
    problem = r"of the reductions \['mean', 'none'\]; .*filter\(reduction=\.\.\.\)"
    with pytest.raises(StoreError, match=problem):
        store.batches("post_block", 0)
    for name, reduction in (("a", "mean"), ("b", "none")):
        [batch] = store.filter(reduction=reduction).batches("post_block", 0)
        assert batch.request_ids == [name] * 3
    assert len(store.filter(reduction=("mean", "none"))) == 2


def test_numbers_of_numpy_name_layers_and_sizes_of_batches(mixed: Store) -> None:
    one = np.int64(1)
    rows = mixed[0].tensor("post_block", one)
    assert torch.equal(rows, mixed[0].tensor("post_block", 1))
    [batch] = mixed.batches("post_block", one, rows=np.int32(500), seed=np.uint8(3))
    assert torch.equal(batch.rows[: len(rows)], rows)


def test_what_a_run_that_goes_on_can_leave_out(mixed: Store) -> None:
    assert mixed.request_ids() == {"r0", "r1", "r2", "r3"}
    assert mixed.has("r1")
    assert mixed.has("r1", tag="b", sample_index=0)
    assert not mixed.has("r1", tag="c")
    assert not mixed.has("r1", sample_index=1)
    assert not mixed.has("r9")
    assert mixed.request_ids(tag="c") == set()
    assert mixed.filter(request_id="r2").request_ids() == {"r2"}


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is no store: it has no tllm-store.json"):
        stores.open(tmp_path)
    (tmp_path / "tllm-store.json").write_text('{"format":"tllm-store","version":99}')
    with pytest.raises(StoreError, match="format version 99; this tLLM reads version 1: update"):
        stores.open(tmp_path)
    with pytest.raises(ValueError, match="format version 99"):
        StoreWriter(tmp_path)


def stack(store: Store, layer: int = 0) -> torch.Tensor:
    return torch.cat([record.tensor("post_block", layer) for record in store])


class PartOfWorker(IterableDataset):
    """What `doc/guides/capture.md` says of several workers of a `DataLoader`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __iter__(self) -> Iterator[list[tuple[str, int]]]:
        info = get_worker_info()
        store = stores.open(self._store.root)
        names = sorted({record.request_id for record in store})
        part = store.filter(request_id=names[info.id :: info.num_workers])
        for batch in part.batches("post_block", 1, rows=7):
            yield list(zip(batch.request_ids, batch.positions.tolist(), strict=True))


def test_workers_of_a_loader_that_share_the_records_give_every_row_once(mixed: Store) -> None:
    loader = DataLoader(PartOfWorker(mixed), batch_size=None, num_workers=2)
    found = sorted(tuple(row) for batch in loader for row in batch)
    every = [
        (record.request_id, p)
        for record in stores.open(mixed.root)
        for p in record.positions("post_block", 1).tolist()
    ]
    assert found == sorted(every)


@pytest.mark.parametrize("rows", [1, 3, 7, 1000])
def test_batches_give_every_row_once_in_order(mixed: Store, rows: int) -> None:
    batches = list(mixed.batches("post_block", 1, rows=rows))
    assert torch.equal(torch.cat([batch.rows for batch in batches]), stack(mixed, 1))
    positions = [p for record in mixed for p in record.positions("post_block", 1).tolist()]
    assert torch.cat([batch.positions for batch in batches]).tolist() == positions
    ids = [record.request_id for record in mixed for _ in range(record.prompt_len)]
    assert [name for batch in batches for name in batch.request_ids] == ids
    numbers = torch.cat([batch.records for batch in batches]).tolist()
    assert [mixed[number].request_id for number in numbers] == ids
    assert all(len(batch) == rows for batch in batches[:-1])
    assert len(batches) == len(mixed.stream("post_block", 1, rows=rows))


@pytest.mark.parametrize("shuffle", [False, True])
def test_two_arrays_of_the_same_records_come_in_one_order(mixed: Store, shuffle: bool) -> None:
    layers = [mixed.batches("post_block", n, rows=7, shuffle=shuffle, seed=3) for n in (0, 1)]
    for one, other in zip(*layers, strict=True):
        assert one.request_ids == other.request_ids
        assert torch.equal(one.records, other.records)
        assert torch.equal(one.positions, other.positions)


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=12),
    st.integers(1, 300),
    st.integers(0, 3),
)
def test_shuffled_batches_give_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], rows: int, seed: int
) -> None:
    root = tmp_path_factory.mktemp("store")
    write(root, [record_of(str(n), rows=length) for n, length in enumerate(lengths)])
    store = stores.open(root)

    def read(seed: int) -> list[tuple[str, int, float]]:
        found = []
        for batch in store.batches("post_block", 0, rows=rows, shuffle=True, seed=seed):
            firsts = batch.rows[:, 0].tolist()
            found += zip(batch.request_ids, batch.positions.tolist(), firsts, strict=True)
        return found

    wanted = [
        (record.request_id, position, first)
        for record in store
        for position, first in zip(
            record.positions("post_block", 0).tolist(),
            record.tensor("post_block", 0)[:, 0].tolist(),
            strict=True,
        )
    ]
    assert sorted(read(seed)) == sorted(wanted)
    assert read(seed) == read(seed)
    if len(wanted) > 20:
        assert read(seed) != wanted
        assert read(seed) != read(seed + 1)


def test_shuffling_mixes_rows_of_many_records(tmp_path: Path) -> None:
    write(tmp_path, [record_of(str(n), rows=100, layers=1) for n in range(100)])
    opened = stores.open(tmp_path)
    assert list(opened.batches("post_block", 0, shuffle=True, seed=2**127))  # as randbits(128)
    batches = list(opened.batches("post_block", 0, rows=500, shuffle=True))
    assert all(len(set(batch.request_ids)) > 50 for batch in batches)


def test_formats_agree(mixed: Store) -> None:
    tensors = list(mixed.batches("post_block", 0, rows=9))
    arrays = list(mixed.batches("post_block", 0, rows=9, format="numpy"))
    tables = list(mixed.batches("post_block", 0, rows=9, format="arrow"))
    for tensor, array, table in zip(tensors, arrays, tables, strict=True):
        assert array.rows.dtype == np.float32
        assert np.array_equal(array.rows, tensor.rows.float().numpy())
        assert isinstance(table, pa.RecordBatch)
        assert table.schema.field("rows").type == pa.list_(pa.float32(), 16)
        assert table["rows"].to_pylist() == array.rows.tolist()
        assert table["request_id"].to_pylist() == list(tensor.request_ids)
        assert table["position"].to_pylist() == array.positions.tolist()
        assert table["record"].to_pylist() == tensor.records.tolist()
    head = next(iter(mixed.batches("lm_head_in", format="arrow")))
    assert head.schema.field("rows").type == pa.list_(pa.float16(), 24)
    converted = next(iter(mixed.batches("post_block", 0, dtype=torch.float64)))
    assert converted.rows.dtype == torch.float64


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_that_is_changed_in_place_changes_no_other_and_no_batch(
    tmp_path: Path, layout: str
) -> None:
    wanted = record_of("r", layers=2, dtype=torch.float32)
    write(tmp_path, [wanted], layout)
    store = stores.open(tmp_path)
    store[0].positions(*KEY).sub_(3)
    store[0].numpy(*KEY)[:] = 0
    assert torch.equal(store[0].tensor("post_block", 1), wanted.arrays["post_block", 1].tensor)
    for layer in range(2):
        assert store[0].positions("post_block", layer).tolist() == [0, 2, 4]
        [batch] = store.batches("post_block", layer)
        assert torch.equal(batch.rows, wanted.arrays["post_block", layer].tensor)
        assert batch.positions.tolist() == [0, 2, 4]
    assert_whole(store)


def test_records_that_differ_in_dtype_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path, [record_of("a"), record_of("b", dtype=torch.float32)])
    store = stores.open(tmp_path)
    with pytest.raises(StoreError, match=r"dtypes \['BF16', 'F32'\]"):
        store.batches("post_block", 0)
    assert len(next(iter(store.filter(request_id="a").batches("post_block", 0)))) == 3


def test_the_index_saves_reading_sidecars_and_says_the_same(mixed: Store) -> None:
    table = mixed.index()
    assert table["first"].to_pylist().count(True) == 12
    assert len(table) == 12 * 4
    again = stores.open(mixed.root)
    assert [r.name for r in again] == [r.name for r in mixed]
    assert again[5].hooks == mixed[5].hooks
    assert again[5].token_ids == mixed[5].token_ids
    # Columns that anybody's Parquet reader can query.
    layer_1 = pq.read_table(mixed.root / "index.parquet", filters=[("layer", "=", 1)])
    assert layer_1["rows"].to_pylist() == [r.shape("post_block", 1)[0] for r in mixed]
    assert set(layer_1["tag"].to_pylist()) == {"a", "b", ""}


def test_names_of_files_may_have_more_than_two_gigabytes(mixed: Store) -> None:
    """As of a million records with all layers, where a column of `string` ends."""
    for _ in range(2):
        assert mixed.index().schema.field("file").type == pa.large_string()
        mixed = stores.open(mixed.root)  # from the index


def test_the_index_is_brought_up_to_date_by_new_sidecars_only(tmp_path: Path) -> None:
    from tllm.stores.catalog import Catalog

    write(tmp_path, [record_of(str(n)) for n in range(5)], layout="packed")
    stores.open(tmp_path).index()
    write(tmp_path, [record_of(str(n)) for n in range(5, 8)], layout="packed")
    catalog = Catalog.read(tmp_path)
    assert (catalog.indexed, len(catalog.lines)) == (5, 8)
    store = stores.open(tmp_path)
    assert len(store) == 8
    for record in store:
        assert_same(record, record_of(record.request_id))
    # What is gone or was replaced is not taken from it.
    write(tmp_path, [record_of("3", rows=1)], layout="packed", on_collision="overwrite")
    store = stores.open(tmp_path)
    assert len(store) == 8
    assert_same(store.record("3"), record_of("3", rows=1))


def test_an_index_that_cannot_be_read_is_done_without(mixed: Store) -> None:
    (mixed.root / "index.parquet").write_bytes(b"nonsense")
    assert len(stores.open(mixed.root)) == 12
    mixed.index()
    data = (mixed.root / "index.parquet").read_bytes()
    (mixed.root / "index.parquet").write_bytes(data[: len(data) // 2])
    assert len(stores.open(mixed.root)) == 12


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_records_of_several_names_that_share_an_id_are_records_of_their_own(
    tmp_path: Path, layout: str, indexed: bool
) -> None:
    """As two consumers of one engine wrote them once: the id was of the request alone."""

    def meta(**names: Any) -> RecordMeta:
        return RecordMeta(**{"request_id": "r", "record_id": "of the request", **names})

    others = [meta(), meta(tag="first"), meta(request_id="s"), meta(sample_index=1)]
    with ExitStack() as ends:
        open_writer = partial(StoreWriter, tmp_path, layout=layout)
        second = ends.enter_context(open_writer(writer_id="second"))
        writers = [ends.enter_context(open_writer(writer_id=f"{n}")) for n in range(len(others))]
        stream = second.begin(meta(tag="second"))
        for position in range(2):
            stream.append("post_block", 1, [position], torch.full((1, 4), float(position)))
            second.flush()
        stream.finish()
        for number, (writer, other) in enumerate(zip(writers, others, strict=True)):
            rows = Rows(torch.full((1, 4), 10.0 + number), [3])
            writer.submit(Record(other, {("attn_out", number): rows}))
    store = stores.open(tmp_path)
    if indexed:
        store.index()
        store = stores.open(tmp_path)
    assert len(store) == 5
    for number, other in enumerate(others):
        names = {name: getattr(other, name) for name in ("request_id", "tag", "sample_index")}
        record = store.record(**names)
        assert (record.status, record.error) == ("ok", "")
        assert record.keys == [ArrayKey("attn_out", number)]
        assert record.tensor("attn_out", number).tolist() == [[10.0 + number] * 4]
    parts = store.record("r", tag="second")
    assert parts.tensor("post_block", 1)[:, 0].tolist() == [0, 1]
    assert [record.record_id for record in store] == ["of the request"] * 5
    assert_whole(store)


def test_an_empty_store_is_a_store(tmp_path: Path) -> None:
    StoreWriter(tmp_path).close()
    store = stores.open(tmp_path)
    assert (len(store), list(store), store.keys(), store.nbytes, store.rows) == (0, [], [], 0, 0)
    assert store.request_ids() == set()
    store.index()
    assert len(stores.open(tmp_path)) == 0
    assert_whole(store)


def test_records_without_arrays_survive_the_index(tmp_path: Path) -> None:
    meta = RecordMeta("e", status="partial_error", error="nothing")
    with StoreWriter(tmp_path) as writer:
        writer.submit(Record(meta, {}))
        writer.submit(record_of("r"))
    for _ in range(2):
        store = stores.open(tmp_path)
        assert {record.request_id: len(record.keys) for record in store} == {"e": 0, "r": 2}
        store.index()


def test_refreshing_sees_what_came_since(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, publish_interval=1000) as writer:
        store = stores.open(tmp_path)
        for number in range(5):
            writer.submit(record_of(str(number)))
            writer.flush()
            assert len(store) == number
            store = store.refresh()
            assert len(store) == number + 1
            assert_same(store.record(str(number)), record_of(str(number)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_refreshing_sees_files_that_took_the_place_of_others(tmp_path: Path, layout: str) -> None:
    def write_filled(value: float) -> torch.Tensor:
        rows = torch.full((3, 4), value)
        write(tmp_path / "store", [Record(RecordMeta("r"), {KEY: Rows(rows, [0, 1, 2])})], layout)
        return rows

    before = write_filled(1.0)
    store = stores.open(tmp_path / "store")
    assert torch.equal(store[0].tensor(*KEY), before)
    shutil.rmtree(tmp_path / "store")
    after = write_filled(2.0)
    store = store.refresh()
    assert torch.equal(store[0].tensor(*KEY), after)
    assert torch.equal(stack(store), after)


def test_refreshing_maps_no_file_again_that_is_still_there(mixed: Store, monkeypatch) -> None:
    rows = stack(mixed)
    monkeypatch.setattr(MappedPayload, "__init__", None)
    assert torch.equal(stack(mixed.refresh()), rows)


def test_a_record_that_was_replaced_meanwhile_says_so(tmp_path: Path) -> None:
    write(tmp_path, [record_of("r")], layout="packed")
    store = stores.open(tmp_path)
    write(tmp_path, [record_of("r", rows=5)], layout="packed", on_collision="overwrite")
    with pytest.raises(StoreError, match=r"replaced or removed; Store.refresh\(\)"):
        store[0].tensor("post_block", 0)
    with pytest.raises(StoreError, match=r"Store.refresh\(\)"):
        _ = store[0].token_ids
    assert store.refresh()[0].shape("post_block", 0) == (5, 16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_store_may_be_read_while_it_is_written(tmp_path: Path, layout: str) -> None:
    count = 60
    StoreWriter(tmp_path).close()
    writer = FORKS.Process(target=write_many, args=(str(tmp_path), layout, "w", str(count)))
    writer.start()
    store = stores.open(tmp_path)
    seen = 0
    while True:
        ended = not writer.is_alive()
        store = store.refresh()
        assert len(store) >= seen
        for record in store[seen:]:
            assert record.tensor("post_block", 1).shape == (3, 16)
        seen = len(store)
        if ended:
            break
    assert writer.exitcode == 0
    assert len(store) == 2 * count
    for record in store:
        assert_same(record, record_of(record.request_id, tag=record.tag))
    assert_whole(store)


def test_writers_in_many_processes_never_meet(tmp_path: Path) -> None:
    count = 30
    writers = [
        FORKS.Process(
            target=write_many,
            args=(str(tmp_path), LAYOUTS[n % 3], f"dp{n // 2}-pp{n % 2}", str(count)),
        )
        for n in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    store = stores.open(tmp_path)
    # Each wrote "shared" under every tag too: none overwrote another's.
    assert len(store) == 4 * 2 * count
    assert len(store.filter(request_id="shared")) == 4 * count
    for record in store:
        assert_same(record, record_of(record.request_id, tag=record.tag))
    assert_whole(store)


def rows_in_another_process(record: stores.StoredRecord) -> torch.Tensor:
    return record.tensor("post_block", 1).clone()


def test_stores_records_streams_and_errors_reach_other_processes(mixed: Store) -> None:
    stream = mixed.stream("post_block", 1)
    expected = [rows_in_another_process(record) for record in mixed]  # files are mapped now
    store, record, copied = pickle.loads(pickle.dumps((mixed, mixed[3], stream)))
    assert store[3].token_ids == record.token_ids == mixed[3].token_ids
    assert len(copied) == len(stream)
    with FORKS.Pool(2) as pool:
        for rows, wanted in zip(pool.map(rows_in_another_process, mixed), expected, strict=True):
            assert torch.equal(rows, wanted)
        lacking = mixed.filter(hook="lm_head_in")[0]
        with pytest.raises(StoreError, match=r"has no post_block.1") as raised:
            pool.apply_async(rows_in_another_process, (lacking,)).get(60)
        assert raised.value.reason == "missing"

"""What is written comes back, bit for bit, in every layout."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.stores.samples import (
    DTYPES,
    LAYOUTS,
    assert_same,
    assert_whole,
    payloads,
    record_of,
    rows_of,
)
from tllm import stores
from tllm.stores import Record, RecordMeta, Rows, StoreWriter

IDS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=40)
ANY_DTYPE = st.sampled_from(DTYPES)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def records(draw: st.DrawFn) -> Record:
    rows = draw(st.integers(0, 9))
    positions = sorted(draw(st.sets(st.integers(0, 1000), min_size=rows, max_size=rows)))
    meta = RecordMeta(
        draw(IDS),
        tag=draw(IDS),
        sample_index=draw(st.integers(0, 3)),
        token_ids=draw(st.lists(st.integers(0, 200_000), max_size=5)),
        metadata=draw(
            st.dictionaries(
                st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False), max_size=2
            )
        ),
    )
    keys = draw(
        st.lists(
            st.one_of(
                st.tuples(st.sampled_from(["post_block", "attn_out"]), st.integers(0, 100)),
                st.just(("lm_head_in", None)),
            ),
            unique=True,
            max_size=4,
        )
    )
    return Record(
        meta,
        {
            key: Rows(
                rows_of(
                    f"{meta.request_id}{key}",
                    rows,
                    draw(st.integers(1, 9)),
                    draw(st.sampled_from(DTYPES)),
                ),
                positions,
            )
            for key in keys
        },
    )


@settings(max_examples=40)
@given(
    given_records=st.lists(records(), max_size=6, unique_by=lambda r: r.meta.identity),
    layout=st.sampled_from(LAYOUTS),
    shard_bytes=st.sampled_from([1, 300, 1 << 20]),
    chunk=st.integers(0, 4),
)
def test_any_records_in_any_layout(
    tmp_path_factory: pytest.TempPathFactory,
    given_records: list[Record],
    layout: stores.Layout,
    shard_bytes: int,
    chunk: int,
) -> None:
    root = tmp_path_factory.mktemp("store")
    with StoreWriter(root, layout=layout, shard_bytes=shard_bytes) as writer:
        futures = [write(writer, record, chunk) for record in given_records]
        writer.flush()
        assert all(future.result(0).status == "ok" for future in futures)
    store = stores.open(root)
    assert len(store) == len(given_records)
    for record in given_records:
        meta = record.meta
        found = store.record(meta.request_id, tag=meta.tag, sample_index=meta.sample_index)
        assert_same(found, record)
        assert found.metadata == meta.metadata
    assert_whole(store)
    for path in payloads(root):
        load_file(path)
    # The index says the same as the sidecars.
    store.index()
    again = stores.open(root)
    assert [record.name for record in again] == [record.name for record in store]
    for record in given_records:
        meta = record.meta
        assert_same(
            again.record(meta.request_id, tag=meta.tag, sample_index=meta.sample_index), record
        )


def write(writer: StoreWriter, record: Record, chunk: int):
    """Whole, or in chunks of rows in turn."""
    if not chunk:
        return writer.submit(record)
    stream = writer.begin(record.meta)
    longest = max((len(rows.positions) for rows in record.arrays.values()), default=0)
    for start in range(0, max(longest, 1), chunk):
        for (hook, layer), rows in record.arrays.items():
            stop = start + chunk
            stream.append(hook, layer, rows.positions[start:stop], rows.tensor[start:stop])
    return stream.finish()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("durability", ["rename", "fsync"])
def test_both_durabilities_write_the_same(tmp_path: Path, layout, durability) -> None:
    record = record_of("r")
    with StoreWriter(tmp_path, layout=layout, durability=durability) as writer:
        writer.submit(record)
    store = stores.open(tmp_path)
    assert_same(store[0], record)
    assert_whole(store)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_special_values_survive(tmp_path: Path, layout) -> None:
    values = torch.tensor([[float("nan"), float("inf"), -0.0, 1e-40]])
    record = Record(
        RecordMeta("r"),
        {
            ("post_block", 0): Rows(values.bfloat16(), [0]),
            ("post_block", 1): Rows(values, [0]),
        },
    )
    with StoreWriter(tmp_path, layout=layout) as writer:
        writer.submit(record)
    assert_same(stores.open(tmp_path)[0], record)


def test_numpy_gives_bfloat16_as_float32(tmp_path: Path) -> None:
    record = record_of("r")
    with StoreWriter(tmp_path) as writer:
        writer.submit(record)
    stored = stores.open(tmp_path)[0]
    array = stored.numpy("block_output", 0)
    assert array.dtype == "float32"
    assert torch.equal(torch.from_numpy(array), stored.tensor("post_block", 0).float())


def test_a_view_with_strides_is_stored_as_it_looks(tmp_path: Path) -> None:
    base = rows_of("x", 8, 12, torch.float32)
    record = Record(
        RecordMeta("r"),
        {
            ("post_block", 0): Rows(base.T, range(12)),
            ("post_block", 1): Rows(base[::2, 3:7], torch.arange(4)),
        },
    )
    with StoreWriter(tmp_path) as writer:
        writer.submit(record)
    assert_same(stores.open(tmp_path)[0], record)


def test_changes_to_a_tensor_stay_private(tmp_path: Path) -> None:
    record = record_of("r")
    with StoreWriter(tmp_path) as writer:
        writer.submit(record)
    stores.open(tmp_path)[0].tensor("post_block", 0).zero_()
    store = stores.open(tmp_path)
    assert_same(store[0], record)
    assert_whole(store)


def test_ids_that_are_equal_in_unicode_are_one_record(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, on_collision="skip", layout="packed") as writer:
        writer.submit(record_of("é"))
        again = writer.submit(record_of(unicodedata.normalize("NFD", "é")))
        writer.flush()
        assert again.result(0).status == "skipped"
    assert len(stores.open(tmp_path)) == 1


def test_ids_that_are_equal_in_unicode_are_found_as_one(tmp_path: Path) -> None:
    decomposed = unicodedata.normalize("NFD", "é")
    with StoreWriter(tmp_path) as writer:
        writer.submit(record_of(decomposed, tag=decomposed))
    store = stores.open(tmp_path)
    for text in ("é", decomposed):
        assert store.record(text, tag=text).request_id == "é"
        assert len(store.filter(request_id=[text], tag=text)) == 1
        assert store.has(text, tag=text)
        assert store.request_ids(tag=text) == {"é"}


def test_hostile_ids_stay_below_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    names = ["../../x", "/etc/passwd", "..", ".", "", "con", "a" * 1000, "a/b", "a%2fb", "A", "a"]
    for layout in LAYOUTS:
        with StoreWriter(root, layout=layout, writer_id=f"../{layout}") as writer:
            for name in names:
                writer.submit(record_of(name, tag=f"{name}{layout}"))
    assert list(tmp_path.iterdir()) == [root]
    store = stores.open(root)
    assert len(store) == len(names) * len(LAYOUTS)
    for record in store:
        assert_same(record, record_of(record.request_id, tag=record.tag))
    assert_whole(store)

"""What the writer does with records: collisions, limits, streams, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.stores.samples import (
    LAYOUTS,
    assert_same,
    assert_whole,
    in_pieces,
    payloads,
    record_of,
    rows_of,
    stacked,
)
from tllm import stores
from tllm.consumers.capture.filesystem import FilesystemConsumer
from tllm.stores import Published, Record, RecordMeta, Rows, StackedRows, StoreError, StoreWriter
from tllm.stores.ledger import Ledger


def changed(request_id: str, rows: int = 7) -> Record:
    """The same identity as `record_of(request_id)`, other rows."""
    return record_of(request_id, rows=rows)


@pytest.mark.parametrize("again", [False, True], ids=["same writer", "later"])
@pytest.mark.parametrize("layout", LAYOUTS)
class TestCollisions:
    def write_both(self, root: Path, layout, again: bool, policy: str):
        """`r`, and `r` once more; the second one's future."""
        writer = StoreWriter(root, layout=layout, on_collision=policy)
        first = writer.submit(record_of("r"))
        if again:
            writer.close()
            assert first.result(0).status == "ok"
            writer = StoreWriter(root, layout=layout, on_collision=policy)
        second = writer.submit(changed("r"))
        writer.close()
        return second, writer.stats()

    def test_error_refuses_the_second(self, tmp_path: Path, layout, again: bool) -> None:
        second, stats = self.write_both(tmp_path, layout, again, "error")
        with pytest.raises(StoreError, match=r"record 'r' sample 0 .* exists already") as caught:
            second.result(0)
        assert caught.value.reason == "collision"
        assert stats.failed == 1
        assert_same(stores.open(tmp_path).record("r"), record_of("r"))
        assert_whole(stores.open(tmp_path))

    def test_skip_keeps_the_first(self, tmp_path: Path, layout, again: bool) -> None:
        second, stats = self.write_both(tmp_path, layout, again, "skip")
        assert second.result(0).status == "skipped"
        assert second.result(0).record_id == stores.open(tmp_path).record("r").record_id
        assert stats.skipped == 1
        assert_same(stores.open(tmp_path).record("r"), record_of("r"))

    def test_overwrite_keeps_the_second(self, tmp_path: Path, layout, again: bool) -> None:
        second, _ = self.write_both(tmp_path, layout, again, "overwrite")
        assert second.result(0).status == "ok"
        store = stores.open(tmp_path)
        assert len(store) == 1
        assert_same(store.record("r"), changed("r"))
        assert_whole(store)
        if layout != "sharded" and again:
            # The old files are gone.
            assert len(payloads(tmp_path)) == (1 if layout == "packed" else 2)

    def test_suffix_keeps_both(self, tmp_path: Path, layout, again: bool) -> None:
        second, _ = self.write_both(tmp_path, layout, again, "suffix")
        assert second.result(0).status == "ok"
        store = stores.open(tmp_path)
        assert sorted(record.name for record in store) == ["r#0", "r#0~2"]
        both = {record.generation: record for record in store}
        assert_same(both[1], record_of("r"))
        assert_same(both[2], changed("r"))
        with pytest.raises(StoreError, match="2 records have the request id 'r'"):
            store.record("r")
        assert_whole(store)


def test_overwriting_many_times_leaves_the_last(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        with StoreWriter(tmp_path / layout, layout=layout, on_collision="overwrite") as writer:
            for rows in range(1, 9):
                writer.submit(changed("r", rows))
                if rows % 3 == 0:
                    writer.flush()
        store = stores.open(tmp_path / layout)
        assert len(store) == 1
        assert_same(store[0], changed("r", 8))


def test_samples_and_tags_do_not_collide(tmp_path: Path) -> None:
    given = [record_of("r", tag=tag, sample_index=n) for tag in ("", "a", "b") for n in range(3)]
    for layout in LAYOUTS:
        with StoreWriter(tmp_path / layout, layout=layout) as writer:
            futures = [writer.submit(record) for record in given]
            writer.flush()
            assert {future.result(0).status for future in futures} == {"ok"}


def test_a_record_that_failed_may_be_written_again(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        stream = writer.begin(RecordMeta("r"))
        stream.append("post_block", 0, [0], rows_of("x", 1, 8))
        stream.abort()
        with pytest.raises(StoreError, match="aborted"):
            stream.future.result(60)
        future = writer.submit(record_of("r"))
        writer.flush()
        assert future.result(0).status == "ok"
    assert len(stores.open(tmp_path)) == 1


def test_skipping_for_one_that_then_fails_is_an_error(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, on_collision="skip") as writer:
        stream = writer.begin(RecordMeta("r"))
        skipped = writer.submit(record_of("r"))
        assert not skipped.done()
        stream.abort()
        with pytest.raises(StoreError, match="skipped for one of the same name that then failed"):
            skipped.result(60)


def incomplete(rows: int = 1) -> Record:
    """The same identity as `record_of("r")`."""
    record = record_of("r", rows=rows)
    lost = {"status": "partial_error", "error": "the disk was full"}
    return Record(replace(record.meta, record_id="", **lost), record.arrays)


@pytest.mark.parametrize("again", [False, True], ids=["same writer", "later"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_incomplete_record_is_not_skipped_for(tmp_path: Path, layout, again: bool) -> None:
    given = [incomplete(2), incomplete(1), record_of("r"), changed("r")]
    writer = StoreWriter(tmp_path, layout=layout, on_collision="skip")
    for number, record in enumerate(given):
        result = writer.submit(record)
        writer.flush()
        statuses = ["partial_error", "partial_error", "ok", "skipped"]
        assert result.result(0).status == statuses[number]
        store = stores.open(tmp_path)
        if number < 2:  # it does not hide another one that is not whole either
            assert {each.generation for each in store} == set(range(1, number + 2))
        else:
            assert (store.record("r").status, store.record("r").generation) == ("ok", 3)
            assert_same(store.record("r"), record_of("r"))
        if again:
            writer.close()
            writer = StoreWriter(tmp_path, layout=layout, on_collision="skip")
    assert result.result(0).record_id == given[2].meta.record_id
    assert again or (writer.stats().skipped, writer.stats().partial) == (1, 2)
    writer.close()
    assert_whole(stores.open(tmp_path))


@pytest.mark.parametrize("policy, skipped", [("suffix", True), ("overwrite", False)])
def test_a_whole_record_is_skipped_for_unless_an_incomplete_one_hides_it(
    tmp_path: Path, policy: str, skipped: bool
) -> None:
    whole = record_of("r")
    with StoreWriter(tmp_path, on_collision=policy) as writer:
        writer.submit(whole)
        writer.submit(incomplete())
    with StoreWriter(tmp_path, on_collision="skip") as writer:
        future = writer.submit(changed("r"))
        writer.flush()
        assert future.result(0).status == ("skipped" if skipped else "ok")
        assert not skipped or future.result(0).record_id == whole.meta.record_id
    records = stores.open(tmp_path).filter(status="ok")
    assert_same(records.record("r"), whole if skipped else changed("r"))


def test_skipping_for_one_that_is_then_incomplete_is_an_error(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, on_collision="skip") as writer:
        stream = writer.begin(RecordMeta("r"))
        skipped = writer.submit(record_of("r"))
        stream.finish("partial_error", "the request was aborted")
        writer.flush()
        with pytest.raises(
            StoreError, match="one of the same name that then was incomplete: the r"
        ):
            skipped.result(0)
        future = writer.submit(changed("r"))
        writer.flush()
        assert future.result(0).status == "ok"
    assert_same(stores.open(tmp_path).record("r"), changed("r"))


def test_stages_skip_for_the_same_records(tmp_path: Path) -> None:
    """A stage does not know, before the store is opened again, what the others lost."""

    def write(record_id: str, error: str = "") -> list[Published | BaseException]:
        futures = []
        for stage, writer in enumerate(writers):
            lost = {"status": "partial_error", "error": error} if error and stage else {}
            meta = RecordMeta("r", record_id=record_id, stage=stage, num_stages=2, **lost)
            rows = Rows(rows_of(record_id, 2, 8), [0, 1])
            futures.append(writer.submit(Record(meta, {("post_block", stage): rows})))
            writer.flush()
        return [future.exception(0) or future.result(0) for future in futures]

    for run in range(3):
        with ExitStack() as ends:
            writers = [
                ends.enter_context(StoreWriter(tmp_path, writer_id=f"{n}", on_collision="skip"))
                for n in range(2)
            ]
            first, second = write(f"first of run {run}", "the disk was full" if not run else "")
            if run == 0:
                assert [first.status, second.status] == ["ok", "partial_error"]
                first, second = write("second")
                assert first.status == "skipped" and isinstance(second, StoreError)
            else:
                assert [first.status, second.status] == [["ok", "skipped"][run - 1]] * 2
    [record] = stores.open(tmp_path)
    assert (record.record_id, record.status) == ("first of run 1", "ok")
    assert_whole(stores.open(tmp_path))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_max_bytes_refuses_further_records_over_runs(tmp_path: Path, layout) -> None:
    one = sum(rows.tensor.nbytes + 4 * 3 for rows in record_of("x").arrays.values())
    for start, wanted in ((0, 3), (3, 0)):
        with StoreWriter(tmp_path, layout=layout, max_bytes=3 * one + 10) as writer:
            futures = [writer.submit(record_of(str(start + n))) for n in range(5)]
            writer.flush()
            kept = [future for future in futures if future.exception(0) is None]
            assert len(kept) == wanted
            refused = futures[-1].exception(0)
            assert isinstance(refused, StoreError)
            assert refused.reason == "limit"
            assert f"max_bytes={3 * one + 10}" in str(refused)
    store = stores.open(tmp_path)
    assert store.request_ids() == {"0", "1", "2"}
    assert store.nbytes == 3 * one
    assert_whole(store)


@pytest.mark.parametrize("layout", ["packed", "per_file"])
def test_records_that_were_overwritten_do_not_count_as_used(tmp_path: Path, layout) -> None:
    one = sum(rows.tensor.nbytes + 4 * 3 for rows in record_of("x").arrays.values())
    with StoreWriter(
        tmp_path, layout=layout, max_bytes=2 * one, on_collision="overwrite"
    ) as writer:
        for _ in range(5):
            assert writer.submit(record_of("x")).result(60).status == "ok"
        with pytest.raises(StoreError, match="max_bytes"):
            [writer.submit(record_of(name)).result(60) for name in ("y", "z")]
    assert stores.open(tmp_path).nbytes == 2 * one


def test_what_another_layout_overwrote_does_not_count_as_used(tmp_path: Path) -> None:
    """Of writers that share a ledger."""
    one = sum(rows.tensor.nbytes + 4 * 3 for rows in record_of("x").arrays.values())
    ledger = Ledger("overwrite", 2 * one, LAYOUTS)
    for _ in range(2):
        for layout in LAYOUTS:
            with StoreWriter(tmp_path, layout=layout, writer_id=layout, ledger=ledger) as writer:
                future = writer.submit(record_of("x"))
                writer.flush()
                assert future.result(0).status == "ok"
                assert_same(stores.open(tmp_path).record("x"), record_of("x"))
                written = sum(path.match("*post_block*") for path in payloads(tmp_path))
                assert written == (2 if layout == "per_file" else 0)
                assert len(stores.open(tmp_path)) == 1
        ledger = Ledger("overwrite", 3 * one, LAYOUTS)  # the shard stays
    assert_whole(stores.open(tmp_path))


def test_rows_whose_caller_was_interrupted_are_missing(tmp_path: Path, monkeypatch) -> None:
    """Ctrl-C, while it waits for a disk."""
    with StoreWriter(tmp_path) as writer:
        stream = writer.begin(RecordMeta("r"))
        stream.append("post_block", 0, [0], torch.ones(1, 4))

        def interrupted(nbytes: int) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(writer._intake, "_fits", lambda nbytes: False)
            patch.setattr(writer._intake, "_wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                stream.append("post_block", 0, [1], torch.ones(1, 4))
        stream.append("post_block", 0, [2], torch.ones(1, 4))
        result = stream.finish().result(60)
    assert (result.status, result.rows) == ("partial_error", 2)
    assert result.error == "rows of post_block.0 were given up while they waited for room"


def test_a_record_whose_caller_was_interrupted_may_be_submitted_again(
    tmp_path: Path, monkeypatch
) -> None:
    def interrupted(nbytes: int) -> None:
        raise KeyboardInterrupt

    with StoreWriter(tmp_path, max_bytes=200) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(writer._intake, "_fits", lambda nbytes: False)
            patch.setattr(writer._intake, "_wait", interrupted)
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    writer.submit(Record(RecordMeta("r"), rows()))
        assert writer.submit(Record(RecordMeta("r"), rows())).result(60).status == "ok"
        stats = writer.stats()
    assert (stats.submitted, stats.published, stats.failed) == (3, 1, 2)


def test_a_record_ends_also_beyond_a_limit_that_was_lowered(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        writer.submit(record_of("r"))
    with StoreWriter(tmp_path, max_bytes=1) as writer:
        stream = writer.begin(RecordMeta("s"))
        stream.append("post_block", 0, [0], torch.ones(1, 4))
        lost = stream.finish()
        given_up = writer.begin(RecordMeta("t"))
        given_up.abort()
        empty = writer.submit(record_of("u", rows=0))
        writer.flush()
        assert isinstance(refused := lost.exception(0), StoreError)
        assert refused.reason == "limit"
        assert isinstance(given_up.future.exception(0), StoreError)
        assert empty.result(0).status == "ok"


def test_a_stream_at_the_limit_keeps_what_fits_and_says_so(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, max_bytes=100, publish_interval=0.05) as writer:
        stream = writer.begin(RecordMeta("r"))
        for n in range(10):
            stream.append("post_block", 0, [n], torch.full((1, 4), float(n)))
        result = stream.finish()
        writer.flush()
        assert result.result(0).status == "partial_error"
        assert "rows of post_block.0 were not kept: limit" in result.result(0).error
        assert result.result(0).rows == 5
        # What the refused rows would have taken is free again.
        assert writer.submit(record_of("s", rows=0)).result(60).status == "ok"
    found = stores.open(tmp_path)[0]
    assert found.status == "partial_error"
    assert found.tensor("post_block", 0)[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_is_stored_in_order_over_blocks_and_shards(tmp_path: Path, layout) -> None:
    # A quarter of the queue is one block, and a shard takes few of these.
    options = {"queue_bytes": 64_000, "shard_bytes": 50_000, "threads": 2}
    with StoreWriter(tmp_path, layout=layout, **options) as writer:
        streams = [writer.begin(RecordMeta(f"s{n}")) for n in range(4)]
        wanted = {}
        for step in range(300):
            for number, stream in enumerate(streams):
                for layer in range(3):
                    rows = rows_of(f"{number} {layer} {step}", 1 + step % 2, 32)
                    positions = torch.arange(len(rows)) + 2 * step
                    stream.append("post_block", layer, positions, rows)
                    wanted.setdefault((number, layer), []).append((positions, rows))
        futures = [
            stream.finish(token_ids=[1, 2], metadata={"n": n}) for n, stream in enumerate(streams)
        ]
        writer.flush()
        assert {future.result(0).status for future in futures} == {"ok"}
        assert writer.stats().peak_queued_bytes <= 64_000
    store = stores.open(tmp_path)
    for (number, layer), parts in wanted.items():
        found = store.record(f"s{number}")
        assert torch.equal(found.tensor("post_block", layer), torch.cat([r for _, r in parts]))
        assert torch.equal(
            found.positions("post_block", layer), torch.cat([p for p, _ in parts]).int()
        )
        assert found.token_ids == (1, 2)
        assert found.metadata == {"n": number}
    if layout == "per_file":
        # A file, a tensor, however it was written.
        assert all(len(files_of(record)) == 3 for record in store)
    if layout == "sharded":
        assert len(payloads(tmp_path)) > 5
    assert_whole(store)


def files_of(record: stores.StoredRecord) -> list[Path]:
    return record.files


def test_a_packed_stream_with_very_many_blocks_goes_on_in_another_file(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, layout="packed", queue_bytes=8_000, threads=1) as writer:
        stream = writer.begin(RecordMeta("r"))
        for step in range(400):
            for layer in range(8):
                stream.append("post_block", layer, [step], torch.full((1, 64), float(step)))
        future = stream.finish()
        writer.flush()
        assert len([p for p in future.result(0).paths if p.suffix == ".safetensors"]) > 1
    found = stores.open(tmp_path)[0]
    for layer in range(8):
        assert found.tensor("post_block", layer)[:, 0].tolist() == list(range(400))
    assert_whole(stores.open(tmp_path))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_aborted_stream_leaves_nothing(tmp_path: Path, layout) -> None:
    with StoreWriter(tmp_path, layout=layout, publish_interval=0.01) as writer:
        stream = writer.begin(RecordMeta("r"))
        stream.append("post_block", 0, [0], rows_of("x", 1, 8))
        writer.flush()
        stream.append("post_block", 0, [1], rows_of("y", 1, 8))
        stream.abort()
        with pytest.raises(StoreError, match="aborted"):
            stream.future.result(60)
        with pytest.raises(StoreError, match="has ended"):
            stream.append("post_block", 0, [2], rows_of("y", 1, 8))
    store = stores.open(tmp_path)
    assert len(store.filter(status=("ok", "partial_error", "pending"))) == 0
    assert_whole(store)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_closing_publishes_what_is_unfinished_as_partial(tmp_path: Path, layout) -> None:
    writer = StoreWriter(tmp_path, layout=layout)
    stream = writer.begin(RecordMeta("r"))
    stream.append("post_block", 0, [0, 5], rows_of("x", 2, 8))
    writer.close()
    writer.close()
    assert stream.future.result(0).status == "partial_error"
    found = stores.open(tmp_path)[0]
    assert found.error == "the writer was closed before the record ended"
    assert found.positions("post_block", 0).tolist() == [0, 5]
    with pytest.raises(StoreError, match="the writer is closed"):
        writer.submit(record_of("s"))
    with pytest.raises(StoreError, match="the writer is closed"):
        writer.begin(RecordMeta("s"))
    with pytest.raises(StoreError, match="the writer is closed"):
        writer.flush()


def test_a_partial_record_says_what_is_missing(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, publish_interval=0.05) as writer:
        meta = RecordMeta("r", status="partial_error", error="the request was aborted")
        record = Record(meta, record_of("r").arrays)
        assert writer.submit(record).result(60).error == "the request was aborted"
        # Without any rows, too.
        empty = RecordMeta("e", status="partial_error", error="nothing arrived")
        writer.submit(Record(empty, {}))
    store = stores.open(tmp_path)
    assert store.record("r").status == "partial_error"
    assert store.record("e").error == "nothing arrived"
    assert store.record("e").keys == []
    assert not store.has("r")
    assert store.has("r", status="partial_error")


def test_records_are_published_by_themselves_after_the_interval(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, publish_interval=0.05) as writer:
        assert writer.submit(record_of("r")).result(30).status == "ok"
        assert len(stores.open(tmp_path)) == 1


def test_shards_have_about_the_size_that_was_asked(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, shard_bytes=1_000_000, queue_bytes=4_000_000, threads=1) as writer:
        for n in range(100):
            writer.submit(record_of(str(n), rows=40, hidden=512, layers=1))
    sizes = [path.stat().st_size for path in payloads(tmp_path)]
    assert len(sizes) == 4
    assert max(sizes) < 1_400_000


def test_records_of_a_block_share_one_tensor(tmp_path: Path) -> None:
    from safetensors import safe_open

    with StoreWriter(tmp_path, threads=1) as writer:
        for n in range(50):
            writer.submit(record_of(str(n)))
    (payload,) = payloads(tmp_path)
    with safe_open(payload, "pt") as file:
        assert sorted(file.keys()) == ["positions", "post_block.0", "post_block.1"]
        assert file.get_slice("post_block.1").get_shape() == [150, 16]
        # Those of a record are shared by its arrays.
        assert file.get_slice("positions").get_shape() == [150]


def test_pipeline_stages_write_parts_of_one_record(tmp_path: Path) -> None:
    for stage in (1, 0):
        with StoreWriter(tmp_path, layout=LAYOUTS[stage], writer_id=f"pp{stage}") as writer:
            meta = RecordMeta("r", record_id="one", stage=stage, num_stages=2, token_ids=[7])
            rows = Rows(rows_of(str(stage), 2, 8), [0, 1])
            writer.submit(Record(meta, {("post_block", stage): rows}))
        store = stores.open(tmp_path)
        if stage == 1:
            # The first half alone is not the record.
            assert len(store) == 0
            assert len(store.filter(status="pending")) == 1
    assert len(store) == 1
    assert store[0].hooks == {"post_block": [0, 1]}
    for stage in (0, 1):
        assert torch.equal(store[0].tensor("post_block", stage), rows_of(str(stage), 2, 8))
    assert store.verify().records == 1
    assert_whole(store)


def test_an_error_in_one_stage_is_an_error_of_the_record(tmp_path: Path) -> None:
    for stage, error in ((0, ""), (1, "rows were dropped")):
        with StoreWriter(tmp_path, writer_id=str(stage)) as writer:
            meta = RecordMeta(
                "r",
                record_id="one",
                stage=stage,
                num_stages=2,
                status="partial_error" if error else "ok",
                error=error,
            )
            writer.submit(Record(meta, {("post_block", stage): Rows(rows_of("x", 1, 8), [0])}))
    store = stores.open(tmp_path)
    assert (store[0].status, store[0].error) == ("partial_error", "rows were dropped")


def test_overwriting_one_stage_takes_effect_with_the_last(tmp_path: Path) -> None:
    def write(record_id: str, stage: int, rows: int) -> None:
        with StoreWriter(
            tmp_path, layout="packed", writer_id=str(stage), on_collision="overwrite"
        ) as writer:
            meta = RecordMeta("r", record_id=record_id, stage=stage, num_stages=2)
            given = Rows(rows_of("x", rows, 8), range(rows))
            writer.submit(Record(meta, {("post_block", stage): given}))

    write("old", 0, 1)
    write("old", 1, 1)
    write("new", 0, 2)
    assert [record.record_id for record in stores.open(tmp_path)] == ["old"]
    assert_whole(stores.open(tmp_path))
    write("new", 1, 2)
    assert [record.record_id for record in stores.open(tmp_path)] == ["new"]
    assert stores.open(tmp_path)[0].shape("post_block", 1) == (2, 8)


def test_many_threads_may_submit(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, threads=3, shard_bytes=20_000, queue_bytes=200_000) as writer:
        futures: list = []

        def submit(part: int) -> None:
            futures.extend(writer.submit(record_of(f"{part}-{n}")) for n in range(60))

        threads = [threading.Thread(target=submit, args=(part,)) for part in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.flush()
        assert {future.result(0).status for future in futures} == {"ok"}
        assert writer.stats().queued_bytes == 0
    store = stores.open(tmp_path)
    assert len(store) == 360
    for record in store:
        assert_same(record, record_of(record.request_id))


def test_a_record_larger_than_the_queue_is_written_alone(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, queue_bytes=1000) as writer:
        futures = [writer.submit(record_of(str(n), rows=100)) for n in range(4)]
        writer.flush()
        assert {future.result(0).status for future in futures} == {"ok"}


def test_stats_count_what_was_done(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        writer.submit(record_of("a"))
        writer.submit(record_of("a"))
        writer.flush()
        stats = writer.stats()
    assert (stats.submitted, stats.published, stats.failed) == (2, 1, 1)
    assert stats.rows == 6
    assert stats.bytes == stores.open(tmp_path).nbytes
    assert stats.queued_bytes == 0


def rows(**changes) -> dict:
    given = {"tensor": rows_of("x", 3, 8), "positions": [0, 1, 2], **changes}
    return {("post_block", 0): Rows(**given)}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({("nowhere", 0): Rows(rows_of("x", 1, 8), [0])}, "unknown hook point 'nowhere'"),
        ({("post_block", -1): Rows(rows_of("x", 1, 8), [0])}, "layer=-1 is not a layer"),
        ({("post_block", None): Rows(rows_of("x", 1, 8), [0])}, "layer=None is not a layer"),
        ({("post_block", True): Rows(rows_of("x", 1, 8), [0])}, "layer=True is not a layer"),
        ({("lm_head_in", 3): Rows(rows_of("x", 1, 8), [0])}, "has no layer: give None"),
        (
            {
                ("post_block", 0): Rows(rows_of("x", 1, 8), [0]),
                ("block_output", 0): Rows(rows_of("x", 1, 8), [0]),
            },
            "post_block.0 is given twice",
        ),
        (rows(tensor=rows_of("x", 3, 8)[0]), r"give a tensor \[rows, hidden\]"),
        (rows(tensor=np.zeros((3, 8))), r"give a tensor \[rows, hidden\]"),
        (rows(tensor=torch.zeros(3, 8, device="meta")), "on meta was given"),
        (rows(tensor=torch.zeros(3, 8).to_sparse()), "sparse"),
        (rows(tensor=torch.zeros(3, 8, dtype=torch.complex64)), "complex64 cannot be stored"),
        (rows(tensor=torch.zeros(3, 0)), r"give a tensor \[rows, hidden\]"),
        (rows(positions=[0, 1]), "2 positions were given for 3 rows"),
        (rows(positions=[0, 1, 1]), "positions must ascend"),
        (rows(positions=[2, 1, 0]), "positions must ascend"),
        (rows(positions=[-1, 1, 2]), "positions must ascend, from 0"),
        (rows(positions=[0, 1, 2**31]), "at most 2147483647"),
        (rows(positions=[0.0, 1.0, 2.0]), "give a list of integers"),
        (rows(positions=[[0], [1], [2]]), "give a list of integers"),
        (
            rows(positions=torch.tensor([0, 1, 2]).bfloat16()),
            "post_block.0: positions=tensor.*BFlo",
        ),
        (rows(positions=torch.arange(3, device="meta")), "post_block.0: positions=.*meta"),
        (rows(positions=[[0], [1, 2], 3]), "inhomogeneous.*give a list of integers"),
        ({("post_block", 0): rows_of("x", 1, 8)}, "post_block.0: Tensor was given; give Rows"),
        (
            {"post_block": {0: Rows(rows_of("x", 1, 8), [0])}},
            "arrays has the key 'post_block'; give",
        ),
        (None, r"arrays=None is NoneType; give Rows by \(hook, layer\), StackedRows"),
        (Rows(rows_of("x", 1, 8), [0]), "is Rows; give Rows by"),
        ([Rows(rows_of("x", 1, 8), [0])], "Rows was given as a stack; give StackedRows"),
    ],
)
def test_malformed_rows_are_refused_by_name(tmp_path: Path, arrays, message: str) -> None:
    with StoreWriter(tmp_path) as writer, pytest.raises(ValueError, match=message):
        writer.submit(Record(RecordMeta("r"), arrays))
    assert len(stores.open(tmp_path)) == 0


def test_what_is_no_record_is_refused_by_name(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match=r"record=\{'a': 1\} is dict; give a Record"):
            writer.submit({"a": 1})
        with pytest.raises(ValueError, match=r"meta=\{'a': 1\} is dict; give a RecordMeta"):
            writer.submit(Record({"a": 1}, {}))
        with pytest.raises(ValueError, match="meta='r' is str; give a RecordMeta"):
            writer.begin("r")
    assert len(stores.open(tmp_path)) == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": 3}, "request_id=3"),
        ({"tag": "a\0b"}, "tag='a"),
        ({"tag": None}, "tag=None"),
        ({"sample_index": -1}, "sample_index=-1"),
        ({"prompt_len": 1.5}, "prompt_len=1.5"),
        ({"token_ids": ["a"]}, r"token_ids=\['a'\] is not allowed; give a list of integers"),
        ({"token_ids": [1.5]}, r"token_ids=\[1.5\] is not allowed"),
        ({"token_ids": 7}, "token_ids=7 is not allowed"),
        ({"stage": 2, "num_stages": 2}, "stage=2 of num_stages=2"),
        ({"num_stages": 0}, "stage=0 of num_stages=0"),
        ({"status": "fine"}, "status='fine' is not known"),
        ({"status": "partial_error"}, "says in error what is missing"),
        ({"error": "oh"}, "does not go with status='ok'"),
        ({"metadata": {"x": object()}}, "metadata must be plain JSON"),
        ({"metadata": {"x": float("nan")}}, "metadata must be plain JSON"),
        ({"metadata": {1: "x"}}, "metadata has keys that are no strings"),
    ],
)
def test_malformed_descriptions_are_refused_by_field(fields, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecordMeta(**{"request_id": "r", **fields})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "zip"}, "layout='zip' is not known; choose one of per_file, packed, sharded"),
        ({"durability": "never"}, "durability='never'"),
        ({"on_collision": "?"}, "on_collision='\\?'"),
        ({"overflow": "wait"}, "overflow='wait'"),
        ({"threads": 0}, "threads=0"),
        ({"threads": True}, "threads=True"),
        ({"max_bytes": 0}, "max_bytes=0"),
        ({"shard_bytes": 1.5}, "shard_bytes=1.5"),
        ({"publish_interval": 0}, "publish_interval=0"),
        ({"publish_interval": float("nan")}, "publish_interval=nan"),
        ({"publish_interval": "1"}, "publish_interval='1'"),
        ({"spill_folder": 3}, "spill_folder=3"),
        ({"writer_id": ""}, "writer_id=''"),
        ({"writer_id": "a\nb"}, "writer_id='a"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StoreWriter(tmp_path, **options)


def test_an_unknown_option_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"no \['writer'\]; it takes writer_id, ledger, layout, dura"
    ):
        StoreWriter(tmp_path, writer="a")


@pytest.mark.parametrize(
    "options",
    [{"threads": 0}, {"durability": "never"}, {"shard_bytes": 0}, {"publish_interval": -1}],
)
def test_a_consumer_refuses_them_before_a_model_is_loaded(tmp_path: Path, options) -> None:
    [name] = options
    with pytest.raises(ValueError, match=f"{name}="):
        FilesystemConsumer(tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_a_stream_refuses_rows_that_do_not_go_with_those_before(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, publish_interval=0.05) as writer:
        stream = writer.begin(RecordMeta("r"))
        stream.append("post_block", 0, [3], rows_of("x", 1, 8))
        with pytest.raises(ValueError, match="positions must ascend, from 4"):
            stream.append("block_output", 0, [3], rows_of("x", 1, 8))
        with pytest.raises(ValueError, match="one dtype and one width"):
            stream.append("post_block", 0, [4], rows_of("x", 1, 9))
        with pytest.raises(ValueError, match="one dtype and one width"):
            stream.append("post_block", 0, [4], rows_of("x", 1, 8, torch.float32))
        with pytest.raises(ValueError, match="says in error what is missing"):
            stream.finish("partial_error")
        # None of these spoiled it.
        stream.append("post_block", 0, [4], rows_of("x", 1, 8))
        assert stream.finish().result(60).status == "ok"


def test_a_record_id_is_used_once(tmp_path: Path) -> None:
    for _ in range(2):
        with StoreWriter(tmp_path, on_collision="suffix") as writer:
            if not len(stores.open(tmp_path)):
                writer.submit(Record(RecordMeta("r", record_id="id"), {}))
            with pytest.raises(ValueError, match="record_id='id' \\(stage 0\\) was used before"):
                writer.submit(Record(RecordMeta("s", record_id="id"), {}))


@pytest.mark.parametrize("aborts", [False, True])
def test_the_id_of_a_record_that_never_ended_is_not_used_again(tmp_path: Path, aborts) -> None:
    """Readers would take its first part for that of the other record."""
    meta = RecordMeta("r", record_id="id")
    script = f"""if True:
        import os, torch
        from tllm.stores import RecordMeta, StoreWriter
        writer = StoreWriter({str(tmp_path)!r})
        stream = writer.begin(RecordMeta("r", record_id="id"))
        stream.append("post_block", 0, [0, 1], torch.ones(2, 4))
        writer.flush()
        if {aborts}:
            stream.abort()
            writer.close()
        os._exit(0)
    """
    subprocess.run([sys.executable, "-c", script], check=True)
    with StoreWriter(tmp_path) as writer:
        if aborts and not list(tmp_path.rglob("*.jsonl")):
            writer.submit(Record(meta, {}))
            return
        with pytest.raises(ValueError, match="record_id='id' \\(stage 0\\) was used before"):
            writer.submit(Record(meta, {}))


def test_what_comes_while_a_writer_is_closed_is_stored_or_refused(tmp_path: Path) -> None:
    def submit(name: str) -> None:
        for count in range(10_000):
            try:
                futures.append(writer.submit(record_of(f"{name}-{count}", rows=20)))
            except StoreError as refused:
                assert refused.reason == "closed"
                return
            if count == 5:
                closing.set()

    for number in range(5):
        writer = StoreWriter(tmp_path / str(number), threads=1, queue_bytes=4096)
        futures: list[Future[Published]] = []
        closing = threading.Event()
        threads = [threading.Thread(target=submit, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        assert closing.wait(60)
        writer.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        errors = [future.exception(60) for future in futures]
        assert {error.reason for error in errors if isinstance(error, StoreError)} <= {"closed"}
        assert len(stores.open(tmp_path / str(number))) == errors.count(None) > 5
        stats = writer.stats()
        assert stats.submitted == stats.published + stats.failed


@pytest.mark.parametrize("what", ["flush", "submit", "begin"])
def test_who_asks_just_before_a_writer_is_closed_hears_it(
    tmp_path: Path, monkeypatch, what
) -> None:
    writer = StoreWriter(tmp_path, threads=1)
    is_open = writer._require_open

    def closed_just_after() -> None:
        is_open()
        monkeypatch.setattr(writer, "_require_open", is_open)
        writer.close()

    monkeypatch.setattr(writer, "_require_open", closed_just_after)
    with pytest.raises(StoreError, match="the writer is closed; open another one"):
        if what == "flush":
            writer.flush(60)
        elif what == "submit":
            writer.submit(record_of("r")).result(60)
        else:
            stream = writer.begin(RecordMeta("r"))
            stream.append("post_block", 0, [0], torch.ones(1, 4))
            stream.finish().result(60)


def test_stale_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    StoreWriter(tmp_path).close()
    folder = tmp_path / "writers" / "main"
    (folder / "sharded").mkdir()
    (folder / "sharded" / "shard-00000007.safetensors").write_bytes(b"x")
    (folder / "staging" / "3").mkdir()
    (folder / "staging" / "3" / "x.safetensors").write_bytes(b"x")
    with StoreWriter(tmp_path, publish_interval=0.05) as writer:
        assert payloads(tmp_path) == []
        assert writer.submit(record_of("r")).result(60).status == "ok"


def test_a_payload_without_sidecar_does_not_stand_in_the_way(tmp_path: Path) -> None:
    for layout in ("packed", "per_file"):
        root = tmp_path / layout
        with StoreWriter(root, layout=layout) as writer:
            sidecar = writer.submit(record_of("r")).result(60).paths[-1]
        sidecar.unlink()
        assert stores.open(root).verify().unpublished
        with StoreWriter(root, layout=layout) as writer:
            writer.submit(record_of("r", rows=1, layers=1))
        assert_same(stores.open(root)[0], record_of("r", rows=1, layers=1))
        assert not stores.open(root).verify().unpublished


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("queue_bytes", [20_000, 1 << 20], ids=["many blocks", "one block"])
def test_stacked_rows_are_stored_as_each_array_by_itself(
    tmp_path: Path, layout, queue_bytes: int
) -> None:
    dtypes = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    records = [
        record_of(f"{n}", rows=rows, layers=layers, dtype=dtypes[n % 3], hidden=8 * (1 + n % 2))
        for n, (rows, layers) in enumerate([(1, 5), (0, 2), (3, 1), (40, 5), (1, 1), (2, 28)] * 9)
    ]
    spill = tmp_path / "spill"
    spill.mkdir()
    root = tmp_path / "root"
    with StoreWriter(
        root, layout=layout, queue_bytes=queue_bytes, overflow="spill", spill_folder=spill
    ) as writer:
        futures = []
        for n, record in enumerate(records):
            if n % 4 == 3:
                stream = writer.begin(record.meta)
                for piece in in_pieces(record):
                    stream.append_stack(piece)
                futures.append(stream.finish())
            else:
                given = (record, stacked(record), Record(record.meta, in_pieces(record)))[n % 4]
                futures.append(writer.submit(given))
    assert {future.result(0).status for future in futures} == {"ok"}
    store = stores.open(root)
    for record, future in zip(records, futures, strict=True):
        assert_same(store.record(record.meta.request_id), record)
        given = record.arrays.values()
        assert future.result(0).rows == sum(len(rows.tensor) for rows in given)
        assert future.result(0).bytes == sum(
            rows.tensor.nbytes + 4 * len(rows.tensor) for rows in given
        )
    assert_whole(store)


@pytest.mark.parametrize(
    ("places", "shape", "message"),
    [
        ((), (1, 1, 4), "places=.. is empty"),
        ((("post_block", 1), ("block_output", 1)), (1, 2, 4), "post_block.1 is given twice"),
        ((("post_block", 1),), (1, 2, 4), "for 1 places"),
        ((("post_block", 1),), (2, 4), "give a tensor .rows, places, hidden."),
        ((("post_block", 1),), (2, 1, 4), "1 positions were given for 2 rows"),
        ((("middle", 1),), (1, 1, 4), "unknown hook point 'middle'"),
        ([("middle", 1)], (1, 1, 4), "unknown hook point 'middle'"),
        ([], (1, 1, 4), "places=.. is empty"),
        (None, (1, 1, 4), "places=None is not allowed; give the hook point and layer of each"),
        ((12,), (1, 1, 4), r"places=\(12,\) is not allowed"),
        ((("post_block",),), (1, 1, 4), r"places=\(\('post_block',\),\) is not allowed"),
    ],
)
def test_stacked_rows_that_are_not_fit_are_refused(
    tmp_path: Path, places, shape, message: str
) -> None:
    with StoreWriter(tmp_path) as writer, pytest.raises(ValueError, match=message):
        writer.submit(Record(RecordMeta("r"), StackedRows(places, torch.zeros(shape), [0])))


def test_the_places_of_a_stack_may_be_a_list(tmp_path: Path) -> None:
    given = StackedRows([("post_block", 1), ("mlp_out", 1)], torch.ones(1, 2, 4), [0])
    with StoreWriter(tmp_path) as writer:
        assert writer.submit(Record(RecordMeta("r"), given)).result(60).status == "ok"
        stream = writer.begin(RecordMeta("s"))
        with pytest.raises(ValueError, match="NoneType was given as a stack"):
            stream.append_stack(None)
        stream.append_stack(given)
        assert stream.finish().result(60).rows == 2


def test_pieces_of_a_stack_must_follow_each_other(tmp_path: Path) -> None:
    def piece(*positions, places=(("post_block", 1), ("mlp_out", 1)), hidden=4):
        return StackedRows(places, torch.zeros(len(positions), len(places), hidden), positions)

    wrong = {
        "ascend, from 3": piece(2, 4),
        "F32 rows of 8 of post_block.1, mlp_out.1": piece(5, hidden=8),
    }
    with StoreWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match="no pieces were given"):
            writer.submit(Record(RecordMeta("none"), []))
        other = piece(5, places=(("post_block", 1),))
        with pytest.raises(ValueError, match="the same places, dtype and width"):
            writer.submit(Record(RecordMeta("other"), [piece(1, 2), other]))
        stream = writer.begin(RecordMeta("streamed"))
        stream.append_stack(piece(1, 2))
        for message, given in wrong.items():
            with pytest.raises(ValueError, match=message):
                writer.submit(Record(RecordMeta(message), [piece(1, 2), given]))
            with pytest.raises(ValueError, match=message):
                stream.append_stack(given)
        with pytest.raises(ValueError, match="append_stack before"):
            stream.append("post_block", 1, [3], torch.zeros(1, 4))
        stream.append_stack(piece(4))
        stream.finish(prompt_len=3)
    record = stores.open(tmp_path).record("streamed")
    assert record.prompt_len == 3
    assert record.positions("post_block", 1).tolist() == [1, 2, 4]
    assert record.positions("mlp_out", 1).tolist() == [1, 2, 4]
    assert_whole(stores.open(tmp_path))

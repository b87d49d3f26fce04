"""Roots that are not what one would expect, and what others left in them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.stores.samples import LAYOUTS, assert_same, assert_whole, record_of
from tllm import stores
from tllm.cli.capture import Job
from tllm.consumers.capture.filesystem import FilesystemConsumer
from tllm.stores import StoreError, StoreWriter

NOT_UTF8 = os.fsdecode(b"odd \xff\xfe")


def write(root: str | Path, layout: stores.Layout = "packed", name: str = "r") -> None:
    with StoreWriter(root, layout=layout, publish_interval=0.05) as writer:
        assert writer.submit(record_of(name)).result(60).status == "ok"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["relative/x", NOT_UTF8, "ünï", "a b\n'", "link", "x" * 250])
def test_odd_roots_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: stores.Layout, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "link":
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
    write(name, layout)
    monkeypatch.chdir("/")
    store = stores.open(tmp_path / name)
    assert_same(store.record("r"), record_of("r"))
    assert_whole(store)
    store.index()
    for _ in store.refresh(), stores.open(tmp_path / name):
        assert_same(store.record("r"), record_of("r"))
    for format in ("parquet", "npz", "safetensors"):
        assert len(stores.export(store, tmp_path / name / "out" / format, format)) == 2


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    write("~/acts")
    assert_same(stores.open(Path("~/acts")).record("r"), record_of("r"))
    assert_same(stores.open(tmp_path / "home/acts").record("r"), record_of("r"))
    assert FilesystemConsumer("~/acts")._root == str(tmp_path / "home/acts")
    job = Job("model", Path(__file__), Path("~/acts"), {"hooks": "embed"})
    assert job.out == tmp_path / "home/acts"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize("root", [2024, None, ["acts"]])
def test_what_is_no_path_is_refused_by_name(root: object) -> None:
    for use in StoreWriter, stores.open, FilesystemConsumer:
        with pytest.raises(ValueError, match=r"root=.* is \w+; give a folder as text or a path"):
            use(root)


@pytest.mark.parametrize("root", ["", "a\0b", "x/" * 1700, "a" * 300 + "/b"])
def test_names_of_no_folder_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match=r"root.*give a|File name too long"):
        StoreWriter(root)
    with pytest.raises((ValueError, StoreError), match=r"root.*give a|File name too long"):
        stores.open(root)
    if len(root) != 302:
        with pytest.raises(ValueError, match=r"root"):
            FilesystemConsumer(root)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["dangling", "loop", "file", "file/below"])
def test_what_is_no_folder_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match="cannot be a store"):
        StoreWriter(tmp_path / name)
    with pytest.raises(StoreError, match=r"is no store|cannot be read"):
        stores.open(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "content", [None, b"", b"x", b"\xff\xfe", b"[" * 100_000, b"1" * 10_000, b"null", b"[]"]
)
@pytest.mark.parametrize("place", ["tllm-store.json", "index.parquet", "sidecar", "payload"])
def test_whatever_stands_in_place_of_a_file_is_an_error_that_names_it(
    tmp_path: Path, place: str, content: bytes | None
) -> None:
    """None stands for a folder."""
    write(tmp_path)
    stores.open(tmp_path).index()
    folder = tmp_path / "writers/main/packed/@untagged"
    path = {"sidecar": folder / "r@0.json", "payload": folder / "r@0.safetensors"}.get(
        place, tmp_path / place
    )
    path.unlink()
    path.mkdir() if content is None else path.write_bytes(content)
    if place == "tllm-store.json":
        with pytest.raises(StoreError, match=r"tllm-store\.json"):
            stores.open(tmp_path)
        return
    store = stores.open(tmp_path)
    assert not store.verify().ok
    if place == "index.parquet":
        assert_same(store.record("r"), record_of("r"))
        return
    with pytest.raises(StoreError, match=path.name):
        store.record("r").tensor("post_block", 0)


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path)
    folder = tmp_path / "writers/main/packed"
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "f").write_text("mine")
    for name in (b"odd\xff.json", b"notes.json"):
        Path(os.fsdecode(os.fsencode(folder / "@untagged") + b"/" + name)).write_text("mine")
    (tmp_path / "README").write_text("mine")
    (tmp_path / "writers/.DS_Store").write_text("mine")
    shutil.rmtree(tmp_path / "writers/main/staging")
    (tmp_path / "writers/main/staging").symlink_to(victim)
    write(tmp_path, name="next")
    store = stores.open(tmp_path)
    assert store.request_ids() == {"r", "next"}
    assert len(store.damages) == 2
    assert not store.verify().ok
    store.index()
    assert (victim / "f").read_text() == "mine"


def test_a_folder_that_a_writer_cannot_use_is_said_with_the_root(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "writers/main/sharded").write_text("mine")
    with pytest.raises(ValueError, match=rf"{tmp_path}.*writers/main/sharded"):
        StoreWriter(tmp_path)
    (tmp_path / "writers/main/sharded").unlink()
    # It holds nothing that keeps the next one out.
    write(tmp_path, name="next")


def test_a_request_whose_error_names_an_odd_file_can_be_read(tmp_path: Path) -> None:
    meta = stores.RecordMeta("r", status="partial_error", error=f"lost: {NOT_UTF8}")
    with StoreWriter(tmp_path) as writer:
        writer.submit(stores.Record(meta, {}))
    assert stores.open(tmp_path).record("r").error == "lost: odd \\udcff\\udcfe"
    (tmp_path / "log").write_text(str(StoreError(f"lost: {NOT_UTF8}", "io")), "utf-8")


def test_a_root_that_another_writer_has_is_refused_with_whose_it_is(tmp_path: Path) -> None:
    with StoreWriter(tmp_path), pytest.raises(ValueError, match="is in use") as refused:
        StoreWriter(tmp_path)
    assert f"by process {os.getpid()} on {os.uname().nodename}" in str(refused.value)
    assert "left of a run that was killed, end it" in str(refused.value)

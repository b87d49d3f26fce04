"""`tllm store`, run as a user would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from child_process import TLLM
from typer.testing import CliRunner

from tests.stores.samples import payloads, record_of
from tllm.cli import app
from tllm.stores import RecordMeta, StoreWriter


def tllm(*arguments: str | Path, columns: str | None = "200") -> tuple[int, str]:
    """Exit status, and what was printed; to a file where there are no columns."""
    result = CliRunner(env={"COLUMNS": columns}).invoke(app, ["store", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with StoreWriter(tmp_path / "store") as writer:
        for number in range(5):
            writer.submit(record_of(f"r[{number}]", tag="probe" if number else "", layers=3))
        writer.begin(RecordMeta("cut"))
    return tmp_path / "store"


def test_ls_lists_records_and_says_how_many(root: Path) -> None:
    status, text = tllm("ls", root)
    assert status == 0
    assert "probe/r[3]#0" in text
    assert "post_block 0-2" in text
    assert "partial_error" in text
    assert "6 records; 45 rows, 1.6 kB" in text
    assert "pending" not in text


def test_no_columns_are_no_width(root: Path) -> None:
    """As in the environment of a program that has no terminal: nothing was printed at all."""
    assert tllm("ls", root, columns="0") == tllm("ls", root, columns=None)


def test_ls_tells_of_records_whose_end_is_not_there(root: Path) -> None:
    with StoreWriter(root, writer_id="first") as writer:
        half = record_of("half")
        writer.submit(replace(half, meta=replace(half.meta, num_stages=2)))
    status, text = tllm("ls", root)
    assert status == 0
    assert "6 records" in text
    assert "1 more are pending" in text
    assert "half" not in text
    assert "half" in tllm("ls", root, "--status", "pending")[1]


def test_the_installed_command_has_it(root: Path, run: Callable[..., Any]) -> None:
    status, text = run(TLLM, "store", "verify", root)
    assert (status, "Nothing is wrong." in text) == (0, True), text


def test_names_are_told_whole_in_a_file_and_on_a_narrow_terminal(tmp_path: Path) -> None:
    """An ellipsis at their end would leave nothing to give to `show`."""
    name = "chatcmpl-8b6fd1e7a9c2430d"
    with StoreWriter(tmp_path / "store") as writer:
        writer.submit(record_of(name, layers=3))
    assert f" {name}#0 " in tllm("ls", tmp_path / "store", columns=None)[1]
    _, narrow = tllm("ls", tmp_path / "store", columns="60")
    rows = [line.split("│") for line in narrow.splitlines()]
    assert "".join(row[1].strip() for row in rows if len(row) > 1) == f"{name}#0"


def test_ls_filters(root: Path) -> None:
    status, text = tllm("ls", root, "--tag", "probe", "--layer", "1", "--limit", "2")
    assert status == 0
    assert "4 records, 2 shown; 12 rows" in text
    assert "cut" not in text
    assert "0 records" in tllm("ls", root, "--hook", "mlp_out")[1]
    assert "1 records" in tllm("ls", root, "--status", "partial_error")[1]
    status, text = tllm("ls", root, "--hook", "nowhere")
    assert status == 2
    assert "unknown hook point 'nowhere'" in text


def test_show_tells_all_about_a_record(root: Path) -> None:
    for name in ("r[3]", "probe/r[3]#0"):
        status, text = tllm("show", root, name)
        assert status == 0
        for fact in ("a/model", "post_block.2", "bfloat16", "[3, 16]", "0, 2, 4", "torch 2."):
            assert fact in text
        assert "writers/main/sharded/shard-0000000" in text
    status, text = tllm("show", root, "nobody")
    assert status == 2
    assert "no record has the request id 'nobody'" in text
    with StoreWriter(root, writer_id="other") as writer:
        writer.submit(record_of("r[3]", tag="second", layers=1))
    status, text = tllm("show", root, "r[3]")
    assert status == 2
    assert "give one of their names (probe/r[3]#0, second/r[3]#0), or --tag and --sample" in text
    assert tllm("show", root, "r[3]", "--tag", "second")[0] == 0


def test_verify_fails_when_something_is_wrong(root: Path) -> None:
    status, text = tllm("verify", root)
    assert status == 0
    assert "Nothing is wrong." in text
    path = payloads(root)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    status, text = tllm("verify", root)
    assert status == 1
    assert path.name in text
    assert "checksum" in text
    assert tllm("verify", root, "--no-checksums")[0] == 0


def test_export_writes_a_file_an_array(root: Path, tmp_path: Path) -> None:
    status, text = tllm("export", root, tmp_path / "out", "--tag", "probe", "--layer", "2")
    assert status == 0
    assert "post_block.2.parquet" in text
    table = pq.read_table(tmp_path / "out" / "post_block.2.parquet")
    assert len(table) == 12
    status, text = tllm("export", root, tmp_path / "out", "--tag", "probe", "--layer", "2")
    assert status == 2
    assert "is there already" in text


def test_an_export_of_nothing_says_what_was_asked_and_what_there_is(root: Path, tmp_path: Path):
    """It said that "these 0 records" had no arrays, of a store with plenty."""
    for given, says in (
        (["--tag", "prob"], "by --tag prob; the store has tag none, probe; arrays post_block 0-2"),
        (["--hook", "mlp_in"], "by --hook mlp_in; the store has arrays post_block 0-2"),
        (["--layer", "7", "--reduction", "mean"], "reduction none; arrays post_block 0-2"),
    ):
        status, text = tllm("export", root, tmp_path / "out", *given)
        assert status == 2
        assert says in text
        assert not (tmp_path / "out").exists()


def test_index_is_written(root: Path) -> None:
    status, text = tllm("index", root)
    assert status == 0
    assert "16 rows in" in text
    assert (root / "index.parquet").exists()


def test_what_is_no_store_is_an_error_in_one_line(tmp_path: Path) -> None:
    for command in ("ls", "verify", "index"):
        status, text = tllm(command, tmp_path)
        assert status == 2
        assert "is no store" in text
        assert "Traceback" not in text


def test_damaged_sidecars_are_reported(root: Path) -> None:
    (root / "writers/main/sharded/shard-00000099.jsonl").write_text("{}\n")
    status, text = tllm("ls", root)
    assert status == 1
    assert "damaged:" in text
    assert "shard-00000099.jsonl" in text

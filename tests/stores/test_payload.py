"""Payloads are safetensors, byte for byte."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save

from tests.stores.samples import DTYPES, bits, rows_of
from tllm.stores.format import as_bytes, dtype_name
from tllm.stores.payload import PayloadFile, decode_header, write_all


def add(file: PayloadFile, name: str, tensor: torch.Tensor) -> None:
    width = tensor.shape[1] if tensor.dim() == 2 else None
    file.add([name], dtype_name(tensor.dtype), width, len(tensor), [as_bytes(tensor)])


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a.0", "a.1", "b"]),
            st.sampled_from(DTYPES),
            st.integers(0, 5),
            st.integers(1, 5),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_safetensors_reads_any_sequence_of_rows(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[tuple[str, torch.dtype, int, int, bool]],
) -> None:
    path = tmp_path_factory.mktemp("payload") / "x.safetensors"
    file = PayloadFile(path, header_bytes=64 << 10)
    wanted = []
    for number, (name, dtype, rows, hidden, write) in enumerate(pieces):
        tensor = rows_of(str(number), rows, hidden, dtype)
        place = file.add([name], dtype_name(dtype), hidden, rows, [as_bytes(tensor)])
        wanted.append((place.tensors[0], place.row_starts[0], tensor))
        if write:
            file.write()
    size = file.finish({"format": "pt"})
    assert size == path.stat().st_size
    loaded = load_file(path)
    for name, row_start, tensor in wanted:
        found = loaded[name][row_start : row_start + len(tensor)]
        assert found.dtype == tensor.dtype
        assert torch.equal(bits(found), bits(tensor))
    entries, data_start = decode_header(memoryview(path.read_bytes()))
    for entry in entries.values():
        if not entry.name.startswith("padding"):
            element = loaded[entry.name].element_size()
            assert (data_start + entry.begin) % element == 0


def test_a_file_in_one_go_is_what_safetensors_itself_writes(tmp_path: Path) -> None:
    tensor = rows_of("x", 4, 8)
    file = PayloadFile(tmp_path / "x", header_bytes=4096, sync=True)
    add(file, "rows", tensor)
    file.finish({"format": "pt"})
    assert (tmp_path / "x").read_bytes() == save({"rows": tensor}, {"format": "pt"})


def test_rows_of_one_name_become_one_tensor_over_many_writes(tmp_path: Path) -> None:
    parts = [rows_of(str(i), 2, 8) for i in range(5)]
    file = PayloadFile(tmp_path / "x", header_bytes=4096)
    for part in parts:
        add(file, "rows", part)
        file.write()
    file.finish({})
    with safe_open(tmp_path / "x", "pt") as opened:
        assert list(opened.keys()) == ["rows"]
        assert torch.equal(opened.get_tensor("rows"), torch.cat(parts))


def test_rolling_back_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = PayloadFile(tmp_path / "x", header_bytes=4096)
    add(file, "rows", rows_of("kept", 3, 8))
    file.write()
    mark = file.mark()
    add(file, "rows", rows_of("lost", 3, 8))
    add(file, "other", rows_of("lost too", 1, 3))
    file.write()
    file.rollback(mark)
    add(file, "rows", rows_of("after", 1, 8))
    file.finish({})
    loaded = load_file(tmp_path / "x")
    assert list(loaded) == ["rows"]
    assert torch.equal(loaded["rows"], torch.cat([rows_of("kept", 3, 8), rows_of("after", 1, 8)]))


def test_a_first_block_with_many_tensors_gets_room_in_the_header(tmp_path: Path) -> None:
    file = PayloadFile(tmp_path / "x", header_bytes=64)
    for layer in range(300):
        add(file, f"post_block.{layer}", rows_of(str(layer), 1, 2))
    file.write()
    file.finish({})
    assert len(load_file(tmp_path / "x")) == 300


def test_more_buffers_than_one_system_call_takes(tmp_path: Path) -> None:
    buffers = [memoryview(bytes([i % 251]) * (i % 7)) for i in range(5000)]
    with (tmp_path / "x").open("wb") as file:
        write_all(file.fileno(), buffers)
    assert (tmp_path / "x").read_bytes() == b"".join(buffers)


def test_a_pipe_that_takes_little_at_a_time_gets_every_byte() -> None:
    read, write = os.pipe()
    data = os.urandom(1 << 20)
    pid = os.fork()
    if pid == 0:
        os.close(read)
        write_all(write, [memoryview(data[i : i + 10_007]) for i in range(0, len(data), 10_007)])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        assert file.read() == data
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:9] + b"?" + data[10:],
        lambda data: data[:5],
        lambda data: data.replace(b"[3,8]", b"[4,8]"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, damage) -> None:
    data = save({"rows": rows_of("x", 3, 8)})
    decode_header(memoryview(data))
    with pytest.raises(ValueError):
        decode_header(memoryview(damage(data)))

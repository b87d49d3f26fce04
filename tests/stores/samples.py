"""Records to write, and what must come back."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from tllm.stores import (
    ArrayKey,
    Record,
    RecordMeta,
    Rows,
    StackedRows,
    Store,
    StoredRecord,
)

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)

LAYOUTS = ("per_file", "packed", "sharded")


def rows_of(seed: str, rows: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`[rows, hidden]` that depend on `seed` alone."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "little")
    values = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(number)) * 4
    if dtype is torch.uint8:
        values = values.abs()
    return values > 0 if dtype is torch.bool else values.to(dtype)


def record_of(
    request_id: str,
    *,
    tag: str = "",
    rows: int = 3,
    hidden: int = 16,
    layers: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    sample_index: int = 0,
) -> Record:
    """A record that can be told from any other."""
    positions = torch.arange(rows, dtype=torch.int32) * 2
    meta = RecordMeta(
        request_id,
        tag=tag,
        sample_index=sample_index,
        prompt_len=rows,
        token_ids=range(rows),
        model="a/model",
    )
    arrays = {
        ("post_block", layer): Rows(
            rows_of(f"{tag}|{request_id}|{sample_index}|{layer}", rows, hidden, dtype), positions
        )
        for layer in range(layers)
    }
    return Record(meta, arrays)


def stacked(record: Record) -> Record:
    """The same record with its arrays in one tensor."""
    assert not isinstance(record.arrays, StackedRows)
    rows = list(record.arrays.values())
    tensor = torch.stack([each.tensor for each in rows], 1)
    return Record(record.meta, StackedRows(tuple(record.arrays), tensor, rows[0].positions))


def in_pieces(record: Record) -> list[StackedRows]:
    """Its arrays stacked, a few rows at a time."""
    whole = stacked(record).arrays
    assert isinstance(whole, StackedRows)
    starts = range(0, max(1, len(whole.tensor)), 7)
    return [
        StackedRows(whole.places, whole.tensor[at : at + 7], whole.positions[at : at + 7])
        for at in starts
    ]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: NaN and the sign of zero count."""
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)


def assert_same(stored: StoredRecord, record: Record) -> None:
    """What is stored is what was given, bit for bit."""
    assert (stored.request_id, stored.tag) == (record.meta.request_id, record.meta.tag)
    assert stored.sample_index == record.meta.sample_index
    assert stored.token_ids == tuple(record.meta.token_ids)
    assert stored.num_tokens == len(record.meta.token_ids)
    keys = {ArrayKey.of(hook, layer): rows for (hook, layer), rows in record.arrays.items()}
    assert set(stored.keys) == set(keys)
    for key, rows in keys.items():
        tensor = stored.tensor(*key)
        assert tensor.dtype == rows.tensor.dtype
        assert tensor.shape == rows.tensor.shape
        assert torch.equal(bits(tensor), bits(rows.tensor))
        assert stored.positions(*key).tolist() == torch.as_tensor(rows.positions).tolist()


def assert_whole(store: Store) -> None:
    """Nothing under the root is wrong."""
    result = store.verify()
    assert result.ok, result.problems
    assert not store.damages


def payloads(root: Path) -> list[Path]:
    """Every published or staged payload."""
    return sorted(root.rglob("*.safetensors"))

"""Copies of a store's rows in other formats."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tllm.spec.reading import require_one_of
from tllm.stores.batches import Batches
from tllm.stores.error import StoreError
from tllm.stores.format import as_bytes, canonical_json, dtype_name, to_numpy
from tllm.stores.payload import PayloadFile
from tllm.stores.publish import remove, write_file
from tllm.stores.reader import Store

ExportFormat = Literal["parquet", "npz", "safetensors"]

_BATCH_ROWS = 8192


def export(
    store: Store, out: str | os.PathLike[str], format: ExportFormat = "parquet"
) -> list[Path]:
    """Write all rows of the records of `store`, one file an array: `OUT/post_block.12.parquet`.

    - `parquet`: columns `request_id`, `tag`, `sample_index`, `position`, `rows` (a list of fixed
      size). bfloat16 and float8 become float32.
    - `npz`: arrays of the same names. bfloat16 and float8 become float32.
    - `safetensors`: tensors `rows` (as stored), `positions`, `records` (int64), and beside it a
      JSON file with `request_id`, `tag` and `sample_index` of each number in `records`.

    Rows are copied batch by batch; the files appear under their names when all are whole. Where
    records differ in the model, reduction, dtype or width of any array, nothing is written.

    Returns:
        The files, without the JSON files.

    Raises:
        ValueError: the format is not known, or a file is there already.
        StoreError: there are no arrays, or records differ in the model, reduction, dtype or width
            of one.
        OSError: a file cannot be written.
    """
    require_one_of("format", format, ExportFormat)
    keys = store.keys()
    if not keys:
        raise StoreError(f"these {len(store)} records have no arrays to export", "missing")
    folder = Path(out).absolute()
    targets = {key: folder / f"{key.name}.{format}" for key in keys}
    written = [*targets.values()]
    if format == "safetensors":
        written += [_names_beside(target) for target in targets.values()]
    if there := [str(path) for path in written if path.exists()]:
        raise ValueError(f"{', '.join(there)} is there already; remove it, or choose another OUT")
    for key in keys:  # of all before the first is written: half an export would look like one
        store.stream(*key, rows=_BATCH_ROWS)
    folder.mkdir(parents=True, exist_ok=True)
    names = _Names(store)
    staged = {target: folder / f".{target.name}.{os.getpid()}" for target in written}
    try:
        for key, target in targets.items():
            remove(staged[target])
            _WRITERS[format](store.stream(*key, rows=_BATCH_ROWS), names, staged[target])
            if format == "safetensors":
                write_file(staged[_names_beside(target)], names.to_json(), sync=False)
        for target, whole in staged.items():
            os.replace(whole, target)
    except BaseException:
        for part in staged.values():
            remove(part)
        raise
    return list(targets.values())


def _names_beside(target: Path) -> Path:
    return target.with_suffix(".json")


class _Names:
    """Who the records of a store are, by their number."""

    def __init__(self, store: Store) -> None:
        columns = store.names()
        self.request_ids = pa.array(columns["request_id"], pa.string())
        self.tags = pa.array(columns["tag"], pa.string())
        self.samples = pa.array(columns["sample_index"], pa.int32())

    def to_json(self) -> bytes:
        """All of them."""
        lists = {
            "request_id": self.request_ids.to_pylist(),
            "tag": self.tags.to_pylist(),
            "sample_index": self.samples.to_pylist(),
        }
        return canonical_json(lists).encode() + b"\n"


def _write_parquet(batches: Batches, names: _Names, path: Path) -> None:
    with contextlib.ExitStack() as opened:
        # A file, since Arrow takes no path that is not UTF-8.
        file = opened.enter_context(path.open("wb"))
        item = pa.from_numpy_dtype(to_numpy(batches.empty()).dtype)
        columns = {
            "request_id": pa.string(),
            "tag": pa.string(),
            "sample_index": pa.int32(),
            "position": pa.int32(),
            "rows": pa.list_(item, batches.hidden),
        }
        # Also where there are no rows: an empty file is no Parquet.
        writer = pq.ParquetWriter(file, pa.schema(columns), compression="zstd")
        opened.enter_context(writer)
        for batch in batches.as_arrow():
            records = batch["record"]
            table = pa.table(
                {
                    "request_id": batch["request_id"],
                    "tag": names.tags.take(records),
                    "sample_index": names.samples.take(records),
                    "position": batch["position"],
                    "rows": batch["rows"],
                }
            )
            writer.write_table(table)


def _write_npz(batches: Batches, names: _Names, path: Path) -> None:
    positions: list[npt.NDArray[Any]] = [np.empty(0, np.int32)]
    records: list[npt.NDArray[Any]] = [np.empty(0, np.int64)]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        # Rows go through batch by batch; what is kept of them meanwhile is small.
        with archive.open("rows.npy", "w", force_zip64=True) as file:
            header = {
                "descr": np.lib.format.dtype_to_descr(to_numpy(batches.empty()).dtype),
                "fortran_order": False,
                "shape": (batches.total_rows, batches.hidden),
            }
            np.lib.format.write_array_header_2_0(file, header)
            for batch in batches.as_numpy():
                file.write(np.ascontiguousarray(batch.rows).data)
                positions.append(batch.positions)
                records.append(batch.records)
        record = pa.array(np.concatenate(records))
        for name, column in (
            ("position", np.concatenate(positions)),
            ("sample_index", names.samples.take(record).to_numpy()),
            ("request_id", np.array(names.request_ids.take(record).to_pylist(), np.str_)),
            ("tag", np.array(names.tags.take(record).to_pylist(), np.str_)),
        ):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, column, allow_pickle=False)


def _write_safetensors(batches: Batches, names: _Names, path: Path) -> None:
    file = PayloadFile(path, header_bytes=4096)
    file.add(["rows"], dtype_name(batches.empty().dtype), batches.hidden, 0, [])
    positions: list[torch.Tensor] = [torch.empty(0, dtype=torch.int32)]
    records: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)]
    for batch in batches.as_torch():
        rows = as_bytes(batch.rows)
        file.add(["rows"], dtype_name(batch.rows.dtype), batches.hidden, len(batch), [rows])
        file.write()
        positions.append(batch.positions)
        records.append(batch.records)
    file.add(["positions"], "I32", None, batches.total_rows, [as_bytes(torch.cat(positions))])
    file.add(["records"], "I64", None, batches.total_rows, [as_bytes(torch.cat(records))])
    file.finish({"format": "pt"})


_WRITERS: dict[str, Callable[[Batches, _Names, Path], None]] = {
    "parquet": _write_parquet,
    "npz": _write_npz,
    "safetensors": _write_safetensors,
}

"""`python -m benchmarks.stores`: how fast records reach the disk, beside plain writes of the same
bytes.

A round writes the same bytes plainly (large files, sequentially, by as many threads, with the same
policy of syncing) and through a `StoreWriter`, in turn; the figure is the median over rounds of the
ratio. Both times end when every byte is where the policy wants it.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from tllm.stores import Layout, Record, RecordMeta, StackedRows, StoreWriter, WriterStats
from tllm.stores import open as open_store

RESULTS = Path(__file__).parent / "results"

_FILE_BYTES = 256 << 20
_WRITE_BYTES = 8 << 20


@dataclass(frozen=True)
class Workload:
    """What one record is.

    Attributes:
        rows: of each array.
    """

    name: str
    layout: Layout
    rows: int
    layers: int
    hidden: int = 3584

    @property
    def record_bytes(self) -> int:
        """Bytes of the rows of one record, in bfloat16."""
        return self.rows * self.layers * self.hidden * 2


WORKLOADS = {
    w.name: w
    for w in (
        Workload("sharded-all-tokens", "sharded", rows=512, layers=4),
        Workload("sharded-one-layer", "sharded", rows=512, layers=1),
        Workload("sharded-last-token", "sharded", rows=1, layers=28),
        Workload("packed-last-token", "packed", rows=1, layers=28),
        Workload("packed-all-tokens", "packed", rows=512, layers=4),
        Workload("per-file-all-tokens", "per_file", rows=512, layers=4),
    )
}


def write_plainly(folder: Path, data: torch.Tensor, total: int, threads: int, sync: bool) -> float:
    """Seconds for `total` bytes in files of 256 MiB, from the buffer `data` over and over."""
    view = memoryview(data.view(torch.uint8).reshape(-1).numpy())
    blocks = [view[i : i + _WRITE_BYTES] for i in range(0, len(view), _WRITE_BYTES)]

    def work(part: int) -> None:
        left, number = total // threads, 0
        while left > 0:
            fd = os.open(folder / f"{part}-{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            room = min(left, _FILE_BYTES)
            left -= room
            while room > 0:
                for block in blocks:
                    room -= os.write(fd, block[: max(room, 0)])
            if sync:
                os.fsync(fd)
            os.close(fd)
            number += 1

    start = time.perf_counter()
    workers = [threading.Thread(target=work, args=(part,)) for part in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def write_records(
    folder: Path, data: torch.Tensor, workload: Workload, total: int, threads: int, sync: bool
) -> tuple[float, WriterStats]:
    """Seconds for records of `total` bytes, until the last is published."""
    shape = workload.rows, workload.layers, workload.hidden
    places = tuple(("post_block", layer) for layer in range(workload.layers))
    flat = data.view(-1)
    size = workload.rows * workload.hidden
    available = flat.numel() // size
    positions = torch.arange(workload.rows, dtype=torch.int32)
    with StoreWriter(
        folder,
        layout=workload.layout,
        durability="fsync" if sync else "rename",
        threads=threads,
        shard_bytes=_FILE_BYTES,
    ) as writer:
        start = time.perf_counter()
        futures = []
        taken = 0
        for number in range(total // workload.record_bytes):
            # As captures come to the writer: the rows of all layers in one tensor.
            first = (taken % (available - workload.layers + 1)) * size
            taken += workload.layers
            rows = flat[first : first + workload.layers * size].view(shape)
            meta = RecordMeta(f"request-{number}")
            futures.append(writer.submit(Record(meta, StackedRows(places, rows, positions))))
        writer.flush()
        seconds = time.perf_counter() - start
        assert all(future.result().status == "ok" for future in futures)
        return seconds, writer.stats()


def read_batches(folder: Path) -> dict[str, float]:
    """MB/s of batches of one layer, in order and shuffled, from the page cache."""
    store = open_store(folder)
    figures = {}
    for shuffle in (False, True):
        start = time.perf_counter()
        done = sum(
            batch.rows.numel() * batch.rows.element_size()
            for batch in store.batches("post_block", 0, shuffle=shuffle)
        )
        figures["shuffled" if shuffle else "in order"] = done / (time.perf_counter() - start) / 1e6
    return figures


def measure(
    workload: Workload, place: Path, total: int, rounds: int, threads: int, sync: bool
) -> dict[str, Any]:
    """Rounds of both, in turn."""
    data = torch.randn(64 << 20, dtype=torch.float32).view(torch.bfloat16)
    # Of records alone: a round is whole records.
    total -= total % workload.record_bytes
    plain: list[float] = []
    ours: list[float] = []
    for _ in range(rounds):
        for write in (False, True):
            os.sync()
            folder = Path(tempfile.mkdtemp(dir=place))
            try:
                if write:
                    seconds, stats = write_records(folder, data, workload, total, threads, sync)
                    ours.append(total / seconds / 1e6)
                    reading = read_batches(folder)
                else:
                    seconds = write_plainly(folder, data, total, threads, sync)
                    plain.append(total / seconds / 1e6)
            finally:
                shutil.rmtree(folder)
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    return {
        "name": f"{workload.name}-{'fsync' if sync else 'rename'}",
        "workload": asdict(workload),
        "bytes": total,
        "threads": threads,
        "plain_mb_per_second": statistics.median(plain),
        "store_mb_per_second": statistics.median(ours),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "reading_mb_per_second": reading,
        "stats": stats.to_dict(),
    }


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Any of: {', '.join(WORKLOADS)}; all by default.")
    ] = None,
    place: Annotated[Path, typer.Option(help="Folder on the disk to measure.")] = Path("."),
    mib: Annotated[int, typer.Option(help="MiB a round.")] = 2048,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 5,
    threads: Annotated[int, typer.Option(help="Writer threads, of both.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Measure the store's writer against the disk."""
    if unknown := [name for name in names or () if name not in WORKLOADS]:
        raise typer.BadParameter(f"{unknown} not known; choose among {', '.join(WORKLOADS)}")
    out.mkdir(parents=True, exist_ok=True)
    table = Table("benchmark", "plain MB/s", "store MB/s", "ratio", "range of ratios")
    for name in names or WORKLOADS:
        for sync in (True, False):
            result = measure(WORKLOADS[name], place, mib << 20, rounds, threads, sync)
            result["date"] = datetime.date.today().isoformat()
            result["hardware"] = (
                f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
            )
            (out / f"store-{result['name']}.json").write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result), flush=True)
            table.add_row(
                result["name"],
                f"{result['plain_mb_per_second']:,.0f}",
                f"{result['store_mb_per_second']:,.0f}",
                f"{result['ratio']:.3f}",
                f"{min(result['ratios']):.3f} to {max(result['ratios']):.3f}",
            )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

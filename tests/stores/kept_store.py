"""The small store of format version 1 that is kept in `tests/stores/store_v1`.

`python -m tests.stores.kept_store ROOT` wrote it, with the first writer of this format. Every value
in it follows from `values` and `WANTED`, so what is read can be compared without what wrote it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.stores.samples import DTYPES
from tllm import stores
from tllm.stores import Record, RecordMeta, Rows, StackedRows, StoreWriter

KEPT = Path(__file__).with_name("store_v1")

Key = tuple[str, int | None]


def values(seed: int, rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """`[rows, hidden]`; every value is exact in every dtype."""
    numbers = (torch.arange(rows * hidden) * 7 + seed * 13) % 31
    if dtype.is_floating_point:
        return ((numbers - 15) / 4).to(torch.float32).view(rows, hidden).to(dtype)
    return (numbers > 15 if dtype is torch.bool else numbers).to(dtype).view(rows, hidden)


@dataclass(frozen=True)
class Wanted:
    """What one record of the kept store holds."""

    request_id: str
    writer: str
    keys: tuple[Key, ...]
    rows: int = 3
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    tag: str = ""
    sample_index: int = 0
    generation: int = 1
    status: str = "ok"
    error: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    stage: int = 0
    num_stages: int = 1

    @property
    def name(self) -> str:
        """As `StoredRecord.name` has it."""
        tag = f"{self.tag}/" if self.tag else ""
        again = f"~{self.generation}" if self.generation > 1 else ""
        return f"{tag}{self.request_id}#{self.sample_index}{again}"

    @property
    def positions(self) -> list[int]:
        """Of the rows of every array."""
        return [2 * row + self.seed for row in range(self.rows)]

    def tensor(self, key: Key) -> torch.Tensor:
        """The rows of an array."""
        return values(self.seed + self.keys.index(key), self.rows, 8, self.dtype)

    def meta(self) -> RecordMeta:
        """For the writer."""
        status: Any = self.status if self.status != "pending" else "ok"
        return RecordMeta(
            self.request_id,
            tag=self.tag,
            sample_index=self.sample_index,
            prompt_len=self.rows,
            token_ids=range(self.seed, self.seed + self.rows),
            model="a/model",
            versions={"tllm": "0.1.0", "torch": "2.0"},
            status=status,
            error=self.error,
            metadata=self.metadata,
            record_id=f"kept-{self.request_id}-{self.tag}-{self.sample_index}-{self.generation}-"
            f"{self.writer.partition('-')[0]}",
            stage=self.stage,
            num_stages=self.num_stages,
            created="2026-01-02T03:04:05.000006Z",
        )

    def singles(self) -> Record:
        """Each array by itself."""
        return Record(
            self.meta(), {key: Rows(self.tensor(key), self.positions) for key in self.keys}
        )

    def stacked(self) -> Record:
        """All arrays in one tensor."""
        return Record(self.meta(), self.stack(0, self.rows))

    def stack(self, start: int, stop: int) -> StackedRows:
        """Some rows of all arrays."""
        rows = torch.stack([self.tensor(key) for key in self.keys], 1)[start:stop]
        return StackedRows(self.keys, rows, self.positions[start:stop])


LAYERS: tuple[Key, ...] = (("post_block", 0), ("post_block", 11), ("lm_head_in", None))
ONE: tuple[Key, ...] = (("attn_out", 3),)
UNUSUAL = "Ünï/../cødé %+~"

WANTED = [
    *(
        Wanted(str(dtype).removeprefix("torch."), "sharded", ONE, dtype=dtype, seed=n)
        for n, dtype in enumerate(DTYPES)
    ),
    Wanted("stacked", "sharded", LAYERS, tag="probe", seed=20, metadata={"x": [1.5, None, "é"]}),
    Wanted("stacked", "sharded", LAYERS, tag="probe", sample_index=1, rows=1, seed=21),
    Wanted("singles", "sharded", LAYERS, dtype=torch.float16, seed=22),
    Wanted("three shards", "sharded", LAYERS, rows=9, seed=23),
    Wanted("failed", "sharded", ONE, rows=2, seed=24, status="partial_error", error="a disk: full"),
    Wanted("nothing", "sharded", (), rows=0),
    Wanted(UNUSUAL, "sharded", ONE, tag=UNUSUAL, seed=25),
    Wanted("pending", "sharded", ONE, rows=2, seed=26, status="pending"),
    Wanted("r", "packed", LAYERS, seed=30),
    Wanted("stacked", "packed", LAYERS, tag="packed", dtype=torch.float32, seed=31),
    Wanted("replaced", "packed", ONE, seed=32, generation=2),
    Wanted(UNUSUAL, "packed", ONE, tag="packed", seed=33),
    Wanted("x" * 200, "packed", ONE, tag="packed", seed=34),
    Wanted("r", "per_file", LAYERS, tag="files", seed=40),
    Wanted("r", "per_file", LAYERS, tag="files", rows=4, seed=41, generation=2),
    Wanted("stacked", "per_file", LAYERS, tag="files", dtype=torch.float32, seed=42),
    Wanted("in goes", "per_file", LAYERS, tag="files", rows=80, seed=43),
    Wanted("later", "packed-later", ONE, seed=50),
]
"""All records that can be read; those of one tag and request id with `generation` in order."""

STAGED = [
    Wanted("stages", f"packed-{n}", (("mlp_out", n),), seed=60, stage=n, num_stages=2)
    for n in (0, 1)
]
"""One record, written by two pipeline stages."""


def write(root: Path) -> None:
    """Write the store, and end without closing its last writer."""
    by_writer: dict[str, list[Wanted]] = {}
    for wanted in WANTED:
        by_writer.setdefault(wanted.writer, []).append(wanted)
    with StoreWriter(root, layout="packed", writer_id="packed", on_collision="overwrite") as writer:
        old = Wanted("replaced", "packed", ONE, rows=2, seed=1)
        writer.submit(old.singles()).result(60)
        submit_all(writer, by_writer["packed"])
    # The lowest limits there are: what a record has is written in several goes.
    with StoreWriter(
        root,
        layout="per_file",
        writer_id="per_file",
        threads=1,
        queue_bytes=4000,
        on_collision="suffix",
    ) as writer:
        *whole, last = by_writer["per_file"]
        submit_all(writer, whole)
        stream = writer.begin(last.meta())
        for start in range(0, last.rows, 8):
            stream.append_stack(last.stack(start, start + 8))
        stream.finish().result(60)
    stores.open(root).index()
    for staged in STAGED:
        with StoreWriter(root, layout="packed", writer_id=staged.writer) as writer:
            writer.submit(staged.singles()).result(60)
    with StoreWriter(root, layout="packed", writer_id="packed-later") as writer:
        submit_all(writer, by_writer["packed-later"])
    writer = StoreWriter(root, writer_id="sharded", threads=1, publish_interval=1000)
    gone = Wanted("gone", "sharded", ONE, seed=2)
    aborted = writer.begin(gone.meta())
    aborted.append_stack(gone.stack(0, 2))
    in_parts = next(w for w in WANTED if w.request_id == "three shards")
    stream = writer.begin(in_parts.meta())
    for start in range(0, 9, 3):
        stream.append_stack(in_parts.stack(start, start + 3))
        writer.flush()
    aborted.abort()
    stream.finish()
    for wanted in by_writer["sharded"]:
        if wanted.status == "pending":
            writer.begin(wanted.meta()).append_stack(wanted.stack(0, wanted.rows))
        elif wanted is not in_parts:
            singles = wanted.request_id != "stacked"
            writer.submit(wanted.singles() if singles else wanted.stacked())
    writer.flush()
    for lock in root.rglob("lock"):
        lock.write_text("process 1 on host\n")
    os._exit(0)


def submit_all(writer: StoreWriter, records: list[Wanted]) -> None:
    """Whole records, stacked where their request id says so."""
    for wanted in records:
        stacked = wanted.request_id == "stacked"
        writer.submit(wanted.stacked() if stacked else wanted.singles()).result(60)


if __name__ == "__main__":
    write(Path(sys.argv[1]))

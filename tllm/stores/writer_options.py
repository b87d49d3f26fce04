"""How records are written."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Literal

from tllm.spec.reading import require_one_of, whole_number
from tllm.stores.format import Layout
from tllm.stores.queue import Overflow

Durability = Literal["rename", "fsync"]


OnCollision = Literal["error", "overwrite", "suffix", "skip"]


@dataclass(frozen=True)
class WriterOptions:
    """How a `StoreWriter` writes. Raises `ValueError` naming what is not allowed.

    Attributes:
        layout: `sharded` (many records a file), `packed` (a file a record), or `per_file` (a file
            a record, hook point and layer).
        durability: `rename` survives the death of the process; `fsync` also that of the machine.
        threads: of this writer.
        on_collision: when a record of the same tag, request id and sample exists: `error` refuses
            the new one, `skip` leaves it out without an error, `overwrite` replaces the old one,
            `suffix` keeps both.
        max_bytes: of rows and positions that this writer may leave under the root, those of its
            earlier runs included; None for no limit. Records that would exceed it are refused, and
            streams lose the rows beyond it.
        shard_bytes: a shard is published when it has that much.
        queue_bytes: of rows in memory, submitted and not written.
        overflow: when they are reached: `block` makes the caller wait, `drop` loses the rows,
            `spill` keeps them in a nameless file until it has `spill_bytes`, and then loses them.
            Whatever is lost is counted and marked.
        spill_bytes: for `spill`.
        spill_folder: for `spill`; by default the writer's own folder. Better on another disk.
        publish_interval: seconds after which a shard is published though it is not full.
    """

    layout: Layout = "sharded"
    durability: Durability = "rename"
    threads: int = 2
    on_collision: OnCollision = "error"
    max_bytes: int | None = None
    shard_bytes: int = 256 << 20
    queue_bytes: int = 512 << 20
    overflow: Overflow = "block"
    spill_bytes: int = 8 << 30
    spill_folder: str | os.PathLike[str] | None = None
    publish_interval: float = 2.0

    def __post_init__(self) -> None:
        """Check each."""
        for name, allowed in (
            ("layout", Layout),
            ("durability", Durability),
            ("on_collision", OnCollision),
            ("overflow", Overflow),
        ):
            require_one_of(name, getattr(self, name), allowed)
        for name in ("threads", "shard_bytes", "queue_bytes", "spill_bytes", "max_bytes"):
            value = getattr(self, name)
            if value is None and name == "max_bytes":
                continue
            whole_number(value, f"{name}=", 1)
        interval = self.publish_interval
        if (
            isinstance(interval, bool)
            or not isinstance(interval, (int, float))
            or not 0 < interval < threading.TIMEOUT_MAX
        ):
            raise ValueError(f"publish_interval={interval!r} must be a time above 0, in s")
        if self.spill_folder is not None and not isinstance(self.spill_folder, (str, os.PathLike)):
            raise ValueError(f"spill_folder={self.spill_folder!r} is not allowed; give a path")

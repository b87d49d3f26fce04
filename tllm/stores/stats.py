"""What a writer has done."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class WriterStats:
    """Counters of a `StoreWriter`, since it was opened.

    Attributes:
        submitted: records submitted or begun.
        published: records on disk, those with rows missing among them.
        partial: of those, the ones with rows missing (`partial_error`).
        failed: records of which nothing can be read.
        dropped: of those and of the partial ones, how many lost rows to a full queue.
        skipped: records that were there already, with `on_collision="skip"`.
        rows, bytes: of what was published: rows, and bytes of rows and positions.
        spilled, spilled_bytes: records or chunks of records that waited on disk.
        queued_bytes, peak_queued_bytes: of rows in memory: now, and the most there were.
        blocked_seconds: time that `submit` and `append` waited for room.
    """

    submitted: int = 0
    published: int = 0
    partial: int = 0
    failed: int = 0
    dropped: int = 0
    skipped: int = 0
    rows: int = 0
    bytes: int = 0
    spilled: int = 0
    spilled_bytes: int = 0
    queued_bytes: int = 0
    peak_queued_bytes: int = 0
    blocked_seconds: float = 0.0

    def to_dict(self) -> dict[str, int | float]:
        """As plain data."""
        return asdict(self)


class Counters:
    """The counters behind `WriterStats`, for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = {field.name: 0 for field in fields(WriterStats)}

    def add(self, **counts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, count in counts.items():
                self._values[name] += count

    def snapshot(self, **more: int | float) -> WriterStats:
        """All counters; `more` are those that are kept elsewhere."""
        with self._lock:
            return WriterStats(**{**self._values, **more})  # type: ignore[arg-type]

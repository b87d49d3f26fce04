"""What a writer thread does with records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tllm.stores.error import StoreError
from tllm.stores.paths import Layout, WriterPaths
from tllm.stores.record import CheckedRows, CheckedStack, RecordMeta
from tllm.stores.recording import Recording


@dataclass(eq=False)
class Item:
    """Rows of a record, its end, or both.

    Attributes:
        arrays: rows, each with its own array; several items of a record come in their order.
        end: the record's final description, when nothing more will come.
        lost: why rows are missing that should have come before, and the error behind it.
        abort: the record is given up.
        nbytes: of rows and positions.
    """

    recording: Recording
    arrays: Sequence[CheckedRows | CheckedStack] = ()
    end: RecordMeta | None = None
    lost: Mapping[str, StoreError] = field(default_factory=dict)
    abort: bool = False
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(rows.nbytes for rows in self.arrays)


@dataclass(frozen=True)
class Publishing:
    """What the publishers of one writer share.

    Attributes:
        sync: wait for the device.
        shard_bytes: size at which a shard is published.
        block_bytes: bytes to collect before they are written.
        interval: seconds after which a shard is published though it is not full.
        numbers: of shards.
        names: of staged files.
        release: called with the bytes of rows that need no memory any more.
    """

    paths: WriterPaths
    layout: Layout
    sync: bool
    shard_bytes: int
    block_bytes: int
    interval: float
    numbers: Iterator[int]
    names: Iterator[int]
    release: Callable[[int], None]


@dataclass
class Publisher(ABC):
    """Writes the records of one thread. All methods are called from that thread."""

    room: Publishing
    deadline: float | None = field(default=None, init=False)
    """When `publish_due` should be called, by `time.monotonic`."""

    @property
    @abstractmethod
    def holding(self) -> bool:
        """Whether rows are staged in memory."""

    @abstractmethod
    def accept(self, item: Item) -> None:
        """Take rows or a record's end. Errors of the system end up in the record."""

    @abstractmethod
    def relieve(self) -> None:
        """Write all staged rows: somebody waits for memory."""

    @abstractmethod
    def publish_due(self) -> None:
        """Publish what has waited for `Publishing.interval`."""

    @abstractmethod
    def flush(self) -> None:
        """Publish all records that have ended."""

    @abstractmethod
    def give_up(self, recording: Recording, error: Exception) -> None:
        """Let go of a record's staged rows after an error; when it has ended, settle it."""

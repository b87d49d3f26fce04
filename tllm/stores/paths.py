"""Where things are in a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from tllm.stores.name import file_name
from tllm.stores.record import RecordMeta

Layout = Literal["per_file", "packed", "sharded"]

MARKER = "tllm-store.json"
INDEX = "index.parquet"
WRITERS = "writers"
PAYLOAD_SUFFIX = ".safetensors"

_UNTAGGED = "@untagged"  # `file_name` never gives an @
_SIDECARS = {"sharded": ".jsonl", "packed": ".json", "per_file": ".json"}


@dataclass(frozen=True)
class WriterPaths:
    """The folder of one writer under a root: nobody else writes in it."""

    root: Path
    writer_id: str

    @cached_property
    def folder(self) -> Path:
        """All of this writer's files."""
        return self.root / WRITERS / file_name(self.writer_id)

    @property
    def lock(self) -> Path:
        """Locked while the writer lives."""
        return self.folder / "lock"

    @cached_property
    def staging(self) -> Path:
        """What is not published yet."""
        return self.folder / "staging"

    def shard(self, number: int) -> Path:
        """A shard's payload; its sidecar has the suffix `.jsonl`."""
        return self.folder / "sharded" / f"shard-{number:08d}{PAYLOAD_SUFFIX}"

    def next_shard(self) -> int:
        """The first number above all that are taken."""
        taken = [int(name[6:14]) for name in self._shard_files() if name[6:14].isdigit()]
        return max(taken, default=-1) + 1

    def shards(self) -> list[Path]:
        """The payloads that are there."""
        folder = self.folder / "sharded"
        return [folder / name for name in self._shard_files() if name.endswith(PAYLOAD_SUFFIX)]

    def _shard_files(self) -> list[str]:
        try:
            names = os.listdir(self.folder / "sharded")
        except FileNotFoundError:
            return []
        return [name for name in names if name.startswith("shard-")]

    def sidecar(self, layout: Layout, meta: RecordMeta, gen: int) -> Path:
        """The sidecar of one record; payloads lie beside it, under the same stem."""
        tag = file_name(meta.tag) if meta.tag else _UNTAGGED
        stem = f"{file_name(meta.request_id)}@{meta.sample_index}"
        if meta.stage:
            stem += f"-stage{meta.stage}"
        if gen > 1:
            stem += f"-{gen}"
        return self.folder / layout / tag / f"{stem}.json"


def sidecars(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """All sidecars under a root: path relative to it, and state; shards in order, others by name.

    A file that disappears meanwhile is left out.
    """
    for writer in _folders(root / WRITERS):
        for layout, suffix in _SIDECARS.items():
            folder = root / WRITERS / writer / layout
            inner = [folder] if layout == "sharded" else [folder / tag for tag in _folders(folder)]
            for place in inner:
                yield from _files(root, place, suffix)


def _folders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _files(root: Path, folder: Path, suffix: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        with os.scandir(folder) as entries:
            found = sorted(entry.name for entry in entries if entry.name.endswith(suffix))
    except FileNotFoundError:
        return
    for name in found:
        try:
            yield (folder / name).relative_to(root).as_posix(), (folder / name).stat()
        except FileNotFoundError:
            continue

"""Files that appear whole, or not at all; and stay when the machine dies, where that is asked."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from tllm.stores.payload import write_all


def publish_files(
    payloads: Sequence[tuple[Path, Path]], sidecar: Path, text: bytes, staging: Path, sync: bool
) -> None:
    """Move payloads into place, then the sidecar; after an `OSError` nothing of it is there.

    Payloads without a sidecar are not part of the store.

    Args:
        payloads: `(staged, final)` files, or folders of files.
        sidecar, text: its final path, and its content.
        staging: folder for unfinished files, on the same file system.
        sync: wait until all is on the device. The payloads' content must be there already.
    """
    make_folder(sidecar.parent, sync)
    staged = staging / f"sidecar-{threading.get_ident()}"
    moved: list[Path] = []
    try:
        write_file(staged, text, sync)
        for source, target in payloads:
            if source.is_dir():
                if sync:
                    sync_folder(source)
                # Left by a writer that was killed before its sidecar was there.
                remove(target)
            os.replace(source, target)
            moved.append(target)
        os.replace(staged, sidecar)
        moved.append(sidecar)
        if sync:
            sync_folder(sidecar.parent)
    except OSError:
        # The sidecar first: what it names must be there as long as it is.
        for path in (staged, *reversed(moved)):
            with contextlib.suppress(OSError):
                remove(path)
        raise


def write_file(path: Path, data: bytes, sync: bool) -> None:
    """Write a small file; what is there is overwritten."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(fd, [memoryview(data)])
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path, sync: bool) -> None:
    """Make a folder and those above it that are missing."""
    if folder.is_dir():
        return
    make_folder(folder.parent, sync)
    folder.mkdir(exist_ok=True)
    if sync:
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the device."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it; nothing when it is not there."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        # Which of the two errors a folder gives depends on the system.
        if not path.is_dir():
            raise
        shutil.rmtree(path)

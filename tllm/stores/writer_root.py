"""The root of a store, as a writer opens it, and who else writes into it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tllm.stores.catalog import Catalog
from tllm.stores.error import StoreError, WriterInUseError, describe
from tllm.stores.format import MARKER, WRITERS, WriterPaths, marker_text, require_marker
from tllm.stores.publish import make_folder, remove, sync_folder, write_file


def open_root(paths: WriterPaths, *, sync: bool, spill_place: Path | None) -> tuple[int, Catalog]:
    """Lock the writer's folder and see what is there.

    Args:
        sync: wait for the device.
        spill_place: the folder to spill to, if it will be.

    Returns:
        The lock's file descriptor, and all records under the root.
    """
    with contextlib.ExitStack() as undo:
        with _opening(paths.root):
            lock = _lock(paths, sync)
            undo.callback(os.close, lock)
            remove(paths.staging)
            paths.staging.mkdir()
            _write_marker(paths, sync)
            catalog = Catalog.read(paths.root)
            _remove_unpublished(paths)
        if spill_place is not None and not os.access(spill_place, os.W_OK | os.X_OK):
            raise PermissionError(
                errno.EACCES, f"spill_folder={str(spill_place)!r} cannot be written; give another"
            )
        undo.pop_all()
    return lock, catalog


@contextlib.contextmanager
def _opening(root: Path) -> Iterator[None]:
    """Say of errors of the system what they mean for the root."""
    try:
        yield
    except (NotADirectoryError, FileExistsError) as error:
        raise ValueError(
            f"root={str(root)!r} cannot be a store, {describe(error)}; give a folder"
        ) from error
    except OSError as error:
        denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        kind = PermissionError if denied else OSError
        hint = (
            f"give a folder that user {os.geteuid()} may write"
            if denied
            else "mend that, or give another"
        )
        what = f"root={str(root)!r} cannot be written, {describe(error)}; {hint}"
        raise kind(error.errno, what) from error
    except StoreError as error:
        raise ValueError(f"root={str(root)!r} cannot be gone on with: {error}") from error


def _lock(paths: WriterPaths, sync: bool) -> int:
    """Make the writer's folder and lock it; returns the lock's file descriptor."""
    make_folder(paths.folder, sync)
    fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner_in(fd)
            raise WriterInUseError(
                f"writer_id={paths.writer_id!r} is in use under {str(paths.root)!r} by {owner}; "
                "give each writer an id of its own, or a root of its own; where that process is "
                "left of a run that was killed, end it",
                owner,
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def owner_of(root: Path, name: str) -> str:
    """The process that has a writer's folder under a root, and its host; empty where none has.

    What is written there stays when that process has ended: it is the lock that counts.
    """
    try:
        fd = os.open(root / WRITERS / name / "lock", os.O_RDONLY)
    except OSError:  # no writer has begun there, or others may not look
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner_in(fd)
    except OSError:  # of a file system without locks
        return ""
    finally:
        os.close(fd)
    return ""


def _owner_in(lock: int) -> str:
    return os.pread(lock, 200, 0).decode(errors="replace").strip()


def _write_marker(paths: WriterPaths, sync: bool) -> None:
    """Mark the root as a store, unless it is one; `StoreError` when it is one of a version that is
    not known."""
    if (paths.root / MARKER).exists():
        require_marker(paths.root)
        return
    # Several writers may do this at once: they write the same, each in one go.
    write_file(paths.staging / MARKER, marker_text(), sync)
    os.replace(paths.staging / MARKER, paths.root / MARKER)
    if sync:
        sync_folder(paths.root)


def _remove_unpublished(paths: WriterPaths) -> None:
    """Remove shards whose writer was killed before their sidecar was there."""
    for payload in paths.shards():
        if not payload.with_suffix(".jsonl").exists():
            payload.unlink()

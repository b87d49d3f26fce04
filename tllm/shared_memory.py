"""Memory that processes of one host share: shared files with an owner, and what travels in them.

A shared file lies in `/dev/shm`. Its name tells the process that answers for it, so that whoever
comes later can remove what a killed process left behind:

    tllm-<pid namespace>-<pid>-<start time>-<random>

`SharedFile` reserves, maps, links and releases; `populate` allocates the pages of what is mapped;
`sweep` removes files of processes that are gone.
`SharedRows` are rows that two processes map. Results reach the user's process in shared files
(`result_memory.py`, `answers.py`).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import tempfile
import uuid
import weakref
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tllm.cuda_runtime import page_lock, page_unlock

_MEMORY = Path("/dev/shm")

FOLDER = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
"""Where shared files are. Without `/dev/shm` they work as well, through a disk."""

IN_MEMORY = _MEMORY == FOLDER and os.access(FOLDER, os.W_OK)
"""Whether shared files cost no more than memory."""

WORTHWHILE = 1 << 20
"""Bytes from which on sharing costs less than copying."""

NAME = re.compile(r"tllm-(\d+)-(\d+)-(\d+)-[0-9a-f]{32}(-[0-9a-f]{32})?")

_MADV_POPULATE_WRITE = 23
"""Of Linux, from 5.14 on."""

_POPULATED_AT_ONCE = 16 << 20
"""Bytes: while the system allocates their pages, no thread of the process can map or unmap
memory."""

Bytes = npt.NDArray[np.uint8]


# -- shared files --------------------------------------------------------------------------------


class SharedFile:
    """Memory under a name.

    Attributes:
        path: the file; a reader on this host opens it by this.
    """

    def __init__(self, path: Path) -> None:
        """A file that somebody has reserved."""
        self.path = path
        self._named = True

    @classmethod
    def reserve(cls, nbytes: int, owner: str = "", backed: bool = True) -> SharedFile:
        """Make a file.

        Args:
            nbytes: 1 or more.
            owner: name of a file of the process that will answer for this one; by default it
                is this process.
            backed: have all of its pages now; else `back` must come before they are written.

        Raises `OSError` when there is no room.
        """
        made = cls(FOLDER / _new_name(owner))
        with open(made.path, "xb", opener=_private) as file:
            file.truncate(nbytes)
        if backed:
            made.back(0, nbytes)
        return made

    def back(self, start: int, nbytes: int) -> None:
        """Have the pages of some bytes: one that cannot be had while it is written is a signal,
        and this is an error.

        Raises `OSError` when there is no room; the file is then released.
        """
        try:
            with self.path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), start, nbytes)
        except OSError:
            self.release()
            raise

    def map(self) -> Bytes:
        """Its bytes, to be read and written. They stay when the name is gone.

        Raises `OSError` when it is not there.
        """
        with self.path.open("r+b") as file:
            return _mapped(file.fileno())

    def hold(self) -> Bytes:
        """Its bytes, for a reader: the memory is not used for anything else (`is_held`) as long as
        this process, or one that it forked, has them mapped.

        Raises `OSError` when it is not there.
        """
        with self.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # of the mapping, too, which has the same open file
            mapped = _mapped(file.fileno())
            self.path.stat()  # nobody took the name away meanwhile
        return mapped

    def link(self, owner: str) -> SharedFile:
        """The same memory under another name, for which the process that has the file `owner`
        answers. Raises `OSError`."""
        path = FOLDER / _new_name(owner)
        os.link(self.path, path)
        return SharedFile(path)

    def release(self) -> None:
        """Remove the name; the memory is free when nobody has it mapped and no other name is
        left."""
        if self._named:
            self._named = False
            self.path.unlink(missing_ok=True)


def populate(address: int, nbytes: int) -> None:
    """Allocate the pages of a shared file that is mapped there, and map them: whoever writes waits
    for neither then. Several threads do it faster than one, and it lets go of the interpreter.

    Args:
        address: where a page begins.

    Raises `OSError`: with `EFAULT` when there is no room, with `EINVAL` where the system cannot.
    """
    for low in range(0, nbytes, _POPULATED_AT_ONCE):
        part = min(_POPULATED_AT_ONCE, nbytes - low)
        if _libc().madvise(address + low, part, _MADV_POPULATE_WRITE):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


def room() -> int:
    """Bytes of shared memory that may be taken. A quarter of all is left to others: vLLM's
    processes speak through memory whose pages they get when they write, and one that cannot be had
    then ends the process."""
    found = os.statvfs(FOLDER)
    return max(0, (found.f_bavail - found.f_blocks // 4) * found.f_frsize)


def own_path() -> Path:
    """Where this process may put something else than a file, as a socket; removed like one."""
    return FOLDER / _new_name()


def is_shared_file(path: object) -> bool:
    """Whether it is the path that some shared file has or had, and not of anything else."""
    if not isinstance(path, str):
        return False
    folder, _, name = path.rpartition(os.sep)
    return folder == str(FOLDER) and NAME.fullmatch(name) is not None


def sweep() -> int:
    """Remove shared files of processes that are gone, and return how many.

    Those of other users and of other containers are left alone: which processes they have is not
    known here.
    """
    removed = 0
    own_namespace = _namespace()
    for path in FOLDER.glob("tllm-*"):
        try:
            if path.stat().st_uid != os.geteuid() or not _is_left(path.name, own_namespace):
                continue
            path.unlink()
        except OSError:  # it has gone, or is not ours to remove
            continue
        removed += 1
    return removed


def _mapped(descriptor: int) -> Bytes:
    """The bytes of a file, to be read and written.

    `mmap.mmap` would keep a descriptor: who has many results would run out of them.

    Raises `OSError`.
    """
    nbytes = os.fstat(descriptor).st_size
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc().mmap(None, nbytes, access, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, _libc().munmap, address, nbytes).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8)


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_ssize_t,
    )
    library.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    library.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return library


def _is_left(name: str, own_namespace: int) -> bool:
    told = NAME.fullmatch(name)
    if told is None:
        return False
    namespace, pid, start = map(int, told.group(1, 2, 3))
    return bool(own_namespace) and namespace == own_namespace and start_time(pid) != start


def _new_name(owner: str = "") -> str:
    """A name that nobody has, for which this process answers, or the one of a file `owner`."""
    if owner:
        return f"{owner}-{uuid.uuid4().hex}"
    pid = os.getpid()
    return f"tllm-{_namespace()}-{pid}-{start_time(pid)}-{uuid.uuid4().hex}"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _namespace() -> int:
    """Containers may share the folder and not the process ids; 0 if there is no way to know."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def start_time(pid: int) -> int:
    """When a process began, in ticks since the host did: ids are used again. 0 if it is gone."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return 0
    # The name of the program, in parentheses, may hold anything.
    return int(stat.rpartition(")")[2].split()[19])


# -- rows that two processes map -----------------------------------------------------------------


class SharedRows:
    """`[rows, width]` float32, mapped by the process that reserved them and by those that open
    them.

    Attributes:
        values: `[rows, width]`.
    """

    def __init__(self, path: Path, width: int) -> None:
        """Map a file.

        Raises `ValueError` when it is not there: another host made it, or it was removed.
        """
        self._segment = SharedFile(path)
        self.path = path
        try:
            raw = self._segment.map()
        except OSError as error:
            raise ValueError(
                f"shared rows {path} cannot be opened: {error}. They are shared by processes of "
                "one host; across hosts, use transport='rpc'"
            ) from error
        self.values: npt.NDArray[np.float32] = raw.view(np.float32).reshape(-1, width)

    @classmethod
    def create(cls, rows: int, width: int) -> SharedRows:
        """Reserve them. Raises `OSError` when there is no room."""
        return cls(SharedFile.reserve(4 * rows * width).path, width)

    def __len__(self) -> int:
        return len(self.values)

    def pin(self, device: torch.device) -> bool:
        """Let a GPU write into the rows without waiting for the host; False when it cannot."""
        return page_lock(self.values.ctypes.data, self.values.nbytes, device)

    def unpin(self, device: torch.device) -> None:
        """Undo `pin`."""
        page_unlock(self.values.ctypes.data, device)

    def unlink(self) -> None:
        """Remove the name. The rows stay until nobody refers to them."""
        self._segment.release()

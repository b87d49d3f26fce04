"""Who writes into a store at this moment."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tllm.stores.format import WRITERS


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
        return os.pread(fd, 200, 0).decode(errors="replace").strip()
    except OSError:  # of a file system without locks
        return ""
    finally:
        os.close(fd)
    return ""

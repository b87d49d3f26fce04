"""An output that nobody reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def nobody_reads() -> Iterator[None]:
    """What is printed goes to nobody, as that of a command before `| head` that has ended."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as output, redirect_stdout(output):
        yield

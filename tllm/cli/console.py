"""What commands print to."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from rich.console import Console
from typer.core import TyperGroup

_UNBROKEN = 10_000
"""Columns of what is no terminal: a file, or a command that searches in the lines."""


def output_console(*, stderr: bool = False) -> Console:
    """A console. Lines are broken for a terminal alone, or where COLUMNS says how long they are."""
    console = Console(stderr=stderr)
    columns = os.environ.get("COLUMNS", "")
    if not console.is_terminal and not (columns.isdigit() and int(columns)):
        console.width = _UNBROKEN
    return console


class Commands(TyperGroup):
    """The command. Its work is done to the end though what it prints goes to nobody, as with
    `| head`; where it cannot be written, as on a full disk, that is said, and the status is 2."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with _printing():
            return super().main(*args, **kwargs)


class _Output:
    """A stream that notes what a write fails with, and does not raise it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self.error = error
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self.error = error


@contextmanager
def _printing() -> Iterator[None]:
    stream = sys.stdout
    status: object = 0
    output = _Output(stream)
    sys.stdout = cast(TextIO, output)
    try:
        yield
    except SystemExit as ended:
        status = ended.code
        raise
    finally:
        output.flush()
        sys.stdout = stream
        if output.error is not None:
            _give_up(output.error, stream, status)


def _give_up(error: OSError, stream: TextIO, status: object) -> None:
    """Let Python write nothing to a stream any more; raises `SystemExit` where that is to be
    known, and the status says nothing yet."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    if error.errno == errno.EPIPE:
        return
    print(f"what was printed could not all be written: {error.strerror}", file=sys.stderr)
    if not status:
        raise SystemExit(2)

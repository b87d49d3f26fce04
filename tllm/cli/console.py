"""What commands print to."""

from __future__ import annotations

import os

from rich.console import Console

_UNBROKEN = 10_000
"""Columns of what is no terminal: a file, or a command that searches in the lines."""


def output_console(*, stderr: bool = False) -> Console:
    """A console. Lines are broken for a terminal alone, or where COLUMNS says how long they are."""
    console = Console(stderr=stderr)
    columns = os.environ.get("COLUMNS", "")
    if not console.is_terminal and not (columns.isdigit() and int(columns)):
        console.width = _UNBROKEN
    return console

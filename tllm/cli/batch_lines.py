"""The input file of `tllm run-batch`, which is looked through before an engine starts."""

from __future__ import annotations

import json
from pathlib import Path

from tllm.server.bodies import refusal

_READ = "/v1/chat/completions"
"""The path at which a batch reads our fields."""


def check_lines(path: Path) -> None:
    """Refuse a file with a line that is no request, or that asks for interventions at a path that
    ignores them. What a chat asks is checked with the chat, and is an error in its answer.

    Raises `ValueError` naming the line.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    _check_line(f"-i {str(path)!r}: line {number}", line)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"-i {str(path)!r}: {error}; give a local file in UTF-8") from None


def _check_line(place: str, line: str) -> None:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is no JSON: {error}") from None
    body = given.get("body") if isinstance(given, dict) else None
    if not isinstance(body, dict):
        raise ValueError(
            f"{place} is no request; give an object with custom_id, method, url and body"
        )
    url = given.get("url")
    if url != _READ and (refused := refusal(str(url), body, lambda: f"use {_READ}")):
        raise ValueError(f"{place}: {refused[0]}")

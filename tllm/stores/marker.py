"""The file that says that a folder is a store, and of which version."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tllm.stores.error import StoreError
from tllm.stores.paths import MARKER
from tllm.stores.payload import sync_folder
from tllm.stores.publication import write_file
from tllm.stores.record import canonical_json
from tllm.stores.sidecar import FORMAT, VERSION


def write_marker(root: Path, staging: Path, sync: bool) -> None:
    """Mark a folder as a store, unless it is one.

    Raises `ValueError` when it is one of a version that is not known.
    """
    if (root / MARKER).exists():
        try:
            require_marker(root)
        except StoreError as error:
            raise ValueError(str(error)) from None
        return
    # Several writers may do this at once: they write the same, each in one go.
    staged = staging / MARKER
    write_file(
        staged, canonical_json({"format": FORMAT, "version": VERSION}).encode() + b"\n", sync
    )
    os.replace(staged, root / MARKER)
    if sync:
        sync_folder(root)


def require_marker(root: Path) -> None:
    """`StoreError` unless a folder is a store that this tLLM can read."""
    try:
        marker = json.loads((root / MARKER).read_bytes())
    except FileNotFoundError:
        raise StoreError(
            f"{str(root)!r} is no store: it has no {MARKER}; give the folder that was the root of "
            "a StoreWriter",
            "missing",
        ) from None
    except OSError as error:
        raise StoreError.from_os_error(f"{str(root)!r} cannot be read", error) from None
    except ValueError as error:
        raise StoreError(f"{str(root / MARKER)!r} is no JSON: {error}", "damaged") from None
    if not isinstance(marker, dict) or marker.get("format") != FORMAT:
        raise StoreError(f"{str(root / MARKER)!r} is not the marker of a {FORMAT}", "damaged")
    if marker.get("version") != VERSION:
        raise StoreError(
            f"{str(root)!r} has format version {marker.get('version')!r}; this tLLM reads version "
            f"{VERSION}: update it",
            "damaged",
        )

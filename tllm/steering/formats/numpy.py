"""Vectors in numpy's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tllm.steering.formats.contents import Contents, from_saved

MAGIC = b"\x93NUMPY"


def read(path: Path) -> Contents:
    """Read a `.npy` file, `[hidden]` or `[layers, hidden]`, or an `.npz` file of named arrays."""
    try:
        loaded: Any = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return from_saved(loaded)
        with loaded:
            arrays = {name: loaded[name] for name in loaded.files}
    except Exception as error:
        # Not only ValueError: of a damaged header numpy raises whatever its tokenizer does.
        raise ValueError(
            f"numpy cannot read it without pickles, which may run any code: {error}; save arrays "
            "of floating-point numbers"
        ) from None
    return from_saved(arrays)

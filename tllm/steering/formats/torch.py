"""Vectors that were saved with `torch.save`, read without running what a pickle may hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from tllm.steering.formats.contents import Contents, from_saved

_GLOBAL = re.compile(r"GLOBAL (\S+)")


def read(path: Path) -> Contents:
    """Read a `.pt` file: a tensor, or a dict as `from_saved` takes it.

    Loaded with `weights_only=True`: tensors, numbers, strings, lists and dicts. `ValueError` for a
    file that holds anything else, since restoring it could run any code.
    """
    try:
        value: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Not only UnpicklingError: on a damaged file the restricted unpickler fails in any way.
        named = _GLOBAL.search(str(error))
        what = f"holds {named[1]}" if named else "could not be restored as tensors"
        raise ValueError(
            f"it {what}, and a pickle with more than tensors may run any code when it is loaded, "
            "so it is not; where you trust it, load it yourself and give tllm.steering.load the "
            "result saved as safetensors, npz, or a dict of tensors (or, of repeng, the "
            "ControlVector itself)"
        ) from None
    return from_saved(value)

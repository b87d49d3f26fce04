"""Arrays in files of numpy, torch and safetensors, read without running what they hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from tllm.spec.reading import json_mapping
from tllm.steering.formats.contents import Contents, from_saved
from tllm.steering.module import FORMAT, SteeringModule, from_header

NUMPY_MAGIC = b"\x93NUMPY"

_UNNAMED = "arr_0"
"""What `np.savez(path, array)` calls the first array that is given without a name."""

_GLOBAL = re.compile(r"GLOBAL (\S+)")


def read_numpy(path: Path) -> Contents:
    """Read a `.npy` file, `[hidden]` or `[layers, hidden]`, or an `.npz` file of named arrays, or
    of one to which `np.savez` gave a name."""
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
    return from_saved(arrays[_UNNAMED] if [*arrays] == [_UNNAMED] else arrays)


def restored(file: Path) -> Any:
    """What `torch.save` put into a file of a folder, loaded with `weights_only=True`."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # on a damaged file the restricted unpickler fails in any way
        raise ValueError(
            f"its file {file.name} cannot be read as tensors alone, and anything else could run "
            f"code: {(str(error) or type(error).__name__).splitlines()[0]:.80}"
        ) from None


def read_torch(path: Path) -> Contents:
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


def read_safetensors(path: Path) -> Contents | SteeringModule:
    """Read a file; one that `SteeringModule.save` wrote comes back as the module it was.

    `ValueError` if a name of a tensor says no layer, see `tllm.steering.formats.names`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            names = list(file.keys())
            if "W_dec" in names:
                raise ValueError(
                    "it holds a sparse autoencoder (W_dec); give the folder that has it and its "
                    "cfg.json, and the features= that you want"
                )
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"it is damaged: {error}") from None
    contents = from_saved(tensors)
    if header.get("format") != FORMAT:
        return Contents(contents.placed, contents.stack, {**header, **contents.metadata})
    vectors: dict[str, dict[int, object]] = {}
    for each in contents.placed:
        vectors.setdefault(str(each.place.hook), {})[each.place.layer] = each.vector
    try:
        return from_header(vectors, json_mapping(header["tllm"], "its header"))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"it says it is {FORMAT}, but its header is not as SteeringModule.save writes it: "
            f"{type(error).__name__} {error}"
        ) from None

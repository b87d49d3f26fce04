"""Vectors in a safetensors file, tLLM's own or anybody's."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tllm.steering.formats.contents import Contents, from_saved
from tllm.steering.module import FORMAT, SteeringModule, from_header


def read(path: Path) -> Contents | SteeringModule:
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
        return from_header(vectors, json.loads(header["tllm"]))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"it says it is {FORMAT}, but its header is not as SteeringModule.save writes it: "
            f"{type(error).__name__} {error}"
        ) from None

"""Control vectors of llama.cpp and repeng: GGUF files with one tensor `direction.N` a layer.

`direction.N` is added to the stream that leaves block N, counting from 0: `post_block` of layer N.
The two programs that use these files agree on it.

- llama.cpp: `common_control_vector_load_one` (common/common.cpp) puts `direction.N` at offset
  N - 1, because there is none for layer 0, `llama_adapter_cvec::apply` (src/llama-adapter.cpp)
  takes `tensors[il]` from offset il - 1, and every model calls `build_cvec(cur, il)` on what
  leaves block il, just before it is named `l_out`. So `tensors[il]` is `direction.il`.
- repeng (repeng/extract.py and control.py): `export_gguf` writes `direction.{layer}`, where a
  layer's hidden states were `hidden_states[layer + 1]`, the output of block `layer`, and
  `ControlModel` adds it to the output of block `layer`.

llama.cpp refuses `direction.0`, repeng would write it for block 0; it is read so. Note that
llama.cpp's own cvector-generator names what it measured after block il `direction.{il + 1}`, so
its vectors act one block after the one they were measured at, here as in llama.cpp.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from tllm.spec.hooks import HookPoint
from tllm.spec.reading import json_mapping
from tllm.steering.formats.contents import Contents, Placed
from tllm.steering.formats.names import NamedPlace

MAGIC = b"GGUF"
ARCHITECTURE = "controlvector"

_DIRECTION = re.compile(r"direction\.(0|[1-9][0-9]*)")


def read(path: Path) -> Contents:
    """Read a control vector; F32, F16, BF16 and F64 tensors.

    Raises:
        ImportError: the `gguf` package is not installed, or older than 0.16.
        ValueError: not a control vector, or one that is not to be added to the stream.
    """
    try:
        import gguf
    except ImportError:
        raise ImportError(
            f"{path} is a GGUF file, and the package that reads them is not installed; "
            "pip install 'tllm[steering]'"
        ) from None
    if not hasattr(gguf.ReaderField, "contents"):
        raise ImportError("gguf is older than 0.16; pip install -U 'tllm[steering]'")
    try:
        file = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in file.fields.items()}
        tensors = [(each.name, each.tensor_type, np.array(each.data)) for each in file.tensors]
    except Exception as error:
        # The reader trusts what it reads, and fails in any way on a damaged file.
        raise ValueError(f"it is damaged, or of a GGUF version that is not read: {error}") from None
    architecture = fields.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(
            f"it is a GGUF file of general.architecture={architecture!r}; a control vector's is "
            f"{ARCHITECTURE!r}"
        )
    _check_is_added(fields)
    types = gguf.GGMLQuantizationType
    placed = []
    for name, kind, data in tensors:
        match = _DIRECTION.fullmatch(name)
        if match is None:
            raise ValueError(f"it has a tensor {name!r}; those of a control vector are direction.N")
        if kind not in (types.F32, types.F16, types.BF16, types.F64):
            raise ValueError(
                f"{name} is {kind.name}; directions are read in F32, F16, BF16 and F64, so export "
                "it in one of those"
            )
        vector = gguf.dequantize(data, kind) if kind == types.BF16 else data
        placed.append(Placed(NamedPlace(HookPoint.POST_BLOCK, int(match[1])), vector))
    if not placed:
        raise ValueError("it has no tensor direction.N, so there is nothing to steer with")
    return Contents(tuple(placed), metadata=_metadata(fields))


def _check_is_added(fields: dict[str, Any]) -> None:
    """Some writers put vectors into this container that are not for the residual stream."""
    native = fields.get("controlvector.easysteer")
    component = json_mapping(native, "its header of EasySteer").get("component") if native else None
    if component not in (None, "hidden_states"):
        raise ValueError(
            f"EasySteer wrote it for {component!r}; only directions of hidden_states are read"
        )
    mode = fields.get("glp.mode", "add")
    if mode != "add":
        raise ValueError(
            f"its glp.mode is {mode!r}, so its directions are not for adding; make a steering spec "
            "of them yourself, with the algorithm that they are for"
        )


def _metadata(fields: dict[str, Any]) -> dict[str, Any]:
    prefix = f"{ARCHITECTURE}."
    return {
        name.removeprefix(prefix): value
        for name, value in fields.items()
        if name.startswith(prefix) and isinstance(value, (str, int, float, bool))
    }

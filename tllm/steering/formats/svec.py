"""Vectors of CAST as IBM's `activation-steering` saves them: `SteeringVector.save`, a `.svec` file.

JSON with `directions`, vectors by layer, and `model_type`. Direction N is used where block N
begins, to judge by and to steer with: `LeashLayer`, which stands around block N, looks at what
enters it. So it goes to `pre_attn` of layer N, though it was measured on what leaves that block.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tllm.spec.hooks import HookPoint
from tllm.spec.reading import json_mapping
from tllm.steering.formats.contents import Contents, Placed
from tllm.steering.formats.names import NamedPlace


def read(path: Path) -> Contents:
    """Read a file. Raises `ValueError` for JSON that is something else."""
    saved = json_mapping(path.read_bytes(), "its JSON")
    directions = saved.get("directions")
    if not isinstance(directions, Mapping) or not directions:
        raise ValueError(
            f"it is JSON with {sorted(saved)}; what is read has 'directions', vectors by layer, as "
            "activation-steering saves them (.svec). A module's specification in JSON goes to "
            "llm.steering.register_module(name, json.load(file)), or to "
            "tllm serve --steering-module NAME=FILE.json"
        )
    if wrong := [name for name in directions if not name.isdecimal()]:
        raise ValueError(f"its directions have the layer {wrong[0]!r}; layers count from 0")
    placed = (
        Placed(NamedPlace(HookPoint.PRE_ATTN, int(layer)), vector)
        for layer, vector in directions.items()
    )
    return Contents(tuple(placed), metadata={"model_hint": saved.get("model_type")})

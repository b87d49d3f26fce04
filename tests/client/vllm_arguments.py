"""Writes `tllm/client/vllm_arguments.py`: the engine arguments of the vLLM that is installed.

python tests/client/vllm_arguments.py
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

from vllm import EngineArgs

PATH = Path(__file__).parents[2] / "tllm" / "client" / "vllm_arguments.py"
_PLAIN = {str: "str", int: "int", float: "float", bool: "bool", type(None): "None"}
_HEAD = '''"""vLLM's engine arguments, for editors and type checkers: those of vLLM 0.32.

Written by `python tests/client/vllm_arguments.py`. What has a type of vLLM's own is `Any` here.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class VllmArguments(TypedDict, total=False):
    """The fields of `vllm.EngineArgs`, but for the model."""

    # fmt: off
'''


def written(kind: Any) -> str:
    """A type as it is written."""
    arguments = typing.get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if typing.get_origin(kind) is typing.Literal:
        return f"Literal[{', '.join(map(json.dumps, arguments))}]"
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        parts = list(dict.fromkeys(map(written, arguments)))
        return "Any" if "Any" in parts else " | ".join(parts)
    if typing.get_origin(kind) in (list, set, dict, tuple):
        inner = ", ".join("..." if each is ... else written(each) for each in arguments)
        return f"{typing.get_origin(kind).__name__}[{inner}]"
    return "Any"


def line(name: str, kind: str) -> str:
    """A field; a long type in as few lines as it takes, which no formatter would."""
    whole = f"{name}: {kind}"
    if len(whole) > 96:
        whole = f"{name}: ({kind})"
    return textwrap.fill(
        whole, 100, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False
    )


def module() -> str:
    """The module."""
    fields = [field for field in dataclasses.fields(EngineArgs) if field.name != "model"]
    return _HEAD + "\n".join(line(field.name, written(field.type)) for field in fields) + "\n"


if __name__ == "__main__":
    PATH.write_text(module())

"""Writes `tllm/client/vllm_arguments.py`: the engine arguments of the vLLM that is installed.

python tests/client/vllm_arguments.py
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
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

'''


def written(kind: Any) -> str:
    """A type as it is written."""
    arguments = typing.get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if typing.get_origin(kind) is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        parts = list(dict.fromkeys(map(written, arguments)))
        return "Any" if "Any" in parts else " | ".join(parts)
    if typing.get_origin(kind) in (list, set, dict, tuple):
        inner = ", ".join("..." if each is ... else written(each) for each in arguments)
        return f"{typing.get_origin(kind).__name__}[{inner}]"
    return "Any"


def module() -> str:
    """The module."""
    fields = [field for field in dataclasses.fields(EngineArgs) if field.name != "model"]
    lines = [f"    {field.name}: {written(field.type)}" for field in fields]
    made = _HEAD + "\n".join(lines) + "\n"
    command = [sys.executable, "-m", "ruff", "format", "--line-length", "100", "-"]
    return subprocess.run(command, input=made, text=True, capture_output=True, check=True).stdout


if __name__ == "__main__":
    PATH.write_text(module())

"""Only `tllm.engine` knows vLLM's own engine. The import linter sees no parts of other packages."""

import ast
from pathlib import Path

import pytest

import tllm

TREE = Path(tllm.__file__).parent
PRIVATE = ("vllm.v1", "vllm.executor")


def imported(path: Path) -> list[str]:
    """Every module that a file imports, or a name of."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
    return found


ROOMS = sorted(
    p.name for p in TREE.iterdir() if p.is_dir() and p.name not in ("__pycache__", "engine")
)


@pytest.mark.parametrize("room", [*ROOMS, "."])
def test_only_the_engine_room_imports_vllms_engine(room):
    paths = TREE.glob("*.py") if room == "." else (TREE / room).rglob("*.py")
    found = {
        str(path.relative_to(TREE)): name
        for path in paths
        for name in imported(path)
        if name.startswith(PRIVATE)
    }
    assert found == {}


def test_the_engine_room_does():
    assert any(n.startswith(PRIVATE) for p in (TREE / "engine").glob("*.py") for n in imported(p))

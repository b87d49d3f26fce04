"""A function is read on one screen."""

import ast
from pathlib import Path

import tllm

TREE = Path(tllm.__file__).parent
MOST_LINES = 60


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, without its signature and its docstring."""
    body = function.body[ast.get_docstring(function, clean=False) is not None :]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_no_function_is_longer_than_a_screen_but_in_kernels():
    """What a GPU runs is one function, however many cases it has."""
    found = {}
    for path in sorted(TREE.rglob("*.py")):
        if "kernels" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if function and (lines := body_lines(node)) > MOST_LINES:
                found[f"{path.relative_to(TREE)}: {node.name}"] = lines
    assert found == {}

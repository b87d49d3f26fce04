"""One name, one idea: a reader who has met a class knows it by its name everywhere."""

import ast
from collections import defaultdict
from pathlib import Path

import tllm

TREE = Path(tllm.__file__).parent


def class_names() -> dict[str, list[str]]:
    """Where each class is made; private ones of a file count too."""
    found = defaultdict(list)
    for path in sorted(TREE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(TREE)))
    return found


def test_no_class_name_stands_twice():
    assert {name: places for name, places in class_names().items() if len(places) > 1} == {}


def test_no_class_is_called_as_one_of_collections_abc():
    assert not class_names().keys() & {"Sequence", "Mapping", "Iterable", "Iterator", "Callable"}

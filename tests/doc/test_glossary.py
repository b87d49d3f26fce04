"""The glossary speaks of what there is."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_glossary_names_classes_that_exist():
    classes = set()
    for path in (ROOT / "tllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes.add(node.name)
            elif isinstance(node, (ast.AnnAssign, ast.Assign)):
                targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                classes |= {each.id for each in targets if isinstance(each, ast.Name)}
    rows = re.findall(r"^\|.*\|$", (ROOT / "doc/developer-guides/glossary.md").read_text(), re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[-2])}
    assert len(named) > 15
    assert sorted(named - classes) == []


def test_no_word_is_explained_twice():
    text = (ROOT / "doc/developer-guides/glossary.md").read_text()
    words = [row.split("|")[1].strip() for row in re.findall(r"^\|.*\|$", text, re.M)]
    words = [word for word in words if word not in ("Word", "---")]
    assert len(words) == len(set(words))

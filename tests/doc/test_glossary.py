"""The glossary, and what is written for developers, speak of what there is."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def nodes():
    """Of all syntax trees of the package."""
    for path in (ROOT / "tllm").rglob("*.py"):
        yield from ast.walk(ast.parse(path.read_text()))


def members(node):
    """The names that the body of a class gives to it and, in its methods, to `self`."""
    found = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    found |= {each.name for each in node.body if isinstance(each, ast.AsyncFunctionDef)}
    for each in ast.walk(node):
        targets = getattr(each, "targets", [getattr(each, "target", None)])
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        found |= {target.attr for target in targets if isinstance(target, ast.Attribute)}
    return found


def test_documents_for_developers_name_members_that_exist():
    """As `Class.member`, of classes of ours and what they inherit from each other."""
    classes = {node.name: node for node in nodes() if isinstance(node, ast.ClassDef)}

    def has(name, member):
        if name not in classes:
            return True  # a base that is not ours
        bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
        return member in members(classes[name]) or any(has(base, member) for base in bases)

    named = set()
    for path in (ROOT / "doc/developer-guides").glob("*.md"):
        named |= set(re.findall(r"`([A-Z]\w+)\.(\w+)", path.read_text()))
    ours = {(name, member) for name, member in named if name in classes}
    assert len(ours) > 30
    assert sorted(pair for pair in ours if not has(*pair)) == []


def test_the_glossary_names_classes_that_exist():
    classes = set()
    for node in nodes():
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

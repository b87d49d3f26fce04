"""The code in the documents runs as it stands there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.child_process import run_script
from tllm.client.arguments import OurArguments
from tllm.engine.options import EngineOptions

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_PATH = re.compile(r"`((?:tllm|doc|tests|demo|examples|benchmarks)/[\w./-]*)`")

DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "doc").rglob("*.md")),
]


def python_blocks(document: Path) -> str:
    return "\n".join(_BLOCK.findall(document.read_text()))


#: Which model runner a test process drives is no business of a user's script.
_HARNESS = ("VLLM_USE_V2_MODEL_RUNNER", "TRITON_INTERPRET")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a script in a process of its own, in the repository's root unless another folder is said;
    what it printed."""
    for name in _HARNESS:
        monkeypatch.delenv(name, raising=False)

    def run_in_process(script: Path, cwd: Path = ROOT) -> str:
        log = tmp_path / "output.txt"
        run_script(script, log=log, environment={}, timeout=550, cwd=cwd, forks=True)
        return log.read_text()

    return run_in_process


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "doc/getting-started/write-your-first-consumer.md",
        "doc/guides/capture.md",
        "doc/guides/conditional-steering.md",
        "doc/guides/controlled-generation.md",
        "doc/guides/controllers.md",
        "doc/guides/lenses.md",
        "doc/guides/patching.md",
        "doc/guides/speculative-decoding.md",
        "doc/guides/steering.md",
        "doc/reference/esamp-usage.md",
        "doc/reference/port-catalog.md",
        "doc/reference/store-format.md",
    ],
)
def test_the_code_of_a_document_runs_from_top_to_bottom(
    name: str, run: Callable[[Path], str], tmp_path: Path
) -> None:
    code = python_blocks(ROOT / name)
    # What needs a GPU runs here on the demo model.
    code = code.replace("Qwen/Qwen2.5-7B-Instruct", "demo/model")
    small = 'dtype="bfloat16", enforce_eager=True, kv_cache_memory_bytes=2**28'
    code = code.replace('dtype="bfloat16"', small)
    script = tmp_path / "document.py"
    script.write_text(code)
    assert run(script)


_GUARD = 'if __name__ == "__main__":'
_ENGINE = re.compile(r"^(?:\w+ = )?(?:LLM|make_llm)\(", re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_a_document_whose_code_makes_an_engine_outside_a_guard_says_where_it_runs(document):
    """`run` above does not see it: there the main module is none that a new process imports."""
    if _ENGINE.search(python_blocks(document)):
        text = document.read_text()
        assert text.index("a notebook") < text.index("```python")
        assert f"In a script put them under `{_GUARD}`" in text


def test_an_example_makes_its_engine_behind_a_guard():
    for script in EXAMPLES:
        assert _GUARD in script.read_text(), script.name
        assert not _ENGINE.search(script.read_text()), script.name


#: Run beside a server, in `tests/server`.
_CLIENTS = {"openai_client.py"}
EXAMPLES = [p for p in sorted((ROOT / "examples").glob("*.py")) if p.name not in _CLIENTS]


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda p: p.name)
def test_an_example_runs_from_any_folder(
    script: Path, run: Callable[..., str], tmp_path: Path
) -> None:
    assert run(script, tmp_path)


def test_every_example_is_listed():
    listed = _PATH.findall((ROOT / "doc" / "README.md").read_text())
    examples = (ROOT / "examples").glob("[!_]*")
    found = {path.relative_to(ROOT).as_posix() for path in examples}
    assert {path.rstrip("/") for path in listed if path.startswith("examples/")} == found


def test_the_arguments_of_an_engine_are_listed_with_their_defaults():
    text = (ROOT / "doc" / "reference" / "arguments.md").read_text().partition("## Environment")[0]
    rows = [row.split("|")[1:3] for row in re.findall(r"^\| `.*$", text, re.MULTILINE)]
    names = [re.findall(r"`(\w+)`", row[0]) for row in rows]
    assert sorted(name for those in names for name in those) == sorted(OurArguments.__annotations__)
    for field in dataclasses.fields(EngineOptions):
        (default,) = (row[1] for row, those in zip(rows, names, strict=True) if field.name in those)
        shown = f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
        assert shown in default or field.default is None


def _leads_to(path: Path, heading: str) -> bool:
    """Whether a file is there, with the heading if one is named, as GitHub names it."""
    if not heading or not path.exists():
        return path.exists()
    titles = _HEADING.findall(path.read_text())
    return heading in {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    links = {
        f"{link}#{heading}": _leads_to(document.parent / link if link else document, heading)
        for link, heading in _LINK.findall(text)
    }
    paths = {path: (ROOT / path).exists() for path in _PATH.findall(text)}
    missing = [name for name, exists in {**links, **paths}.items() if not exists]
    assert not missing

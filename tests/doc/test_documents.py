"""The code in the documents runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
_PATH = re.compile(r"`((?:tllm|doc|tests|demo|examples|benchmarks)/[\w./-]*)`")

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "doc").rglob("*.md"))]


def python_blocks(document: Path) -> str:
    return "\n".join(_BLOCK.findall(document.read_text()))


#: Which model runner a test process drives is no business of a user's script.
_HARNESS = ("VLLM_USE_V2_MODEL_RUNNER", "TRITON_INTERPRET")


def run(script: Path) -> str:
    """Run a script as a user would, from the repository's root."""
    result = subprocess.run(
        [sys.executable, script],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in _HARNESS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "doc/getting-started/write-your-first-consumer.md",
        "doc/guides/capture.md",
        "doc/guides/controlled-generation.md",
        "doc/guides/steering.md",
        "doc/reference/port-catalog.md",
    ],
)
def test_the_code_of_a_document_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    code = python_blocks(ROOT / name)
    # What needs a GPU runs here on the demo model.
    code = code.replace("Qwen/Qwen2.5-7B-Instruct", "demo/model")
    code = code.replace('dtype="bfloat16"', 'dtype="bfloat16", enforce_eager=True')
    script = tmp_path / "document.py"
    script.write_text(code)
    assert run(script)


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_an_example_runs(script: Path) -> None:
    assert run(script)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    links = {link: (document.parent / link).exists() for link in _LINK.findall(text)}
    paths = {path: (ROOT / path).exists() for path in _PATH.findall(text)}
    missing = [name for name, exists in {**links, **paths}.items() if not exists]
    assert not missing

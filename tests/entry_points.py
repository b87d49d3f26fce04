"""The package's entry points as they are declared now."""

from __future__ import annotations

from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]


def declared_in(folder: Path) -> str:
    """Write the metadata of an installed tLLM into a folder that is to be on the path: an editable
    installation has the entry points of the day it was made."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    info = folder / "tllm-0.1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tllm\nVersion: 0.1.0\n")
    lines: list[str] = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return str(folder)

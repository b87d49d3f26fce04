"""The newest vLLM for tests on a CPU, for which there is no build: its Python, with the compiled
parts of the version that is installed.

    python -m tests.newest_vllm .newest && PYTHONPATH=$PWD/.newest pytest tests/engine

Nobody promises that the two fit. Where they did not, an operator would be missing or refuse its
arguments, and tests would fail.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from tllm.engine.versions import NEWEST

ALSO = ("oss-harmony==0.0.11", "orjson==3.13.0")
"""What it imports that the installed version does not."""


def make(folder: Path, version: str) -> None:
    """Put vLLM's Python and the installed kernels into a folder for `PYTHONPATH`."""
    installed = importlib.util.find_spec("vllm")
    assert installed is not None and installed.origin is not None
    kernels = Path(installed.origin).parent
    with tempfile.TemporaryDirectory() as wheels:
        _pip("download", "-d", wheels, f"vllm=={version}")
        [wheel] = Path(wheels).glob("vllm-*.whl")
        with ZipFile(wheel) as archive:
            own = [name for name in archive.namelist() if name.startswith("vllm/")]
            archive.extractall(folder, [name for name in own if not name.endswith(".so")])
    for library in kernels.rglob("*.so"):
        place = folder / "vllm" / library.relative_to(kernels)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, place)
    # vLLM takes the platform of a CPU where its version says so.
    described = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
    described.parent.mkdir(exist_ok=True)
    described.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    _pip("install", "--target", str(folder), *ALSO)


def _pip(command: str, *arguments: str) -> None:
    given = sys.executable, "-m", "pip", command, "-q", "--no-deps", *arguments
    subprocess.run(given, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vllm", default=str(NEWEST))
    asked = parser.parse_args()
    make(asked.folder, asked.vllm)

"""A peer's own virtual environment, outside of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_REPOSITORY = Path(__file__).parents[2]
_TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Environment:
    """What a peer is installed from.

    Attributes:
        pins: groups of arguments of `pip install`, one after the other; None for this
            environment.
        missing: why it cannot be installed, where that is known; nothing is tried then.
    """

    pins: tuple[tuple[str, ...], ...] | None
    missing: str = ""

    def python(self, name: str, cache: Path) -> Path:
        """The interpreter, installed now if it is not there.

        Raises:
            RuntimeError: it cannot be installed; says why.
        """
        if self.missing:
            raise RuntimeError(self.missing)
        if self.pins is None:
            return Path(sys.executable)
        folder = cache / name
        python, done = folder / "bin" / "python", folder / "installed"
        wanted = repr(self.pins)
        if done.exists() and done.read_text() == wanted:
            return python
        shutil.rmtree(folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(folder)])
        for arguments in self.pins:
            run([str(python), "-m", "pip", "install", "-q", *arguments])
        done.write_text(wanted)
        return python


def run(command: list[str]) -> None:
    """A command that is part of installing.

    Raises:
        RuntimeError: it failed; says why, in its own words.
    """
    done = subprocess.run(
        command, cwd=_REPOSITORY, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise RuntimeError((lines or done.stderr.splitlines() or ["pip failed"])[-1])


HERE = Environment(None)

ENVIRONMENTS = {
    "vLLM": HERE,
    "tLLM": HERE,
    "tLLM, queries": HERE,
    "vLLM's hidden-state extraction": HERE,
    # It asks for Python 3.12, but runs on 3.11, for which there are CPU builds of torch.
    "vllm-lens": Environment(
        (
            ("--no-deps", "-r", "requirements/cpu-oldest.lock"),
            ("--no-deps", "--ignore-requires-python", "vllm-lens==1.3.0", "zstandard==0.25.0"),
        )
    ),
    "nnsight": Environment(((_TORCH, "transformers==5.19.0", "nnsight==0.8.1"),)),
    "TransformerLens": Environment(((_TORCH, "transformer_lens==3.9.0"),)),
    "genlm-backend": Environment(((_TORCH, "genlm-backend==0.3.1"),)),
    "EasySteer": Environment(
        None,
        missing="a fork of vLLM that is built from its repository for a GPU: the package of that"
        " name (easysteer 0.0.1.dev0) is empty",
    ),
}

"""`--help`: every subcommand has it, at once and without what libraries say when they load."""

from __future__ import annotations

import subprocess
import sys

from child_process import python_path, run_command
from server import serving

_SCRIPT = """
import sys
from typer.main import get_command
from typer.testing import CliRunner
from tllm.cli import app

def asked(command, *before):
    yield before
    for name, inner in getattr(command, "commands", {}).items():
        yield from asked(inner, *before, name)

for names in asked(get_command(app)):
    found = CliRunner().invoke(app, [*names, "--help"])
    assert found.exit_code == 0 and "Usage:" in found.output, names
    print(" ".join(names))
print({"vllm", "torch"} & sys.modules.keys())
"""


def test_help_loads_neither_vllm_nor_torch():
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )
    *commands, loaded = found.stdout.splitlines()
    assert {"serve", "run-batch", "verify", "capture", "sweep", "strength-sweep", "store ls"} <= {
        *commands
    }
    assert (loaded, found.stderr) == ("set()", "")


def test_serve_has_the_help_of_vllms_own_options_too(tmp_path):
    asked = "serve", "--help=max-model-len"
    log = tmp_path / "log"
    status, ours = run_command(serving.__file__, *asked, log=log, environment=python_path())
    assert status == 0 and "--max-model-len" in ours and "--max-num-seqs" not in ours

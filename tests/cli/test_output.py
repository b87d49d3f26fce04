"""What commands do where what they print cannot be written."""

import os
import subprocess
import sys

import pytest
from closed_output import nobody_reads
from typer.testing import CliRunner

from tests.stores.samples import record_of
from tllm.cli import app
from tllm.stores import StoreWriter

RUN = [sys.executable, "-c", "from tllm.cli import app; app()"]


@pytest.mark.parametrize("asked", [["--help"], ["--version"]])
def test_what_cannot_be_printed_on_a_full_disk_is_said(asked):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*RUN, *asked], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "what was printed could not all be written: No space left on device\n"


def test_a_command_that_nobody_reads_does_its_work_to_the_end_and_has_its_status(tmp_path):
    with StoreWriter(tmp_path / "store") as writer:
        writer.submit(record_of("r", layers=2))
    out = tmp_path / "out"
    for asked, status in (["export", tmp_path / "store", out], 0), (["ls", tmp_path / "no"], 2):
        with nobody_reads(), pytest.raises(SystemExit) as ended:
            app(["store", *map(str, asked)])
        assert ended.value.code == status
    assert len([*out.iterdir()]) == 2


def test_the_shell_hears_nothing_of_a_reader_that_has_ended():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*RUN, "--help"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_is_python_s_own_again_afterwards():
    before = sys.stdout
    assert CliRunner().invoke(app, ["--version"]).output.startswith("tllm ")
    assert sys.stdout is before

"""Ctrl-C while requests are sent to an engine in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import interrupted_user

pytestmark = pytest.mark.skipif(
    os.environ["TLLM_TEST_RUNNER"] != "v1",
    reason="the interpreted V2 runner is set up in this process only",
)


def test_after_an_interrupt_in_a_message_the_engine_hears_the_next(tiny_model):
    """A message that is sent in part ends the thread with which the engine reads its messages."""
    tests = Path(__file__).parents[1]
    paths = {"PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
    user = subprocess.run(
        [sys.executable, interrupted_user.__file__, tiny_model],
        env=os.environ | paths | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=180,
        check=True,
    )
    assert user.stdout.split() == ["interrupted", "True"] * 2

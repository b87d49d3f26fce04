"""Ctrl-C while requests are sent to an engine in a process of its own."""

from __future__ import annotations

import pytest
from child_process import python_path, run_script

from engine import interrupted_user
from tllm.runtime.kernels.backend import INTERPRETED

pytestmark = pytest.mark.skipif(
    INTERPRETED,
    reason="the interpreted V2 runner is set up in this process only",
)


def test_after_an_interrupt_in_a_message_the_engine_hears_the_next(tiny_model, tmp_path):
    """A message that is sent in part ends the thread with which the engine reads its messages."""
    said = tmp_path / "said"
    run_script(
        interrupted_user,
        *(tiny_model, said),
        log=tmp_path / "log",
        environment=python_path() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        timeout=180,
        forks=True,
    )
    assert said.read_text().split() == ["interrupted", "True"] * 2

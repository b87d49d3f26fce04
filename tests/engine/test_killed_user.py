"""A user's process that is killed leaves no memory, and a store that goes on."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil
import pytest
from child_process import python_path, script_process

import tllm.stores
from engine import killed_user
from engine.asking import generate
from tllm.consumers.capture.filesystem import FilesystemConsumer
from tllm.runtime.kernels.backend import INTERPRETED
from tllm.shared_memory import FOLDER, sweep

pytestmark = pytest.mark.skipif(
    INTERPRETED,
    reason="the interpreted V2 runner is set up in this process only",
)


def test_a_user_that_is_killed_leaves_nothing_and_a_store_that_goes_on(tiny_model, llm, tmp_path):
    root = tmp_path / "store"
    environment = python_path() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    said, log = tmp_path / "said", tmp_path / "log"
    user = script_process(killed_user, tiny_model, root, said, log=log, environment=environment)
    user.start()
    try:
        while not said.exists():
            assert user.exitcode is None, log.read_text()
            time.sleep(0.05)
        others = [psutil.Process(int(pid)) for pid in said.read_text().split()]
    finally:
        user.kill()
        user.join()
    assert others
    for process in others:  # vLLM's engine outlives its user: whoever killed one ends both
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not psutil.wait_procs(others, timeout=60)[1]
    sweep()  # as the next engine does
    pids = [user.pid, *(process.pid for process in others)]
    left = [path.name for path in FOLDER.glob("tllm-*")]
    assert not [name for name in left for pid in pids if f"-{pid}-" in name]

    store = tllm.stores.open(root)
    assert store.verify().ok
    expected = store.record("whole").tensor("post_block", 1)
    llm.register_consumer(FilesystemConsumer(root, publish_interval=0.05))
    [output] = generate(llm, [killed_user.PROMPT], killed_user.asked("next", 3))
    result = output.outputs[0].capture_results["filesystem"]
    assert (result.status, result.error) == ("ok", None)
    rows = store.refresh().record("next").tensor("post_block", 1)
    assert (rows - expected).norm() < 1e-4 * expected.norm()

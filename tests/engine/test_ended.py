"""An engine's process that has ended is found to have, whatever its workers do."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import wait

import zmq
from vllm.v1.engine.core_client import BackgroundResources
from vllm.v1.engine.utils import CoreEngineProcManager

from tllm.engine.calls import has_ended


def _leave_a_child(read: int, write: int) -> None:
    """End, and leave a process behind that lives until the pipe is closed."""
    if os.fork() == 0:
        os.close(write)
        os.read(read, 1)
    os._exit(0)


def test_an_engine_has_ended_also_where_a_forked_worker_outlives_it() -> None:
    read, write = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=_leave_a_child, args=(read, write))
    process.start()
    os.close(read)
    try:
        manager = object.__new__(CoreEngineProcManager)
        manager.processes = [process]
        resources = BackgroundResources(zmq.Context.instance(), engine_manager=manager)
        deadline = time.monotonic() + 10
        while not has_ended(resources):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert wait([process.sentinel], 0.2) == []  # for this vLLM waits: the child holds it open
    finally:
        os.close(write)
    assert wait([process.sentinel], 10) == [process.sentinel]

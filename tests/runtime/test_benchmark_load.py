"""The load that a benchmark is measured under, and which figures it is measured for."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from benchmarks.load import Load
from benchmarks.pairs import Copies, measure, step_costs
from benchmarks.workload import BENCHMARKS

HELD = """
import os, subprocess, sys
from benchmarks.load import Load
sleeper = subprocess.Popen(["sleep", "60"])
with Load(cores=1, neighbours=2):
    print(sleeper.pid, flush=True)
    sys.stdin.readline()
sleeper.kill()
"""


@pytest.fixture
def loaded():
    """A process that has a load and an older child; the process, and the child."""
    process = subprocess.Popen(
        [sys.executable, "-c", HELD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child = psutil.Process(int(process.stdout.readline()))
    yield process, child
    process.kill()
    child.kill()  # it has the same standard output, whose end is waited for
    process.communicate()


def neighbours_of(process):
    return [
        each
        for each in psutil.Process(process.pid).children()
        if "benchmarks.neighbour" in each.cmdline()
    ]


def test_what_was_started_before_has_the_cores_of_the_neighbours(loaded):
    process, child = loaded
    neighbours = neighbours_of(process)
    assert len(neighbours) == 2
    one = [sorted(os.sched_getaffinity(0))[0]]
    assert [each.cpu_affinity() for each in (child, *neighbours)] == [one] * 3


def test_neighbours_end_with_a_process_that_was_killed(loaded):
    process, _ = loaded
    neighbours = neighbours_of(process)
    assert neighbours
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(neighbours, timeout=30)
    assert not alive


def is_neighbour(process):
    try:
        return "benchmarks.neighbour" in process.cmdline()
    except psutil.ZombieProcess:  # a child that another test has left, which has ended
        return False


def test_afterwards_every_thread_has_its_own_cores_again():
    before = os.sched_getaffinity(0)
    child = subprocess.Popen(["sleep", "60"])
    try:
        last = {max(before)}
        os.sched_setaffinity(child.pid, last)
        with Load(cores=1, neighbours=1) as load:
            assert os.sched_getaffinity(0) == os.sched_getaffinity(child.pid) == {*load.cores}
            # Other tests of this process may have left children, in any order.
            [neighbour] = [each for each in psutil.Process().children() if is_neighbour(each)]
            assert load.described()["neighbours"] == 1
        assert os.sched_getaffinity(0) == before
        assert os.sched_getaffinity(child.pid) == last
        assert not neighbour.is_running()
    finally:
        child.kill()
        child.wait()


class Rounds:
    """An engine whose rounds take as long as they are told to, quiet and loaded."""

    def __init__(self, quiet, loaded):
        self.seconds = {True: loaded, False: quiet}

    def round(self, benchmark, number):
        burning = any(map(is_neighbour, psutil.Process().children()))
        seconds = self.seconds[burning]
        times = dict.fromkeys(("step_seconds", "start_seconds", "end_seconds"), seconds)
        return {"seconds": seconds, "steps": 1, "tokens": 8, "counters": {}, **times}

    def costs(self, benchmark, number):
        return {"steps_timed": 1, "host_us": 1e6 * self.seconds[False]}


def test_the_ratio_under_load_is_of_loaded_rounds_on_both_sides():
    vllm, tllm = Copies([Rounds(1.0, 4.0)]), Copies([Rounds(2.0, 5.0)])
    (found,) = measure(vllm, tllm, [BENCHMARKS["idle-tiny"]], pairs=2, loaded=True)
    assert found["ratios"] == [0.5, 0.5]
    assert found["loaded"]["ratios"] == [0.8, 0.8]
    assert found["loaded"]["vllm_tokens_per_second"] == 2.0
    assert found["loaded"]["neighbours"] == 8
    assert found["loaded"]["cores"] == sorted(os.sched_getaffinity(0))[:4]
    costs = step_costs(vllm, tllm, [BENCHMARKS["idle-tiny"]])
    assert costs["idle-tiny"]["more_host_us"] == 1e6
    (quiet,) = measure(vllm, tllm, [BENCHMARKS["idle-tiny"]], pairs=1)
    assert "loaded" not in quiet

"""What the workers have room for: tensor-parallel ranks keep the same rows, and pipeline stages
those of their own layers."""

from types import SimpleNamespace

import pytest

from tllm.client.calls import drive
from tllm.client.kept_rows import RowKeeping
from tllm.engine.worker_calls import WorkerCalls

ROW_BYTES = 512
PLACES = [("q", layer) for layer in range(4)]


def worker(layers, free):
    patching = SimpleNamespace(
        has=lambda _, layer: layer in layers, free_bytes=lambda *, on_host: free
    )
    return SimpleNamespace(_session=SimpleNamespace(patching=patching))


def keeping(workers):
    """The client of an engine with these workers."""
    facts = SimpleNamespace(row_bytes=ROW_BYTES, max_patch_mib=1, max_patch_host_mib=1)

    def ask(call):
        assert call.method == "patch_room"
        return [WorkerCalls.patch_room(each, *call.args) for each in workers]

    return RowKeeping(SimpleNamespace(facts=facts, ask=ask))


@pytest.mark.parametrize(
    ("workers", "runs"),
    [
        ([worker(range(4), 2**20)], 8),
        ([worker(range(4), 2**20)] * 4, 8),
        ([worker(range(4), 2**20), worker(range(4), 2**19)], 4),
        ([worker((0, 1), 2**20), worker((2, 3), 2**20)], 17),
        ([worker((0, 1, 2), 2**20), worker((3,), 2**20)], 11),
        ([worker(range(4), 2**20), worker((), 2**10)], 8),
    ],
)
def test_the_worker_with_the_least_room_counts(workers, runs):
    there = keeping(workers)
    assert drive(there.room(60, PLACES), lambda answers: answers) == runs
    prompts = [[1] * 60] * runs
    drive(there._check_room(prompts, [PLACES] * runs, False), lambda answers: answers)
    more = [*prompts, [1] * 60]
    with pytest.raises(ValueError, match=r"in a worker, and of max_patch_mib=1 there are"):
        drive(there._check_room(more, [PLACES] * (runs + 1), False), lambda answers: answers)
    without = [[*PLACES]] * runs + [[]]
    drive(there._check_room(more, without, False), lambda answers: answers)

"""What consumers write, against sums made vector by vector."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tllm.ports import RequestInfo
from tllm.runtime.columns import DECODE, PREFILL, Column
from tllm.runtime.slots import RunningSequence, Slots
from tllm.runtime.taps import Taps
from tllm.runtime.writer import Additions
from tllm.spec.hooks import HookPoint

HIDDEN, REQUESTS = 3, 5
TAP = HookPoint.POST_BLOCK, 0


class Worker:
    """Additions of a worker with some running sequences and one tap."""

    def __init__(self):
        self.taps = Taps(
            {TAP: None},
            second={},
            hidden_size=HIDDEN,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_tokens=16,
            max_programs=2,
            add_rows=2,
        )
        self.slots = Slots(REQUESTS)
        self.additions = Additions(self.taps, self.slots)
        self.requests = [
            RequestInfo(f"{i}", f"{i}", 0, 1, slot=self.slots.pop_slot(), prompt_len=1)
            for i in range(REQUESTS)
        ]
        for info in self.requests:
            self.slots.add_sequence(RunningSequence(info.request_id, info, {}, False))

    def added(self, phase):
        """`[requests, hidden]`, what the tap makes of rows of zeros of a phase."""
        self.taps.commit()
        add_rows = self.slots.values[Column.ADD, phase, [r.slot for r in self.requests]]
        self.taps.plan[Column.ADD.plan_row, :REQUESTS] = torch.from_numpy(add_rows)
        rows = torch.zeros(REQUESTS, HIDDEN)
        torch.ops.tllm.tap(rows, None, self.taps.descriptors[0], self.taps.plan)
        return rows


WHO = st.lists(st.integers(0, REQUESTS - 1), unique=True, max_size=REQUESTS)
WRITES = st.tuples(st.integers(0, 2), WHO, st.sampled_from(["a vector each", "one", "clear"]))
PHASES = [(PREFILL, DECODE), (DECODE,), (DECODE,)]


@settings(deadline=None)
@given(st.lists(WRITES, max_size=12))
def test_all_that_is_written_adds_up(writes):
    worker = Worker()
    writers = [worker.additions.add_writer(TAP, phases) for phases in PHASES]
    expected = torch.zeros(len(writers), 2, REQUESTS, HIDDEN)
    for number, (which, who, what) in enumerate(writes, start=1):
        requests = [worker.requests[i] for i in who]
        if what == "clear":
            writers[which].clear(requests)
            expected[which][:, who] = 0.0
            continue
        shape = (len(who), HIDDEN) if what == "a vector each" else (HIDDEN,)
        vectors = torch.arange(float(torch.Size(shape).numel())).view(shape) + 100.0 * number
        writers[which].set(requests, vectors)
        for phase in PHASES[which]:
            expected[which][phase, who] = vectors
        for phase in (PREFILL, DECODE):
            assert torch.equal(worker.added(phase), expected.sum(0)[phase])
    for phase in (PREFILL, DECODE):
        assert torch.equal(worker.added(phase), expected.sum(0)[phase])


@pytest.mark.parametrize("shape", [(REQUESTS, HIDDEN), (HIDDEN,)])
def test_what_was_written_stays_though_its_tensor_is_used_again(shape):
    """Rows of the ring, too, are others in the next step."""
    worker = Worker()
    first, second = (worker.additions.add_writer(TAP, (DECODE,)) for _ in range(2))
    vectors = torch.ones(shape)
    first.set(worker.requests, vectors)
    vectors.fill_(100.0)
    second.set(worker.requests, torch.full((HIDDEN,), 2.0))
    assert torch.equal(worker.added(DECODE), torch.full((REQUESTS, HIDDEN), 3.0))

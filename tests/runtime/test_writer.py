"""What consumers write, against sums made vector by vector."""

from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tllm.ports import RequestInfo
from tllm.runtime.columns import DECODE, PREFILL, STAGES, Column
from tllm.runtime.slots import RunningSequence, Slots
from tllm.runtime.taps import Taps
from tllm.runtime.writer import Additions
from tllm.spec.hooks import HookPoint

HIDDEN, REQUESTS = 3, 5
TAP, OTHER_TAP = (HookPoint.POST_BLOCK, 0), (HookPoint.POST_BLOCK, 1)


class Worker:
    """Additions of a worker with some running sequences and one tap."""

    def __init__(self, device="cpu"):
        self.taps = Taps(
            {TAP: None, OTHER_TAP: None},
            second={},
            hidden_size=HIDDEN,
            dtype=torch.float32,
            device=torch.device(device),
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
        self._asked = {}

    def named(self, who):
        """Some of the requests: the very same object each time, as a steady batch has it."""
        return self._asked.setdefault(tuple(who), tuple(self.requests[i] for i in who))

    def replace(self, number):
        """A sequence ends, and another has its slot."""
        old = self.requests[number]
        self.additions.forget(old.slot)
        self.slots.remove(old.request_id)
        name = f"{old.request_id}'"
        new = RequestInfo(name, name, 0, 1, slot=self.slots.pop_slot(), prompt_len=1)
        assert new.slot == old.slot
        self.slots.add_sequence(RunningSequence(name, new, {}, False))
        self.requests[number] = new

    def added(self, phase, tap=TAP):
        """`[requests, hidden]`, what the tap makes of rows of zeros of a phase."""
        self.taps.commit()
        add_rows = self.slots.values[Column.ADD, phase, [r.slot for r in self.requests]]
        self.taps.plan[Column.ADD.plan_row, :REQUESTS] = torch.from_numpy(add_rows)
        rows = torch.zeros(REQUESTS, HIDDEN)
        descriptor = self.taps.descriptors[self.taps.index[tap] // STAGES]
        torch.ops.tllm.tap(rows, None, descriptor, self.taps.plan)
        return rows


WHO = st.sampled_from([(), (0,), (2, 1), (0, 1, 2, 3, 4), (4, 2, 0)])
WRITES = st.tuples(
    st.integers(0, 3), WHO, st.sampled_from(["a vector each", "a vector each", "one", "clear"])
)
ENDS = st.integers(0, REQUESTS - 1)
PHASES = [(PREFILL, DECODE), (DECODE,), (DECODE,), (DECODE,)]
TAPS = [TAP, TAP, TAP, OTHER_TAP]


@given(st.lists(WRITES | ENDS, max_size=16))
def test_all_that_is_written_adds_up(actions):
    """Also where the same requests are written again, and those whose sequence has ended."""
    worker = Worker()
    writers = [worker.additions.add_writer(t, p) for t, p in zip(TAPS, PHASES, strict=True)]
    expected = torch.zeros(len(writers), 2, REQUESTS, HIDDEN)
    for number, action in enumerate(actions, start=1):
        if isinstance(action, int):
            worker.replace(action)
            expected[:, :, action] = 0.0
        else:
            which, who, what = action
            requests = worker.named(who)
            runs = [i for i, r in zip(who, requests, strict=True) if r is worker.requests[i]]
            of_running = [n for n, i in enumerate(who) if i in runs]
            if what == "clear":
                writers[which].clear(requests)
                expected[which][:, runs] = 0.0
            else:
                shape = (len(who), HIDDEN) if what == "a vector each" else (HIDDEN,)
                vectors = torch.arange(float(torch.Size(shape).numel())).view(shape)
                vectors = vectors + 100.0 * number
                writers[which].set(requests, vectors)
                for phase in PHASES[which]:
                    expected[which][phase, runs] = (
                        vectors[of_running] if len(shape) > 1 else vectors
                    )
        for tap in (TAP, OTHER_TAP):
            own = expected[[number for number, at in enumerate(TAPS) if at == tap]].sum(0)
            for phase in (PREFILL, DECODE):
                assert torch.equal(worker.added(phase, tap), own[phase])


def test_writers_at_one_tap_that_repeat_themselves_add_up():
    worker = Worker()
    writers = [worker.additions.add_writer(TAP, (DECODE,)) for _ in range(2)]
    requests = worker.named(range(REQUESTS))
    for number in range(3):
        for writer in writers:
            writer.set(requests, torch.full((REQUESTS, HIDDEN), float(number)))
        assert torch.equal(worker.added(DECODE), torch.full((REQUESTS, HIDDEN), 2.0 * number))


def test_a_write_for_the_same_requests_does_nothing_for_each_of_them():
    worker = Worker()
    writer = worker.additions.add_writer(TAP, (PREFILL, DECODE))
    requests = worker.named(range(REQUESTS))
    writer.set(requests, torch.zeros(REQUESTS, HIDDEN))
    before = dict(writer.values)
    vectors = torch.arange(float(REQUESTS * HIDDEN)).view(REQUESTS, HIDDEN)
    writer.set(requests, vectors)
    assert all(writer.values[row] is before[row] for row in before)
    assert torch.equal(worker.added(DECODE), vectors)


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


def test_a_request_that_is_named_twice_has_its_last_vector_each_time():
    worker = Worker()
    writer = worker.additions.add_writer(TAP, (PREFILL, DECODE))
    requests = worker.named([0, 1, 0])
    for number in range(2):
        vectors = number + torch.arange(3.0)[:, None].expand(3, HIDDEN)
        writer.set(requests, vectors)
        for phase in (PREFILL, DECODE):
            assert torch.equal(worker.added(phase)[:2], vectors[[2, 1]])


def test_a_consumer_that_learns_outside_of_inference_mode_writes():
    """The engine is in inference mode; who makes gradients leaves it."""
    worker = Worker()
    requests = worker.named(range(REQUESTS))
    vectors = torch.ones(REQUESTS, HIDDEN)
    with torch.inference_mode():
        writer = worker.additions.add_writer(TAP, (DECODE,))
        writer.set(requests, vectors)
        for number in (2, 3):
            with torch.inference_mode(False), torch.enable_grad():
                writer.set(requests, (number * vectors).requires_grad_())
            assert torch.equal(worker.added(DECODE), number * vectors)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def test_a_write_for_a_sequence_that_has_ended_is_not_added_to_the_next_one():
    """Its results were made, and the engine lets go of it later."""
    worker = Worker()
    first, second = (worker.additions.add_writer(TAP, (DECODE,)) for _ in range(2))
    old = worker.requests[0]
    worker.additions.forget(old.slot)
    ended = worker.slots.running(old)
    ended.ended = True
    first.set([old], torch.ones(HIDDEN))
    worker.slots.remove(old.request_id)
    new = RequestInfo("new", "new", 0, 1, slot=worker.slots.pop_slot(), prompt_len=1)
    worker.slots.add_sequence(RunningSequence("new", new, {}, False))
    worker.requests[0] = new
    second.set([new], torch.full((HIDDEN,), 2.0))
    assert worker.added(DECODE)[0].tolist() == [2.0] * HIDDEN


@pytest.mark.parametrize("who", [(0,), (0, 1)], ids=["alone", "with others"])
def test_what_was_written_anew_is_known_until_its_sequence_ends(who):
    worker = Worker()
    writer = worker.additions.add_writer(TAP, (DECODE,))

    def renewed(number, phase=DECODE):
        return worker.additions.renewed([writer], worker.requests[number].slot, [phase])

    requests = worker.named(who)
    writer.set(requests, torch.ones(len(who), HIDDEN))
    assert not renewed(0)
    for _ in range(2):  # the second time it is a repetition
        writer.set(requests, torch.ones(len(who), HIDDEN))
    writer.set(worker.named((2,)), torch.ones(HIDDEN))
    assert [renewed(0), renewed(2), renewed(0, PREFILL)] == [True, False, False]
    worker.replace(0)
    assert not renewed(0)


def test_a_first_write_counts_as_anew_where_rows_are_computed_already():
    worker = Worker()
    writer = worker.additions.add_writer(TAP, (PREFILL, DECODE))
    slots = np.array([r.slot for r in worker.requests[:2]])
    worker.slots.deliver(slots, np.array([1, 2], np.int32))  # of a prompt of one token each
    writer.set(worker.requests[:2], torch.ones(HIDDEN))
    slots = slots.tolist()
    found = [worker.additions.renewed([writer], at, [p]) for at in slots for p in (PREFILL, DECODE)]
    assert found == [True, False, True, True]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_what_is_no_number_is_never_added(device, value):
    """Where the host has to be told by the device, nothing is added, and a later write refused."""
    worker = Worker(device)
    writer = worker.additions.add_writer(TAP, (DECODE,))
    requests = worker.named(range(REQUESTS))
    diverged = torch.ones(REQUESTS, HIDDEN, dtype=torch.float64, device=device)
    writer.set(requests, diverged)
    diverged[2, 1] = value
    with pytest.raises(ValueError, match="NaN, infinite or beyond the model's dtype"):
        for _ in range(3):
            writer.set(requests, diverged)
            torch.cuda.synchronize() if device == "cuda" else None
    table = worker.taps._add_tables[worker.taps.index[TAP]]
    assert table.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e5])
def test_what_a_model_in_float16_cannot_have_is_left_out_where_nobody_waits(dtype, value):
    worker = Worker()
    worker.taps.dtype = torch.float16
    writer = worker.additions.add_writer(TAP, (DECODE,))
    vectors = torch.ones(REQUESTS, HIDDEN, dtype=dtype)
    vectors[2, 1] = value
    found = writer._without_what_is_no_number(vectors).half()
    assert found.isfinite().all() and found.sum() == REQUESTS * HIDDEN - 1
    with pytest.raises(ValueError, match="NaN, infinite or beyond the model's dtype"):
        writer._without_what_is_no_number(torch.ones(REQUESTS, HIDDEN, dtype=dtype))


def test_what_is_no_tensor_is_refused():
    worker = Worker()
    writer = worker.additions.add_writer(TAP, (DECODE,))
    with pytest.raises(TypeError, match="vectors are list; give a tensor"):
        writer.set(worker.requests, [0.0] * HIDDEN)
    with pytest.raises(TypeError, match="complex64; a residual stream has real numbers"):
        writer.set(worker.requests, torch.ones(HIDDEN, dtype=torch.complex64))


def on_another_thread(work):
    thread = Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("then", ["clear", "set"])
def test_what_the_engines_thread_writes_after_another_thread_stays(then):
    worker = Worker()
    writer = worker.additions.add_writer(TAP, (DECODE,))
    ones = torch.ones(REQUESTS, HIDDEN)
    on_another_thread(lambda: writer.set(worker.requests, ones))
    if then == "clear":
        writer.clear(worker.requests)
    else:
        writer.set(worker.requests, 2 * ones)
    worker.additions.commit()
    expected = torch.zeros_like(ones) if then == "clear" else 2 * ones
    assert torch.equal(worker.added(DECODE), expected)


def test_a_writer_that_was_removed_changes_nothing():
    """Its consumer may have a thread that goes on."""
    worker = Worker()
    stays, goes = (worker.additions.add_writer(TAP, (DECODE,)) for _ in range(2))
    requests, ones = worker.named(range(REQUESTS)), torch.ones(REQUESTS, HIDDEN)
    stays.set(requests, ones)
    worker.additions.remove_writer(goes)
    for number in range(2):
        goes.set(requests, 10.0 * ones)
        assert torch.equal(worker.added(DECODE), ones), number
    worker.additions.remove_writer(stays)
    stays.set(requests, ones)
    assert not worker.additions.writers, "steps go on asking for writers"
    assert not worker.added(DECODE).any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")
def test_vectors_of_another_stream_are_added_when_they_are_there():
    """Though they are changed and freed right after they were written."""
    worker = Worker("cuda")
    writer = worker.additions.add_writer(TAP, (DECODE,))
    requests, side = worker.named(range(REQUESTS)), torch.cuda.Stream()
    for number in (1.0, 2.0):
        with torch.cuda.stream(side):
            torch.cuda._sleep(10**9)
            vectors = torch.full((REQUESTS, HIDDEN), number, device="cuda")
            writer.set(requests, vectors)
            vectors.fill_(100.0)
            del vectors
            torch.full((REQUESTS, HIDDEN), 200.0, device="cuda")
        worker.additions.commit()
        rows = [2 * request.slot + DECODE for request in requests]
        table = worker.taps._add_tables[worker.taps.index[TAP]]
        assert torch.equal(table[rows].cpu(), torch.full((REQUESTS, HIDDEN), number))

"""Shared memory is whole, and nothing of a killed process stays."""

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tllm import result_memory, shared_memory
from tllm.result_memory import ResultMemory
from tllm.shared_memory import FOLDER, SharedFile, SharedRows, populate, sweep

OWNER = """
import sys, time, torch
from tllm.answers import SharedFolder
from tllm.answers import AnswerWriter
from tllm.result_memory import ResultMemory
from tllm.shared_memory import SharedFile, SharedRows
folder, memory = SharedFolder(), ResultMemory()
kept = [SharedRows.create(4, 8), SharedFile.reserve(100), memory.empty((1 << 20,), torch.float32)]
AnswerWriter(memory).encode({"linked": kept[2].numpy(), "copied": bytes(9) * 200_000}, folder.token)
AnswerWriter().encode(torch.zeros(1 << 20).numpy(), folder.token)
print(folder.token, flush=True)
time.sleep(600)
"""


def names(of=None):
    """Of shared files: of this process, unless part of another's names is given."""
    of = f"-{os.getpid()}-" if of is None else of
    return {path.name for path in FOLDER.glob("tllm-*") if of in path.name}


@pytest.fixture
def owner():
    """A process with files of every kind, and the part of their names that tells it."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        token = process.stdout.readline().strip()
        yield process, f"-{process.pid}-{token.split('-')[3]}-"
    finally:
        process.kill()
        process.wait()


def test_a_killed_process_leaves_nothing(owner):
    process, own = owner
    assert len(names(own)) >= 6
    before = names(own)
    sweep()
    assert names(own) == before  # it lives
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert names(own) == before
    assert sweep() >= len(before)
    assert not names(own)


ENDS = """
import torch, weakref
from tllm.result_memory import ResultMemory

def as_a_thread_does():
    print(tuple(memory.empty((1 << 20,), torch.float32).shape))

memory = ResultMemory()
weakref.finalize(memory, as_a_thread_does)  # what is made later ends before
memory.empty((1 << 20,), torch.float32)
"""


def test_a_process_that_ends_may_still_ask_for_memory():
    command = [sys.executable, "-c", ENDS]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (0, "(1048576,)\n"), process.stderr


def test_an_id_that_is_used_again_is_another_process():
    mine = SharedFile.reserve(10)
    parts = mine.path.name.split("-")
    parts[3] = str(int(parts[3]) - 1)
    earlier = FOLDER / "-".join(parts)
    earlier.touch()
    sweep()
    assert mine.path.exists() and not earlier.exists()
    mine.release()


def test_files_of_other_users_and_containers_are_left_alone(monkeypatch):
    dead = f"-999999999-1-{32 * 'a'}"
    namespace = SharedFile.reserve(1).path.name.split("-")[1]
    theirs, elsewhere = FOLDER / f"tllm-{namespace}{dead}", FOLDER / f"tllm-1{dead}"
    try:
        theirs.touch()
        elsewhere.touch()
        user = os.geteuid()
        with monkeypatch.context() as other_user:
            other_user.setattr(os, "geteuid", lambda: user + 1)
            sweep()
        assert theirs.exists()
        sweep()
        assert not theirs.exists() and elsewhere.exists()
    finally:
        theirs.unlink(missing_ok=True)
        elsewhere.unlink()


def test_what_has_another_name_is_left_alone():
    strange = FOLDER / "tllm-something-else"
    strange.touch()
    try:
        os.utime(strange, (0, 0))
        sweep()
        assert strange.exists()
    finally:
        strange.unlink()


def test_a_link_outlives_the_name_it_was_made_of():
    reader = SharedFile.reserve(1)
    file = SharedFile.reserve(1000)
    file.map()[:] = np.arange(1000) % 251
    linked = file.link(reader.path.name)
    assert linked.path.name.startswith(f"{reader.path.name}-")
    file.release()
    found = linked.map()
    linked.release()
    reader.release()
    assert np.array_equal(found, np.arange(1000) % 251)


def test_rows_are_those_of_whoever_maps_them():
    mine = SharedRows.create(3, 5)
    other = SharedRows(mine.path, 5)
    mine.values[1] = 7
    assert len(other) == 3 and other.values[1].tolist() == [7] * 5
    mine.unlink()
    other.values[2] = 8
    assert mine.values[2, 0] == 8
    with pytest.raises(ValueError, match="across hosts"):
        SharedRows(mine.path, 5)


def test_memory_for_results_is_free_when_no_view_of_it_is_left():
    memory = ResultMemory()
    before = names()
    view = memory.empty((2, 1 << 20), torch.uint8)[1:]
    [made] = names() - before
    raw = memoryview(view.numpy()).cast("B")
    [(file, offset)] = memory.locate([raw])
    assert (file.path.name, offset) == (made, 1 << 20)
    del raw
    memory.trim()
    assert names() - before == {made}
    del view
    memory.trim(60)
    assert names() - before == {made}
    memory.trim()
    assert not names() - before
    assert memory.locate([memoryview(b"abc")]) == [None]


MIB = 1 << 20


def given_to(reader, memory, rows):
    """A link to the file that rows are in, as an answer has it."""
    [(file, offset)] = memory.locate([memoryview(rows.numpy()).cast("B")])
    assert offset == 0
    return file.link(reader.path.name)


def test_memory_for_results_is_used_again_when_no_reader_has_it():
    memory, reader = ResultMemory(), SharedFile.reserve(1)

    def ask(nbytes=4 * MIB):
        rows = memory.empty((nbytes,), torch.uint8)
        [(file, _)] = memory.locate([memoryview(rows.numpy())])
        return rows, file.path

    rows, first = ask()
    rows.fill_(7)
    link = given_to(reader, memory, rows)
    del rows
    other, second = ask()  # a link that nobody has opened
    assert second != first
    found = link.hold()
    link.release()
    part = torch.from_numpy(found)[MIB:]
    del found, other
    _kept, path = ask()  # a part of it is still held
    assert path == second
    assert part.unique().tolist() == [7]
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    del part
    _held, path = ask()
    assert path not in (first, second)  # a forked process has it, too
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    again, path = ask(4 * MIB - 9)
    assert path == first
    del again
    _small, path = ask(MIB)
    assert path != first  # it would waste more than it uses
    reader.release()


def test_only_memory_that_was_used_before_is_lent_to_devices():
    memory, reader, cpu = ResultMemory(), SharedFile.reserve(1), torch.device("cpu")
    assert memory.used_before(1, 1 << 30, cpu) is None
    rows = memory.empty((4 * MIB,), torch.uint8).fill_(7)
    assert memory.used_before(1, 1 << 30, cpu) is None
    link = given_to(reader, memory, rows)
    del rows
    assert memory.used_before(1, 1 << 30, cpu) is None  # a reader may still come for it
    link.release()
    assert memory.used_before(5 * MIB, 1 << 30, cpu) is None
    assert memory.used_before(1, 3 * MIB, cpu) is None
    lent = memory.used_before(1, 1 << 30, cpu)
    assert lent is not None and len(lent) == 4 * MIB and lent.dtype == torch.uint8
    assert memory.used_before(1, 1 << 30, cpu) is None
    [(file, offset)] = memory.locate([memoryview(lent[MIB:].numpy())])
    assert file.path.exists() and offset == MIB
    reader.release()


def test_pages_are_unlocked_on_the_device_of_the_worker(monkeypatch):
    calls, device = [], torch.device("cuda:1")
    monkeypatch.setattr(result_memory, "page_lock", lambda *args: calls.append(args) or True)
    monkeypatch.setattr(result_memory, "page_unlock", lambda *args: calls.append(args))
    memory = ResultMemory()
    memory.empty((4 * MIB,), torch.uint8)
    address = memory.used_before(1, 1 << 30, device).data_ptr()
    assert calls == [(address, 4 * MIB, device)]
    release = threading.Thread(target=memory.trim)
    release.start()
    release.join()
    assert calls[1:] == [(address, device)]


def test_what_a_reader_has_stays_when_the_worker_gives_it_back():
    memory, reader = ResultMemory(), SharedFile.reserve(1)
    rows = memory.empty((MIB,), torch.uint8).fill_(3)
    link = given_to(reader, memory, rows)
    found = link.hold()
    link.release()
    with pytest.raises(FileNotFoundError):
        link.hold()
    del rows
    memory.trim()
    assert (memory.empty((MIB,), torch.uint8).fill_(4) == 4).all() and (found == 3).all()
    reader.release()


def test_memory_that_nobody_asks_for_goes(monkeypatch):
    monkeypatch.setattr(result_memory, "_KEPT_S", 0.05)
    memory, before = ResultMemory(), names()
    memory.empty((MIB,), torch.uint8)
    assert len(names() - before) == 1
    until = time.monotonic() + 20
    while names() - before and time.monotonic() < until:
        time.sleep(0.01)
    assert not names() - before


def test_no_more_is_kept_than_a_share_of_all_memory():
    memory, before = ResultMemory(), names()
    memory._most_kept = 3 * MIB
    pieces = [memory.empty((MIB,), torch.uint8) for _ in range(5)]
    assert len(names() - before) == 5
    del pieces
    assert len(names() - before) == 3
    memory.trim()


def test_memory_is_made_ready_before_rows_need_it(monkeypatch):
    memory, before, cpu = ResultMemory(), names(), torch.device("cpu")
    memory.make_ready([4 * MIB, 9, 4 * MIB - 9])  # of which the second is not worth a file
    monkeypatch.setattr(memory, "_made", lambda nbytes: pytest.fail("memory was made on demand"))
    assert memory.used_before(1, 1 << 30, cpu) is None  # nobody has used it
    rows = [memory.empty((nbytes,), torch.uint8) for nbytes in (4 * MIB - 9, 4 * MIB)]
    assert [tensor.fill_(7).unique().tolist() for tensor in rows] == [[7], [7]]
    assert len(names() - before) == 2
    found = memory.locate([memoryview(tensor.numpy()) for tensor in rows])
    assert len({file.path for file, _ in found}) == 2
    del rows, found
    assert len(memory.used_before(1, 1 << 30, cpu)) == 4 * MIB
    memory.trim()
    assert not names() - before


def test_memory_that_was_made_ready_for_nothing_goes(monkeypatch):
    monkeypatch.setattr(result_memory, "_KEPT_S", 0.05)
    memory, before = ResultMemory(), names()
    memory.make_ready([MIB] * 3)
    until = time.monotonic() + 20
    while (names() - before or memory._coming) and time.monotonic() < until:
        time.sleep(0.01)
    assert not names() - before and not memory._coming
    memory.make_ready([MIB] * 3)
    del memory
    gc.collect()
    assert not names() - before


def test_memory_that_is_still_to_be_allocated_takes_room(monkeypatch):
    memory, before, goes_on = ResultMemory(), names(), threading.Event()

    def late(address, nbytes):
        goes_on.wait(20)

    monkeypatch.setattr(result_memory, "populate", late)
    monkeypatch.setattr(result_memory, "room", lambda: 3 * MIB)
    memory.make_ready([MIB, MIB])
    memory.make_ready([MIB, MIB])  # of which there is room for one
    assert len(memory._coming) == 2
    memory.make_ready([MIB])
    assert len(memory._coming) == 3
    goes_on.set()
    assert all(memory.empty((MIB,), torch.uint8).fill_(1).all() for _ in range(3))
    memory.trim()
    assert not memory._coming and not names() - before


@pytest.mark.parametrize("fault", [errno.EFAULT, errno.EINVAL])
def test_without_room_or_on_an_older_system_nothing_is_made_ready(monkeypatch, fault):
    """An older one has the pages, and maps none of them."""

    def populate(address, nbytes):
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(result_memory, "populate", populate)
    memory, before = ResultMemory(), names()
    memory.make_ready([MIB])
    assert memory._coming[0].piece.exception() is None
    assert len(names() - before) == (fault == errno.EINVAL)
    rows = memory.empty((MIB,), torch.uint8).fill_(3)
    assert rows.sum() == 3 * MIB and len(names() - before) == 1
    del rows
    memory.trim()
    monkeypatch.setattr(result_memory, "room", lambda: MIB)
    memory.make_ready([MIB, MIB])
    ResultMemory(1).make_ready([MIB, MIB])
    assert not memory._coming and not names() - before


def test_pages_of_shared_memory_are_allocated_before_they_are_written():
    file = SharedFile.reserve(3 * MIB, backed=False)
    mapped = file.map()
    assert file.path.stat().st_blocks == 0
    populate(mapped.ctypes.data, 3 * MIB)
    assert file.path.stat().st_blocks * 512 == 3 * MIB
    with pytest.raises(OSError, match="memory") as raised:  # that nobody has mapped
        populate(1 << 12, MIB)
    assert raised.value.errno == errno.ENOMEM
    file.release()


def test_without_room_it_is_an_error_and_nothing_stays(monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    before = names()
    with pytest.raises(OSError, match="No space"):
        SharedFile.reserve(100)
    rows = ResultMemory().empty((1024, 1024), torch.float32)
    assert rows.fill_(2).sum() == 2 * 1024 * 1024
    assert ResultMemory().empty((0, 3, 4), torch.float16).shape == (0, 3, 4)
    assert not names() - before


@contextmanager
def few_descriptors(free):
    """So many more files can be opened, or about as many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = os.open(os.devnull, os.O_RDONLY)
    os.close(opened)
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("free", range(5))
def test_without_descriptors_nothing_stays(free):
    memory, before = ResultMemory(), names()
    with few_descriptors(free):
        rows = memory.empty((MIB,), torch.uint8)
    assert len(names() - before) <= 1
    del rows
    memory.trim()
    assert not names() - before

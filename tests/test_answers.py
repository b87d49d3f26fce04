"""Answers cross processes whole, through shared memory when they are large."""

import asyncio
import copy
import gc
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tllm import answers
from tllm.answers import SharedFolder, decode
from tllm.client import calls
from tllm.consumers.capture.activations import Activations, CapturedRows, StageRows
from tllm.result_memory import ResultMemory

SHARED = Path("/dev/shm")


def files(token):
    return {path.name for path in SHARED.iterdir() if path.name.startswith(token)}


def own_files():
    """Those of this process, and links that it made for a reader in it."""
    return {name for name in files("tllm-") if f"-{os.getpid()}-" in name}


@pytest.mark.parametrize("rows", [0, 3, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_answer_arrives_as_it_was(rows, dtype):
    folder, writer = SharedFolder(), answers.AnswerWriter()
    pieces = [torch.randn(rows, 4, 64).to(dtype), torch.randn(2, 4, 64).to(dtype)]
    given = ("ok", {"a": CapturedRows(np.arange(rows + 2, dtype=np.int32), pieces), "b": [1, "x"]})
    for token in (folder.token, "", "tllm-" + 32 * "0", "../etc"):
        payload = writer.encode(given, token)
        small = len(payload) < 10_000
        assert small == (rows < 10 or bool(token and token == folder.token))
        status, got = decode(payload)
        assert (status, got["b"]) == ("ok", [1, "x"])
        assert torch.equal(got["a"].tensor, torch.cat(pieces))
        got["a"].tensor.add_(1)  # it is the reader's own
        assert files(folder.token) == {folder.token}


def test_what_nobody_came_for_is_removed(monkeypatch):
    folder, writer = SharedFolder(), answers.AnswerWriter()
    big = np.zeros(1 << 20)
    writer.encode(big, folder.token)
    assert len(files(folder.token)) == 2
    monkeypatch.setattr(answers, "_KEPT_S", 0.0)
    decode(writer.encode(big, folder.token))
    assert files(folder.token) == {folder.token}
    token = folder.token
    del folder
    gc.collect()
    assert not files(token)


def test_without_room_it_goes_as_bytes(monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tllm.shared_memory.os.posix_fallocate", full)
    folder, writer = SharedFolder(), answers.AnswerWriter()
    big = np.random.default_rng(0).random(1 << 20)
    payload = writer.encode(big, folder.token)
    assert np.array_equal(decode(payload), big)
    assert pickle.loads(payload)[1] is None
    assert files(folder.token) == {folder.token}


def test_a_quarter_of_shared_memory_is_left_to_others(monkeypatch):
    """vLLM's processes speak through it, and end where they find none."""
    found = os.statvfs(SHARED)
    folder, writer = SharedFolder(), answers.AnswerWriter()
    big = np.zeros(1 << 20)
    for left, shared in ((big.nbytes, True), (big.nbytes - found.f_frsize, False)):
        fields = list(found)
        fields[4] = found.f_blocks // 4 + left // found.f_frsize  # f_bavail
        monkeypatch.setattr(os, "statvfs", lambda _, fields=fields: os.statvfs_result(fields))
        payload = writer.encode(big, folder.token)
        assert (pickle.loads(payload)[1] is not None) == shared
        assert np.array_equal(decode(payload), big)
    assert files(folder.token) == {folder.token}


def test_without_room_rows_that_are_in_shared_memory_stay_there(monkeypatch):
    memory = ResultMemory()
    folder, writer = SharedFolder(), answers.AnswerWriter(memory)
    rows, big = memory.empty((1 << 20,), torch.float32).fill_(3), np.zeros(1 << 20)
    monkeypatch.setattr(answers, "room", lambda: 0)
    payload = writer.encode([rows.numpy(), big], folder.token)
    assert len(files(folder.token)) == 2
    found, copied = decode(payload)
    assert np.array_equal(found, rows.numpy()) and np.array_equal(copied, big)
    assert files(folder.token) == {folder.token}


def test_rows_in_shared_memory_are_not_copied(monkeypatch):
    def copied(*args):
        raise AssertionError("rows were copied")

    monkeypatch.setattr(answers, "_copy", copied)
    memory = ResultMemory()
    folder, writer = SharedFolder(), answers.AnswerWriter(memory)
    before = own_files()
    rows = memory.empty((600, 4, 256), torch.bfloat16).copy_(torch.randn(600, 4, 256))
    assert len(own_files() - before) == 1
    expected = rows.clone()
    payloads = [
        writer.encode(CapturedRows(np.arange(len(part), dtype=np.int32), [part]), folder.token)
        for part in (rows[:200], rows[200:])
    ]
    # The worker lets go of them before the user's process looks.
    del rows
    gc.collect()
    memory.trim()
    assert own_files() - before == files(f"{folder.token}-")
    found = [decode(payload).tensor for payload in payloads]
    assert torch.equal(torch.cat(found), expected)
    found[0].add_(1)  # it is the reader's own
    assert torch.equal(found[1], expected[200:])
    assert files(folder.token) == {folder.token}


def test_small_results_share_a_file_for_as_long_as_anybody_has_one():
    memory = ResultMemory()
    folder, writer = SharedFolder(), answers.AnswerWriter(memory)
    before = own_files()
    results = [memory.empty((100, 251), torch.float32).fill_(number) for number in range(60)]
    made = own_files() - before
    assert len(made) == 2, "6 MB in files of 4"
    found = [decode(writer.encode([r.numpy() for r in results[:3]], folder.token))]
    found += [decode(writer.encode([r.numpy() for r in results[3:]], folder.token))]
    assert [float(each.mean()) for each in found[0] + found[1]] == list(range(60))
    assert all(each.min() == each.max() for each in found[0] + found[1])
    found[0][0] += 1  # it is the reader's own
    assert [float(each.mean()) for each in found[0] + found[1]] == [1, *range(1, 60)]
    del results, found
    gc.collect()
    memory.trim()
    assert own_files() == before
    again = memory.empty((100, 251), torch.float32)
    assert len(own_files() - before) == 1
    del again
    memory.trim()


def test_whoever_is_given_little_of_a_file_does_not_hold_all_of_it():
    memory = ResultMemory()
    folder, writer = SharedFolder(), answers.AnswerWriter(memory)
    rows = memory.empty((4, 1000), torch.float32).copy_(torch.randn(4, 1000))
    payload = writer.encode({"rows": rows.numpy()}, folder.token)
    assert pickle.loads(payload)[1] is None
    assert torch.equal(torch.from_numpy(decode(payload)["rows"]), rows)
    del rows
    memory.trim()
    assert files(folder.token) == {folder.token}


@pytest.mark.parametrize(
    ("nbytes", "share", "held"), [(4 << 20, 7, True), (4 << 20, 9, False), (64 << 20, 9, True)]
)
def test_a_small_result_holds_no_file_that_others_have_most_of(nbytes, share, held):
    """One of many requests that ended together is kept, and the others are not."""
    memory = ResultMemory()
    folder, writer = SharedFolder(), answers.AnswerWriter(memory)
    rows = memory.empty((nbytes,), torch.uint8)
    rows[:] = 7
    kept = decode(writer.encode(rows[: nbytes // share].numpy(), folder.token))
    del rows
    gc.collect()
    again = memory.used_before(nbytes, nbytes, torch.device("cpu"))
    assert (again is None) == held
    if again is not None:
        again[:] = 0
    kept += 1  # it is the reader's own
    assert (kept == 8).all()
    del again, kept
    memory.trim()
    assert files(folder.token) == {folder.token}


def test_results_that_are_kept_take_no_file_descriptors():
    memory = ResultMemory()
    folder, writer = SharedFolder(), answers.AnswerWriter(memory)
    rows = memory.empty((1 << 20,), torch.float32).copy_(torch.randn(1 << 20))
    before = len(os.listdir("/proc/self/fd"))
    kept = [decode(writer.encode({"linked": rows.numpy()}, folder.token)) for _ in range(5)]
    kept += [decode(answers.AnswerWriter().encode(rows.numpy(), folder.token)) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert torch.equal(torch.from_numpy(kept[4]["linked"]), rows)
    assert torch.equal(torch.from_numpy(kept[9]), rows)


def test_names_that_readers_have_removed_are_forgotten():
    """A server gives thousands of answers before the first is too old to be come for."""
    memory = ResultMemory()
    folder, writer = SharedFolder(), answers.AnswerWriter(memory)
    rows = memory.empty((1 << 20,), torch.float32).fill_(1)
    unread = writer.encode(rows.numpy(), folder.token)
    for _ in range(5):
        decode(writer.encode(rows.numpy(), folder.token))
    assert len(writer._written) == 2
    assert float(decode(unread).sum()) == 1 << 20
    del rows
    gc.collect()
    memory.trim()
    assert files(folder.token) == {folder.token}


def test_names_are_forgotten_as_fast_as_they_are_given():
    """One answer may have those of the results of many requests."""
    memory = ResultMemory()
    folder, writer = SharedFolder(), answers.AnswerWriter(memory)
    rows = [memory.empty((1 << 18,), torch.float32).fill_(1) for _ in range(40)]
    for _ in range(5):
        decode(writer.encode([each.numpy() for each in rows], folder.token))
    assert len(writer._written) <= len(rows)


def test_rows_that_were_looked_at_are_pickled_once():
    """By hook point and layer they are views of one tensor, and each would bring all of it."""
    rows = CapturedRows(np.arange(4, dtype=np.int32), [torch.randn(4, 64, 64)])
    places = tuple(("post_block", layer) for layer in range(64))
    blocks = [StageRows(places, rows, rows.up_to(0))]
    given = Activations(blocks, reduction="none", dtype=torch.float32, num_layers=64)
    before = len(pickle.dumps(given))
    assert torch.equal(given["post_block"][-1].tensor, rows.tensor[:, 63])
    assert len(pickle.dumps(given)) == before
    for again in (pickle.loads(pickle.dumps(given)), copy.deepcopy(given)):
        assert torch.equal(again["post_block"][-1].tensor, rows.tensor[:, 63])


def test_an_answer_that_comes_after_its_caller_has_left_keeps_nothing(monkeypatch):
    folder, writer = SharedFolder(), answers.AnswerWriter()
    big = np.zeros(1 << 20)

    async def ask_all_workers(engine, args):
        answered = asyncio.get_running_loop().create_future()

        def answer():  # whoever still waits
            payload = writer.encode(("ok", big), folder.token)
            if not answered.done():
                answered.set_result([payload])

        asyncio.get_running_loop().call_later(0.05, answer)
        return await answered

    async def leave():
        asked = asyncio.ensure_future(
            calls.AsyncCalls(None, folder.token).ask(calls.WorkerCall("x"))
        )
        await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.sleep(0.2)

    monkeypatch.setattr(calls, "ask_all_workers", ask_all_workers)
    asyncio.run(leave())
    assert len(writer._written) == 1
    assert files(folder.token) == {folder.token}

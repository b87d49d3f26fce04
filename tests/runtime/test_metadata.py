"""Who rows belong to, when they are selected, split and joined."""

import copy
import dataclasses
import pickle
import threading
import time

import numpy as np
import pytest
import torch

from tllm.ports import PerToken, RequestInfo, RowMeta
from tllm.runtime import transfer
from tllm.runtime.read_rows import ReadRows, join_meta, split_meta
from tllm.runtime.transfer import DeliveryThread


def info(name: str, sample: int = 0) -> RequestInfo:
    return RequestInfo(name, f"prompt {name}", sample, 2, slot=ord(name) + sample, prompt_len=3)


def meta(requests, index) -> RowMeta:
    count = len(index)
    return RowMeta(
        tuple(requests),
        np.array(index, np.int32),
        np.arange(count, dtype=np.int32),
        np.full(count, 1, np.int64),
    )


def test_rows_that_are_described_when_asked_are_described_as_others():
    requests, starts = (info("a"), info("b")), np.array([7, 9, 4], np.int32)
    index, which = np.array([0, 1], np.int32), np.array([2, 0], np.int32)

    def described():
        return RowMeta.of_tokens(requests, index, starts, which, 5, before=1)

    for found in (
        described(),
        copy.copy(described()),
        pickle.loads(pickle.dumps(described())),
        dataclasses.replace(described(), requests=requests),
        described().select(np.array([0, 1])),
    ):
        assert found.positions.tolist() == [3, 6] and found.positions.dtype == np.int32
        assert found.steps.tolist() == [5, 5] and found.steps.dtype == np.int64
        assert found.is_prefill.tolist() == [False, False]
        assert len(found) == 2
    assert described().positions is not described().positions
    with pytest.raises(AttributeError, match="no attribute 'position'"):
        described().position  # noqa: B018
    with pytest.raises(dataclasses.FrozenInstanceError):
        described().positions = starts


def test_selected_rows_keep_their_sequences_in_the_order_of_their_first_row():
    chosen = meta([info("a"), info("b"), info("c")], [0, 1, 2, 1]).select(np.array([3, 2, 1]))
    assert [r.request_id for r in chosen.requests] == ["b", "c"]
    assert chosen.request_ids == ["b", "c", "b"]
    assert chosen.positions.tolist() == [3, 2, 1]


def test_joined_rows_list_a_sequence_once():
    parts = [meta([info("a"), info("b")], [0, 1]), meta([info("b"), info("c")], [1, 0])]
    parts[1].positions[:] = 5
    joined, order = join_meta(parts)
    assert order is None
    assert [r.request_id for r in joined.requests] == ["a", "b", "c"]
    assert joined.request_ids == ["a", "b", "c", "b"]


def test_joined_rows_of_a_sequence_ascend_by_position():
    parts = [meta([info("a"), info("b")], [0, 0, 0, 1, 1]), meta([info("b"), info("a")], [0, 1, 1])]
    parts[0].positions[:] = [1, 2, 5, 3, 4]
    parts[1].positions[:] = [5, 0, 4]
    joined, order = join_meta(parts)
    assert joined.request_ids == ["a"] * 5 + ["b"] * 3
    assert joined.positions.tolist() == [0, 1, 2, 4, 5, 3, 4, 5]
    assert order.tolist() == [6, 0, 1, 7, 2, 3, 4, 5]
    before = RowMeta.select(joined, np.argsort(order))
    assert before.positions.tolist() == [*parts[0].positions, *parts[1].positions]


def test_rows_of_several_steps_stay_in_the_order_of_steps():
    steps = [meta([info("a"), info("b")], [0, 1]) for _ in range(3)]
    for step, part in enumerate(steps):
        part.positions[:] = 7 + step
    joined, order = join_meta(steps)
    assert order is None
    assert joined.request_ids == ["a", "b"] * 3


@pytest.mark.parametrize(
    ("key", "groups"),
    [
        (("engine_step_id",), [[0, 1, 2, 3]]),
        (("prompt_id",), [[0, 1, 3], [2]]),
        (("request_id",), [[0, 3], [1], [2]]),
    ],
)
def test_rows_are_split_by_the_bundle_key(key, groups):
    rows = meta([info("a"), info("a", 1), info("b")], [0, 1, 2, 0])
    found = [
        list(range(4)) if part is None else part.tolist() for _, part in split_meta(rows, key, 0)
    ]
    assert found == groups


def test_rows_are_split_by_the_row_limit():
    parts = [part.tolist() for _, part in split_meta(meta([info("a")], [0] * 5), (), 2)]
    assert parts == [[0, 1], [2, 3], [4]]


def test_values_of_tokens_computed_ahead_of_the_end_are_cut_off():
    values = PerToken(np.arange(2, 8, dtype=np.int32), np.arange(6))
    cut = values.up_to(6)
    assert cut.positions.tolist() == [2, 3, 4] and cut.values.tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
@pytest.mark.parametrize("positions", [[4, 5, 2, 3], [5, 4, 3, 2]])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_values_in_another_order_are_sorted(kind, positions, dtype):
    given = kind([[10 * position] for position in positions])
    values = PerToken(np.array(positions, dtype), given).up_to(5)
    assert values.positions.tolist() == [2, 3]
    assert values.values.tolist() == [[20], [30]]


class TestDeliveryThread:
    def test_jobs_run_in_order_on_one_thread_and_drain_waits_for_them(self):
        thread = DeliveryThread("jobs")
        done = []
        for i in range(50):
            thread.submit(lambda i=i: done.append((i, threading.current_thread().name)))
        thread.drain()
        assert done == [(i, "jobs") for i in range(50)]
        assert not thread.waiting
        thread.close()

    def test_waiting_for_one_returns_when_a_job_has_ended(self):
        thread, gate, done = DeliveryThread("jobs"), threading.Event(), []
        assert not thread.wait_for_one()
        thread.submit(lambda: gate.wait(60) and done.append(1))
        threading.Timer(0.05, gate.set).start()
        assert thread.wait_for_one()
        assert done == [1]
        thread.close()

    def test_what_waits_is_told_and_since_when(self):
        thread, gate = DeliveryThread("jobs"), threading.Event()
        assert (thread.waiting, thread.lag_s) == (0, 0.0)
        for _ in range(3):
            thread.submit(lambda: gate.wait(60))
        time.sleep(0.02)
        assert thread.waiting == 3
        assert thread.lag_s >= 0.02
        gate.set()
        thread.drain()
        assert (thread.waiting, thread.lag_s) == (0, 0.0)
        thread.close()

    def test_a_long_wait_is_said(self, monkeypatch, caplog):
        monkeypatch.setattr(transfer, "_PATIENCE_S", 0.02)
        thread = DeliveryThread("slow-consumer")

        def until_it_was_said():
            begin = time.monotonic()
            while "slow-consumer: for" not in caplog.text and time.monotonic() - begin < 60:
                time.sleep(0.01)

        thread.submit(until_it_was_said)
        thread.drain()
        assert "has waited for this thread" in caplog.text
        thread.close()

    def test_draining_from_a_job_does_not_wait_for_itself(self):
        thread = DeliveryThread("jobs")
        thread.submit(thread.drain)
        thread.drain()
        thread.close()

    def test_jobs_find_the_device_that_they_work_on(self, monkeypatch):
        chosen, device = [], torch.device("cuda:1")
        monkeypatch.setattr(
            torch.cuda,
            "set_device",
            lambda given: chosen.append((given, threading.current_thread().name)),
        )
        thread = DeliveryThread("jobs", device)
        thread.submit(lambda: chosen.append("job"))
        thread.close()
        assert chosen == [(device, "jobs"), "job"]


def test_rows_of_a_step_with_drafts_are_handed_out_as_without():
    """Prompts' rows with the first generated one of each sequence, then the second of each."""
    lengths = [5, 2, 3]
    requests = tuple(
        RequestInfo(str(n), str(n), 0, 1, n, length) for n, length in enumerate(lengths)
    )
    owner = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2], np.int32)
    positions = np.array([3, 4, 5, 6, 9, 10, 11, 0, 1], np.int32)
    described = RowMeta(requests, owner, positions, np.zeros(len(owner), np.int64))
    rows = ReadRows({"rows": torch.from_numpy(100 * owner + positions)}, described, 0)
    turns = [turn.parts["rows"].tolist() for turn in rows.in_turns()]
    assert turns == [[3, 4, 5, 109, 200, 201], [6, 110], [111]]
    assert [[r.request_id for r in turn.meta.requests] for turn in rows.in_turns()][1:] == [
        ["0", "1"],
        ["1"],
    ]
    (alone,) = rows.select(np.array([0, 1, 2, 4, 7])).in_turns()
    assert alone.parts["rows"].tolist() == [3, 4, 5, 109, 200]

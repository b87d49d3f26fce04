"""Real faults: the request's result says so, the engine lives, what was published stays whole."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from engine.asking import generate, greedy, prompts_of
from engine.recorder import Recorder

import tllm.stores
from tllm.consumers.base import Consumer
from tllm.consumers.capture import capturing
from tllm.consumers.capture.filesystem import FilesystemConsumer
from tllm.consumers.capture.memory import MemoryConsumer
from tllm.ports import ConsumerFlow, CpuExport, ResidualStream
from tllm.registry import consumer_from_spec
from tllm.runtime.ring import Ring
from tllm.stores.queue import SpillFile


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB, mounted where only a process that holds it sees it."""
    shell = f'mount -t tmpfs -o size=1m tmpfs "{tmp_path}" && echo mounted && exec sleep 600'
    holder = subprocess.Popen(
        ["unshare", "-rm", "sh", "-c", shell], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stderr is not None
    if not holder.stdout.readline():
        pytest.skip(f"no file system can be mounted here: {holder.stderr.read().decode()}")
    yield Path(f"/proc/{holder.pid}/root{tmp_path}")
    holder.kill()
    holder.communicate()


def test_a_full_disk_fails_the_requests_that_it_hits(small_disk, llm):
    root = small_disk / "store"
    llm.register_consumer(FilesystemConsumer(root, layout="packed"))
    params = [
        greedy(2, capture={"filesystem": {"hooks": {"post_block": "all"}, "request_id": str(i)}})
        for i in range(40)
    ]
    outputs = generate(llm, prompts_of([40] * 40), params)
    results = [output.capture_results["filesystem"] for output in outputs]
    assert {"ok", "error"} <= {result.status for result in results}
    assert any("No space left" in (result.error or "") for result in results)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2] * 40
    # The engine lives, and so does the writer once there is room again.
    published = [result.payload for result in results if result.status != "error"]
    for path in published[0].paths:
        Path(path).unlink()
    again = {"hooks": {"post_block": [0]}, "request_id": "again"}
    [after] = generate(llm, prompts_of([40]), greedy(2, capture={"filesystem": again}))
    assert after.capture_results["filesystem"].status == "ok"
    store = tllm.stores.open(root)
    assert {record.request_id for record in store} == {
        "again",
        *(payload.request_id for payload in published[1:]),
    }
    assert store.verify().ok
    assert llm.intervention_stats()[0]["consumers"]["filesystem"] == "ok"


def test_a_killed_worker_leaves_what_was_published(served):
    found, root = served
    assert found["killed"] == "EngineDeadError"
    store = tllm.stores.open(root)
    assert {str(number) for number in range(3)} <= set(store.request_ids())
    assert store.verify().ok
    for record in store:
        assert all(record.tensor(hook, layer).isfinite().all() for hook, layer in record.keys)


class Stalled(Consumer):
    """Gives its result when it is let."""

    consumer_id = "stalled"
    on_request_only = True
    promised: Future = Future()

    def flows(self):
        return []

    def validate_options(self, options):
        pass

    def on_request_finished(self, request, ctx):
        return type(self).promised


def test_a_stalled_consumer_leaves_its_result_pending(llm):
    Stalled.promised = Future()
    llm.register_consumer(Stalled())
    capture = {"stalled": {}, "memory": {"hooks": {"post_block": [0]}}}
    patience, llm._sync.result_timeout_s = llm._sync.result_timeout_s, 0.2
    try:
        begin = time.monotonic()
        outputs = generate(llm, prompts_of([5, 6]), [greedy(2, capture=capture), greedy(2)])
        assert time.monotonic() - begin < 60
    finally:
        llm._sync.result_timeout_s = patience
    results = outputs[0].capture_results
    assert results["stalled"].status == "pending"
    assert results["memory"].status == "ok"
    assert generate(llm, prompts_of([5]), greedy(2))[0].outputs[0].token_ids
    threading.Timer(0.3, Stalled.promised.set_result, ["done"]).start()
    llm.wait_for_results(outputs)
    results = outputs[0].capture_results
    assert (results["stalled"].status, results["stalled"].payload) == ("ok", "done")
    assert len(results["memory"].payload["post_block"][0]) == 6


@pytest.mark.parametrize("kind", ["lock", "cancelled"])
def test_a_result_that_cannot_be_sent_is_an_error_of_its_own(llm, truth, kind):
    Stalled.promised = Future()
    if kind == "cancelled":
        Stalled.promised.cancel()
    else:
        Stalled.promised.set_result(threading.Lock())
    llm.register_consumer(Stalled())
    spec = {"hooks": {"post_block": [0]}}
    params = [
        greedy(2, capture={"stalled": {}, "memory": spec}),
        greedy(2, capture={"memory": spec}),
    ]
    outputs = generate(llm, prompts_of([5, 6]), params)
    for output in outputs:
        truth.check(output, spec)
    result = outputs[0].capture_results["stalled"]
    assert result.status == "error"
    assert ("CancelledError" if kind == "cancelled" else "cannot be sent") in result.error


class Raising(Consumer):
    """Raises where it is told to, when it was promised already."""

    consumer_id = "raising"
    on_request_only = True

    def __init__(self, where):
        self._where = where

    def flows(self):
        return [ConsumerFlow(reads=[ResidualStream.read(layer=0)])]

    def validate_options(self, options):
        pass

    def _at(self, where):
        if self._where == where:
            raise OSError(f"broken in {where}")

    def request_flows(self, options, num_layers):
        if num_layers and options.get("asked"):
            self._at("request_flows")
        return ()

    def consume_bundle(self, bundle, ctx):
        self._at("consume_bundle")

    def on_request_finished(self, request, ctx):
        self._at("on_request_finished")
        return 1


@pytest.mark.parametrize("where", ["consume_bundle", "on_request_finished"])
def test_a_consumer_that_raises_is_an_error_of_its_own_results(llm, truth, where):
    llm.register_consumer(Raising(where))
    spec = {"hooks": {"post_block": [1]}}
    capture = {"raising": {}, "memory": spec}
    outputs = generate(llm, prompts_of([5, 30]), [greedy(4, capture=capture)] * 2)
    for output in outputs:
        assert output.capture_results["memory"].status == "ok"
        truth.check(output, spec)
        result = output.capture_results["raising"]
        assert (result.status, result.error) == ("error", f"OSError: broken in {where}")


class Exiting(Raising):
    """Wants the process to end."""

    def __init__(self, where, error):
        super().__init__(where)
        self._error = error
        self._in_worker = False

    def flows(self):
        window = "background" if self._where == "on a thread" else "same_step"
        writes = [CpuExport.write(channel="rows")]
        return [ConsumerFlow(reads=[ResidualStream.read(layer=0)], writes=writes, window=window)]

    def start(self, ctx):
        self._in_worker = True

    def request_flows(self, options, num_layers):
        if self._in_worker:
            self._at("request_flows")
        return ()

    def _at(self, where):
        if self._where == where or (self._where, where) == ("on a thread", "consume_bundle"):
            raise self._error("enough")

    def on_request_started(self, request, ctx):
        self._at("on_request_started")

    def consume_bundle(self, bundle, ctx):
        ctx.export("rows", {})
        self._at("consume_bundle")

    def on_export(self, channel, tensors, meta):
        self._at("on_export")

    def on_step_end(self, ctx):
        self._at("on_step_end")

    def on_error(self, error):
        raise SystemExit("again")

    def stop(self):
        raise SystemExit("and again")


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("request_flows", SystemExit),
        ("on_request_started", SystemExit),
        ("consume_bundle", SystemExit),
        ("consume_bundle", asyncio.CancelledError),
        ("on a thread", KeyboardInterrupt),
        ("on a thread", SystemExit),
        ("on_export", SystemExit),
        ("on_step_end", SystemExit),
        ("on_request_finished", GeneratorExit),
    ],
)
def test_a_consumer_that_wants_to_exit_ends_nothing_but_itself(llm, truth, where, error):
    exiting = llm.register_consumer(Exiting(where, error))
    spec = {"hooks": {"post_block": [1]}}
    capture = {"raising": {"asked": True}, "memory": spec}
    outputs = generate(llm, prompts_of([5, 30]), [greedy(4, capture=capture)] * 2)
    exiting.synchronize()
    for output in outputs:
        truth.check(output, spec)
        if where != "on_export":  # which may come after the end
            assert output.capture_results["raising"].error == f"{error.__name__}: enough"
    assert exiting.read_stats()["runtime"]["error"] == f"{error.__name__}: enough"


def test_a_consumer_that_exits_at_its_start_is_not_registered(llm):
    class AtStart(Raising):
        def start(self, ctx):
            raise SystemExit("enough")

    with pytest.raises(Exception, match="SystemExit"):
        llm.register_consumer(AtStart("start"))
    assert "raising" not in llm.intervention_stats()[0]["consumers"]
    assert generate(llm, prompts_of([5]), greedy(2))[0].outputs[0].token_ids


def test_a_promise_of_a_consumer_that_then_raised_is_not_waited_for(llm, monkeypatch):
    def broken(self, ending, activations):
        raise OSError("broken")

    monkeypatch.setattr(MemoryConsumer, "conclude", broken)
    capture = {"memory": {"hooks": {"post_block": [1]}}}
    [output] = generate(llm, prompts_of([5]), greedy(2, capture=capture))
    result = output.capture_results["memory"]
    assert (result.status, result.error) == ("error", "OSError: broken")


class TestOverload:
    """The ring is full."""

    @pytest.fixture
    def ring(self, llm):
        session = llm.llm_engine.model_executor.driver_worker.worker.session
        kept = session._ring, session._planner._ring

        def small(rows, max_rows, overflow):
            taps = session._taps
            ring = Ring(
                hidden_size=taps.hidden_size,
                dtype=taps.dtype,
                device=taps.device,
                rows=rows,
                max_rows=max_rows,
                overflow=overflow,
                on_move=taps.set_arena,
                make_progress=session._make_progress,
            )
            session._ring = session._planner._ring = ring
            return ring

        yield small
        session._ring, session._planner._ring = kept
        session._taps.set_arena(kept[0].arena)
        session._slots.invalidate()

    def test_a_step_that_alone_needs_more_is_served(self, llm, truth, ring):
        made = ring(64, 64, "block")
        spec = {"hooks": {"post_block": "all", "attn_out": "all"}}
        outputs = generate(llm, prompts_of([20, 9]), greedy(4, capture={"memory": spec}))
        for output in outputs:
            truth.check(output, spec)
        assert made.capacity > 64

    def test_what_is_dropped_marks_the_requests_that_it_hit(self, llm, truth, ring):
        ring(64, 64, "drop")
        llm.register_consumer(
            Recorder(ConsumerFlow(reads=[ResidualStream.read(layer=0)], window="background"))
        )
        wide = {"hooks": {"post_block": "all", "attn_out": "all"}}
        narrow = {"hooks": {"post_block": [0]}, "positions": "all_generated"}
        before = llm.intervention_stats()[0]["rows_dropped"]
        params = [greedy(4, capture={"memory": spec}) for spec in (wide, narrow)]
        [first] = generate(llm, prompts_of([20]), params[0])
        [second] = generate(llm, prompts_of([5]), params[1])
        result = first.capture_results["memory"]
        assert result.status == "partial_error"
        assert "20 rows were dropped because the capture ring was full" in result.error
        assert result.payload["post_block"][1].positions.tolist() == [20, 21, 22]
        assert first.consumer_results["recorder"].status == "partial_error"
        truth.check(second, narrow)
        assert second.consumer_results["recorder"].status == "ok"
        assert llm.intervention_stats()[0]["rows_dropped"] - before == 20


def test_a_slow_disk_makes_the_engine_wait_and_loses_nothing(llm, truth, tmp_path):
    consumer = FilesystemConsumer(tmp_path, layout="packed", queue_mib=1)
    consumer._queue_bytes = 4096
    llm.register_consumer(consumer)
    capture = {"filesystem": {"hooks": {"post_block": "all"}}}
    outputs = generate(llm, prompts_of([20, 30, 9]), greedy(6, capture=capture))
    assert [o.capture_results["filesystem"].status for o in outputs] == ["ok"] * 3
    records = {len(r.token_ids): r for r in tllm.stores.open(tmp_path)}
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        record = records[len(tokens)]
        expected = truth.states(tokens[:-1])["post_block", 2]
        assert torch.allclose(record.tensor("post_block", 2), expected, rtol=1e-4, atol=1e-4)


class TestHostMemory:
    """Rows of running requests exceed what may wait in memory: 40 rows of two layers."""

    SPEC: ClassVar = {"hooks": {"post_block": [0, 2]}}
    LIMIT = 40 * 2 * 128 * 4

    def register(self, llm, overflow, spill_bytes=1 << 20):
        consumer = consumer_from_spec(f"memory:overflow={overflow}")
        consumer._host_bytes, consumer._spill_bytes = self.LIMIT, spill_bytes
        return llm.register_consumer(consumer)

    def captured(self, llm):
        """Three requests that exceed the limit beside a plain one, and one that does not."""
        params = [*[greedy(6, capture={"memory": self.SPEC})] * 3, greedy(6)]
        together = generate(llm, prompts_of([30, 12, 24, 20]), params)
        assert [len(output.outputs[0].token_ids) for output in together] == [6] * 4
        return together[:3], generate(llm, prompts_of([9]), params[0])

    @pytest.mark.parametrize("overflow", ["drop", "block"])
    def test_rows_beyond_are_given_up_counted_and_marked(self, llm, truth, overflow):
        consumer = self.register(llm, overflow)
        together, alone = self.captured(llm)
        missing = 0
        for output in together:
            result = output.capture_results["memory"]
            found = output.activations["post_block"][2]
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
            lost = len(tokens) - len(found)
            missing += lost
            assert result.status == ("partial_error" if lost else "ok")
            if lost:
                assert f"{lost} rows were given up: rows of running requests" in result.error
            expected = truth.states(tokens)["post_block", 2][found.positions]
            assert torch.allclose(found.tensor, expected, rtol=1e-4, atol=1e-4)
        stats = consumer.read_stats()
        assert stats["host_rows_dropped"] == missing > 0
        assert stats["host_bytes"] == 0
        truth.check(alone[0], self.SPEC)

    def test_rows_beyond_wait_on_disk(self, llm, truth):
        consumer = self.register(llm, "spill")
        together, alone = self.captured(llm)
        for output in (*together, *alone):
            truth.check(output, self.SPEC)
        stats = consumer.read_stats()
        assert stats["host_rows_dropped"] == stats["host_bytes"] == 0
        assert stats["host_bytes_spilled"] > self.LIMIT / 2

    def test_a_slow_spill_disk_makes_the_engine_wait(self, llm, truth, monkeypatch):
        """It took whatever memory the rows needed that waited for the disk."""
        put, consume, under_way = SpillFile.put, MemoryConsumer.consume_bundle, []

        def slow(file, rows):
            time.sleep(0.02)
            return put(file, rows)

        def watched(consumer, bundle, ctx):
            consume(consumer, bundle, ctx)
            rows = bundle.entries["rows"].nbytes
            under_way.append(consumer._captured_bytes - consumer._arrived_bytes - rows)

        monkeypatch.setattr(SpillFile, "put", slow)
        monkeypatch.setattr(MemoryConsumer, "consume_bundle", watched)
        consumer = self.register(llm, "spill")
        together, alone = self.captured(llm)
        for output in (*together, *alone):
            truth.check(output, self.SPEC)
        assert max(under_way) <= self.LIMIT / 4
        stats = consumer.read_stats()
        assert stats["blocked_seconds"] > 0.05
        assert stats["host_rows_dropped"] == 0 < stats["host_bytes_spilled"]

    def test_a_full_spill_file_is_said(self, llm, truth):
        consumer = self.register(llm, "spill", spill_bytes=20_000)
        together, alone = self.captured(llm)
        errors = [output.capture_results["memory"].error for output in together]
        assert any(error and "and the spill file" in error for error in errors)
        assert consumer.read_stats()["host_rows_dropped"] > 0
        truth.check(alone[0], self.SPEC)

    def test_a_store_gets_what_was_spilled(self, llm, truth, tmp_path):
        consumer = FilesystemConsumer(tmp_path, layout="packed", overflow="spill")
        consumer._host_bytes = self.LIMIT
        llm.register_consumer(consumer)
        capture = {"filesystem": {**self.SPEC, "request_id": "r"}}
        [output] = generate(llm, prompts_of([60]), greedy(6, capture=capture))
        assert output.capture_results["filesystem"].status == "ok"
        assert consumer.read_stats()["host_bytes_spilled"] > 0
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        got = tllm.stores.open(tmp_path).record("r").tensor("post_block", 2)
        expected = truth.states(tokens)["post_block", 2]
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4)

    def test_a_spill_folder_that_is_not_there_is_refused_at_registration(self, llm, tmp_path):
        with pytest.raises(ValueError, match=r"spill_folder=.*cannot be written"):
            llm.register_consumer(MemoryConsumer(overflow="spill", spill_folder=tmp_path / "no"))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"overflow": "wait"}, "overflow='wait' is not known"),
            ({"host_mib": 0}, "host_mib=0 must be 1 or more"),
            ({"spill_mib": 1.5}, "spill_mib=1.5 is not a whole number"),
        ],
    )
    def test_options_are_checked(self, options, message):
        with pytest.raises(ValueError, match=message):
            MemoryConsumer(**options)


def test_an_engine_that_waits_for_a_stalled_disk_says_so(llm, tmp_path, monkeypatch, caplog):
    conclude, warning = FilesystemConsumer.conclude, "consumer 'filesystem': for "
    stalled = threading.Event()

    def slow(self, ending, activations):
        begin = time.monotonic()
        while not stalled.is_set() and time.monotonic() - begin < 60:
            time.sleep(0.6)
            if warning in caplog.text:
                stalled.set()
        conclude(self, ending, activations)

    monkeypatch.setattr(FilesystemConsumer, "conclude", slow)
    monkeypatch.setattr(capturing, "_PATIENCE_S", 0.1)
    consumer = FilesystemConsumer(tmp_path, layout="packed")
    consumer._queue_bytes = 1
    llm.register_consumer(consumer)
    capture = {"filesystem": {"hooks": {"post_block": "all"}}}
    params = [greedy(1, capture=capture), greedy(9, capture=capture), greedy(9)]
    outputs = generate(llm, prompts_of([5, 9, 7]), params)
    assert [o.capture_results["filesystem"].status for o in outputs[:2]] == ["ok"] * 2
    assert len(outputs[2].outputs[0].token_ids) == 9
    assert warning in caplog.text
    assert f"its store {tmp_path}" in caplog.text
    stats = consumer.read_stats()
    assert stats["stalls"] == 1
    assert stats["blocked_seconds"] >= 0.1


def test_an_engine_that_waits_for_a_writer_goes_on_when_it_fails(llm, tmp_path, monkeypatch):
    def broken(self, ending, activations):
        time.sleep(0.5)
        raise OSError("broken")

    monkeypatch.setattr(FilesystemConsumer, "conclude", broken)
    consumer = FilesystemConsumer(tmp_path)
    consumer._queue_bytes = 1
    llm.register_consumer(consumer)
    capture = {"filesystem": {"hooks": {"post_block": "all"}}}
    params = [greedy(1, capture=capture), greedy(9, capture=capture)]
    outputs = generate(llm, prompts_of([5, 9]), params)
    for output in outputs:
        result = output.capture_results["filesystem"]
        assert (result.status, result.error) == ("error", "OSError: broken")
        assert output.outputs[0].token_ids


def test_what_only_a_worker_can_refuse_is_an_error_of_the_request(llm, truth):
    """Requests may come by ways that the user's process does not see."""
    spec = {"hooks": {"post_block": [1]}}
    wrong = {"hooks": {"router": [1]}}
    generate(llm, prompts_of([5]), greedy(1, capture={"memory": spec}))
    uses = llm._tllm.uses
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(uses), "_check_places", lambda *_: None)
        params = [greedy(3, capture={"memory": each}) for each in (wrong, spec)]
        outputs = generate(llm, prompts_of([5, 9]), params)
    result = outputs[0].capture_results["memory"]
    assert result.status == "error"
    assert "has no hook point router" in result.error
    truth.check(outputs[1], spec)

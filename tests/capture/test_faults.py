"""Real faults: the request's result says so, the engine lives, what was published stays whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from engine.asking import generate, greedy, prompts_of
from engine.recorder import Recorder

import tllm.stores
from tllm.consumers.base import Consumer
from tllm.consumers.capture.filesystem import FilesystemConsumer
from tllm.ports import ConsumerFlow, ResidualStream
from tllm.runtime.ring import Ring

HERE = Path(__file__).parent


def run(*command: str, multiprocessing: bool = False) -> dict:
    """What a script found."""
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing))}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(found[-1].removeprefix("FOUND "))


def test_a_full_disk_fails_the_requests_that_it_hits(tiny_model, tmp_path, runner):
    if runner == "v2":
        pytest.skip("the disk does not know which runner computes")
    allowed = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if (probe := subprocess.run(allowed, capture_output=True, text=True)).returncode:
        pytest.skip(f"no file system can be mounted here: {probe.stderr.strip()}")
    script = str(HERE / "full_disk.py")
    found = run("unshare", "-m", sys.executable, script, tiny_model, str(tmp_path))
    assert "error" in found["statuses"]
    assert "ok" in found["statuses"]
    assert any("No space left" in error for error in found["errors"])
    assert found["tokens"] == [2] * 40
    assert found["consumers"] == {"filesystem": "ok"}
    published = {str(i) for i, status in enumerate(found["statuses"]) if status != "error"}
    assert found["after"] == "ok"
    assert len(set(found["stored"]) - {"again"}) == len(published) - 1
    assert found["whole"]


def test_a_killed_worker_leaves_what_was_published(tiny_model, tmp_path, runner):
    if runner == "v2":
        pytest.skip("the test harness of the V2 runner is not in other processes")
    script = str(HERE / "killed_worker.py")
    found = run(sys.executable, script, tiny_model, str(tmp_path), multiprocessing=True)
    assert found == {"statuses": ["ok"] * 6, "error": "EngineDeadError"}
    store = tllm.stores.open(tmp_path)
    assert {f"a{i}" for i in range(6)} <= set(store.request_ids())
    assert store.verify().ok
    for record in store:
        assert record.tensor("post_block", 3).isfinite().all()


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
    patience, llm._result_timeout_s = llm._result_timeout_s, 0.2
    try:
        begin = time.monotonic()
        outputs = generate(llm, prompts_of([5, 6]), [greedy(2, capture=capture), greedy(2)])
        assert time.monotonic() - begin < 60
    finally:
        llm._result_timeout_s = patience
    results = outputs[0].capture_results
    assert results["stalled"].status == "pending"
    assert results["memory"].status == "ok"
    assert generate(llm, prompts_of([5]), greedy(2))[0].outputs[0].token_ids
    threading.Timer(0.3, Stalled.promised.set_result, ["done"]).start()
    llm.wait_for_results(outputs)
    results = outputs[0].capture_results
    assert (results["stalled"].status, results["stalled"].payload) == ("ok", "done")
    assert len(results["memory"].payload["post_block"][0]) == 6


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


def test_a_promise_of_a_consumer_that_then_raised_is_not_waited_for(llm, monkeypatch):
    from tllm.consumers.capture.memory import MemoryConsumer

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
    wrong = {"hooks": {"post_block": [77]}}
    generate(llm, prompts_of([5]), greedy(1, capture={"memory": spec}))
    client = llm._tllm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(client), "_check_places", lambda *_: None)
        params = [greedy(3, capture={"memory": each}) for each in (wrong, spec)]
        outputs = generate(llm, prompts_of([5, 9]), params)
    result = outputs[0].capture_results["memory"]
    assert result.status == "error"
    assert "post_block needs a layer from 0 to 3" in result.error
    truth.check(outputs[1], spec)

"""Consumers come and go, requests end in every way, and one mistake never harms anybody else."""

import re
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import pytest
import torch
from oldest_vllm import ON_0_30
from tiny_engines import TINY_ENGINE

from engine.asking import assert_rows_match, generate, greedy, prompts_of, sampled, tokens_of
from engine.recorder import Recorder
from engine.reference import HIDDEN
from tllm import LLM, SamplingParams
from tllm.consumers.base import Consumer
from tllm.consumers.capture.filesystem import FilesystemConsumer
from tllm.consumers.probe import ProbeConsumer
from tllm.ports import ConsumerFlow, CpuExport, Logits, ResidualStream, Sampler

ROOT = Path(__file__).parents[2]
SHOWN = [
    ("examples/own_consumer.py", "Entropy"),
    ("doc/getting-started/write-your-first-consumer.md", "TokenNorm"),
    ("doc/reference/port-catalog.md", "Surprise"),
]
"""Consumers that users may begin with."""
HALF = {"mid": ("post_block", 1)}


def flow(window="same_step", **kwargs) -> ConsumerFlow:
    return ConsumerFlow(reads=[ResidualStream.read(layer=1, role="mid")], window=window, **kwargs)


def start(llm, name: str, prompt, params) -> None:
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)


def finish(llm) -> dict[str, list[int]]:
    """Step until all requests have ended; their generated tokens."""
    tokens = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    llm.llm_engine.step()
    return tokens


def named_in(text: str, name: str):
    """A class of a module's text, or of the first block of Python of a document that has it."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL) or [text]
    found = {"__name__": "shown"}
    exec(next(block for block in blocks if f"class {name}" in block), found)
    return found[name]


class Statistics:
    """Of a class that is no consumer."""

    def read_stats(self):
        return {"seen": self.seen}


class Counting(Statistics):
    """Counts rows, and says what its object was made with."""

    consumer_id = "counting"

    def flows(self):
        return [flow()]

    def consume_bundle(self, bundle, ctx):
        rows = self.seen.get("rows", 0) + len(bundle.meta)
        self.seen.update(rows=rows, step=self.step)


class MixedIn(Counting, Consumer):
    def __init__(self):
        self.seen, self.step = {}, 2


@dataclass(frozen=True)
class Frozen(Counting, Consumer):
    step: int = 2
    seen: dict = field(default_factory=dict)


@dataclass(slots=True)
class Slotted(Counting, Consumer):
    step: int = 2
    seen: dict = field(default_factory=dict)


class Numbered(Consumer):
    """Takes numbers below its own."""

    consumer_id = "numbered"

    def __init__(self, own):
        self.own = own

    def flows(self):
        return [flow()]

    def validate_options(self, options):
        if set(options) - {"number"}:
            raise ValueError(f"{sorted(options)}: only number")
        if options.get("number", 0) >= self.own:
            raise ValueError(f"number={options['number']} is too large for {self.own}")

    def consume_bundle(self, bundle, ctx):
        assert all(info.options.get("number", 0) < self.own for info in bundle.meta.requests)

    def on_request_finished(self, request, ctx):
        return self.own, request.options.get("number")


def ended(llm):
    """Step until all requests have ended; their last outputs."""
    outputs = {}
    while llm.llm_engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.llm_engine.step()}
    return outputs


@pytest.mark.skipif(
    ON_0_30,
    reason="an engine of vLLM 0.30 in the user's process does not end with its user",
)
def test_an_engine_ends_with_its_user_and_others_of_the_process_go_on(
    llm, tiny_model, tmp_path, reference
):
    """The user may keep a consumer, and what speaks for it; the next may have its store."""
    asked = greedy(3, capture={"filesystem": {"hooks": {"post_block": [1]}}})
    for shut_down in (False, True):
        consumer = FilesystemConsumer(tmp_path / "store")
        other = LLM(tiny_model, capture_consumers=[consumer], **TINY_ENGINE)
        (output,) = generate(other, prompts_of([5]), asked)
        assert output.capture_results["filesystem"].status == "ok"
        engine, steering = weakref.ref(other.llm_engine), other.steering
        if shut_down:  # vLLM's own takes process groups along
            engine().engine_core.shutdown()
        del other
        assert engine() is None
        with pytest.raises(RuntimeError, match="consumer 'filesystem' was registered in has ended"):
            consumer.read_stats()
        with pytest.raises(RuntimeError, match="this engine has ended"):
            steering.status()
    for prompt, tokens in zip(
        prompts_of([5, 9]), tokens_of(generate(llm, prompts_of([5, 9]), greedy(3))), strict=True
    ):
        assert tokens == reference.greedy(prompt, 3)


class TestRegistration:
    def test_a_consumer_registered_mid_traffic_sees_rows_from_the_next_step_on(self, llm):
        start(llm, "early", prompts_of([5])[0], greedy(8))
        for _ in range(3):
            llm.llm_engine.step()
        recorder = llm.register_consumer(Recorder(flow()))
        start(llm, "late", prompts_of([4])[0], greedy(3))
        finish(llm)
        positions = recorder.positions("mid")
        assert positions["late", 0] == list(range(6))
        early = positions["early", 0]
        assert early == list(range(early[0], 12)) and early[0] > 5
        assert [i.request_id for i in recorder.log.started] == ["early", "late"]

    def test_a_consumer_unregistered_mid_traffic_gets_what_was_computed(self, llm):
        recorder = llm.register_consumer(Recorder(flow("background")))
        start(llm, "a", prompts_of([5])[0], greedy(8))
        for _ in range(4):
            llm.llm_engine.step()
        llm.unregister_consumer(recorder)
        before = recorder.positions("mid")["a", 0]
        assert before == list(range(len(before))) and len(before) > 5
        finish(llm)
        assert recorder.positions("mid")["a", 0] == before

    @pytest.mark.parametrize("steps", [0, 4])
    def test_a_request_that_asked_for_a_consumer_hears_that_it_left(self, llm, steps):
        """And one that did not ask, or had its result before, hears nothing of it."""
        recorder = llm.register_consumer(Recorder(flow()))
        asked = {"consumers": {"recorder": {}}}
        (before,) = generate(llm, prompts_of([5]), greedy(2, **asked))
        start(llm, "asked", prompts_of([5])[0], sampled(8, n=2, **asked))
        start(llm, "not asked", prompts_of([5])[0], greedy(8))
        for _ in range(steps):
            llm.llm_engine.step()
        llm.unregister_consumer(recorder)
        outputs = {}
        while llm.llm_engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.llm_engine.step()}
        for sample in outputs["asked"].outputs:
            result = sample.consumer_results["recorder"]
            assert (result.status, result.payload) == ("error", None)
            assert "unregistered before the request had ended" in result.error
        assert outputs["not asked"].outputs[0].consumer_results == {}
        llm.wait_for_results([before])
        assert before.outputs[0].consumer_results["recorder"].status == "ok"

    @pytest.mark.parametrize("asked", [True, False])
    def test_a_consumer_that_came_anew_says_that_rows_before_are_missing(self, llm, asked):
        """Its result has a part of the rows, and is not given as whole."""
        llm.register_consumer(ProbeConsumer([1.0] * HIDDEN))
        named = {"consumers": {"probe": {}}} if asked else {}
        start(llm, "a", prompts_of([5])[0], greedy(8, **named))
        for _ in range(3):
            llm.llm_engine.step()
        llm.unregister_consumer("probe")
        llm.register_consumer(ProbeConsumer([1.0] * HIDDEN))
        outputs = {}
        while llm.llm_engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.llm_engine.step()}
        result = outputs["a"].outputs[0].consumer_results["probe"]
        assert result.status == "partial_error"
        assert "registered anew, so that rows before that are missing" in result.error
        assert 0 < len(result.payload.positions) < 12
        (after,) = generate(llm, prompts_of([5]), greedy(8, **named))
        assert after.outputs[0].consumer_results["probe"].status == "ok"

    def test_a_consumer_that_comes_after_a_request_began_says_that_rows_before_are_missing(
        self, llm
    ):
        """As in a replica that another front end's registration has not reached yet."""
        asked = {"capture": {"memory": {"hooks": {"post_block": [1]}, "positions": "all"}}}
        generate(llm, prompts_of([5]), greedy(2, **asked))
        session = llm.llm_engine.model_executor.driver_worker.worker.session
        memory = session.consumers.get("memory")
        start(llm, "a", prompts_of([5])[0], greedy(8, **asked))
        session.unregister("memory")
        for _ in range(3):
            llm.llm_engine.step()
        session.consumers.register(type(memory.consumer)(), memory.registration)
        outputs = {}
        while llm.llm_engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.llm_engine.step()}
        result = outputs["a"].outputs[0].consumer_results["memory"]
        assert result.status == "partial_error"
        assert "rows before that are missing" in result.error
        assert 0 < len(result.payload["post_block"][1].positions) < 12

    def test_a_consumer_without_results_that_came_anew_says_so_to_who_asked_for_it(self, llm):
        class Silent(Recorder):
            def on_request_finished(self, request, ctx):
                """It has nothing to say."""

        llm.register_consumer(Silent(flow()))
        start(llm, "asked", prompts_of([5])[0], greedy(8, consumers={"recorder": {}}))
        start(llm, "not asked", prompts_of([5])[0], greedy(8))
        for _ in range(3):
            llm.llm_engine.step()
        llm.unregister_consumer("recorder")
        llm.register_consumer(Silent(flow()))
        outputs = {}
        while llm.llm_engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.llm_engine.step()}
        result = outputs["asked"].outputs[0].consumer_results["recorder"]
        assert (result.status, result.payload) == ("partial_error", None)
        assert "registered anew" in result.error
        assert outputs["not asked"].outputs[0].consumer_results == {}

    @pytest.mark.parametrize("steps", [0, 3])
    def test_a_request_hears_that_another_consumer_has_the_id_that_it_named(self, llm, steps):
        """Also one that waited, or that the new consumer cannot serve, which harms nobody else."""
        asked = {"consumers": {"numbered": {"number": 7}}}
        llm.register_consumer(Numbered(10))
        start(llm, "asked", prompts_of([5])[0], greedy(6, **asked))
        start(llm, "unasked", prompts_of([5])[0], greedy(6))
        off = {"numbered": {"enabled": False}}
        start(llm, "off", prompts_of([5])[0], greedy(6, consumers=off))
        for _ in range(steps):
            llm.llm_engine.step()
        llm.unregister_consumer("numbered")
        for _ in range(1 if steps else 0):  # it may run without any for a while
            llm.llm_engine.step()
        llm.register_consumer(Numbered(20))
        outputs = ended(llm)
        result = outputs["asked"].outputs[0].consumer_results["numbered"]
        assert (result.status, result.payload) == ("partial_error", (20, 7))
        told = (
            "while the request ran the consumer was registered"
            if steps
            else "another registered under its id, before"
        )
        assert told in result.error
        unasked = outputs["unasked"].outputs[0].consumer_results["numbered"]
        assert unasked.status == "partial_error" if steps else "ok"
        assert not outputs["off"].outputs[0].consumer_results

        start(llm, "asked", prompts_of([5])[0], greedy(6, **asked))
        for _ in range(steps):
            llm.llm_engine.step()
        llm.unregister_consumer("numbered")
        llm.register_consumer(Numbered(5))
        start(llm, "beside", prompts_of([5])[0], greedy(6, consumers={"numbered": {"number": 3}}))
        outputs = ended(llm)
        result = outputs["asked"].outputs[0].consumer_results["numbered"]
        assert (result.status, result.payload) == ("error", None)
        assert "cannot do what it asks: ValueError: number=7 is too large for 5" in result.error
        result = outputs["beside"].outputs[0].consumer_results["numbered"]
        assert (result.status, result.payload) == ("ok", (5, 3))

    def test_a_second_consumer_of_the_same_id_is_refused(self, llm):
        llm.register_consumer(Recorder(flow()))
        with pytest.raises(ValueError, match=r"recorder.*another consumer_id"):
            llm.register_consumer(Recorder(flow()))

    @pytest.mark.parametrize("name", ["memory", "signals", "patching"])
    def test_a_consumer_by_the_name_of_results_of_ours_is_refused(self, llm, name):
        with pytest.raises(ValueError, match=rf"Recorder has consumer_id='{name}'.*another"):
            llm.register_consumer(Recorder(flow(), consumer_id=name))

    def test_an_id_is_free_again_after_unregistering(self, llm, reference):
        llm.unregister_consumer(llm.register_consumer(Recorder(flow())))
        recorder = llm.register_consumer(Recorder(flow()))
        outputs = generate(llm, prompts_of([5]), greedy(3))
        assert_rows_match(recorder, outputs, reference, HALF)

    def test_unregistering_an_unknown_consumer_names_those_there_are(self, llm):
        llm.register_consumer(Recorder(flow()))
        with pytest.raises(ValueError, match=r"'nobody'.*recorder"):
            llm.unregister_consumer("nobody")

    def test_statistics_are_asked_for_by_instance_or_id(self, llm):
        probe = llm.register_consumer(ProbeConsumer([1.0] * HIDDEN))
        generate(llm, prompts_of([5]), greedy(3))
        assert llm.read_stats("probe") == llm.read_stats(probe) == probe.read_stats()
        assert llm.read_stats("probe")["runtime"]["rows"] == 7
        with pytest.raises(ValueError, match=r"no consumer 'nobody' .* registered are probe\. Use"):
            llm.read_stats("nobody")

    @pytest.mark.parametrize("kind", [MixedIn, Frozen, Slotted])
    def test_an_object_of_any_class_stands_for_its_copies(self, llm, kind):
        """Its own fields reach the copies, and what it is asked is asked of these."""
        counting = llm.register_consumer(kind())
        generate(llm, prompts_of([5]), greedy(3))
        assert counting.read_stats()["seen"] == {"rows": 7, "step": 2}
        llm.unregister_consumer(counting)
        with pytest.raises(RuntimeError, match="'counting' is not registered with an engine"):
            counting.read_stats()

    def test_a_consumer_that_fails_to_start_leaves_nothing_behind(self, llm):
        class Broken(Recorder):
            def start(self, ctx):
                raise OSError("no such file")

        with pytest.raises(RuntimeError, match="no such file"):
            llm.register_consumer(Broken(flow()))
        assert llm.intervention_stats()[0]["consumers"] == {}
        llm.register_consumer(Recorder(flow()))

    def test_a_consumer_that_cannot_be_copied_is_refused_with_what_to_do(self, llm):
        holding = Recorder(flow())
        holding.lock = Lock()
        says = r"'recorder' cannot be copied to the workers: .*lock.*; make what .* in start"
        with pytest.raises(TypeError, match=says):
            llm.register_consumer(holding)
        llm.register_consumer(Recorder(flow()))

    def test_clearing_consumers_ends_all_capture(self, llm):
        recorder = llm.register_consumer(Recorder(flow()))
        llm.clear_consumers()
        before = llm.intervention_stats()[0]["rows_captured"]
        generate(llm, prompts_of([5]), greedy(3))
        assert recorder.log.calls == []
        assert llm.intervention_stats()[0]["rows_captured"] == before

    def test_the_users_object_answers_for_its_copies_while_registered(self, llm):
        recorder = llm.register_consumer(Recorder(flow()))
        generate(llm, prompts_of([5]), greedy(3))
        recorder.synchronize()
        assert recorder.read_stats()["runtime"]["rows"] == 7
        llm.unregister_consumer(recorder)
        with pytest.raises(RuntimeError, match="'recorder' is not registered with an engine"):
            recorder.read_stats()

    def test_an_object_of_two_engines_answers_for_neither(self, llm, tight_llm):
        """Which one was meant is not known; each engine answers."""
        recorder = llm.register_consumer(Recorder(flow()))
        tight_llm.register_consumer(recorder)
        generate(llm, prompts_of([5]), greedy(3))
        for ask in (recorder.read_stats, recorder.synchronize):
            with pytest.raises(RuntimeError, match=r"in 2 engines.*llm\.\w+\('recorder'\) of each"):
                ask()
        rows = [each.read_stats(recorder)["runtime"]["rows"] for each in (llm, tight_llm)]
        assert rows == [7, 0]
        tight_llm.unregister_consumer(recorder)
        assert recorder.read_stats()["runtime"]["rows"] == 7
        llm.unregister_consumer(recorder)
        with pytest.raises(RuntimeError, match="'recorder' is not registered with an engine"):
            recorder.read_stats()

    def test_a_flow_of_many_roles_fails_as_a_whole(self, llm):
        reads = [ResidualStream.read(layer=1), ResidualStream.read(layer=9, role="far")]
        writes = [ResidualStream.write(layer=1)]
        with pytest.raises(ValueError, match="layer"):
            llm.register_consumer(Recorder(ConsumerFlow(reads=reads, writes=writes)))
        assert llm.intervention_stats()[0]["consumers"] == {}


class TestRequestOptions:
    def test_a_disabled_consumer_sees_nothing_of_the_request(self, llm, reference):
        recorder = llm.register_consumer(Recorder(flow()))
        off = greedy(3, consumers={"recorder": {"enabled": False}})
        outputs = generate(llm, prompts_of([5, 6, 7]), [greedy(3), off, greedy(3)])
        assert_rows_match(recorder, [outputs[0], outputs[2]], reference, HALF)
        assert outputs[1].consumer_results == {}
        assert outputs[1].request_id not in {i.request_id for i in recorder.log.started}

    @pytest.mark.parametrize(
        ("consumers", "message"),
        [
            ({"nobody": {}}, r"consumers\['nobody'\].*registered are recorder"),
            ({"recorder": {"strength": 1}}, r"consumers\['recorder'\].*strength.*enabled"),
            (
                {"recorder": {"enabled": 1}},
                r"consumers\['recorder'\]\['enabled'\]=1 must be True or False",
            ),
        ],
    )
    def test_a_wrong_option_is_refused_by_name_and_the_engine_goes_on(
        self, llm, consumers, message
    ):
        recorder = llm.register_consumer(Recorder(flow()))
        with pytest.raises(ValueError, match=message):
            generate(llm, prompts_of([5]), greedy(3, consumers=consumers))
        recorder.log.calls.clear()
        generate(llm, prompts_of([5]), greedy(3))
        assert len(recorder.rows("mid")) == 7

    def test_options_reach_the_consumer_with_each_request(self, llm):
        class Optional(Recorder):
            def validate_options(self, options):
                pass

        recorder = llm.register_consumer(Optional(flow()))
        params = [greedy(3, consumers={"recorder": {"strength": i}}) for i in range(2)]
        outputs = generate(llm, prompts_of([5, 5]), [*params])
        given = {i.request_id: i.options for i in recorder.log.started}
        assert [given[o.request_id]["strength"] for o in outputs] == [0, 1]
        assert all(
            info.options == given[info.request_id]
            for call in recorder.log.calls
            for info in call.meta.requests
        )


class TestEnds:
    def test_results_arrive_with_requests_that_stop_early(self, llm, reference):
        recorder = llm.register_consumer(Recorder(flow()))
        prompts = prompts_of([5, 8])
        full = [reference.greedy(prompt, 6) for prompt in prompts]
        stops = [
            SamplingParams(
                temperature=0, max_tokens=6, detokenize=False, stop_token_ids=[tokens[2]]
            )
            for tokens in full
        ]
        outputs = generate(llm, prompts, stops)
        for output, tokens in zip(outputs, full, strict=True):
            stop = tokens.index(tokens[2])
            assert list(output.outputs[0].token_ids) == tokens[: stop + 1]
            assert output.consumer_results["recorder"].status == "ok"
        # A step computed ahead of the stop may have given one more row.
        for (name, _), positions in recorder.positions("mid").items():
            output = next(o for o in outputs if o.request_id == name)
            passed = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
            assert positions in (list(range(passed)), list(range(passed + 1)))

    def test_an_aborted_request_frees_its_slot_and_its_consumers_hear_of_it(self, llm):
        recorder = llm.register_consumer(Recorder(flow("next_step")))
        for name in ("a", "b"):
            start(llm, name, prompts_of([30])[0], greedy(20))
        for _ in range(4):
            llm.llm_engine.step()
        assert llm.intervention_stats()[0]["running_sequences"] == 2
        llm.llm_engine.abort_request(["a"])
        tokens = finish(llm)
        assert len(tokens["b"]) == 20 and "a" not in tokens
        assert {i.request_id for i in recorder.log.finished} == {"a", "b"}
        assert llm.intervention_stats()[0]["running_sequences"] == 0
        assert recorder.positions("mid")["b", 0] == list(range(49))
        last = max(i for i, e in enumerate(recorder.log.events) if e.startswith("bundle"))
        assert recorder.log.events.index("finished a") < last

    def test_a_sequence_finishes_after_all_of_its_bundles(self, llm):
        flows = [flow(w) for w in ("same_step", "next_step", "out_of_band", "background")]
        recorder = llm.register_consumer(Recorder(*flows, flow("background", max_bundle_rows=2)))
        (output,) = generate(llm, prompts_of([5]), greedy(4))
        assert recorder.log.events[-1] == f"finished {output.request_id}"
        for number in range(5):
            assert recorder.positions("mid", number)[output.request_id, 0] == list(range(8))

    def test_a_consumer_does_not_hear_of_plain_requests_that_were_over_before_it(self, llm):
        generate(llm, prompts_of([5, 6]), greedy(3))
        recorder = llm.register_consumer(Recorder(flow()))
        generate(llm, prompts_of([4]), greedy(2))
        assert len(recorder.log.started) == len(recorder.log.finished) == 1

    def test_a_result_that_is_pending_survives_the_counters(self, llm, monkeypatch):
        monkeypatch.setattr(llm._sync, "result_timeout_s", 0.2)
        llm.register_consumer(Stalled())
        (output,) = generate(llm, prompts_of([5]), greedy(2))
        assert output.consumer_results["stalled"].status == "pending"
        Stalled.promised.set_result("done")
        llm.intervention_stats()
        llm.wait_for_results([output], timeout_s=3)
        assert output.consumer_results["stalled"].payload == "done"

    def test_generations_follow_each_other_without_leaving_anything(self, llm):
        llm.register_consumer(Recorder(flow()))
        for _ in range(3):
            outputs = generate(llm, prompts_of([5, 6]), sampled(3, n=2))
            assert all(c.consumer_results for o in outputs for c in o.outputs)
        assert llm.intervention_stats()[0]["running_sequences"] == 0


class Stalled(Consumer):
    """Promises a result, and keeps one waiting."""

    consumer_id = "stalled"
    promised = Future()

    def flows(self):
        return []

    def on_request_finished(self, request, context):
        return type(self).promised


class Raising(Recorder):
    """Raises in one of its callbacks, from the second sequence on."""

    def __init__(self, callback: str, *flows: ConsumerFlow) -> None:
        super().__init__(*flows, consumer_id="raising")
        setattr(self, callback, self._raise)

    def _raise(self, *args):
        raise ZeroDivisionError("my mistake")


CALLBACKS = {
    "on_request_started": flow(),
    "consume_bundle": flow(),
    "on_step_end": flow(),
    "on_request_finished": flow(),
    "guide": ConsumerFlow(writes=[Sampler.write(phase="any")]),
}


class TestMistakes:
    @pytest.mark.parametrize("callback", CALLBACKS)
    def test_a_consumer_that_raises_harms_nobody_else(self, llm, reference, caplog, callback):
        recorder = llm.register_consumer(Recorder(flow()))
        raising = llm.register_consumer(Raising(callback, CALLBACKS[callback]))
        off = {"raising": {"enabled": False}}
        params = [sampled(4), greedy(4), greedy(4, consumers=off)]
        outputs = generate(llm, prompts_of([5, 40, 6]), params)
        assert_rows_match(recorder, outputs, reference, HALF)
        for output in outputs[:2]:
            result = output.consumer_results["raising"]
            if callback != "guide" or output is outputs[0]:
                assert (result.status, result.error) == ("error", "ZeroDivisionError: my mistake")
            assert output.consumer_results["recorder"].status == "ok"
        assert set(outputs[2].consumer_results) == {"recorder"}
        assert tokens_of(outputs)[1] == reference.greedy(outputs[1].prompt_token_ids, 4)
        reports = [r for r in caplog.records if "raised and is detached" in r.getMessage()]
        assert len(reports) == 1
        assert raising.read_stats()["runtime"]["error"] == "ZeroDivisionError: my mistake"

    @pytest.mark.parametrize("window", ["next_step", "out_of_band", "background"])
    def test_a_consumer_that_raises_in_a_later_window_is_reported_once(self, llm, caplog, window):
        llm.register_consumer(Raising("consume_bundle", flow(window)))
        (output,) = generate(llm, prompts_of([5]), greedy(6))
        assert output.consumer_results["raising"].error == "ZeroDivisionError: my mistake"
        reports = [r for r in caplog.records if "raised and is detached" in r.getMessage()]
        assert len(reports) == 1

    def test_nothing_is_captured_for_a_detached_consumer(self, llm):
        llm.register_consumer(Raising("consume_bundle", flow()))
        generate(llm, prompts_of([5]), greedy(6))
        before = llm.intervention_stats()[0]["rows_captured"]
        (output,) = generate(llm, prompts_of([5]), greedy(6))
        assert llm.intervention_stats()[0]["rows_captured"] == before
        assert output.consumer_results["raising"].status == "error"

    def test_a_detached_consumer_steers_no_more(self, llm, reference):
        class Steering(Raising):
            def on_request_started(self, request, ctx):
                ctx.writer("delta").set([request], torch.full((128,), 9.0))

        steering = ConsumerFlow(
            reads=[ResidualStream.read(layer=0)], writes=[ResidualStream.write(layer=0)]
        )
        llm.register_consumer(Steering("on_step_end", steering))
        prompts = prompts_of([5])
        generate(llm, prompts, greedy(4))
        assert tokens_of(generate(llm, prompts, greedy(4)))[0] == reference.greedy(prompts[0], 4)

    def test_an_error_in_on_export_is_reported_like_any_other(self, llm):
        class Exporting(Raising):
            def consume_bundle(self, bundle, ctx):
                ctx.export("states", {"h": bundle.entries["mid"]})

        reads = [ResidualStream.read(layer=1, role="mid")]
        exporting = Exporting(
            "on_export", ConsumerFlow(reads=reads, writes=[CpuExport.write(channel="states")])
        )
        llm.register_consumer(exporting)
        generate(llm, prompts_of([5]), greedy(6))
        exporting.synchronize()
        assert exporting.read_stats()["runtime"]["error"] == "ZeroDivisionError: my mistake"

    @pytest.mark.parametrize(("path", "name"), SHOWN)
    def test_what_we_show_outlives_a_request_that_is_aborted_in_its_prompt(self, llm, path, name):
        shown = llm.register_consumer(named_in((ROOT / path).read_text(), name)())
        start(llm, "aborted", prompts_of([100])[0], greedy(4))
        llm.llm_engine.step()
        llm.llm_engine.abort_request(["aborted"])
        finish(llm)
        (output,) = generate(llm, prompts_of([5]), greedy(4))
        result = output.consumer_results[shown.consumer_id]
        assert (result.status, result.error) == ("ok", None)

    @pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
    def test_what_is_raised_in_on_result_is_the_error_of_that_result(self, llm, error):
        class Hearing(Recorder):
            def on_result(self, output, sample_index, result):
                raise error("my mistake")

        llm.register_consumer(Hearing(flow()))
        outputs = generate(llm, prompts_of([5, 6]), greedy(2))
        for output in outputs:
            result = output.consumer_results["recorder"]
            assert (result.status, result.error) == ("error", f"{error.__name__}: my mistake")

    @pytest.mark.parametrize("raises", [False, True])
    @pytest.mark.parametrize("how", ["clear", "replace"])
    def test_an_on_result_that_takes_samples_away_harms_its_own_result_alone(
        self, llm, how, raises
    ):
        """Our own code looked for a sample that was no longer there: IndexError in `generate`."""

        class Emptying(Recorder):
            def on_result(self, output, sample_index, result):
                if how == "clear":
                    output.outputs.clear()
                else:
                    output.outputs = []
                if raises:
                    raise ZeroDivisionError("my mistake")

        llm.register_consumer(Emptying(flow()))
        asked = {"memory": {"hooks": {"post_block": [1]}}}
        outputs = generate(llm, prompts_of([5, 6]), sampled(2, n=2, capture=asked))
        for output in outputs:
            assert [len(sample.token_ids) for sample in output.outputs] == [2, 2]
            for sample in output.outputs:
                result = sample.consumer_results["recorder"]
                assert result.status == "error"
                assert "changed which samples output.outputs has; they were" in result.error
                assert ("my mistake" in result.error) == raises
                assert sample.capture_results["memory"].status == "ok"

    def test_logits_are_not_missed_by_a_reader_beside_one_that_raises(self, llm):
        recorder = llm.register_consumer(Recorder(ConsumerFlow(reads=[Logits.read()])))
        llm.register_consumer(Raising("consume_bundle", flow()))
        generate(llm, prompts_of([5]), greedy(4))
        assert len(recorder.rows("logits")) == 4

    @pytest.mark.parametrize("error", [SystemExit, KeyError])
    @pytest.mark.parametrize("method", ["validate_options", "needs_tokens_of", "request_flows"])
    def test_what_is_raised_by_a_request_in_the_users_process_names_the_method(
        self, llm, method, error
    ):
        def fails(*_):
            raise error("my mistake")

        llm.register_consumer(type("Asked", (Recorder,), {method: fails})(flow()))
        told = rf"consumer 'recorder' raised in {method}: {error.__name__}: .*my mistake"
        with pytest.raises(RuntimeError, match=told):
            generate(llm, prompts_of([5]), greedy(2, consumers={"recorder": {}}))
        assert not llm.llm_engine.has_unfinished_requests()
        llm.unregister_consumer("recorder")
        generate(llm, prompts_of([5]), greedy(2))

    @pytest.mark.parametrize(
        ("flows", "told"),
        [
            (None, "returned None; let it return a list of ConsumerFlow"),
            (flow(), "returned ConsumerFlow.*; let it return a list"),
            ([3], r"returned \[3\]; let it return a list"),
            ([ConsumerFlow(writes=[ResidualStream.write(layer=1)])], "returned a flow that writes"),
        ],
    )
    def test_what_a_request_reads_is_a_list_of_flows_that_only_read(self, llm, flows, told):
        class Asked(Recorder):
            def request_flows(self, options, num_layers):
                return flows

        llm.register_consumer(Asked(flow()))
        with pytest.raises(RuntimeError, match=rf"request_flows\(\) of consumer 'recorder' {told}"):
            generate(llm, prompts_of([5]), greedy(2))

    @pytest.mark.parametrize("error", [SystemExit, ZeroDivisionError])
    def test_who_waits_hears_what_a_consumer_raises_meanwhile(self, llm, error):
        class Waiting(Recorder):
            def synchronize(self):
                raise error("my mistake")

        waiting = llm.register_consumer(Waiting(flow(), consumer_id="waiting"))
        recorder = llm.register_consumer(Recorder(flow("background")))
        generate(llm, prompts_of([5]), greedy(3))
        told = rf"synchronize: consumer 'waiting' raised in it: {error.__name__}: my mistake"
        with pytest.raises(RuntimeError, match=told):
            waiting.synchronize()
        assert len(recorder.rows("mid")) == 7
        recorder.synchronize()

    def test_who_is_not_registered_is_not_waited_for_and_has_no_statistics(self, llm):
        recorder = llm.register_consumer(Recorder(flow()))
        for one in (recorder, "recorder"):
            llm.synchronize(one)
            assert "runtime" in llm.read_stats(one)
        for call in (
            llm.synchronize,
            llm.read_stats,
            lambda consumer: llm.call_consumer(consumer, "method"),
        ):
            for other in ("other", Recorder(flow(), consumer_id="other")):
                told = r"no consumer 'other' is registered.*recorder.*llm\.register_consumer"
                with pytest.raises(ValueError, match=told):
                    call(other)
            with pytest.raises(TypeError, match="3 is no consumer; give one, or its consumer_id"):
                call(3)

    def test_statistics_that_cannot_be_told_name_the_consumer(self, llm):
        class Counts(Recorder):
            def read_stats(self):
                return 3

            def merge_stats(self, stats):
                raise SystemExit("my mistake")

        counts = llm.register_consumer(Counts(flow()))
        with pytest.raises(Exception, match=r"read_stats\(\) of consumer 'recorder' returned 3"):
            counts.read_stats()
        llm.clear_consumers()
        counts = llm.register_consumer(
            type("Merging", (Recorder,), {"merge_stats": Counts.merge_stats})(flow())
        )
        with pytest.raises(RuntimeError, match="raised in merge_stats: SystemExit: my mistake"):
            counts.read_stats()

    def test_a_method_under_another_name_reaches_the_workers(self, llm):
        def counted(method):
            return lambda self: method(self)

        class Decorated(Recorder):
            @counted
            def read_stats(self):
                return {"told": 1}

            synchronize = counted(Recorder.synchronize)

        decorated = llm.register_consumer(Decorated(flow()))
        decorated.synchronize()
        assert decorated.read_stats()["told"] == 1

    def test_vectors_for_one_request_are_given_with_a_list_of_it(self, llm):
        class Steering(Recorder):
            def on_request_started(self, request, ctx):
                ctx.writer("delta").set(request, torch.zeros(128))

        llm.register_consumer(Steering(ConsumerFlow(writes=[ResidualStream.write(layer=0)])))
        (output,) = generate(llm, prompts_of([5]), greedy(2))
        assert "give a list of them" in output.consumer_results["recorder"].error

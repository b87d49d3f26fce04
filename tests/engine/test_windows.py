"""When each window is called, on which thread, and with which rows together."""

import threading
from collections import Counter, defaultdict

import pytest
import torch

from engine.asking import assert_rows_match, generate, greedy, prompts_of, sampled
from engine.recorder import LOGS, Recorder
from engine.test_lifecycle import finish, start
from tllm.ports import ConsumerFlow, RequestMeta, ResidualStream, Sampler, TokenTarget

HALF = {"mid": ("post_block", 1)}
WINDOWS = ["same_step", "next_step", "out_of_band", "background"]


def flow(window="same_step", phase="any", **kwargs) -> ConsumerFlow:
    read = ResidualStream.read(layer=1, role="mid", phase=phase)
    return ConsumerFlow(reads=[read], window=window, **kwargs)


class Clock(Recorder):
    """Notes sampling (`guide`) among the other events."""

    def guide(self, candidates, ctx):
        self.log.events.append("sampling")

    def on_request_finished(self, request, ctx):
        self.log.events.append("finished")

    def consume_bundle(self, bundle, ctx) -> None:
        super().consume_bundle(bundle, ctx)
        self.log.events[-1] += f" of step {ctx.step}"

    def on_step_end(self, ctx) -> None:
        self.log.events.append(f"end of step {ctx.step}")


def clocked(llm, window: str, *more) -> list[str]:
    """Events of one sampled request of two tokens, steps numbered from 1."""
    reads = [ResidualStream.read(layer=1, role="mid"), *more]
    observed = ConsumerFlow(
        reads=reads, writes=[Sampler.write(phase="any")], window=window, bundle_key=()
    )
    clock = llm.register_consumer(Clock(observed))
    generate(llm, prompts_of([5]), sampled(2))
    first = clock.log.calls[0].step
    return [
        event.replace(f"step {first + 1}", "step 2").replace(f"step {first}", "step 1")
        for event in clock.log.events[1:]
    ]


def test_same_step_is_called_before_the_tokens_are_drawn(llm):
    one = ["bundle 0 of step 1", "sampling", "end of step 1"]
    two = ["bundle 0 of step 2", "sampling", "end of step 2"]
    assert clocked(llm, "same_step") == [*one, *two, "finished"]


def test_same_step_with_token_targets_is_called_after_the_tokens_are_drawn(llm):
    one = ["sampling", "bundle 0 of step 1", "end of step 1"]
    two = ["sampling", "bundle 0 of step 2", "end of step 2"]
    assert clocked(llm, "same_step", TokenTarget.read()) == [*one, *two, "finished"]


def test_next_step_is_called_before_the_next_forward_pass(llm):
    assert clocked(llm, "next_step") == [
        *("sampling", "end of step 1", "bundle 0 of step 1"),
        *("sampling", "end of step 2", "bundle 0 of step 2", "finished"),
    ]


def test_out_of_band_is_called_at_the_end_of_the_step(llm):
    assert clocked(llm, "out_of_band") == [
        *("sampling", "bundle 0 of step 1", "end of step 1"),
        *("sampling", "bundle 0 of step 2", "end of step 2", "finished"),
    ]


def test_only_background_runs_on_a_thread_of_its_own(llm):
    recorder = llm.register_consumer(Recorder(*map(flow, WINDOWS)))
    generate(llm, prompts_of([5, 40]), greedy(4))
    threads = {n: {c.thread for c in recorder.log.calls if c.flow == n} for n in range(4)}
    here = {threading.current_thread().name}
    assert threads[0] == threads[1] == threads[2] == here
    assert threads[3] == {"tllm-recorder"}


@pytest.mark.parametrize("delivery", ["bundle", "device_lease"])
@pytest.mark.parametrize("window", WINDOWS)
def test_every_window_gets_the_right_rows(llm, reference, window, delivery):
    recorder = llm.register_consumer(Recorder(flow(window, delivery=delivery)))
    outputs = generate(llm, prompts_of([5, 40, 30, 1]), greedy(6))
    assert_rows_match(recorder, outputs, reference, HALF)
    steps = [call.step for call in recorder.log.calls]
    assert steps == sorted(steps)


def test_nothing_waits_for_a_background_consumer(llm):
    gate = threading.Event()
    GATES["slow"] = gate

    recorder = llm.register_consumer(Held(flow("background"), consumer_id="slow"))
    start(llm, "a", prompts_of([5])[0], greedy(8))
    for _ in range(5):
        llm.llm_engine.step()
    assert recorder.log.calls == []
    gate.set()
    finish(llm)
    assert recorder.positions("mid")["a", 0] == list(range(12))


GATES: dict[str, threading.Event] = {}


class Held(Recorder):
    def consume_bundle(self, bundle, ctx) -> None:
        assert GATES[self.consumer_id].wait(timeout=60)
        super().consume_bundle(bundle, ctx)


def test_a_bundle_of_a_step_and_phase_holds_all_requests(llm):
    recorder = llm.register_consumer(Recorder(flow()))
    llm.register_consumer(Recorder(flow(), consumer_id="other"))
    some_without = greedy(6, consumers={"other": {"enabled": False}})
    generate(llm, prompts_of([5, 6, 7]), [greedy(6), some_without, greedy(6)])
    keys = Counter((c.key["engine_step_id"], c.key["phase"]) for c in recorder.log.calls)
    assert set(keys.values()) == {1}
    assert len(recorder.log.calls[-1].meta.requests) == 3
    assert len(LOGS["other"].calls[-1].meta.requests) == 2


def test_without_phase_in_the_key_prompt_and_generated_rows_share_a_bundle(llm, reference):
    recorder = llm.register_consumer(Recorder(flow(bundle_key=("engine_step_id",))))
    outputs = generate(llm, prompts_of([5, 40]), greedy(6))
    assert_rows_match(recorder, outputs, reference, HALF)
    steps = [c.key["engine_step_id"] for c in recorder.log.calls]
    assert len(steps) == len(set(steps))
    assert any(len(set(c.meta.is_prefill.tolist())) == 2 for c in recorder.log.calls)


@pytest.mark.parametrize("key", ["request_id", "prompt_id"])
def test_rows_are_split_by_request_or_prompt(llm, key):
    recorder = llm.register_consumer(Recorder(flow(bundle_key=(key,))))
    outputs = generate(llm, prompts_of([5, 6]), sampled(4, n=2))
    assert len({call.key[key] for call in recorder.log.calls}) == len(outputs)
    for call in recorder.log.calls:
        assert {getattr(info, key) for info in call.meta.requests} == {call.key[key]}
    most = max(len(call.meta.requests) for call in recorder.log.calls)
    assert most == (2 if key == "prompt_id" else 1)
    assert len(recorder.rows("mid")) == 2 * (5 + 3) + 2 * (6 + 3)


@pytest.mark.parametrize("window", WINDOWS)
def test_rows_of_n_steps_come_together(llm, reference, window):
    recorder = llm.register_consumer(Recorder(flow(window, dispatch_every_n_steps=3)))
    outputs = generate(llm, prompts_of([5, 6]), greedy(8))
    assert_rows_match(recorder, outputs, reference, HALF)
    decode = [c for c in recorder.log.calls if c.key["phase"] == "decode"]
    assert any(len(set(c.meta.steps.tolist())) == 3 for c in decode)
    for call in recorder.log.calls:
        names = [(i.prompt_id, i.sample_index) for i in call.meta.requests]
        assert len(names) == len(set(names)), "a sequence is listed once"


def test_large_bundles_are_split(llm, reference):
    recorder = llm.register_consumer(Recorder(flow(max_bundle_rows=4)))
    outputs = generate(llm, prompts_of([21, 6]), greedy(3))
    assert_rows_match(recorder, outputs, reference, HALF)
    assert max(len(call.meta) for call in recorder.log.calls) == 4


def test_many_consumers_at_once_do_not_disturb_each_other(llm, reference):
    recorders = [
        llm.register_consumer(Recorder(flow(window, phase), consumer_id=f"{window} {phase}"))
        for window in WINDOWS
        for phase in ("prefill", "decode", "any")
    ]
    outputs = generate(llm, prompts_of([5, 40, 12]), greedy(5))
    for recorder in recorders:
        phase = recorder.consumer_id.split()[1]
        assert_rows_match(recorder, outputs, reference, HALF, phase=phase)


KEPT = []  # an engine has a copy of each consumer


class Keeping(Recorder):
    """Looks at what it was given when all is over."""

    def consume_bundle(self, bundle, ctx):
        KEPT.append((bundle, ctx))


@pytest.mark.parametrize("delivery", ["bundle", "device_lease"])
@pytest.mark.parametrize("window", WINDOWS)
def test_what_a_consumer_keeps_does_not_change(llm, window, delivery):
    KEPT.clear()
    reads = [ResidualStream.read(layer=n, role=f"layer {n}", phase="decode") for n in (1, 2)]
    reads.append(RequestMeta.read(role="who"))
    consumer = llm.register_consumer(
        Keeping(ConsumerFlow(reads=reads, window=window, delivery=delivery))
    )
    outputs = generate(llm, prompts_of([5, 3]), greedy(12))
    consumer.read_stats()  # waits for threads
    lengths = {o.request_id: len(o.prompt_token_ids) for o in outputs}
    positions, steps = defaultdict(list), []
    for bundle, ctx in KEPT:
        meta = bundle.meta
        assert bundle.entries["who"] is meta
        assert set(meta.steps.tolist()) == {ctx.step} == {bundle.key["engine_step_id"]}
        steps.append(ctx.step)
        for name, position in zip(meta.request_ids, meta.positions.tolist(), strict=True):
            positions[name].append(position)
    assert steps == sorted(set(steps))
    for name, length in lengths.items():
        assert positions[name] == list(range(length, length + 11))
    if delivery == "bundle":
        tensors = [bundle.entries["layer 1"] for bundle, _ in KEPT]
        assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
        assert not torch.equal(tensors[3], tensors[8])
    steady = [bundle for bundle, _ in KEPT][5:10]
    assert len({id(bundle.meta.request_index) for bundle in steady}) == 1
    with pytest.raises(ValueError, match="read-only"):
        steady[0].meta.request_index[0] = 1


class Learner(Recorder):
    """Learns to predict the stream after a block from the one before it."""

    def start(self, ctx):
        self.net = torch.nn.Linear(ctx.model.hidden_size, ctx.model.hidden_size, device=ctx.device)
        torch.nn.init.zeros_(self.net.weight)  # what was drawn before is no matter of its losses
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        self.losses = []

    def consume_bundle(self, bundle, ctx):
        with torch.inference_mode(False), torch.enable_grad():
            before, after = (bundle.entries[role].clone() for role in ("before", "mid"))
            loss = torch.nn.functional.mse_loss(self.net(before), after)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.losses.append(float(loss.detach()))

    def on_request_finished(self, request, ctx):
        return self.losses


@pytest.mark.parametrize("window", WINDOWS)
def test_a_consumer_can_train_a_network_in_every_window(llm, window):
    """The network is made in `start`, which is not in inference mode, as the engine's thread is."""
    before = ResidualStream.read(layer=0, role="before", phase="decode")
    after = ResidualStream.read(layer=1, role="mid", phase="decode")
    llm.register_consumer(Learner(ConsumerFlow(reads=[before, after], window=window)))
    (output,) = generate(llm, prompts_of([5]), greedy(24))
    result = output.outputs[0].consumer_results["recorder"]
    assert result.status == "ok", result.error
    assert sum(result.payload[-4:]) < sum(result.payload[:4])

"""Which of our functions a decode step of an engine calls: host time as counts, the same on every
machine. What stands for a device's work on a CPU is not counted."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from vllm.sampling_params import RequestOutputKind

from benchmarks.consumers import EveryRow
from engine.reference import HIDDEN, LAYERS
from tllm import SamplingParams
from tllm.consumers.esamp import ESampConsumer, ESampConsumerConfig
from tllm.runtime.kernels.backend import INTERPRETED

OURS = f"{os.sep}tllm{os.sep}"
ON_DEVICE = (
    "kernels",
    "ops.py",
    "taps.py",
    "tap_hooks.py",
    "sites.py",
    "descriptor.py",
    "columns.py",
)
ON_DEVICE += ("reference.py", "distiller.py", "norm.py", "launches.py")
IN_PLACE_OF_OTHERS = {"BlockKeys.__call__", "in_inference_mode.<locals>.within"}
"""vLLM asks a hasher for each request of each step; ours compares two numbers then, as its does.
And torch's decorator, which is not counted either, calls six functions of its own."""
compiled = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels would take minutes")
FEW, MANY = (1, 2) if INTERPRETED else (2, 8)
SHORT, LONG = 12, 12 if INTERPRETED else 28
"""Tokens of the requests of a run. What threads do for a step is the difference of two runs."""


@dataclass
class Calls:
    """Our functions that were called, by name.

    Attributes:
        steps: on the engine's thread, in each step.
        elsewhere: on delivery threads.
    """

    steps: list[Counter[str]] = field(default_factory=list)
    elsewhere: Counter[str] = field(default_factory=Counter)

    def note(self, frame, event, arg):
        """A profile function."""
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if name in IN_PLACE_OF_OTHERS or "<lambda>" in name:
            return
        if event == "call" and OURS in path:
            parts = path.rsplit(OURS, 1)[1].split(os.sep)
            if not set(parts) & set(ON_DEVICE):
                on_thread = threading.current_thread() is not threading.main_thread()
                (self.elsewhere if on_thread else self.steps[-1])[name] += 1

    @property
    def steady(self):
        """A decode step in the middle: all of them are alike, but for what comes every few."""
        middle = self.steps[LONG // 3 : -2]
        return sorted(middle, key=Counter.total)[len(middle) // 2]


@contextmanager
def called(llm):
    """Our calls in the steps of an engine in this process."""
    engine, found = llm.llm_engine, Calls()
    session = engine.engine_core.engine_core.model_executor.driver_worker.worker.session
    threads = [t for owner in session.consumers for t in (owner.thread, owner.export_thread)]
    step = engine.step

    def counted():
        found.steps.append(Counter())
        sys.setprofile(found.note)
        try:
            return step()
        finally:
            sys.setprofile(None)

    engine.step = counted
    try:
        for thread in threads:
            thread.submit(lambda: sys.setprofile(found.note))
        yield found
        for thread in threads:
            thread.submit(lambda: sys.setprofile(None))
            thread.drain()
    finally:
        engine.step = step


def run(llm, asked, tokens):
    """The calls of requests that decode together, a token each in a step."""
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, top_k=8, **each) for each in asked]
    prompts = [{"prompt_token_ids": [1 + number, 2]} for number in range(len(asked))]
    with called(llm) as found:
        llm.generate(prompts, params, use_tqdm=False)
    return found


def vector(seed):
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed))


def condition(seed, **when):
    """Steering that a condition of its own decides on."""
    probe = {"hook": "pre_attn", "layer": 0, "vector": vector(seed)}
    when = {"probe": probe, "above": 0.0, "name": "gate"} | when
    operation = {"vector": 0.01 * vector(seed + 100)}
    return {"steering_vectors": {"post_block": {n: [operation | {"when": when}] for n in (1, 2)}}}


def steered(seed):
    return {"steering_vectors": {"post_block": {1: [{"vector": 0.01 * vector(seed)}]}}}


def stopping(seed):
    probe = {"hook": "post_block", "layer": 1, "vector": vector(seed)}
    return {"stop_when": {"probe": probe, "above": 1e9, "name": "never"}}


def captured(seed):
    return {"capture": {"memory": {"hooks": {"post_block": [1]}, "positions": "all"}}}


def nothing(seed):
    return {}


def remembering(seed):
    return condition(seed, scope="rest")


CASES = {
    "idle": (nothing, None, 27),
    "steered": (steered, None, 35),
    "conditions": (condition, None, 56),
    "conditions that remember": (remembering, None, 57),
    "conditions that stop": (stopping, None, 64),
    "every layer read": (nothing, lambda: EveryRow(LAYERS), 54),
    "one layer to memory": (captured, None, 62),
    "ESamp": (nothing, lambda: ESampConsumer(ESampConsumerConfig(width=16, rank=8)), 79),
}
"""What requests ask, who is registered, and the most calls of a step."""

MORE_INTERPRETED = 6
"""The V2 runner asks more often how wide guides are."""
MORE_ON_A_GPU = {
    "idle": 6,
    "every layer read": 20,
    "one layer to memory": 20,
    "ESamp": 36,
}
"""Streams are asked for, and kernels launched; in other cases 8, of the V2 runner."""


@pytest.mark.parametrize("case", ["conditions"] if INTERPRETED else CASES)
def test_a_decode_step_calls_as_few_functions_of_ours_whatever_the_requests(llm, case):
    asked, consumer, most = CASES[case]
    if consumer is not None:
        llm.register_consumer(consumer())
    few = run(llm, [asked(n) for n in range(FEW)], LONG).steady
    many = run(llm, [asked(n) for n in range(MANY)], LONG).steady
    assert many == few
    more = (
        MORE_ON_A_GPU.get(case, 8) if torch.cuda.is_available() else INTERPRETED * MORE_INTERPRETED
    )
    assert many.total() <= most + more, many.most_common()


@compiled
@pytest.mark.parametrize("case", ["conditions", "one layer to memory"])
def test_threads_that_bring_rows_do_nothing_for_each_of_them_in_a_step(llm, case):
    asked, _, _ = CASES[case]

    run(llm, [asked(0)], SHORT)  # the consumer comes with the first that asks

    def of_a_step(requests):
        runs = [run(llm, [asked(n) for n in range(requests)], n) for n in (SHORT, LONG)]
        short, long = (found.elsewhere for found in runs)
        return {name: (long[name] - short[name]) / (LONG - SHORT) for name in long}

    few, many = of_a_step(FEW), of_a_step(MANY)
    more = {name: many[name] - few.get(name, 0) for name in many}
    # Ends of requests share a job as far as they come before it begins, which varies. What is done
    # for each row would be done MANY - FEW times more.
    assert max(more.values()) < 1, more
    assert sum(many.values()) <= 12, many


@compiled
def test_each_token_that_is_streamed_costs_few_calls(llm):
    found = []
    for requests in (FEW, MANY):
        with called(llm) as calls:
            for number in range(requests):
                params = SamplingParams(
                    max_tokens=LONG, ignore_eos=True, output_kind=RequestOutputKind.DELTA
                )
                prompt = {"prompt_token_ids": [1 + number, 2]}
                llm.llm_engine.add_request(f"stream {number}", prompt, params)
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
        found.append(calls.steady)
    few, many = found
    assert (many.total() - few.total()) / (MANY - FEW) <= 3, many - few


@compiled
def test_what_a_consumer_reads_costs_the_same_in_one_layer_and_in_all(llm):
    found = []
    for layers in (2, LAYERS):
        llm.clear_consumers()
        llm.register_consumer(EveryRow(layers))
        found.append(run(llm, [{}] * MANY, LONG).steady)
    assert found[0] == found[1]

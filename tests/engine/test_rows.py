"""Every token that passes the model gives one row: none lost, none doubled, none misattributed."""

import random
from collections import Counter

import pytest
import torch

from engine.adder import Adder
from engine.asking import (
    RELATIVE,
    assert_rows_match,
    error_of,
    generate,
    greedy,
    prompts_of,
    sampled,
    tokens_of,
)
from engine.recorder import Recorder
from engine.reference import HIDDEN, Addition
from tllm.ports import ConsumerFlow, Logits, ResidualStream, TokenTarget
from tllm.runtime.kernels.backend import INTERPRETED

REQUESTS = 60 if INTERPRETED else 200
HALF = {"mid": ("post_block", 1)}


def reader(phase="any", *, window="same_step", consumer_id="recorder") -> Recorder:
    read = ResidualStream.read(layer=1, role="mid", phase=phase)
    return Recorder(ConsumerFlow(reads=[read], window=window), consumer_id=consumer_id)


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


@pytest.fixture
def preemptions(tight_llm, monkeypatch):
    """Counts the preemptions of the tight engine."""
    counted = Counter()
    scheduler = scheduler_of(tight_llm)
    preempt = scheduler._preempt_request

    def count(request, *args, **kwargs):
        counted[request.request_id] += 1
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", count)
    return counted


@pytest.fixture
def cache_hits(llm, monkeypatch):
    """Tokens that the prefix cache gave, by request."""
    hits = Counter()
    manager = scheduler_of(llm).kv_cache_manager
    look_up = manager.get_computed_blocks

    def count(request, *args, **kwargs):
        found = look_up(request, *args, **kwargs)
        hits[request.request_id] += found[1]
        return found

    monkeypatch.setattr(manager, "get_computed_blocks", count)
    return hits


def test_rows_of_prompts_computed_in_chunks_arrive_in_order(llm, reference):
    recorder = llm.register_consumer(reader())
    outputs = generate(llm, prompts_of([100, 60, 25, 24, 23, 1]), greedy(5))
    assert_rows_match(recorder, outputs, reference, HALF)
    for output in outputs:
        arrived = [
            int(position)
            for call in recorder.log.calls
            for name, position in zip(call.meta.request_ids, call.meta.positions, strict=True)
            if name == output.request_id
        ]
        assert arrived == sorted(arrived)


def test_a_prompt_whose_rows_are_read_is_computed_in_spite_of_the_cache(llm, reference):
    prompts = prompts_of([100], seed=11)
    generate(llm, prompts, greedy(2))
    recorder = llm.register_consumer(reader())
    outputs = generate(llm, prompts * 2, greedy(4))
    assert_rows_match(recorder, outputs, reference, HALF)


def test_a_reader_of_generated_rows_keeps_cache_hits(llm, reference, cache_hits):
    prompts = prompts_of([100], seed=12)
    generate(llm, prompts, greedy(2))
    recorder = llm.register_consumer(reader("decode"))
    cache_hits.clear()
    outputs = generate(llm, prompts, greedy(4))
    assert sum(cache_hits.values()) == 96
    assert_rows_match(recorder, outputs, reference, HALF, phase="decode")


def test_a_reader_of_logits_keeps_cache_hits(llm, cache_hits):
    prompts = prompts_of([100], seed=14)
    generate(llm, prompts, greedy(2))
    recorder = llm.register_consumer(Recorder(ConsumerFlow(reads=[Logits.read()])))
    cache_hits.clear()
    generate(llm, prompts, greedy(4))
    assert sum(cache_hits.values()) == 96
    assert len(recorder.rows("logits")) == 4


def test_a_request_that_turned_the_reader_off_keeps_cache_hits(llm, cache_hits):
    prompts = prompts_of([100], seed=13)
    generate(llm, prompts, greedy(2))
    llm.register_consumer(reader())
    cache_hits.clear()
    generate(llm, prompts, greedy(4, consumers={"recorder": {"enabled": False}}))
    assert sum(cache_hits.values()) == 96


def test_each_of_n_samples_has_its_own_rows_and_results(llm, reference):
    recorder = llm.register_consumer(reader())
    outputs = generate(llm, prompts_of([30, 4]), sampled(5, n=3))
    assert_rows_match(recorder, outputs, reference, HALF)
    for output in outputs:
        for completion in output.outputs:
            payload = completion.consumer_results["recorder"].payload
            assert payload == {"sample": completion.index, "request_id": output.request_id}


@pytest.mark.parametrize("window", ["same_step", "next_step", "background"])
def test_a_preempted_sequence_gives_each_row_once(tight_llm, reference, preemptions, window):
    reads = [ResidualStream.read(layer=1, role="mid"), TokenTarget.read(role="next")]
    recorder = tight_llm.register_consumer(Recorder(ConsumerFlow(reads=reads, window=window)))
    outputs = generate(tight_llm, prompts_of([30, 20, 40, 25, 35], seed=2), greedy(40))
    assert preemptions
    assert_rows_match(recorder, outputs, reference, HALF)
    following = recorder.rows("next")
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        found = [int(following[output.request_id, 0, i]) for i in range(len(tokens) - 1)]
        assert found == tokens[1:]


def test_a_preempted_sequence_is_steered_as_before(tight_llm, reference, preemptions):
    place = ("post_block", 1)
    vector = 4 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    tight_llm.register_consumer(Adder(place, vector))
    outputs = generate(tight_llm, prompts_of([30, 20, 40, 25, 35], seed=2), greedy(40))
    assert preemptions
    for output, tokens in zip(outputs, tokens_of(outputs), strict=True):
        addition = Addition(place, vector)
        assert reference.would_generate(output.prompt_token_ids, tokens, [addition])
        assert output.consumer_results["adder"].status == "ok"


class Traffic:
    """Random requests that arrive and are aborted at random, driven through `LLMEngine`."""

    READERS = ("all", "prompt", "generated")

    def __init__(self, llm, seed: int, count: int) -> None:
        self.pick = random.Random(seed)
        self.engine = llm.llm_engine
        shared = prompts_of([120], seed=seed)[0]
        self.waiting = []
        for number in range(count):
            # Some prompts begin alike, so that the prefix cache has something to give.
            prompt = shared[: self.pick.randrange(70)] if self.pick.random() < 0.4 else []
            prompt = prompt + prompts_of([self.pick.randint(1, 30)], seed=seed + number)[0]
            self.waiting.append((str(number), prompt))
        self.prompt_len = {name: len(prompt) for name, prompt in self.waiting}
        self.off: dict[str, set[str]] = {}
        self.aborted: set[str] = set()
        self.tokens: dict[str, list[int]] = {}

    def run(self) -> None:
        while self.waiting or self.engine.has_unfinished_requests():
            while self.waiting and self.pick.random() < 0.5:
                self._add(*self.waiting.pop())
            if self.tokens and self.pick.random() < 0.1:
                self._abort(self.pick.choice(list(self.tokens)))
            for output in self.engine.step():
                tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
                self.tokens[output.request_id] = tokens

    def _add(self, name: str, prompt: list[int]) -> None:
        off = {reader for reader in self.READERS if self.pick.random() < 0.3}
        consumers = {reader: {"enabled": False} for reader in off}
        params = greedy(self.pick.randint(1, 14), consumers=consumers)
        self.off[name] = off
        self.tokens[name] = list(prompt)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def _abort(self, name: str) -> None:
        self.engine.abort_request([name])
        self.aborted.add(name)


@pytest.mark.timeout(300)
def test_interleaved_requests_give_exactly_their_rows(tight_llm, reference, preemptions):
    readers = {
        "all": reader(consumer_id="all"),
        "prompt": reader("prefill", window="background", consumer_id="prompt"),
        "generated": reader("decode", window="next_step", consumer_id="generated"),
    }
    for each in readers.values():
        tight_llm.register_consumer(each)
    traffic = Traffic(tight_llm, seed=7, count=REQUESTS)
    traffic.run()
    tight_llm.llm_engine.step()  # tells the worker what ended last
    assert preemptions and traffic.aborted
    assert tight_llm.intervention_stats()[0]["running_sequences"] == 0
    tight_llm.synchronize()
    states = {}
    for name, each in readers.items():
        rows = each.rows("mid")
        by_request = each.positions("mid")
        for request_id, tokens in traffic.tokens.items():
            found = by_request.pop((request_id, 0), [])
            if name in traffic.off[request_id]:
                assert found == []
                continue
            low = traffic.prompt_len[request_id] if name == "generated" else 0
            high = traffic.prompt_len[request_id] if name == "prompt" else len(tokens) - 1
            expected = list(range(low, high))
            if request_id in traffic.aborted:
                # The engine may have been a step or two ahead of the tokens that came back.
                assert found[: len(expected)] == expected[: len(found)]
                assert found == list(range(low, low + len(found)))
            else:
                assert found == expected
            if request_id not in states:
                states[request_id] = reference.run(tokens, [HALF["mid"]])[1][HALF["mid"]]
            for position in found:
                if position < len(tokens):
                    row = rows[request_id, 0, position]
                    assert error_of(row, states[request_id][position]) < RELATIVE
        assert not by_request, "rows of requests that nobody made"

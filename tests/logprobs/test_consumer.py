"""`NextTokenConsumer` as any user of `LLM` may have it, and calls to consumers in the workers."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from logprobs.asking import ENGINE, MODEL, OTHER_ENGINE, agrees
from tllm import LLM, SamplingParams
from tllm.consumers.base import Consumer
from tllm.consumers.next_token import ADDRESS_WIDTH, NextTokenConsumer
from tllm.shared_memory import FOLDER, SharedRows

PROMPTS = [[10, 11, 12], [40, 41]]
SHARED = f"{FOLDER}/tllm-1-2-3-{'0' * 32}"
"""Where shared rows might be, and are not."""


class Counter(Consumer):
    """Has methods that may be called from outside, and one that may not."""

    consumer_id = "counter"
    remote_methods = ("add", "fail")

    def flows(self):
        return []

    def start(self, ctx):
        self.total = 0

    def add(self, numbers, factor):
        self.total += factor * sum(numbers)
        return self.total

    def fail(self):
        raise LookupError("no number")

    def hidden(self):
        return 1


@pytest.fixture(scope="module")
def llm():
    return LLM(MODEL, consumers=[NextTokenConsumer()], **ENGINE)


def generate(llm, asked=PROMPTS, **options):
    params = SamplingParams(
        max_tokens=3,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        consumers={"next_token": options},
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in asked]
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ticket": 1, "place": ["/etc/passwd", 64, 0]}, "'/etc/passwd', which is none of"),
        ({"ticket": 1, "place": [f"{FOLDER}/../tmp/x", 64, 0]}, "which is none of"),
        ({"ticket": 1, "place": "/dev/shm/x"}, "give a list of str, int, int"),
        ({"address": ["/etc/passwd", 0, 0, 64, []]}, "'/etc/passwd', which is none of"),
        ({"address": [SHARED, 0, 0, 64, ["/etc/passwd"]]}, "'/etc/passwd', which is none of"),
        ({"address": [SHARED, 0, 0.5, 64, []]}, "give a list of str, int, int, int, list"),
        ({"address": [SHARED, 0, 0, 64, []]}, "names no file that results go to; name one"),
    ],
)
def test_workers_write_to_shared_rows_and_nowhere_else(llm, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(llm, PROMPTS[:1], **options)


def test_a_request_that_cannot_be_answered_where_it_says_gets_the_error_itself(llm):
    rows = SharedRows.create(2, 64)
    place = {"ticket": 1, "top_k": 4}
    wrong = {
        "no row 2": {**place, "place": [str(rows.path), 64, 2]},
        "cannot be opened": {**place, "place": [SHARED, 64, 0]},
        "200 are needed": {**place, "top_k": 98, "place": [str(rows.path), 64, 0]},
    }
    try:
        for message, options in wrong.items():
            [output] = generate(llm, PROMPTS[:1], **options)
            assert message in output.outputs[0].consumer_results["next_token"].error
        generate(llm, PROMPTS[:1], **place, place=[str(rows.path), 64, 1])
        assert rows.values[1].any()
        assert not rows.values[0].any()
    finally:
        rows.unlink()


def test_a_wrong_place_is_no_matter_of_other_requests(llm):
    """Of another width than its file was known with, or of none that there is: it ended all."""
    rows, table = SharedRows.create(4, 32), SharedRows.create(3, ADDRESS_WIDTH)
    entries = table.values.view(np.int64)
    entries[:] = [[5, 3 << 32, 1, 0], [6, 4, 1, 0], [7, 3, 1, 0]]
    path = str(rows.path)
    try:
        generate(llm, PROMPTS[:1], ticket=1, top_k=4, place=[path, 32, 0])
        generate(llm, PROMPTS[:1], ticket=2, top_k=4, place=[path, 16, 3])
        assert rows.values[[0, 1], [0, 16]].view(np.int32).tolist() == [1, 2]
        for entry, named in enumerate(("row 0 of file 3", "row 4 of file 0")):
            address = [str(table.path), entry, 1, 32, [path]]
            [output] = generate(llm, PROMPTS[:1], top_k=4, address=address)
            assert named in output.outputs[0].consumer_results["next_token"].error
        generate(llm, PROMPTS[:1], top_k=4, address=[str(table.path), 2, 1, 32, [path]])
        assert rows.values[3, 0].view(np.int32) == 7
    finally:
        rows.unlink()
        table.unlink()


def test_samples_that_share_a_ticket_hear_that_they_get_nothing(llm):
    params = SamplingParams(
        n=2, max_tokens=2, detokenize=False, consumers={"next_token": {"ticket": 3}}
    )
    [output] = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
    for sample in output.outputs:
        error = sample.consumer_results["next_token"].error
        assert "its 2 samples have one ticket" in error
    assert llm.call_consumer("next_token", "pop", [3]) == [{}]


def test_results_come_back_with_the_output(llm, reference):
    whole = generate(llm)
    top = generate(llm, top_k=4)
    some = generate(llm, token_ids=[9, 8])
    for i, prompt in enumerate(PROMPTS):
        tokens = [*prompt, *whole[i].outputs[0].token_ids]
        found = whole[i].consumer_results["next_token"].payload
        assert found.positions.tolist() == list(range(len(prompt) - 1, len(tokens) - 1))
        rows = torch.as_tensor(found.values)
        for position, row in zip(found.positions, rows, strict=True):
            expected = reference.next_token_logprobs_sync(tokens[: position + 1])
            assert agrees(row, expected, OTHER_ENGINE)
        best = top[i].consumer_results["next_token"].payload
        assert torch.equal(torch.as_tensor(best["token_ids"].values).long(), rows.topk(4).indices)
        chosen = torch.as_tensor(some[i].consumer_results["next_token"].payload.values)
        assert torch.allclose(chosen, rows[:, [9, 8]], atol=1e-4)


def test_results_that_stay_are_taken_or_forgotten(llm, reference):
    output = generate(llm, PROMPTS[:1], ticket=5)[0]
    assert not output.consumer_results
    [taken] = llm.call_consumer("next_token", "pop", [5, 6])
    tokens = [*PROMPTS[0], *output.outputs[0].token_ids]
    expected = reference.next_token_logprobs_sync(tokens[:-1])
    assert agrees(torch.from_numpy(taken[5].values), expected, OTHER_ENGINE)
    assert llm.call_consumer("next_token", "pop", [5]) == [{}]
    generate(llm, PROMPTS[:1], ticket=7)
    llm.call_consumer("next_token", "forget", [7])
    assert llm.call_consumer("next_token", "pop", [7]) == [{}]


def test_results_that_nobody_takes_make_room_for_later_ones(llm):
    """They stayed in the worker for ever."""
    llm.unregister_consumer("next_token")
    llm.register_consumer(NextTokenConsumer(kept_results=3))
    try:
        for ticket in range(1, 6):
            generate(llm, PROMPTS[:1], ticket=ticket)
        stats = llm.read_stats("next_token")
        assert (stats["kept"], stats["kept_dropped"]) == (3, 2), stats
        [popped] = llm.call_consumer("next_token", "pop", [1, 3, 4, 99])
        assert sorted(popped) == [1, 3, 4]
        assert "ticket 1 was dropped: more than kept_results=3" in popped[1].error
        assert len(popped[3].values) == len(popped[4].values) > 1000
        assert llm.call_consumer("next_token", "pop", [1, 3]) == [{}]
        llm.call_consumer("next_token", "forget", [2])
        assert llm.call_consumer("next_token", "pop", [2]) == [{}]
    finally:
        llm.unregister_consumer("next_token")
        llm.register_consumer(NextTokenConsumer())


def test_a_token_that_is_not_there_is_its_own_requests_error_alone(llm):
    params = [
        SamplingParams(
            max_tokens=2, temperature=0, detokenize=False, consumers={"next_token": options}
        )
        for options in ({"token_ids": [9, 10**6]}, {"token_ids": [9, 8]}, {})
    ]
    outputs = llm.generate([{"prompt_token_ids": [10, 11]}] * 3, params, use_tqdm=False)
    wrong, some, whole = (output.consumer_results["next_token"] for output in outputs)
    assert wrong.status == "error" and "token_ids has 1000000; the vocabulary has" in wrong.error
    assert (some.status, whole.status) == ("ok", "ok")
    expected = torch.as_tensor(whole.payload.values)[:, [9, 8]]
    assert torch.allclose(torch.as_tensor(some.payload.values), expected, atol=1e-4)
    assert generate(llm)[0].consumer_results["next_token"].status == "ok"


def test_requests_that_do_not_ask_cost_nothing(llm):
    before = llm.intervention_stats()[0]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    llm.generate(prompts, SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
    assert llm.intervention_stats()[0] == before


def test_declared_methods_of_a_consumer_may_be_called_and_no_others(llm):
    counter = llm.register_consumer(Counter())
    assert llm.call_consumer(counter, "add", [1, 2], 10) == [30]
    assert llm.call_consumer("counter", "add", [1], 1) == [31]
    with pytest.raises(ValueError, match=r"no remote method 'hidden'.*add, fail"):
        llm.call_consumer(counter, "hidden")
    with pytest.raises(ValueError, match="no consumer 'nobody' is registered"):
        llm.call_consumer("nobody", "add")
    with pytest.raises(ValueError, match=r"add\(numbers, factor\), called with 1 .*'factor'"):
        llm.call_consumer(counter, "add", [1])
    assert llm.call_consumer(counter, "add", [], 1) == [31]  # it is there as before
    with pytest.raises(RuntimeError, match=r"detached: LookupError.*no number"):
        llm.call_consumer(counter, "fail")
    with pytest.raises(RuntimeError, match="detached"):
        llm.call_consumer(counter, "add", [1], 1)
    llm.unregister_consumer(counter)

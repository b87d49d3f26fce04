"""`AsyncVirtualLM`'s queries: right, batched, and whoever asks from wherever."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from logprobs.asking import (
    CACHED,
    CORRELATION,
    MODEL,
    OTHER_ENGINE,
    PLACES,
    VOCAB,
    agrees,
    correlation,
    gathered,
    greedy,
    left_in,
    prompts,
    relative_error,
    vllm_logprobs,
)
from logprobs.steering import HIDDEN
from tllm.consumers.next_token import NextTokenConsumer
from tllm.logprobs import TopLogprobs


def test_log_probabilities_are_those_of_vllm_and_of_transformers(lm, reference):
    for prompt in prompts(4):
        found = lm.next_token_logprobs_sync(prompt)
        assert found.shape == (VOCAB,)
        assert found.dtype == torch.float32
        assert agrees(found, vllm_logprobs(lm, prompt))
        theirs = reference.next_token_logprobs_sync(prompt)
        assert agrees(found, theirs, OTHER_ENGINE)
        assert correlation(found, theirs) > CORRELATION


def test_more_queries_than_the_engine_runs_at_once_each_get_their_own(lm, reference):
    asked = prompts(30, seed=1)
    before = lm.stats()["computed"]
    found = asyncio.run(gathered(map(lm.next_token_logprobs, asked)))
    assert lm.stats()["computed"] - before == 30
    for prompt, row in zip(asked, found, strict=True):
        assert agrees(row, reference.next_token_logprobs_sync(prompt), OTHER_ENGINE)


def test_equal_concurrent_prompts_are_computed_once_and_share_no_memory(lm):
    before = lm.stats()["computed"]
    asked = [[7, 8, 9]] * 5 + [[7, 8]]
    *same, other = asyncio.run(gathered(map(lm.next_token_logprobs, asked)))
    assert lm.stats()["computed"] - before == 2
    assert not torch.equal(same[0], other)
    same[0].fill_(0)
    assert torch.equal(same[1], same[2])
    assert same[1].exp().sum() == pytest.approx(1, abs=1e-4)


def test_a_batch_does_not_wait_for_its_timeout(lm):
    """The fixture's is an hour."""
    asked = gathered(map(lm.next_token_logprobs, prompts(3, seed=2)))
    asyncio.run(asyncio.wait_for(asked, 300))


def passes(lm):
    """Of the model, that answered anything."""
    return lm.run(lm.engine.read_stats(lm.engine.consumers["next_token"]))["bundles"]


def test_queries_that_are_asked_together_are_computed_together(lm):
    lm.batch_next_token_logprobs_sync([[3, 4]])
    before = passes(lm)
    lm.batch_next_token_logprobs_sync([[5 + i, 6, 7] for i in range(PLACES)])
    assert passes(lm) == before + 1


def test_lanes_that_are_stepped_together_are_computed_together(lm):
    async def run():
        lanes = [lm.open([5 + i, 6, 7]) for i in range(PLACES)]
        await gathered(lane.next() for lane in lanes)
        before = await asyncio.to_thread(passes, lm)
        for step in range(3):
            for lane in lanes:
                lane.feed(9 + step)
            await gathered(lane.next() for lane in lanes)
        after = await asyncio.to_thread(passes, lm)
        await gathered(lane.close() for lane in lanes)
        return after - before

    assert asyncio.run(run()) == 3


def test_completions_and_queries_run_side_by_side(lm, reference):
    asked = prompts(6, seed=3)

    async def both():
        samples = [lm.sample(prompt, 12, [], temperature=0) for prompt in asked]
        queries = [lm.next_token_logprobs(prompt) for prompt in asked]
        return await gathered([*samples, *queries])

    found = asyncio.run(both())
    for prompt, tokens, row in zip(asked, found[:6], found[6:], strict=True):
        assert agrees(row, reference.next_token_logprobs_sync(prompt), OTHER_ENGINE)
        assert tokens == asyncio.run(reference.sample(prompt, 12, [], temperature=0))


def test_greedy_generation_gives_the_same_tokens_in_every_way(lm, reference):
    for prompt in prompts(2, seed=4):
        tokens = asyncio.run(greedy(lm, prompt, 10))
        assert tokens == asyncio.run(lm.sample(prompt, 10, [], temperature=0))
        assert tokens == asyncio.run(greedy(reference, prompt, 10))


def test_parts_of_the_vocabulary_are_those_of_the_whole(lm):
    asked = prompts(5, seed=5)
    whole = lm.batch_next_token_logprobs_sync(asked)
    sent = lm.run(lm.engine.read_stats(lm.engine.consumers["next_token"]))["bytes_out"]
    top = lm.batch_next_token_logprobs_sync(asked, top_k=7)
    some = lm.batch_next_token_logprobs_sync(asked, only=[5, 1000, 5])
    sent = lm.run(lm.engine.read_stats(lm.engine.consumers["next_token"]))["bytes_out"] - sent
    assert isinstance(top, TopLogprobs)
    assert relative_error(top.values, whole.topk(7).values) < 1e-4
    assert relative_error(whole.gather(1, top.token_ids.long()), top.values) < 1e-4
    assert relative_error(some, whole[:, [5, 1000, 5]]) < 1e-4
    assert sent < 2 * 5 * VOCAB  # bytes: less than one tenth of two whole answers
    everything = lm.next_token_logprobs_sync(asked[0], top_k=10 * VOCAB)
    assert everything.token_ids.sort().values.tolist() == list(range(VOCAB))


def test_batches_are_rows_in_the_order_asked(lm):
    asked = [*prompts(4, seed=6), [3], [3]]
    rows = lm.batch_next_token_logprobs_sync(asked)
    assert rows.shape == (6, VOCAB)
    assert agrees(asyncio.run(lm.batch_next_token_logprobs(asked)), rows)
    for prompt, row in zip(asked, rows, strict=True):
        assert agrees(lm.next_token_logprobs_sync(prompt), row)


def test_every_thread_and_event_loop_may_ask(lm):
    expected = lm.next_token_logprobs_sync([5, 6])
    found = []

    async def inside():
        found.append(lm.next_token_logprobs_sync([5, 6]))  # waits, but for another thread
        found.append(await lm.next_token_logprobs([5, 6]))

    def elsewhere():
        asyncio.run(inside())

    threads = [threading.Thread(target=elsewhere) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(inside())
    assert len(found) == 8
    assert all(agrees(row, expected) for row in found)


def test_the_callers_event_loop_goes_on_while_the_engine_computes(lm):
    async def ask():
        turns = 0
        waiting = asyncio.ensure_future(lm.sample(list(range(2, 200)), 40, [], temperature=0))
        while not waiting.done():
            await asyncio.sleep(0.001)
            turns += 1
        await waiting
        return turns

    assert asyncio.run(ask()) > 5


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda lm: lm.next_token_logprobs([]), "the prompt is empty"),
        (lambda lm: lm.next_token_logprobs_sync([]), "the prompt is empty"),
        (lambda lm: lm.batch_next_token_logprobs([]), "no prompts were given"),
        (lambda lm: lm.batch_next_token_logprobs_sync([[1], []]), "the prompt is empty"),
        (lambda lm: asyncio.run(lm.sample([], 3, [])), "the prompt is empty"),
        (lambda lm: asyncio.run(lm.batch_sample([], 3, [])), "no prompts were given"),
        (lambda lm: lm.open([]), "the prompt is empty"),
        (lambda lm: lm.next_token_logprobs([VOCAB]), "the model's are 0 to 1347"),
        (lambda lm: lm.next_token_logprobs([-1]), "the prompt has token -1"),
        (lambda lm: lm.next_token_logprobs([1.5]), "a flat list of integers"),
        (lambda lm: lm.next_token_logprobs("text"), "give a list of token ids"),
        (lambda lm: lm.next_token_logprobs([1] * 256), "256 tokens leave no room"),
        (lambda lm: lm.next_token_logprobs([1], top_k=0), "top_k=0"),
        (lambda lm: lm.next_token_logprobs([1], only=[]), "only= is empty"),
        (lambda lm: lm.next_token_logprobs([1], only=[VOCAB]), "only= has token 1348"),
        (lambda lm: lm.next_token_logprobs([1], top_k=1, only=[1]), "give one of them"),
        (lambda lm: lm.next_token_logprobs([1], temperature=2), "unknown arguments"),
        (lambda lm: lm.next_token_logprobs([1], lora_name="x"), "no adapter 'x' was added"),
        (
            lambda lm: lm.next_token_logprobs([1], consumers={"next_token": {}}),
            "set by the backend",
        ),
        (lambda lm: lm.next_token_logprobs_sync([1], consumers={"y": {}}), "no such consumer"),
        (lambda lm: asyncio.run(lm.sample([1], 0, [])), "max_tokens=0"),
        (lambda lm: asyncio.run(lm.sample([1], 2.5, [])), "max_tokens=2.5 is not a whole number"),
        (lambda lm: asyncio.run(lm.sample([1], None, [])), "max_tokens=None is not a whole"),
        (lambda lm: asyncio.run(lm.sample([1], 2, 5)), "eos_token_ids is int; give a list"),
        (lambda lm: asyncio.run(lm.sample([1], 2, top_k=5)), "top_k= was given; completions"),
        (lambda lm: lm.open([1], only=[5]), r"only= was given; give it to next\(\)"),
        (lambda lm: lm.next_token_logprobs([True, 5]), r"flat list of integers, and is \[True"),
        (lambda lm: lm.next_token_logprobs(torch.tensor(5)), "flat list of integers, and is 5"),
        (lambda lm: lm.next_token_logprobs([1], only=5), "only= is int; give a list"),
        (
            lambda lm: lm.next_token_logprobs([1], only=torch.arange(VOCAB) < 9),
            r"only= must be a flat list.*; of a mask, give np\.flatnonzero\(mask\)",
        ),
        (lambda lm: lm.batch_next_token_logprobs_sync(5), "the prompts are int; give a list"),
        (lambda lm: asyncio.run(lm.sample([1], 2, seed=1.5)), "seed=1.5 is not a whole number"),
        (lambda lm: asyncio.run(lm.sample([1], 2, seed=-1)), "seed=-1 is vLLM's word for no seed"),
        (
            lambda lm: asyncio.run(lm.sample([1], 2, temperature="1")),
            "temperature='1' is not a num",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(lm, ask, message):
    with pytest.raises(ValueError, match=message):
        ask(lm)


@pytest.mark.parametrize("most", [0, 2.5, True])
def test_transformers_refuses_the_same_number_of_tokens(reference, most):
    with pytest.raises(ValueError, match=f"max_tokens={most}"):
        asyncio.run(reference.sample([1], most, []))


def test_the_longest_prompt_is_answered(lm, reference):
    prompt = [2 + i % 1000 for i in range(255)]
    expected = reference.next_token_logprobs_sync(prompt)
    assert agrees(lm.next_token_logprobs_sync(prompt), expected, OTHER_ENGINE)


def test_completions_end_at_the_tokens_given_and_at_no_other(lm):
    prompt = [50, 60, 70]
    tokens = asyncio.run(lm.sample(prompt, 20, [], temperature=0))
    assert len(tokens) == 20
    end = tokens[7]
    short = asyncio.run(lm.sample(prompt, 20, [end], temperature=0))
    assert short == tokens[: tokens.index(end)]
    assert 0 in short  # the model's own end, which was not given


def test_completions_with_a_seed_can_be_repeated(lm):
    first = asyncio.run(lm.batch_sample([[9, 8], [9, 8], [4]], 8, [], seed=5))
    assert first[0] == first[1]
    assert asyncio.run(lm.batch_sample([[4]], 8, [], seed=5)) == first[2:]
    numpys = asyncio.run(lm.batch_sample([[4]], 8, [], np.float32(1), np.int64(5)))
    assert numpys == first[2:]
    several = asyncio.run(lm.batch_sample([[9, 8]] * 6, 8, []))
    assert len(set(map(tuple, several))) > 1


def test_earlier_answers_are_remembered_until_they_are_forgotten(lm):
    async def ask(prompt, **options):
        return await lm.next_token_logprobs(prompt, **options)

    def computes(prompt, **options):
        before = lm.stats()["computed"]
        asyncio.run(ask(prompt, **options))
        return lm.stats()["computed"] - before

    assert [computes([i]) for i in (1, 2, 1, 2)] == [1, 1, 0, 0]
    lm.next_token_logprobs_sync([1]).fill_(0)
    assert lm.next_token_logprobs_sync([1]).exp().sum() == pytest.approx(1, abs=1e-4)
    assert computes([1], top_k=3) == 1  # another question
    again = lm.next_token_logprobs_sync([1], top_k=3)
    assert again.token_ids.tolist() == lm.next_token_logprobs_sync([1]).topk(3).indices.tolist()
    others = [computes([i]) for i in range(3, 3 + CACHED)]
    assert [*others, computes([1])] == [1] * (CACHED + 1)  # it was forgotten
    lm.clear_cache()
    assert computes([1]) == 1


def test_answers_and_lanes_are_of_the_weights_and_monitors_that_there_are(lm, tmp_path):
    """Another model's weights, and another condition under a name that entries refer to. No block
    is full, so that none is cached."""
    weights = load_file(Path(MODEL) / "model.safetensors")
    weights["model.norm.weight"] *= 0.5
    save_file(weights, tmp_path / "model.safetensors")
    prompt, steering = [5, 6, 7, 8], lm.engine.steering
    vector = {"vector": [4.0] * 8 + [0.0] * (HIDDEN - 8), "when": "moody"}
    probe = {"hook": "post_block", "layer": 0, "vector": [1.0] * HIDDEN}
    gated = {"steering_vectors": {"post_block": {1: vector}}}

    def replace(path):
        lm.run(lm.engine.collective_rpc("reload_weights", kwargs={"weights_path": str(path)}))

    def said():
        return asyncio.run(lm.next_token_logprobs(prompt)), asyncio.run(lane.next())

    def monitored(edge):
        lm.run(steering.register_monitor("moody", {"probe": probe, "above": edge}))
        found = asyncio.run(lm.next_token_logprobs(prompt, **gated))
        lm.run(steering.unregister_monitor("moody"))
        return found

    lane = lm.open(prompt)
    first = said()
    replace(tmp_path)
    try:
        second = said()
    finally:
        replace(MODEL)
        third = said()
        asyncio.run(lane.close())
    for before, after, again in zip(first, second, third, strict=True):
        assert not agrees(before, after) and agrees(before, again)
    assert agrees(*second)
    on, off = monitored(-1e9), monitored(1e9)
    assert agrees(off, first[0]) and not agrees(on, off)


def test_what_nobody_waits_for_is_aborted(lm):
    async def give_up(seconds):
        tasks = [asyncio.ensure_future(lm.next_token_logprobs(p)) for p in prompts(20, seed=8)]
        await asyncio.sleep(seconds)
        for task in tasks[1:]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(done[0], torch.Tensor)
        return [isinstance(each, asyncio.CancelledError) for each in done[1:]]

    assert all(asyncio.run(give_up(0)))
    asyncio.run(give_up(0.01))  # some may have been answered
    lm.next_token_logprobs_sync([1, 2, 3])
    assert not left_in(lm)


def test_a_question_that_was_given_up_may_be_asked_again_at_once(lm):
    async def ask(turns):
        given_up = asyncio.ensure_future(lm.next_token_logprobs([21, 22, 23]))
        for _ in range(turns):
            await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        lm.clear_cache()
        return await lm.next_token_logprobs([21, 22, 23])

    for turns in range(10):
        assert agrees(asyncio.run(ask(turns)), lm.next_token_logprobs_sync([21, 22, 23]))


def test_no_room_for_a_row_is_the_error_of_whoever_needs_it(lm, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    wide = {"only": list(range(2, 302))}  # a width that no other test asks for

    async def ask():
        asked = [lm.next_token_logprobs([3, 1], **wide), lm.next_token_logprobs([4, 1])]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60.0)

    lm.batch_next_token_logprobs_sync([[1, 2]])  # from here on plain queries go together
    with monkeypatch.context() as patch:
        patch.setattr("tllm.logprobs.arena.SharedRows.create", full)
        refused, answered = asyncio.run(ask())
    assert isinstance(refused, RuntimeError) and "--shm-size" in str(refused)
    assert isinstance(answered, torch.Tensor)
    found, _ = asyncio.run(ask())
    assert found.shape == (300,)


@pytest.mark.parametrize("samples", [1, 3])
def test_nothing_is_left_of_a_request_that_could_not_be_sent(lm, samples):
    async def ask():
        params = SamplingParams(n=samples, temperature=1.0, extra_args={"theirs": object()})
        with pytest.raises(Exception):  # noqa: B017, vLLM's own
            async for _ in lm.engine.generate({"prompt_token_ids": [3, 4]}, params, "unsent"):
                pass

    lm.run(ask())
    processor = lm.engine.output_processor
    kept = processor.request_states, processor.parent_requests, processor.external_req_ids
    assert not any(kept)


def test_an_engine_is_asked_by_one_model_only(lm):
    with pytest.raises(ValueError, match="another AsyncVirtualLM"):
        type(lm)(lm.engine, lm._loop)


def test_an_engine_that_is_paused_answers_or_says_so(lm):
    """Pausing aborts what is under way: of queries, some of which wait for a place, and lanes."""
    asked = prompts(3 * PLACES)

    async def run():
        lanes = [lm.open(tokens) for tokens in asked[:4]]
        await gathered(lane.next() for lane in lanes)
        for lane in lanes:
            lane.feed(5)
        waiting = [lm.next_token_logprobs(tokens) for tokens in asked]
        waiting += [lane.next() for lane in lanes]
        tasks = list(map(asyncio.ensure_future, waiting))
        await asyncio.sleep(0.002)
        await asyncio.to_thread(lambda: lm.run(lm.engine.pause_generation()))
        later = asyncio.ensure_future(lm.next_token_logprobs([3, 1, 4]))
        await asyncio.to_thread(lambda: lm.run(lm.engine.resume_generation()))
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60.0)
        await asyncio.wait({later}, timeout=60.0)
        assert later.done()
        await gathered(lane.close() for lane in lanes)
        return found

    for outcome in asyncio.run(run()):
        assert isinstance(outcome, RuntimeError | torch.Tensor)
    expected = lm.batch_next_token_logprobs_sync(asked)
    assert agrees(torch.stack([lm.next_token_logprobs_sync(each) for each in asked]), expected)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_query_that_is_given_up_at_once_frees_its_row_in_time(lm, at_once):
    """Its row must not be used again while the worker may still write to it."""

    async def run():
        for i in range(20):
            tasks = [
                asyncio.ensure_future(lm.next_token_logprobs([7, i, j])) for j in range(PLACES)
            ]
            if not at_once:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await gathered(lm.next_token_logprobs([8, i, j]) for j in range(2))
        return await gathered(lm.next_token_logprobs([8, i, 0]) for i in range(20))

    found = torch.stack(asyncio.run(run()))
    assert agrees(found, lm.batch_next_token_logprobs_sync([[8, i, 0] for i in range(20)]))


@pytest.mark.parametrize("same", [False, True], ids=["another", "the same"])
def test_a_model_goes_on_when_its_consumer_is_registered_anew(lm, same):
    """Its copies in the workers are new, and cannot open files whose names are gone. With queries
    under way, which may take the lanes' places, and without any."""
    consumer = lm.engine.consumers["next_token"] if same else NextTokenConsumer()

    async def anew(queries, asked_between):
        under_way = [asyncio.ensure_future(lm.next_token_logprobs(each)) for each in queries]
        await asyncio.sleep(0)
        await lm.engine.unregister_consumer("next_token")
        between = [asyncio.ensure_future(lm.next_token_logprobs(each)) for each in asked_between]
        await asyncio.gather(*between, return_exceptions=True)
        await lm.engine.register_consumer(consumer)
        return await asyncio.gather(*under_way, *between, return_exceptions=True)

    async def run():
        lanes = [lm.open(tokens) for tokens in prompts(2, seed=81)]
        await lm.batch_next(lanes)
        steps, ended = [], []
        for queries, between in (([], []), (prompts(20, seed=82), []), ([], [[6, 7]])):
            ended += await asyncio.wait_for(anew(queries, between), 60)
            for lane in lanes:
                lane.feed(9)
            found = await asyncio.wait_for(lm.batch_next(lanes), 60)
            steps.append((found, [lane.tokens for lane in lanes]))
        await gathered(lane.close() for lane in lanes)
        return steps, ended

    steps, ended = lm.run(run())
    asked = prompts(2, seed=83)
    for found, of in (*steps, (lm.batch_next_token_logprobs_sync(asked), asked)):
        assert agrees(found, torch.stack([vllm_logprobs(lm, list(each)) for each in of]))
    assert isinstance(ended[-1], Exception)
    for error in (each for each in ended if not isinstance(each, torch.Tensor)):
        with pytest.raises((RuntimeError, ValueError), match="registered"):
            raise error


def test_reset_cancels_the_queries_that_wait(lm):
    async def reset():
        tasks = [asyncio.ensure_future(lm.next_token_logprobs(p)) for p in prompts(20, seed=9)]
        await asyncio.sleep(0)
        lm.reset_async_queries()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(each, asyncio.CancelledError) for each in done)
        return await lm.next_token_logprobs([4, 5])

    assert agrees(asyncio.run(reset()), lm.next_token_logprobs_sync([4, 5]))
    assert not left_in(lm)

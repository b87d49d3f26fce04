"""Lanes: what a lane says is what a query of its tokens says, and nothing is left behind."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import random

import pytest
import torch
from beyond_interpreting import beyond_interpreting
from oldest_vllm import ON_0_30

from logprobs.asking import OTHER_ENGINE, PLACES, VOCAB, agrees, gathered, left_in, prompts
from tllm.consumers.base import Consumer
from tllm.consumers.probe import ProbeConsumer
from tllm.engine.bulk import Bulk
from tllm.ports import ConsumerFlow, ResidualStream


class Rows(Consumer):
    """Counts the tokens that pass the model."""

    consumer_id = "rows"

    def flows(self):
        return [ConsumerFlow(reads=[ResidualStream.read(layer=0, role="hidden")])]

    def start(self, ctx):
        self.rows = 0

    def consume_bundle(self, bundle, ctx):
        self.rows += len(bundle.meta)

    def read_stats(self):
        return {"rows": self.rows}


def test_a_step_computes_its_new_tokens_only(lm):
    counter = lm.register_consumer(Rows())

    def computed():
        return lm.run(lm.engine.read_stats(counter))["rows"]

    async def steps():
        async with lm.open(list(range(10, 50))) as lane:
            await lane.next()
            yield computed()
            for fed in ([5], [6], [7, 8, 9]):
                lane.feed(*fed)
                await lane.next()
                yield computed()

    async def run():
        return [rows async for rows in steps()]

    counts = asyncio.run(run())
    lm.unregister_consumer("rows")
    assert counts == [40, 41, 42, 45]


@pytest.mark.parametrize(
    "form",
    [
        {},
        pytest.param({"top_k": 9}, marks=beyond_interpreting),
        pytest.param({"only": [3, 99]}, marks=beyond_interpreting),
    ],
    ids=str,
)
def test_lanes_with_forks_say_what_resubmission_says(lm, form):
    """Twice as many lanes as the engine runs at once, and more tokens than its cache holds."""
    rng = random.Random(len(form))
    asked, answers = [], []

    async def walk():
        root = lm.open(list(range(100, 140)))
        await root.next()
        lanes = [root.fork() for _ in range(2 * PLACES)]
        await root.close()
        for step in range(6):
            for lane in lanes:
                lane.feed(*(rng.randrange(2, VOCAB) for _ in range(1 + step % 2)))
            found = await gathered(lane.next(**form) for lane in lanes)
            asked.extend(lane.tokens for lane in lanes)
            answers.extend(found)
            survivors = [rng.choice(lanes) for _ in lanes]
            children = [lane.fork() for lane in survivors]
            await gathered(lane.close() for lane in lanes)
            lanes = children
        await gathered(lane.close() for lane in lanes)

    asyncio.run(walk())
    expected = lm.batch_next_token_logprobs_sync(asked)
    if "top_k" in form:
        answers = [torch.zeros(VOCAB).scatter(0, a.token_ids.long(), a.values) for a in answers]
        expected = torch.where(expected >= expected.topk(9).values[:, -1:], expected, 0)
        assert torch.allclose(torch.stack(answers), expected, atol=1e-3)
    elif form:
        assert torch.allclose(torch.stack(answers), expected[:, [3, 99]], atol=1e-3)
    else:
        assert agrees(torch.stack(answers), expected)


def test_a_fork_and_its_parent_go_separate_ways(lm):
    async def run():
        async with lm.open([20, 21, 22]) as lane:
            first = await lane.next()
            async with lane.fork() as other:
                assert other.tokens == lane.tokens
                lane.feed(30)
                other.feed(31)
                found = await gathered([lane.next(), other.next()])
                again = await gathered([lane.next(), other.next(), lane.next(top_k=2)])
        return first, found, again

    first, found, again = asyncio.run(run())
    expected = [[20, 21, 22], [20, 21, 22, 30], [20, 21, 22, 31]]
    for row, tokens in zip([first, *found], expected, strict=True):
        assert agrees(row, lm.next_token_logprobs_sync(tokens))
    assert agrees(again[0], found[0])
    assert agrees(again[1], found[1])
    assert again[2].token_ids.tolist() == found[0].topk(2).indices.tolist()


def test_a_fork_whose_parent_goes_on_at_once_is_not_given_the_parents_tokens(lm, monkeypatch):
    """On the engine's own loop, where a batch that is full is served before what was posted."""

    async def run():
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(lm._mailbox._collector(loop), "_batch_size", 3)
        lanes = [lm.open([10 + i, 20, 30, 40]) for i in range(3)]
        await lm.batch_next(lanes)
        children = []

        async def forked(lane):
            children.append(lane.fork())
            lane.feed(50)
            await lane.next()

        await gathered(map(forked, lanes))
        for child in children:
            child.feed(60, 70)
        found = [await child.next() for child in children]
        tokens = [child.tokens for child in children]
        await gathered(lane.close() for lane in [*lanes, *children])
        return found, tokens

    found, tokens = lm.run(run())
    assert agrees(torch.stack(found), lm.batch_next_token_logprobs_sync(tokens))


def test_what_is_closed_directly_after_a_fork_keeps_and_takes_nothing_of_the_others(lm):
    async def run():
        root = lm.open([90, 91, 92])
        await root.next()
        child = root.fork()
        await root.close()
        kept = [lm.stats()["kept"]]
        await child.fork().close()
        kept.append(lm.stats()["kept"])
        await child.close()
        return [*kept, lm.stats()["kept"]]

    assert lm.run(run()) == [1, 1, 0]


def test_a_drawn_token_that_was_dropped_is_in_no_cached_block(lm, reference):
    """vLLM draws a token at the end of each turn: here, the one that would fill a block of 32."""

    async def run():
        prompt = list(range(200, 231))
        async with lm.open(prompt) as lane:
            drawn = int((await lane.next()).argmax())
            lane.feed(7, 8)
            await lane.next()
            return [*prompt, drawn, 9]

    tokens = asyncio.run(run())
    expected = reference.next_token_logprobs_sync(tokens)
    assert agrees(lm.next_token_logprobs_sync(tokens), expected, OTHER_ENGINE)


def test_lanes_queries_and_completions_share_the_engine(lm):
    async def run():
        lanes = [lm.open(prompt) for prompt in prompts(PLACES, seed=20)]
        await gathered(lane.next() for lane in lanes)  # every place of the engine is kept
        assert lm.stats()["kept"] == PLACES
        rows = await gathered(map(lm.next_token_logprobs, prompts(12, seed=21)))
        await lm.sample([5], 4, [])
        for lane in lanes:
            lane.feed(17)
        steps = await gathered(lane.next() for lane in lanes)
        tokens = [lane.tokens for lane in lanes]
        await gathered(lane.close() for lane in lanes)
        return rows, steps, tokens

    rows, steps, tokens = asyncio.run(run())
    assert agrees(torch.stack(rows), lm.batch_next_token_logprobs_sync(prompts(12, seed=21)))
    assert agrees(torch.stack(steps), lm.batch_next_token_logprobs_sync(tokens))


def test_closed_lanes_leave_the_cache_to_others(lm):
    """Each of these prompts needs more than a quarter of the cache's blocks."""

    async def fill():
        lanes = [lm.open([i] * 250) for i in range(2, 14)]
        found = await gathered(lane.next() for lane in lanes)
        await gathered(lane.close() for lane in lanes)
        return found

    found = asyncio.run(asyncio.wait_for(fill(), 300))
    assert lm.stats()["kept_blocks"] == 0
    expected = lm.batch_next_token_logprobs_sync([[i] * 250 for i in range(2, 14)])
    assert agrees(torch.stack(found), expected)


def test_cancelled_steps_and_dropped_lanes_leave_nothing_behind(lm):
    async def run():
        lanes = [lm.open(prompt) for prompt in prompts(10, seed=22)]
        tasks = [asyncio.ensure_future(lane.next()) for lane in lanes]
        await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        lanes[0].feed(11)  # one that was cancelled goes on
        found = await lanes[0].next()
        tokens = lanes[0].tokens
        waiting = asyncio.ensure_future(lanes[1].next())
        await asyncio.sleep(0)
        await lanes[1].close()  # while its step is under way
        await asyncio.gather(waiting, return_exceptions=True)
        await lanes[2].close()
        return found, tokens  # the other lanes are dropped

    found, tokens = asyncio.run(run())
    assert agrees(found, lm.next_token_logprobs_sync(tokens))
    gc.collect()
    assert not left_in(lm)


def test_a_lane_may_be_closed_at_every_moment_of_its_first_step(lm):
    """On the engine's own loop, where what happens between two moments is the same each time."""
    lm.register_consumer(ProbeConsumer(torch.ones(128), layer=0))  # it waits for its results

    async def closed_after(moments, **interventions):
        lane = lm.open([90 + moments, 7, 7], **interventions)
        step = asyncio.ensure_future(lane.next())
        for _ in range(moments):
            await asyncio.sleep(0)
        await asyncio.wait_for(lane.close(), 60)
        await asyncio.wait_for(asyncio.gather(step, return_exceptions=True), 60)

    for moments in range(12):
        lm.run(closed_after(moments))
        lm.run(closed_after(moments, consumers={"probe": {}}))
    lm.unregister_consumer("probe")
    assert not left_in(lm)


def test_closing_a_lane_takes_the_answer_from_nobody_else(lm):
    async def run():
        lane = lm.open([80, 81, 82])
        await lane.next()
        other = lane.fork()
        for each in (lane, other):
            each.feed(83)
        asked = [lane.next(), other.next(), lm.next_token_logprobs([80, 81, 82, 83])]
        tasks = [asyncio.ensure_future(each) for each in asked]
        await asyncio.sleep(0)
        await lane.close()
        _, *found = await asyncio.gather(*tasks, return_exceptions=True)
        await other.close()
        return found

    expected = lm.next_token_logprobs_sync([80, 81, 82, 83])
    for _ in range(5):
        lm.clear_cache()
        for row in asyncio.run(run()):
            assert agrees(row, expected)


def test_an_idle_lane_gives_its_place_back_and_goes_on(lm):
    parked = lm.stats()["parked"]

    async def run():
        async with lm.open([40, 41]) as lane:
            await lane.next()
            assert lm.stats()["kept"] == 1
            async with asyncio.timeout(60):
                while lm.stats()["kept"]:
                    await asyncio.sleep(0.1)
            assert lm.stats()["parked"] == parked + 1
            lane.feed(42)
            return await lane.next()

    assert agrees(asyncio.run(run()), lm.next_token_logprobs_sync([40, 41, 42]))


@pytest.mark.parametrize("alone", ["captured", "no prefix cache"])
def test_blocks_that_lanes_do_not_share_are_counted_for_each(lm, monkeypatch, alone):
    """Those that wait for a token would hold blocks that the others need."""
    monkeypatch.setattr(lm._service._admission, "_idle_seconds", 3600.0)
    asked = {"capture": {"memory": {"hooks": {"post_block": [1]}}}} if alone == "captured" else {}
    if not asked:
        config = lm.engine.vllm_config.cache_config
        monkeypatch.setattr(config, "enable_prefix_caching", False)
    lanes = [lm.open([*range(2, 72), last], **asked) for last in (5, 6, 7)]
    lm.batch_next_sync(lanes)
    held = lm.stats()["kept_blocks"]
    for lane in lanes:
        lane.close_sync()
    assert held == 3 * 3


def test_lanes_with_captures_do_not_wait_for_blocks_that_others_hold(lm, monkeypatch):
    """Together they need 56 blocks of 31."""
    monkeypatch.setattr(lm._service._admission, "_idle_seconds", 3600.0)
    asked = {"capture": {"memory": {"hooks": {"post_block": [1]}}}}

    async def run():
        lanes = [lm.open([*range(2, 202)], **asked) for _ in range(PLACES)]
        for token in (5, 6):
            for lane in lanes:
                lane.feed(token)
            rows = await asyncio.wait_for(lm.batch_next(lanes), 120)
        await gathered(lane.close() for lane in lanes)
        return rows

    expected = lm.next_token_logprobs_sync([*range(2, 202), 5, 6])
    assert all(agrees(row, expected) for row in asyncio.run(run()))


def test_a_long_completion_takes_no_more_than_the_engine_has(lm, monkeypatch):
    """Lanes that are idle keep their places beside it, however much is allowed."""
    monkeypatch.setattr(lm._service._admission, "_idle_seconds", 3600.0)
    parked = lm.stats()["parked"]
    lane = lm.open([40, 41])
    lane.next_sync()
    asyncio.run(lm.sample([5], 10**6))
    assert lm.stats()["parked"] == parked
    lane.close_sync()


def test_what_a_lane_cannot_do_is_refused(lm):
    async def run():
        lane = lm.open([1] * 254)
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"cannot be copied or pickled.*fork\(\) gives"):
                copied(lane)
        with pytest.raises(ValueError, match="at least one token"):
            lane.feed()
        with pytest.raises(ValueError, match=r"feed\(\) has token 5000"):
            lane.feed(5000)
        for wrong in ("a", True, 5.0, [5, 6]):
            with pytest.raises(TypeError, match="give token ids, each as an argument"):
                lane.feed(wrong)
        with pytest.raises(TypeError, match="give token ids"):
            lane.feed(5, True)
        assert len(lane) == 254
        waiting = asyncio.ensure_future(lane.next())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="while next"):
            lane.feed(2)
        await waiting
        lane.feed(2)
        await lane.next()
        lane.feed(3)
        with pytest.raises(ValueError, match="256 tokens leave no room"):
            await lane.next()
        await lane.close()
        assert await lane.close() == []
        with pytest.raises(RuntimeError, match="the lane is closed"):
            await lane.next()
        with pytest.raises(RuntimeError, match="the lane is closed"):
            lane.fork()

    asyncio.run(run())


def test_a_probe_sits_inside_a_lane(lm):
    weight = torch.linspace(-1, 1, 128)
    lm.register_consumer(ProbeConsumer(weight, layer=2, consumer_id="probe"))

    async def run():
        lane = lm.open([60, 61, 62], consumers={"probe": {}})
        for token in (63, 64):
            await lane.next()
            lane.feed(token)
        await lane.next()
        outputs = await lane.close()
        answer = await lm.query([60, 61, 62, 63, 64], consumers={"probe": {}})
        return outputs, answer

    outputs, answer = asyncio.run(run())
    lm.unregister_consumer("probe")
    [output] = outputs
    scores = output.consumer_results["probe"].payload
    assert scores.positions.tolist() == [0, 1, 2, 3, 4]
    expected = answer.output.consumer_results["probe"].payload
    assert torch.allclose(
        torch.from_numpy(scores.values), torch.from_numpy(expected.values), rtol=1e-3
    )


def test_lanes_without_an_event_loop(lm):
    lane = lm.open([70, 71])
    first = lane.next_sync()
    lane.feed(int(first.argmax()))
    second = lane.next_sync()
    tokens = lane.tokens
    assert lane.close_sync() == []
    assert agrees(second, lm.next_token_logprobs_sync(tokens))


@pytest.mark.parametrize("form", [{}, {"top_k": 9}, {"only": [3, 99]}], ids=str)
def test_lanes_in_one_call_say_what_each_says(lm, form):
    async def run():
        root = lm.open(list(range(200, 230)))
        await root.next()
        lanes = [root.fork() for _ in range(PLACES + 2)]
        await root.close()
        for step in range(3):
            for number, lane in enumerate(lanes):
                lane.feed(5 + 7 * number + step)
            asked = [*lanes, lanes[0]]  # one of them twice
            together = await lm.batch_next(asked, **form)
            one_by_one = [await lm.next_token_logprobs(lane.tokens, **form) for lane in asked]
            if "top_k" in form:
                assert together.token_ids.tolist() == [o.token_ids.tolist() for o in one_by_one]
                together, one_by_one = together.values, [o.values for o in one_by_one]
            assert torch.allclose(together, torch.stack(one_by_one), atol=1e-3)
        kept = together.clone()
        gc.collect()
        for lane in lanes:
            lane.feed(11)
        again = await lm.batch_next(lanes, **form)
        assert torch.equal(together, kept)  # memory that is looked at is not written again
        del again
        await gathered(lane.close() for lane in lanes)

    asyncio.run(run())
    assert not left_in(lm)


@pytest.mark.skipif(ON_0_30, reason="on vLLM 0.30 the scheduler gives no notice")
def test_lanes_are_answered_with_and_without_notices(lm, monkeypatch):
    def step(lanes):
        for number, lane in enumerate(lanes):
            lane.feed(5 + 7 * number)
        return lm.batch_next_sync(lanes)

    def noticed():
        return lm.stats()["noticed"]

    lanes = [lm.open([30 + i, 40]) for i in range(3)]
    expected = lm.batch_next_token_logprobs_sync([lane.tokens for lane in lanes])
    assert agrees(lm.batch_next_sync(lanes), expected)
    before = noticed()
    step(lanes)
    # vLLM's message may be the first to be looked at, but not always.
    for _ in range(20):
        if noticed() > before:
            break
        step(lanes)
    assert noticed() > before
    # An engine that cannot reach the inbox, as in another container.
    monkeypatch.setattr(Bulk, "_address", lambda bulk: "/nowhere/at/all")
    without = step(lanes)
    told = noticed()
    expected = lm.batch_next_token_logprobs_sync([lane.tokens for lane in lanes])
    assert agrees(without, expected)
    assert noticed() == told
    lm.run(gathered(lane.close() for lane in lanes))
    assert not left_in(lm)


def test_lanes_that_cannot_step_together_are_refused(lm):
    lane, other = lm.open([70, 71]), lm.open([1] * 255)
    other.feed(1)
    assert lm.batch_next_sync([lane]).shape == (1, VOCAB)
    for wrong in ([], lane, [lane, [70, 71]], None):
        with pytest.raises(ValueError, match="must be a list of lanes, one at least"):
            lm.batch_next_sync(wrong)
    with pytest.raises(ValueError, match="256 tokens leave no room"):
        lm.batch_next_sync([lane, other])
    other.close_sync()
    with pytest.raises(RuntimeError, match="the lane is closed"):
        lm.batch_next_sync([lane, other])
    lane.feed(5)  # nobody waits for it
    assert agrees(lane.next_sync(), lm.next_token_logprobs_sync([70, 71, 5]))
    lane.close_sync()


def test_a_reset_leaves_lanes_their_steps(lm):
    async def run():
        async with lm.open([70, 71]) as lane:
            waiting = asyncio.ensure_future(lane.next())
            await asyncio.sleep(0)
            lm.reset_async_queries()
            return await asyncio.wait_for(waiting, 60)

    assert agrees(asyncio.run(run()), lm.next_token_logprobs_sync([70, 71]))


def test_lanes_that_step_together_are_one_message_from_their_first_step_on(lm, monkeypatch):
    """Forks are requests of their own in the engine, but none of vLLM's client."""
    messages, requests = [], []
    core, generate = lm.engine.engine_core, lm.engine.generate
    add = core.add_request_async

    async def added(request):
        messages.append(request.request_id)
        await add(request)

    def generated(*args, **kwargs):
        requests.append(args)
        return generate(*args, **kwargs)

    monkeypatch.setattr(core, "add_request_async", added)
    monkeypatch.setattr(lm.engine, "generate", generated)

    async def run():
        root = lm.open(list(range(20, 90)))
        await root.next()
        lanes = [root.fork() for _ in range(5)]
        await root.close()
        steps = []
        for step in range(4):
            for number, lane in enumerate(lanes):
                lane.feed(100 + 10 * step + number)
            steps.append(await lm.batch_next(lanes))
        tokens = [lane.tokens for lane in lanes]
        await gathered(lane.close() for lane in lanes)
        return tokens, steps

    tokens, steps = asyncio.run(run())
    assert (len(messages), requests) == (5, [])
    for step, found in enumerate(steps):
        asked = [each[: 71 + step] for each in tokens]
        assert agrees(found, lm.batch_next_token_logprobs_sync(asked))


@pytest.mark.parametrize("in_bulk", [True, False])
def test_lanes_go_on_after_the_engine_has_ended_all_requests(lm, monkeypatch, in_bulk):
    """Idle ones, and one whose step is under way; vLLM's client takes the end of a streamed request
    for that of an input."""

    async def run():
        lanes = [lm.open(tokens) for tokens in prompts(3, seed=61 + in_bulk)]
        with monkeypatch.context() as patch:
            if not in_bulk:
                patch.setattr(lm.engine, "takes_plain", lambda: False)
            await lm.batch_next(lanes)
        under_way = lanes[0]
        under_way.feed(9)
        step = asyncio.ensure_future(under_way.next())
        await asyncio.sleep(0.002)
        await asyncio.to_thread(lambda: lm.run(lm.engine.pause_generation(mode="abort")))
        await asyncio.to_thread(lambda: lm.run(lm.engine.resume_generation()))
        await asyncio.wait_for(asyncio.gather(step, return_exceptions=True), 60)
        for lane in lanes:
            lane.feed(10)
        found = await asyncio.wait_for(lm.batch_next(lanes), 60)
        tokens = [lane.tokens for lane in lanes]
        await gathered(lane.close() for lane in lanes)
        return tokens, found

    tokens, found = asyncio.run(run())
    assert agrees(found, lm.batch_next_token_logprobs_sync(tokens))


def test_what_is_registered_while_a_message_is_made_is_no_error(lm, reference, monkeypatch):
    """Other processes, and calls under way, register at any time."""
    registered, takes_plain = lm.engine._tllm.registered, lm.engine.takes_plain
    taken = []

    def takes_and_hears():
        if taken_now := takes_plain():
            taken.append(True)
            registered._version -= 1  # as if there were news
        return taken_now

    async def run():
        asked = prompts(6, seed=77)
        lanes = [lm.open(tokens) for tokens in asked[:3]]
        await lm.next_token_logprobs([5])  # all is known
        with monkeypatch.context() as patch:
            patch.setattr(lm.engine, "takes_plain", takes_and_hears)
            of_lanes = await asyncio.wait_for(lm.batch_next(lanes), 60)
            await lm.next_token_logprobs([6])
            of_queries = await asyncio.wait_for(lm.batch_next_token_logprobs(asked[3:]), 60)
        for lane in lanes:
            lane.feed(9)
        later = await lm.batch_next(lanes)
        tokens = [lane.tokens for lane in lanes]
        await gathered(lane.close() for lane in lanes)
        return asked, torch.cat([of_lanes, of_queries]), tokens, later

    asked, found, tokens, later = asyncio.run(run())
    assert len(taken) >= 2
    assert agrees(found, reference.batch_next_token_logprobs_sync(asked), OTHER_ENGINE)
    assert agrees(later, reference.batch_next_token_logprobs_sync(tokens), OTHER_ENGINE)
    assert lm.stats()["in_flight"] == 0


def test_a_completion_that_the_engine_has_aborted_is_an_error(lm):
    """Its tokens so far are not a completion."""

    async def run():
        task = asyncio.ensure_future(lm.sample([5, 6, 7], 240, [], temperature=0))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(lambda: lm.run(lm.engine.pause_generation(mode="abort")))
        await asyncio.to_thread(lambda: lm.run(lm.engine.resume_generation()))
        await asyncio.wait_for(task, 60)

    with pytest.raises(RuntimeError, match="the engine aborted the request"):
        asyncio.run(run())


def test_steps_without_room_in_shared_memory_are_right(lm, monkeypatch):
    """What cannot go in bulk goes as a request of its own, of all tokens."""
    transport = lm._service._transport
    lease, left = transport.lease_many, [0]

    def leased(form, results):
        places = lease(form, min(results, left[0])) if left[0] else []
        left[0] -= len(places)
        return places

    monkeypatch.setattr(transport, "lease_many", leased)

    async def run():
        lanes = [lm.open(tokens) for tokens in prompts(3, seed=62)]
        steps = []
        for number, left[0] in enumerate((3, 1, 0, 3, 2, 3)):
            for lane in lanes:
                lane.feed(30 + number)
            found = await asyncio.wait_for(lm.batch_next(lanes), 60)
            steps.append((found, [lane.tokens for lane in lanes]))
        await gathered(lane.close() for lane in lanes)
        return steps

    steps = asyncio.run(run())
    left[0] = 1000
    for found, tokens in steps:
        assert agrees(found, lm.batch_next_token_logprobs_sync(tokens))


def test_a_step_that_was_cancelled_may_be_asked_again_or_followed_by_another(lm):
    async def run(moments, fed):
        lane = lm.open([60, 61, 62 + moments])
        await lane.next()
        lane.feed(63)
        cancelled = asyncio.ensure_future(lane.next())
        for _ in range(moments):
            await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        if fed:
            lane.feed(64)
        found = await asyncio.wait_for(lane.next(), 60)
        await lane.close()
        return lane.tokens, found

    for moments in range(8):
        for fed in (False, True):
            tokens, found = lm.run(run(moments, fed))
            assert agrees(found, lm.next_token_logprobs_sync(tokens))
